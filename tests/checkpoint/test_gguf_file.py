"""GGUF files: every stored form exact, a llama model under Hugging Face's names and rows, broken files refused."""

import hashlib
import struct
import sys

import gguf
import numpy as np
import pytest
from checkpoint_files import (
    HEAD_DIM,
    HIDDEN,
    LFS_POINTER,
    VOCAB,
    gguf_entries,
    interleave,
    llama_weights,
    write_gguf,
)

from eaglejax.checkpoint.reader import open_checkpoint
from eaglejax.errors import CheckpointError

Form = gguf.GGMLQuantizationType
UP = "model.layers.1.mlp.up_proj.weight"
Q = "model.layers.0.self_attn.q_proj.weight"
BLOCKS = {Form.F32: "F32", Form.F16: "F16", Form.BF16: "BF16", Form.Q4_0: "F32", Form.Q4_1: "F32", Form.Q8_0: "F32"}
PACKAGE = {Form.Q5_0: 32, Form.Q5_1: 32, Form.Q6_K: 256, Form.Q4_K: 256}


def refused(file, message):
    with pytest.raises(CheckpointError, match=message) as e:
        open_checkpoint(file)
    assert str(file) in str(e.value) and "\n" not in str(e.value)


@pytest.fixture
def sound(tmp_path):
    return write_gguf(tmp_path / "m.gguf", gguf_entries(llama_weights()))


def test_names_and_rows_are_those_of_the_hugging_face_checkpoint(sound):
    weights, reader = llama_weights(), open_checkpoint(sound)
    assert reader.tensors.keys() == weights.keys()
    for name, weight in weights.items():
        assert np.array_equal(reader.read(name), weight), name
        assert np.array_equal(reader.read_rows(name, 3, 9), weight[3:9]), name
    # the rows of q do lie elsewhere in the file
    assert not np.array_equal(interleave(weights[Q], 4), weights[Q])


@pytest.mark.parametrize("form", BLOCKS, ids=lambda f: f.name)
def test_stored_forms(tmp_path, form):
    weights = llama_weights()
    entries = gguf_entries(weights)
    matrices = [name for name in entries if entries[name].ndim == 2]
    reader = open_checkpoint(write_gguf(tmp_path / "m.gguf", entries, forms=dict.fromkeys(matrices, form)))
    for name in (UP, Q, "model.embed_tokens.weight"):
        info, got = reader.tensors[name], reader.read(name)
        assert (info.stored, info.dtype) == (form.name, BLOCKS[form])
        expected = gguf.dequantize(gguf.quantize(weights[name], form), form)
        assert np.array_equal(got.astype(np.float32), expected), name
        assert np.array_equal(reader.read_rows(name, 2, 7), got[2:7]), name
        assert info.nbytes == got.nbytes
    if form not in (Form.F32, Form.F16, Form.BF16):
        assert not np.array_equal(reader.read(UP), weights[UP])


@pytest.mark.parametrize("form", PACKAGE, ids=lambda f: f.name)
def test_forms_widened_by_the_package(tmp_path, form, monkeypatch):
    block, nbytes = gguf.GGML_QUANT_SIZES[form]
    raw = np.random.default_rng(0).integers(0, 60, (VOCAB, 256 // block * nbytes), np.uint8)
    weights = {"token_embd.weight": raw}
    for name, entry in gguf_entries(llama_weights()).items():
        weights.setdefault(name, np.resize(entry, tuple(256 if n == HIDDEN else n for n in entry.shape)))
    extra = {"llama.embedding_length": 256}
    file = write_gguf(tmp_path / "m.gguf", weights, forms={"token_embd.weight": form}, extra=extra)
    reader = open_checkpoint(file)
    expected = gguf.dequantize(raw, form)
    assert reader.tensors["model.embed_tokens.weight"].stored == form.name
    assert np.array_equal(reader.read("model.embed_tokens.weight"), expected)
    assert np.array_equal(reader.read_rows("model.embed_tokens.weight", 4, 6), expected[4:6])
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=rf"form {form.name} need the package gguf; pip install 'eaglejax.demo.'"):
        reader.read("model.embed_tokens.weight")


def test_config_and_tokenizer(sound):
    reader = open_checkpoint(sound)
    assert reader.hf_config == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
    }
    tokenizer = reader.gguf_tokenizer
    assert tokenizer is not None
    assert (tokenizer["tokens"][2:4], tokenizer["merges"], tokenizer["token_type"][:3]) == (
        ["a", "b"],
        ["a b", "ab c"],
        [3, 3, 1],
    )
    assert (tokenizer["model"], tokenizer["pre"], tokenizer["bos_token_id"], tokenizer["eos_token_id"]) == (
        "gpt2",
        "smollm",
        0,
        1,
    )
    assert (tokenizer["add_bos"], tokenizer["unk_token_id"], tokenizer["chat_template"]) == (
        True,
        None,
        "{{ messages }}",
    )
    assert reader.metadata["llama.block_count"] == "2"


def test_untied_biased_and_several_ends(tmp_path):
    weights = llama_weights() | {"lm_head.weight": np.ones((VOCAB, HIDDEN), np.float32)}
    for n in range(2):
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            name = f"model.layers.{n}.self_attn.{part}"
            weights[name + ".bias"] = np.arange(len(weights[name + ".weight"]), dtype=np.float32)
    extra = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.padding_token_id": 3}
    reader = open_checkpoint(write_gguf(tmp_path / "m.gguf", gguf_entries(weights), extra=extra))
    config = reader.hf_config
    assert config is not None
    assert not config["tie_word_embeddings"] and config["attention_bias"] and not config["mlp_bias"]
    assert (config["eos_token_id"], config["pad_token_id"]) == ([1, 5], 3)
    for name in weights:
        assert np.array_equal(reader.read(name), weights[name]), name
        assert np.array_equal(reader.read_rows(name, 1, 4), weights[name][1:4]), name
        index = (slice(1, 4), *(slice(2, n - 1) for n in weights[name].shape[1:]))
        assert np.array_equal(reader.read_block(name, index), weights[name][index]), name
        assert np.array_equal(
            reader.read_block(name, (slice(3, 9),), shape=(weights[name].size,)), weights[name].reshape(-1)[3:9]
        ), name


def test_without_tokenizer_and_with_defaults(tmp_path):
    without = ("llama.rope.freq_base", "llama.attention.head_count_kv")
    weights = llama_weights()
    for n in range(2):
        for part in ("k_proj", "v_proj"):
            weights[f"model.layers.{n}.self_attn.{part}.weight"] = weights[f"model.layers.{n}.self_attn.q_proj.weight"]
    entries = gguf_entries(weights)
    for n in range(2):
        entries[f"blk.{n}.attn_k.weight"] = entries[f"blk.{n}.attn_q.weight"]
    reader = open_checkpoint(write_gguf(tmp_path / "m.gguf", entries, without=without, tokenizer=False))
    assert reader.gguf_tokenizer is None
    config = reader.hf_config
    assert config is not None
    assert (config["rope_theta"], config["num_key_value_heads"], config["eos_token_id"]) == (10000.0, 4, None)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"llama.rope.scaling.type": "none"}, None),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5},
            {"rope_type": "linear", "factor": 2.5},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        ),
    ],
)
def test_rope_scaling(tmp_path, extra, expected):
    reader = open_checkpoint(write_gguf(tmp_path / "m.gguf", gguf_entries(llama_weights()), extra=extra))
    assert reader.hf_config is not None and reader.hf_config["rope_scaling"] == expected


def llama3_divisors(factor):
    """As llama.cpp's converter computes them."""
    divisors = []
    for i in range(0, HEAD_DIM, 2):
        wave = 2 * np.pi * 50000.0 ** (i / HEAD_DIM)
        if wave < 8192 / 4:
            divisors.append(1.0)
        elif wave > 8192 / 1:
            divisors.append(factor)
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_llama3_scaling_is_recognised_from_its_divisors(tmp_path):
    entries = gguf_entries(llama_weights()) | {"rope_freqs.weight": llama3_divisors(8.0)}
    reader = open_checkpoint(write_gguf(tmp_path / "m.gguf", entries))
    assert reader.hf_config is not None
    assert reader.hf_config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in reader.tensors
    entries["rope_freqs.weight"] = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    refused(write_gguf(tmp_path / "m.gguf", entries), "frequency divisors that are not Llama 3's")


BAD_METADATA = {
    "architecture": ({"arch": "gemma3"}, "architecture not supported; found 'gemma3'; expected 'llama'"),
    "experts": ({"extra": {"llama.expert_count": 8}}, "mixture of experts"),
    "unknown setting": ({"extra": {"llama.logit_scale": 0.5}}, "not understood.*found llama.logit_scale = 0.5"),
    "unknown scaling": ({"extra": {"llama.rope.scaling.type": "longrope"}}, "RoPE scaling not supported"),
    "scaling without factor": ({"extra": {"llama.rope.scaling.type": "yarn"}}, "RoPE scaling not supported"),
    "partial rotary": (
        {"extra": {"llama.rope.dimension_count": 16}},
        "llama.rope.dimension_count; found 16; expected 32",
    ),
    "per-layer heads": ({"extra": {"llama.attention.head_count": [4, 2]}}, "llama.attention.head_count; found .4, 2."),
    "no width": ({"without": ("llama.feed_forward_length",)}, "llama.feed_forward_length; found nothing"),
    "no layers": ({"extra": {"llama.block_count": 0}}, "llama.block_count; found 0"),
    "more layers": ({"extra": {"llama.block_count": 3}}, "lacks 9 tensors, 'model.layers.2.input_layernorm.weight'"),
    "fewer layers": ({"extra": {"llama.block_count": 1}}, "tensor 'blk.1.*not part of a dense llama model of 1 layers"),
    "width": ({"extra": {"llama.feed_forward_length": 97}}, r"gate_proj.weight.*found .96, 160.; expected .97, 160."),
    "vocabulary": ({"extra": {"llama.vocab_size": 11}}, r"embed_tokens.*found .10, 160.; expected .11, 160."),
    "split": ({"extra": {"split.count": 2}}, "one part of a split GGUF"),
    "too many tokens": ({"extra": {"tokenizer.ggml.tokens": list("abcdefghijk")}}, "tokenizer does not fit.*11 tokens"),
    "token types": ({"extra": {"tokenizer.ggml.token_type": [1]}}, "tokenizer does not fit.*1 token types"),
}


@pytest.mark.parametrize("name", BAD_METADATA)
def test_metadata_that_is_not_understood_is_refused(tmp_path, name):
    options, message = BAD_METADATA[name]
    refused(write_gguf(tmp_path / "m.gguf", gguf_entries(llama_weights()), **options), message)


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.1.ffn_up.weight"])
def test_missing_tensor(tmp_path, name):
    entries = gguf_entries(llama_weights())
    del entries[name]
    refused(write_gguf(tmp_path / "m.gguf", entries), "lacks 1 tensors|holds no tensor 'token_embd.weight'")


@pytest.mark.parametrize(
    "name", ["blk.0.ffn_gate_inp.weight", "blk.0.attn_q_norm.weight", "cls.weight", "token_embd.scale"]
)
def test_unexpected_tensor(tmp_path, name):
    entries = gguf_entries(llama_weights()) | {name: np.ones(3, np.float32)}
    refused(write_gguf(tmp_path / "m.gguf", entries), f"holds tensor '{name}', which is not part of")


def test_cut_anywhere(sound):
    whole = sound.read_bytes()
    for size in (*range(4, 400, 7), *range(400, len(whole), len(whole) // 50), len(whole) - 1024, len(whole) - 33):
        sound.write_bytes(whole[:size])
        refused(sound, rf"incomplete: .*bytes expected, {size} found.*; download")
    sound.write_bytes(whole[:-1024])
    refused(sound, rf"incomplete: {len(whole)} bytes expected, {len(whole) - 1024} found")


def test_other_damage(sound):
    whole = sound.read_bytes()
    for broken, message in (
        (b"", "is empty"),
        (b"GGML" + whole[4:], "no GGUF file; found b'GGML'; expected b'GGUF'"),
        (LFS_POINTER.encode(), "Git-LFS pointer"),
        (whole[:4] + struct.pack("<I", 1) + whole[8:], "version not supported; found 1; expected 2 or 3"),
        (whole[:4] + struct.pack(">I", 3) + whole[8:], "found 3 in big-endian form"),
        (whole + bytes(64), f"64 extra bytes at the end: {len(whole)} bytes expected"),
        # a count that no file could hold
        (whole[:8] + struct.pack("<Q", 1 << 60) + whole[16:], "incomplete|corrupt"),
        (whole[:16] + struct.pack("<Q", 1 << 60) + whole[24:], "incomplete|corrupt"),
    ):
        sound.write_bytes(broken)
        refused(sound, message)
    sound.write_bytes(whole)
    assert open_checkpoint(sound).tensors


def test_unknown_form_and_place(sound):
    whole = sound.read_bytes()
    at = whole.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
    assert struct.unpack_from("<I", whole, at)[0] == 0
    sound.write_bytes(whole[:at] + struct.pack("<I", 99) + whole[at + 4 :])
    refused(sound, "'token_embd.weight' is stored in a form that is not supported; found ggml type 99")
    sound.write_bytes(whole[: at + 4] + struct.pack("<Q", 64) + whole[at + 12 :])
    refused(sound, "place of tensor")


def test_the_built_in_model_is_what_transformers_makes_of_the_file(smollm2_path):
    """sha256 of float32 tensors of transformers 5.24.0, AutoModelForCausalLM.from_pretrained(..., gguf_file=...)."""
    reader = open_checkpoint(smollm2_path)
    for name, expected in {
        "model.embed_tokens.weight": "3fd491c8066dd9dc1a2bf6796701526c82817d95c0ecabacdef3013c2b8bbbaa",
        "model.layers.0.self_attn.q_proj.weight": "54b377bbfa2deab945dfdba7fb59e0ca3eb74329358bd1b53b635b3ff37c1a56",
        "model.layers.29.self_attn.k_proj.weight": "8e99b2450d5f3d53731f52790cc82f80b04341e533306bcfee6669ffa3c79921",
        "model.layers.7.mlp.down_proj.weight": "9d3af8b67d13c727ae5ffe470464163b9cac42eb494525392bd3e79c8db73880",
        "model.norm.weight": "3b87f8e27335e67fc08f159cabfd2d18f205d6c5b225a6f978153552bf01d559",
    }.items():
        assert hashlib.sha256(reader.read(name).tobytes()).hexdigest() == expected, name
    config, tokenizer = reader.hf_config, reader.gguf_tokenizer
    assert config is not None and tokenizer is not None
    assert (config["num_hidden_layers"], config["rope_theta"], config["tie_word_embeddings"]) == (30, 100000.0, True)
    assert (len(reader.tensors), len(tokenizer["tokens"]), len(tokenizer["merges"])) == (272, 49152, 48900)

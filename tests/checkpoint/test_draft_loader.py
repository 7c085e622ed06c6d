"""Drafts as they are found in the wild, tensor by tensor: what loads gives the designed answer, the rest is refused."""

import jax
import jax.numpy as jnp
import kit_m
import ml_dtypes
import numpy as np
import pytest
from draft_files import (
    CUT,
    KIT,
    RNG,
    TABLE,
    TOKENS,
    Q,
    draft,
    features,
    inspect,
    loaded,
    probabilities,
    proposes,
    refused,
)
from flax import nnx

from eaglejax.checkpoint.draft_loader import read_draft
from eaglejax.checkpoint.reader import CheckpointReader
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.load_report import LoadReport
from eaglejax.models.draft_config import TargetFacts

# 01: embeddings


def test_absent_copied_and_own_embedding(tmp_path):
    borrowed, report = proposes(draft(tmp_path))
    assert "embedding: borrowed from the target, [64, 128]" in report and not borrowed.config.own_embedding
    copied, report = proposes(draft(tmp_path, {"embed_tokens.weight": TABLE}, name="copy"), embedding=None)
    assert "embedding: own" in report and "borrowed" not in report
    np.testing.assert_array_equal(probabilities(copied), probabilities(borrowed))
    # a table of its own, ids permuted, and a head made for it
    order = RNG.permutation(64)
    table, head = np.zeros_like(TABLE), np.zeros_like(KIT["lm_head.weight"])
    table[np.arange(64), order] = 1
    head[:, order] = KIT["lm_head.weight"][:, :64]
    own = draft(tmp_path, {"embed_tokens.weight": table, "lm_head.weight": head}, name="own")
    assert "embedding: own" in proposes(own)[1]
    with pytest.raises(AssertionError):
        proposes(draft(tmp_path, {"lm_head.weight": head}, name="wrong"))  # such a head with the borrowed table


def test_embedding_that_cannot_be_borrowed(tmp_path):
    narrow = {"fc.weight": np.zeros((128, 288), np.float32)}
    refused(
        draft(tmp_path, narrow), r"no embed_tokens.weight.*128 in the draft, 96 in the", facts=TargetFacts(64, 96, 8)
    )
    with pytest.raises(CheckpointError, match="no embedding.*target_embedding"):
        loaded(draft(tmp_path), embedding=None)
    with pytest.raises(CheckpointError, match=r"borrowed embedding.*\[64, 96\].*\[64, 128\]"):
        loaded(draft(tmp_path), embedding=TABLE[:, :96])


# 03, 04: vocabulary maps


def test_cut_vocabulary(tmp_path):
    folder = draft(tmp_path, ids=CUT)
    module, report = proposes(folder)
    np.testing.assert_array_equal(module.target_ids[...], CUT)
    assert "16 of the target's 64 ids" in report and "t2d agrees" in report


def test_full_vocabulary_with_and_without_maps(tmp_path):
    maps = {"d2t": np.zeros(64, np.int64), "t2d": np.ones(64, bool)}
    first, _ = proposes(draft(tmp_path, name="none"))
    second, _ = proposes(draft(tmp_path, maps, name="zero"))
    np.testing.assert_array_equal(first.target_ids[...], second.target_ids[...])
    np.testing.assert_array_equal(probabilities(first), probabilities(second))


def test_absolute_map_is_converted_where_t2d_proves_it(tmp_path):
    module, report = proposes(draft(tmp_path, {"d2t": np.asarray(CUT)}, ids=CUT))
    np.testing.assert_array_equal(module.target_ids[...], CUT)
    assert "! d2t of the draft holds target ids, not offsets" in report
    refused(
        draft(tmp_path, {"d2t": np.asarray(CUT)}, ("t2d",), ids=CUT),
        r"d2t: .*draft id 13 becomes target id 68.*draft_config=.*d2t.*ids",
    )


OFFSETS = np.asarray(CUT, np.int64) - np.arange(16)


def patched(index, value):
    out = OFFSETS.copy()
    out[index] = value
    return out


MAPS = [
    ("no maps", {}, ("d2t", "t2d"), {}, r"no d2t.*16 rows of lm_head.*64"),
    ("no d2t", {}, ("d2t",), {}, r"no d2t.*16 rows of lm_head.*64"),
    (
        "beyond the vocabulary",
        {"d2t": patched(15, 49)},
        (),
        {},
        r"d2t: .*draft id 15 becomes target id 64, expected 0..63",
    ),
    ("beyond, without t2d", {"d2t": patched(15, 49)}, ("t2d",), {}, r"draft id 15 becomes target id 64"),
    ("negative", {"d2t": patched(0, -1)}, (), {}, r"draft id 0 becomes target id -1"),
    ("repeated", {"d2t": patched(3, OFFSETS[3] - 4)}, ("t2d",), {}, r"draft ids 2 and 3 become target ids 11 and 11"),
    (
        "against t2d",
        {"d2t": patched(3, OFFSETS[3] + 1)},
        (),
        {},
        r"target id 16, which t2d says the draft does not know",
    ),
    ("17 true", {"t2d": np.isin(np.arange(64), [*CUT, 0])}, (), {}, r"t2d: .*17 true.*16"),
    ("short d2t", {"d2t": OFFSETS[:15]}, (), {}, r"d2t: .*\[15\].*\[16\]"),
    ("float d2t", {"d2t": OFFSETS.astype(np.float32)}, (), {}, r"d2t: .*float32.*whole numbers"),
    ("indices in t2d", {"t2d": np.arange(64)}, (), {}, r"t2d: .*no table of true and false"),
    ("t2d too long", {"t2d": np.isin(np.arange(80), CUT)}, (), {}, r"another vocabulary.*80 entries of t2d.*64"),
    ("t2d too short", {"t2d": np.isin(np.arange(48), CUT)}, (), {}, r"another vocabulary.*48 entries of t2d.*64"),
    ("size 0", {}, (), {"draft_vocab_size": 0}, r"draft_vocab_size: is impossible; found 0"),
    ("size -1", {}, (), {"draft_vocab_size": -1}, r"draft_vocab_size: is impossible; found -1"),
    ("size as text", {}, (), {"draft_vocab_size": "16"}, r"draft_vocab_size: is impossible; found '16'"),
    ("size true", {}, (), {"draft_vocab_size": True}, r"draft_vocab_size: is impossible; found True"),
    (
        "20 rows",
        {"lm_head.weight": np.zeros((20, 128), np.float32)},
        (),
        {},
        r"draft_vocab_size: .*found 16; expected 20 \(rows of lm_head",
    ),
]


@pytest.mark.parametrize("tensors, drop, config, message", [m[1:] for m in MAPS], ids=[m[0] for m in MAPS])
def test_refused_maps(tmp_path, tensors, drop, config, message):
    refused(draft(tmp_path, tensors, drop, ids=CUT, **config), message)


def test_vocabulary_of_another_size(tmp_path):
    for vocabulary in (32, 48, 96, 128):
        refused(draft(tmp_path), rf"64 rows of lm_head; expected {vocabulary}", facts=TargetFacts(vocabulary, 128, 8))
    for rows in (32, 80):
        own = draft(tmp_path, {"embed_tokens.weight": np.zeros((rows, 128), np.float32)}, name=f"own{rows}")
        refused(own, rf"embed_tokens.weight: .*another vocabulary.*{rows} rows.*64")


def test_padded_target(tmp_path):
    """Rows that pad the target (72 for 64) are nothing the draft proposes; a draft padded further is refused."""
    padded = TargetFacts(72, 128, 8)
    for folder in (draft(tmp_path), draft(tmp_path, ids=CUT, name="cut")):
        plan, _ = inspect(folder, padded)
        assert plan.target_ids.max() < 64 and plan.config.vocab_size == 72
    wide = draft(tmp_path, {"lm_head.weight": np.zeros((80, 128), np.float32)}, name="wide", draft_vocab_size=80)
    refused(wide, "80 rows of lm_head; expected 72", facts=padded)


# 05: types


@pytest.mark.parametrize("d2t", [np.int64, np.int32])
@pytest.mark.parametrize("t2d", [np.bool_, np.uint8])
@pytest.mark.parametrize("weights", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_types_of_tensors(tmp_path, d2t, t2d, weights):
    tensors = kit_m.draft_tensors(Q, (2, 4, 5), ids=CUT)
    stored = {k: v.astype(weights) for k, v in tensors.items() if v.dtype == np.float32}
    maps = {"d2t": tensors["d2t"].astype(d2t), "t2d": tensors["t2d"].astype(t2d)}
    module, report = loaded(draft(tmp_path, stored | maps, ids=CUT))
    np.testing.assert_array_equal(module.target_ids[...], CUT)
    np.testing.assert_array_equal(module.head.weight[...], stored["lm_head.weight"].astype(np.float32))
    np.testing.assert_array_equal(module.fusion.fc.weight[...], stored["fc.weight"].astype(np.float32))
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(module, nnx.Param))} == {jnp.dtype("float32")}
    assert "computed in float32" in report


def test_compute_in_bfloat16(tmp_path):
    # without the large vectors that tell wrong captures, which bfloat16 would not cancel
    fc = np.eye(128, 384, dtype=np.float32)
    module, _ = loaded(draft(tmp_path, {"fc.weight": np.where(np.arange(128)[:, None] < 64, fc, 0)}), dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(module, nnx.Param))} == {jnp.dtype("bfloat16")}
    assert module.empty_caches(2, 3)[0].keys.dtype == jnp.bfloat16
    found = probabilities(module)
    assert found.dtype == np.float32 and np.abs(found - Q[TOKENS]).max() < 0.02


def quantised(dtype, scale_shape, largest):
    """Kit M's matrices as `dtype` with factors of the given shape, and their exact products."""
    stored, exact = {}, {}
    for name, weight in KIT.items():
        if weight.ndim != 2:
            continue
        rows = weight.shape[0]
        top = (
            np.abs(weight).max(-1, keepdims=True)
            if scale_shape == "rows"
            else np.abs(weight).max(keepdims=True).reshape(1)
        )
        factor = (np.maximum(top, 1e-3) / largest).astype(np.float32)
        ratio = weight / factor
        whole = np.rint(ratio).astype(dtype) if dtype == np.int8 else ratio.astype(dtype)
        stored |= {name: whole, f"{name}_scale": factor}
        exact[name] = whole.astype(np.float32) * factor
        assert rows
    return stored, exact


@pytest.mark.parametrize("dtype, largest", [(np.int8, 127), (ml_dtypes.float8_e4m3fn, 448)])
@pytest.mark.parametrize("scale_shape", ["rows", "tensor"])
def test_factors_of_quantised_weights(tmp_path, dtype, largest, scale_shape):
    stored, exact = quantised(dtype, scale_shape, largest)
    settings = {"quantization_config": {"quant_method": "compressed-tensors", "format": "int-quantized"}}
    module, report = loaded(draft(tmp_path, stored, **settings))
    found = {
        "fc.weight": module.fusion.fc.weight,
        "lm_head.weight": module.head.weight,
        "midlayer.self_attn.o_proj.weight": module.first.attention.out.weight,
    }
    for name, leaf in found.items():
        np.testing.assert_array_equal(leaf[...], exact[name])
    both = np.stack([exact[f"midlayer.self_attn.{n}_proj.weight"] for n in "kv"])
    np.testing.assert_array_equal(module.first.attention.kv.weight[...], both)
    np.testing.assert_array_equal(module.norm.scale[...], KIT["norm.weight"])
    assert {"float8_e4m3fn": "F8_E4M3", "int8": "I8"}[np.dtype(dtype).name] in report


def test_refused_types(tmp_path):
    stored, _ = quantised(np.int8, "rows", 127)
    bare = {k: v for k, v in stored.items() if not k.startswith("fc.weight_")}
    refused(draft(tmp_path, bare), r"fc.weight: I8 weights need their scales.*fc.weight_scale")
    grid = stored | {"fc.weight_scale": np.ones((1, 3), np.float32)}
    refused(draft(tmp_path, grid), r"fc.weight_scale: scales of this shape.*\[1, 3\].*\[128, 1\]")
    refused(draft(tmp_path, {"fc.weight_scale": np.ones((128, 1), np.float32)}), "fc.weight: a scale belongs to")
    refused(draft(tmp_path, {"fc.weight": np.zeros((128, 384), np.int32)}), r"fc.weight: weights of this type.*I32")
    refused(draft(tmp_path, {"fc.weight_packed": np.zeros((128, 48), np.int32)}), "unknown weight.*fc.weight_packed")


# 06: names

NAMES = {
    "midlayer": lambda k: k,
    "layers.0": lambda k: k.replace("midlayer.", "layers.0."),
    "model.layers.0": lambda k: k if k in ("d2t", "t2d") else "model." + k.replace("midlayer.", "layers.0."),
    "model.midlayer": lambda k: "model." + k,
    "module.model.layers.0": lambda k: "module.model." + k.replace("midlayer.", "layers.0."),
}


@pytest.mark.parametrize("name", NAMES)
def test_prefixes(tmp_path, name):
    proposes(draft(tmp_path, keys=NAMES[name], ids=CUT))


def test_leftovers_and_unknown_tensors_are_listed(tmp_path):
    extra = {
        "midlayer.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
        "optimizer.state.midlayer.self_attn.q_proj.weight.exp_avg": np.ones(4, np.float32),
        "step": np.ones((), np.int64),
        "something.else": np.ones(3, np.float32),
        "verifier_lm_head.weight": np.ones((2, 2), np.float32),
    }
    _, report = proposes(draft(tmp_path, extra, keys=NAMES["model.midlayer"]))
    skipped = next(line for line in report.splitlines() if "skipped" in line)
    assert all(name in skipped for name in extra if name != "something.else")
    assert "! unknown tensors in the draft's file, not used: model.something.else" in report


def test_fc_bias(tmp_path):
    plain, _ = proposes(draft(tmp_path, {"fc.bias": np.zeros(128, np.float32)}, name="zeros"))
    assert plain.config.fc_bias
    bias = np.random.default_rng(1).normal(0, 1, 128).astype(np.float32)
    module, report = loaded(draft(tmp_path, {"fc.bias": bias}, name="bias"))
    difference = module.fuse(jnp.asarray(features())) - plain.fuse(jnp.asarray(features()))
    np.testing.assert_allclose(difference, np.broadcast_to(bias, difference.shape), atol=1e-4)
    assert "with bias" in report


UNKNOWN = {
    "fancy_norm.weight": np.ones(128, np.float32),
    "midlayer.self_attn.sinks": np.ones(8, np.float32),
    "midlayer.gate.weight": np.ones((8, 128), np.float32),
    "embed_proj.weight": np.ones((128, 128), np.float32),
    "midlayer.mlp.experts.0.up_proj.weight": np.ones((8, 128), np.float32),
    "midlayer.self_attn.q_proj.lora_A.weight": np.ones((2, 256), np.float32),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_weights_are_refused(tmp_path, name):
    refused(draft(tmp_path, {name: UNKNOWN[name]}), f"unknown weight could change.*{name}")


def test_the_same_weight_twice(tmp_path):
    refused(
        draft(tmp_path, {"layers.0.hidden_norm.weight": KIT["norm.weight"]}),
        "two tensors are the same weight.*hidden_norm",
    )


def test_missing_and_misshapen_tensors(tmp_path):
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.post_attention_layernorm.weight", "norm.weight"):
        refused(
            draft(tmp_path, drop=(name,)),
            f"missing.*{name.replace('midlayer', 'layers.0')}|{name.replace('midlayer', 'layers.0')}: .*missing",
        )
    refused(draft(tmp_path, {"norm.weight": np.ones(64, np.float32)}), r"norm.weight: .*misshapen.*\[64\].*\[128\]")
    refused(
        draft(tmp_path, {"midlayer.mlp.down_proj.weight": np.ones((128, 16), np.float32)}),
        r"down_proj.*\[128, 16\].*\[128, 32\]",
    )
    refused(draft(tmp_path, {"layers.2.input_layernorm.weight": np.ones(128, np.float32)}), r"without a gap.*\[0, 2\]")
    refused(draft(tmp_path, {"fc_norm.0.bias": np.ones(128, np.float32)}), "fc_norm.0.bias")
    refused(
        draft(tmp_path, {"midlayer.self_attn.q_norm.weight": np.ones(16, np.float32)}), "q_norm or k_norm is missing"
    )


# order of things


def test_nothing_is_read_before_everything_is_checked(tmp_path, monkeypatch):
    read = []
    plain = CheckpointReader.read
    monkeypatch.setattr(CheckpointReader, "read", lambda self, name: (read.append(name), plain(self, name))[1])
    inspect(draft(tmp_path, ids=CUT))
    assert set(read) == {"d2t", "t2d"}
    with pytest.raises(ConfigError):
        loaded(draft(tmp_path, ids=CUT, draft_vocab_size=20))
    assert set(read) == {"d2t", "t2d"}


def test_head_of_a_cut_vocabulary_can_be_borrowed(tmp_path):
    """Without lm_head the rows of the target's head that the map names are taken; the widths must agree."""
    from eaglejax.checkpoint.target_loader import load_target

    p = RNG.dirichlet(np.ones(64), 64)
    target = load_target(kit_m.write_target(tmp_path / "target", p, tokenizer=False), dtype="float32")
    assert target.head is not None
    report = LoadReport()
    cut = draft(tmp_path, drop=("lm_head.weight",), ids=CUT)
    module = read_draft(cut, dtype="float32", target=target, report=report).draft
    np.testing.assert_array_equal(module.head.weight[...], np.asarray(target.head.weight[...])[CUT])
    assert "head: borrowed from the target, the 16 rows of the draft vocabulary" in str(report)
    full = draft(tmp_path, drop=("lm_head.weight",), name="full", draft_vocab_size=None)
    module = read_draft(full, dtype="float32", target=target, report=report).draft
    assert module.head.weight[...] is target.head.weight[...]
    with pytest.raises(CheckpointError, match="name the target: --model=NAME"):
        loaded(full)
    tied = draft(tmp_path, {"embed_tokens.weight": TABLE}, ("lm_head.weight",), name="tied", tie_word_embeddings=True)
    module, _ = loaded(tied, embedding=None)
    assert module.head.weight[...] is module.embedding.weight[...]


def test_what_d2t_holds_can_be_told(tmp_path):
    """`d2t` in draft_config= reads the table as it says, where the table allows it."""
    ids = draft(tmp_path, {"d2t": np.asarray(CUT)}, ("t2d",), ids=CUT, name="ids")
    told = read_draft(ids, dtype="float32", target_embedding=TABLE, overrides={"d2t": "ids"}, report=LoadReport())
    np.testing.assert_array_equal(told.draft.target_ids[...], CUT)
    offsets = draft(tmp_path, {"d2t": OFFSETS}, ids=CUT, name="offsets")
    for meaning, match in (("ids", "does not hold target ids"), ("map", "unknown meaning")):
        with pytest.raises((CheckpointError, ConfigError), match=match):
            read_draft(
                offsets, dtype="float32", target_embedding=TABLE, overrides={"d2t": meaning}, report=LoadReport()
            )

"""Writers of small checkpoint files, sound and broken, independent of the readers under test."""

import json
import struct
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np

DTYPE_NAMES = {
    np.dtype(np.float64): "F64",
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e5m2): "F8_E5M2",
    np.dtype(np.int64): "I64",
    np.dtype(np.int32): "I32",
    np.dtype(np.int16): "I16",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint8): "U8",
    np.dtype(np.bool_): "BOOL",
}

LFS_POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4cac19622fc3ada9c0fdeadb33f88f367b541f38b89102a3f1261ac81fd5bcb5\nsize 84977953\n"
)


def header_of(tensors: dict[str, np.ndarray]) -> dict:
    """The header of a safetensors file that holds `tensors` one after the other."""
    header, at = {}, 0
    for name, array in tensors.items():
        offsets = [at, at + array.nbytes]
        header[name] = {"dtype": DTYPE_NAMES[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        at += array.nbytes
    return header


def write_raw(file: Path, header: dict | bytes, data: bytes = b"") -> Path:
    """A safetensors file with any header, right or wrong."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return file


def write_safetensors(file: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> Path:
    header = header_of(tensors) | ({"__metadata__": metadata} if metadata else {})
    return write_raw(file, header, b"".join(array.tobytes() for array in tensors.values()))


def write_shards(folder: Path, shards: list[dict[str, np.ndarray]], index: bool = True) -> Path:
    """A folder of numbered shards, with their index or without."""
    weight_map = {}
    for n, tensors in enumerate(shards, 1):
        name = f"model-{n:05}-of-{len(shards):05}.safetensors"
        write_safetensors(folder / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


# a llama model of two layers; the width of each matrix differs from the others
HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 160, 96, 4, 2, 32, 10, 2


def llama_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights of that model under Hugging Face's names."""
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for n in range(LAYERS):
        layer = f"model.layers.{n}."
        shapes |= {
            layer + "input_layernorm.weight": (HIDDEN,),
            layer + "post_attention_layernorm.weight": (HIDDEN,),
            layer + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            layer + "mlp.gate_proj.weight": (WIDTH, HIDDEN),
            layer + "mlp.up_proj.weight": (WIDTH, HIDDEN),
            layer + "mlp.down_proj.weight": (HIDDEN, WIDTH),
        }
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp's converter stores them: channel i beside channel i + head_dim / 2."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(weight.shape)


def gguf_entries(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same model under GGUF's names."""
    entries = {}
    for name, weight in weights.items():
        stem, kind = name.rsplit(".", 1)
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, number, stem = stem.split(".", 3)
            prefix = f"blk.{number}."
        for part, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if stem.endswith(part):
                weight = interleave(weight, heads)
        entries[f"{prefix}{GGUF_NAMES[stem]}.{kind}"] = weight
    return entries


def write_gguf(
    file: Path,
    entries: dict[str, np.ndarray],
    *,
    arch: str = "llama",
    forms: dict[str, gguf.GGMLQuantizationType] | None = None,
    extra: dict[str, object] | None = None,
    without: tuple[str, ...] = (),
    tokenizer: bool = True,
) -> Path:
    """A GGUF file by the format's own package. `forms`: how to quantise a tensor; raw bytes are stored as they are.

    `extra` adds metadata or replaces it; keys in `without` are left out.
    """
    metadata: dict[str, object] = {
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.block_count": LAYERS,
        f"{arch}.feed_forward_length": WIDTH,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.key_length": HEAD_DIM,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 50000.0,
    }
    if tokenizer:
        metadata |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": ["<s>", "</s>", *"abcdefgh"],
            "tokenizer.ggml.token_type": [3, 3] + 8 * [1],
            "tokenizer.ggml.merges": ["a b", "ab c"],
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.chat_template": "{{ messages }}",
        }
    metadata = {k: v for k, v in {**metadata, **(extra or {})}.items() if k not in without}
    writer = gguf.GGUFWriter(file, arch)
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    for key, value in metadata.items():
        writer.add_array(key, value) if isinstance(value, list) else add[type(value)](key, value)
    for name, array in entries.items():
        form = (forms or {}).get(name)
        if form is not None and array.dtype != np.uint8:
            array = gguf.quantize(array, form)
        writer.add_tensor(name, array, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file

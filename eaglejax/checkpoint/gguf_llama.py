"""A GGUF file of the llama architecture seen as a Hugging Face checkpoint: names, config, order of q and k rows."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, Shaped

from eaglejax.checkpoint.byte_runs import full_index, read_bytes
from eaglejax.checkpoint.gguf_file import GGUFTensor, widen
from eaglejax.checkpoint.tensors import CheckpointReader, TensorInfo, cut_block
from eaglejax.errors import CheckpointError

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# keys below "llama." that are read here or change nothing for inference; any other might change the forward pass
KNOWN = {
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "expert_count",
    "expert_used_count",
}
CONVERT = "use the original Hugging Face checkpoint of the model"


class LlamaGGUFReader(CheckpointReader):
    """Reads tensors widened: quantised ones and F32 as float32, F16 and BF16 as they are."""

    def __init__(self, file: Path, metadata: dict[str, Any], table: dict[str, GGUFTensor]):
        notes = {k: str(v) for k, v in metadata.items() if not isinstance(v, list) and not k.startswith("tokenizer.")}
        config = _config(file, metadata, table)
        self._source: dict[str, GGUFTensor] = {}
        tensors: dict[str, TensorInfo] = {}
        for name, tensor in table.items():
            if name == "rope_freqs.weight":
                config["rope_scaling"] = _llama3_scaling(file, tensor, config)
                continue
            hf_name = _hf_name(file, name, config["num_hidden_layers"])
            self._source[hf_name] = tensor
            form = tensor.form
            tensors[hf_name] = TensorInfo(hf_name, tensor.shape, form.dtype, file, tensor.offset, stored=form.name)
        _check_complete(file, tensors, config)
        config["tie_word_embeddings"] = "lm_head.weight" not in tensors
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in tensors
        config["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in tensors
        super().__init__(file, tensors, notes)
        self.hf_config = config
        self.gguf_tokenizer = _tokenizer(file, metadata, config)

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        info, tensor = self.info(name), self._source[name]
        raw = read_bytes(info.file, info.offset, tensor.nbytes)
        self.count_bytes(raw.nbytes)
        values = widen(raw, tensor.form, info.shape, info.file)
        order = self._row_order(info)
        return values if order is None else values[order]

    def read_rows(self, name: str, start: int, stop: int) -> Shaped[np.ndarray, "..."]:
        info, tensor = self.info(name), self._source[name]
        self._check_rows(info, start, stop)
        if start == stop or len(info.shape) < 2:
            return self.read(name)[start:stop]
        order = self._row_order(info)
        wanted = np.arange(start, stop) if order is None else order[start:stop]
        first, count = int(wanted.min()), int(wanted.max() - wanted.min()) + 1
        row = tensor.nbytes // info.shape[0]
        raw = read_bytes(info.file, info.offset + first * row, count * row)
        self.count_bytes(raw.nbytes)
        return widen(raw, tensor.form, (count, *info.shape[1:]), info.file)[wanted - first]

    def read_block(
        self, name: str, index: Sequence[slice], *, shape: Sequence[int] | None = None, dtype: str | None = None
    ) -> Shaped[np.ndarray, "..."]:
        """As for any reader; whole rows are read and widened, and cut then. Seen in another shape: the whole tensor."""
        if shape is not None or dtype is not None or not index:
            return cut_block(self.read(name), index, shape, dtype)
        rows, *rest = full_index(index, self.info(name).shape)
        return np.array(self.read_rows(name, rows.start, rows.stop)[(slice(None), *rest)])

    def _row_order(self, info: TensorInfo) -> Int64[np.ndarray, " n"] | None:
        """Where the file keeps each row of q or k: there RoPE rotates neighbours, in Hugging Face's order halves."""
        match = re.search(r"self_attn\.(q|k)_proj\.", info.name)
        if match is None:
            return None
        assert self.hf_config is not None
        heads = self.hf_config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
        rows = np.arange(info.shape[0], dtype=np.int64)
        return rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _hf_name(file: Path, name: str, layers: int) -> str:
    match = re.fullmatch(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)", name)
    names = TOP if match is None or match["layer"] is None else LAYER
    if match is None or match["part"] not in names or (match["layer"] and int(match["layer"]) >= layers):
        raise CheckpointError(
            f"holds tensor {name!r}, which is not part of a dense llama model of {layers} layers",
            where=file,
            fix=CONVERT,
        )
    prefix = f"model.layers.{int(match['layer'])}." if match["layer"] else ""
    return f"{prefix}{names[match['part']]}.{match['kind']}"


def _check_complete(file: Path, tensors: dict[str, TensorInfo], config: dict[str, Any]) -> None:
    """Every tensor of the architecture is there in the shape that the metadata says."""
    hidden, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[k] * config["head_dim"] for k in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }
    for n in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{n}.{part}.weight": shape for part, shape in layer.items()}
    if missing := [name for name in shapes if name not in tensors]:
        raise CheckpointError(
            f"lacks {len(missing)} tensors, {missing[0]!r} (its Hugging Face name) among them", where=file, fix=CONVERT
        )
    shapes["lm_head.weight"] = (vocab, hidden)
    for name, shape in shapes.items():
        if name in tensors and tensors[name].shape != shape:
            raise CheckpointError(
                f"wrong shape of tensor {name!r} (its Hugging Face name)",
                where=file,
                found=tensors[name].shape,
                expected=f"{shape} by metadata",
            )


def _config(file: Path, metadata: dict[str, Any], table: dict[str, GGUFTensor]) -> dict[str, Any]:
    """The metadata in the keys of a llama config.json."""
    arch = metadata.get("general.architecture")
    if arch != "llama":
        raise CheckpointError(
            "GGUF architecture not supported", where=file, found=repr(arch), expected="'llama'", fix=CONVERT
        )
    if metadata.get("split.count", 1) > 1:
        raise CheckpointError("is one part of a split GGUF file", where=file, fix="join it: llama-gguf-split --merge")
    keys = {k.removeprefix("llama."): v for k, v in metadata.items() if k.startswith("llama.")}
    if keys.get("expert_count", 0):
        raise CheckpointError("holds a mixture of experts, in GGUF not supported", where=file, fix=CONVERT)
    if unknown := sorted(keys.keys() - KNOWN):
        raise CheckpointError(
            "settings that are not understood and may change the model",
            where=file,
            found=", ".join(f"llama.{key} = {keys[key]}" for key in unknown),
            fix=CONVERT,
        )

    def number(key: str, default: Any = None) -> Any:
        """One number; a list of one value per layer only where they are all the same."""
        value = keys.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0 or not math.isfinite(value):
            found = "nothing" if value is None else value
            raise CheckpointError(
                f"unusable metadata llama.{key}", where=file, found=found, expected="one number above 0"
            )
        return _shortest(value)

    hidden, heads = number("embedding_length"), number("attention.head_count")
    head_dim = number("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, head_dim) != head_dim:
            raise CheckpointError(
                f"unusable metadata llama.{key}", where=file, found=keys[key], expected=head_dim, fix=CONVERT
            )
    if "token_embd.weight" not in table:
        raise CheckpointError("holds no tensor 'token_embd.weight'", where=file)
    eos = [metadata[k] for k in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if k in metadata]
    eos = list(dict.fromkeys(eos))
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": number("vocab_size", table["token_embd.weight"].shape[0]),
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        # the default of the format
        "rope_theta": float(number("rope.freq_base", 10000.0)),
        "rope_scaling": _scaling(file, keys),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _shortest(value: Any) -> Any:
    """A float of the file is a float32: 9.999999747378752e-06 was written as 1e-05, and is the same float32."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _scaling(file: Path, keys: dict[str, Any]) -> dict[str, Any] | None:
    """rope_scaling in Hugging Face's form."""
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = _shortest(keys.get("rope.scaling.factor"))
    if kind not in ("linear", "yarn") or not factor or keys.get("rope.scaling.attn_factor", 1.0) != 1.0:
        found = {k: v for k, v in keys.items() if k.startswith("rope.scaling.")}
        raise CheckpointError(
            "RoPE scaling not supported", where=file, found=found, expected="linear or yarn", fix=CONVERT
        )
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.get("rope.scaling.original_context_length"),
        "beta_fast": _shortest(keys.get("rope.scaling.yarn_beta_fast", 32.0)),
        "beta_slow": _shortest(keys.get("rope.scaling.yarn_beta_slow", 1.0)),
    }


def _llama3_scaling(file: Path, tensor: GGUFTensor, config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3's scaling, which GGUF stores as one divisor per frequency: the parameters that give just these."""
    raw = read_bytes(file, tensor.offset, tensor.nbytes)
    divisors = widen(raw, tensor.form, tensor.shape, file).astype(np.float64)
    factor, low, high, original = float(np.round(divisors.max(), 4)), 1.0, 4.0, 8192
    frequencies = config["rope_theta"] ** -(np.arange(0, config["head_dim"], 2) / config["head_dim"])
    turns = original * frequencies / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if config["rope_scaling"] or divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise CheckpointError(
            "rope_freqs.weight holds frequency divisors that are not Llama 3's scaling", where=file, fix=CONVERT
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _tokenizer(file: Path, metadata: dict[str, Any], config: dict[str, Any]) -> dict[str, Any] | None:
    """The tokenizer's tables and ids, None where an id or a table is absent; None altogether without tokens."""
    get = lambda key: metadata.get(f"tokenizer.ggml.{key}")
    tokens, kinds = get("tokens"), get("token_type")
    if tokens is None:
        return None
    if len(tokens) > config["vocab_size"] or (kinds is not None and len(kinds) != len(tokens)):
        raise CheckpointError(
            "its tokenizer does not fit",
            where=file,
            found=f"{len(tokens)} tokens, {len(kinds or ())} token types",
            expected=f"as many of both, at most {config['vocab_size']}",
        )
    return {
        "model": get("model"),
        "pre": get("pre"),
        "tokens": tokens,
        "token_type": kinds,
        "scores": get("scores"),
        "merges": get("merges"),
        "bos_token_id": get("bos_token_id"),
        "eos_token_id": get("eos_token_id"),
        "eot_token_id": get("eot_token_id"),
        "unk_token_id": get("unknown_token_id"),
        "pad_token_id": get("padding_token_id"),
        "add_bos": bool(get("add_bos_token")),
        "add_eos": bool(get("add_eos_token")),
        "add_space_prefix": get("add_space_prefix"),
        "chat_template": metadata.get("tokenizer.chat_template"),
    }

"""A difference and its base as one model: whether the config of the one describes the other but for the experts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaglejax.checkpoint.difference import FAMILY
from eaglejax.checkpoint.json_file import read_config, read_generation_config, read_json
from eaglejax.checkpoint.source import Source
from eaglejax.checkpoint.tensors import CheckpointReader
from eaglejax.errors import ConfigError
from eaglejax.models.capture import MANIFEST_KEY
from eaglejax.models.config import DenseConfig, GQAConfig, MoEConfig, TargetConfig
from eaglejax.models.target_config import read_target_config

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Composition:
    """A difference and its base, found to fit.

    Attributes:
        target: the whole model's config as read. values: the same in the keys of a config.json, tokens as the base has
            them. name: what the difference calls its base.
    """

    target: TargetConfig
    values: dict[str, Any]
    name: str

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts."""
        return moe_layers(self.target)


def compose(folder: Path, name: str, base: Source, reader: CheckpointReader) -> Composition:
    """Checks that the config of a difference describes its base but for the routed experts; no weight is read.

    Arguments:
        name, base: as `difference_base.find_base` gives them.
        reader: the base, opened.

    Raises:
        ConfigError, CheckpointError: a config that is not of such a model, or not of this base; naming the key, what
        was found and what the base has.
    """
    where = folder / "config.json"
    values = {key: value for key, value in read_json(where).items() if key != MANIFEST_KEY}
    theirs = reader.hf_config if reader.hf_config is not None else read_config(base.folder)
    their_file = base.path if reader.hf_config is not None else base.folder / "config.json"
    for config, file in ((values, where), (theirs, their_file)):
        if quantised := config.get("quantization_config"):
            raise ConfigError(
                "differences and their bases are not quantised in this way",
                where=f"{file}: quantization_config",
                found=repr(quantised)[:120],
                expected="a base with plain weights, or a GGUF file",
            )
    ours = read_target_config(values, where=where)
    if ours.family.name != FAMILY:
        raise ConfigError("not the family of a difference", where=where, found=ours.family.name, expected=FAMILY)
    dense = read_target_config(theirs, where=their_file)
    if dense.family.name != "llama":
        raise ConfigError(
            "is no base for routed experts", where=their_file, found=dense.family.name, expected="a dense llama model"
        )
    have, want = _facts(ours.config), _facts(dense.config)
    for key in TOKENS:
        if key in values:
            have[key], want[key] = values[key], theirs.get(key)
    if wrong := [key for key in have if have[key] != want[key]]:
        key = wrong[0]
        more = f" (nor do {', '.join(wrong[1:])})" if len(wrong) > 1 else ""
        raise ConfigError(
            f"does not fit the base of this difference{more}",
            where=f"{where}: {key}",
            found=have[key],
            expected=f"{want[key]}, as in {their_file}",
            fix="name the base that the difference was made for",
        )
    generation = {} if reader.hf_config is not None else read_generation_config(base.folder)
    tokens = {key: theirs.get(key) for key in TOKENS}
    tokens |= {key: generation[key] for key in TOKENS if generation.get(key) is not None}
    return Composition(ours.config, {**values, **tokens}, name)


def moe_layers(config: TargetConfig) -> tuple[int, ...]:
    """Indices of the layers with routed experts."""
    return tuple(index for index, layer in enumerate(config.layers) if isinstance(layer.mlp, MoEConfig))


def _facts(config: TargetConfig) -> dict[str, object]:
    """What a difference shares with its base, by the key of a config.json that says it first of all."""
    attention = config.layers[0].attention
    assert isinstance(attention, GQAConfig)
    widths = {mlp.width if isinstance(mlp, DenseConfig) else mlp.shared_width for mlp in _mlps(config)}
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "rope_theta": attention.rope,
        "attention_bias": attention.qkv_bias or attention.output_bias,
        "use_qk_norm": attention.qk_norm,
        "intermediate_size and n_shared_experts * moe_intermediate_size": sorted(widths),
        "mlp_bias": any(mlp.bias for mlp in _mlps(config) if isinstance(mlp, DenseConfig)),
        # experts have silu always
        "hidden_act": {mlp.activation if isinstance(mlp, DenseConfig) else "silu" for mlp in _mlps(config)},
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_position,
    }


def _mlps(config: TargetConfig) -> list[DenseConfig | MoEConfig]:
    return [layer.mlp for layer in config.layers]

"""Which parts of a model are split over the devices of the "model" axis. What does not divide stays whole on every device, and is said."""

from __future__ import annotations

from dataclasses import dataclass

from eaglejax.errors import ConfigError
from eaglejax.models.config import (
    DenseConfig,
    DraftConfig,
    GQAConfig,
    LayerConfig,
    MLAConfig,
    MoEConfig,
    TargetConfig,
)
from eaglejax.models.split import UNSPLIT, WHOLE, LayerSplit, ModelSplit, Over
from eaglejax.sharding.mesh import MODEL

ExpertSplit = str  # "auto", "experts" or "width"
DraftPlacement = str  # "replicated" or "sharded"


@dataclass(frozen=True)
class Placement:
    """What a user may choose about the split.

    `experts`: "experts" gives every device whole experts, "width" gives every device a part of each; "auto" is the first where it divides.
    `draft`: "replicated" (no collective while drafting, a copy on every device) or "sharded" (as the target).
    """

    experts: ExpertSplit = "auto"
    draft: DraftPlacement = "replicated"

    def __post_init__(self):
        for name, value, known in (
            ("expert_split", self.experts, ("auto", "experts", "width")),
            ("draft_placement", self.draft, ("replicated", "sharded")),
        ):
            if value not in known:
                raise ConfigError("unknown choice", where=name, found=repr(value), expected=" or ".join(known))


def split_target(config: TargetConfig, size: int, placement: Placement, notes: list[str]) -> ModelSplit:
    """The split of a target over `size` devices; what stays whole is added to `notes`.

    Raises ConfigError: `placement.experts` names a split that does not divide.
    """
    if size == 1:
        return UNSPLIT
    layers = tuple(_split_layer(layer, size, placement.experts) for layer in config.layers)
    _note_whole(config.layers, layers, size, notes)
    return ModelSplit(layers, vocab=_vocabulary("vocabulary", "v", config.vocab_size, size, notes))


def split_draft(config: DraftConfig, size: int, placement: Placement, notes: list[str]) -> ModelSplit:
    """The split of a draft over `size` devices: none at all where it is replicated."""
    if size == 1 or placement.draft == "replicated":
        return UNSPLIT
    layers = tuple(_split_layer(layer, size, "auto") for layer in config.layers)
    own: list[str] = []
    _note_whole(config.layers, layers, size, own)
    wide = config.captures * config.target_hidden_size
    split = ModelSplit(
        layers,
        vocab=_vocabulary("vocabulary", "v", config.vocab_size, size, own),
        draft_vocab=_vocabulary("draft vocabulary", "w", config.draft_vocab_size, size, own),
        fusion=Over(MODEL, ("n",), size) if config.fc and wide % size == 0 else WHOLE,
    )
    notes += [f"draft: {line}" for line in own]
    return split


def _split_layer(layer: LayerConfig, size: int, experts: ExpertSplit) -> LayerSplit:
    if isinstance(layer.mlp, DenseConfig):
        return LayerSplit(_attention(layer.attention, size), _width(layer.mlp.width, size))
    shared = _width(layer.mlp.shared_width, size) if layer.mlp.shared_width else WHOLE
    return LayerSplit(_attention(layer.attention, size), _experts(layer.mlp, size, experts), shared)


def _attention(config: GQAConfig | MLAConfig, size: int) -> Over:
    if config.heads % size:
        return WHOLE
    if isinstance(config, MLAConfig) or config.kv_heads % size == 0:
        return Over(MODEL, ("h", "k"), size)
    # fewer KV heads than devices: neighbours keep the same one
    return Over(MODEL, ("h", "k"), size, size // config.kv_heads) if size % config.kv_heads == 0 else WHOLE


def _width(width: int, size: int) -> Over:
    # even parts: 4-bit weights lie two in a byte
    return WHOLE if width % (2 * size) else Over(MODEL, ("f",), size)


def _experts(config: MoEConfig, size: int, asked: ExpertSplit) -> Over:
    whole, parts = config.experts % size == 0, config.width % (2 * size) == 0
    for name, divides, count in (("experts", whole, config.experts), ("width", parts, config.width)):
        if asked == name and not divides:
            raise ConfigError(
                f"the experts cannot be split by {name}",
                where="expert_split",
                found=f"{config.experts} experts of width {config.width} on {size} devices: {count} does not divide",
                fix='leave it at "auto"',
            )
    if whole and asked != "width":
        return Over(MODEL, ("e",), size)
    return Over(MODEL, ("f",), size) if parts else WHOLE


def _vocabulary(kind: str, name: str, count: int, size: int, notes: list[str]) -> Over:
    if count % size:
        notes.append(f"the {kind} of {count} does not divide over {size} devices: whole on each")
        return WHOLE
    return Over(MODEL, (name,), size)


def _note_whole(layers: tuple[LayerConfig, ...], splits: tuple[LayerSplit, ...], size: int, notes: list[str]) -> None:
    lines = {}
    for layer, split in zip(layers, splits, strict=True):
        attention, mlp = layer.attention, layer.mlp
        if split.attention == WHOLE:
            heads = f"{attention.heads} heads"
            if isinstance(attention, GQAConfig):
                heads += f" over {attention.kv_heads} KV heads"
            lines[f"attention of {heads} does not divide over {size} devices: whole on each"] = None
        elif split.attention.repeat > 1:
            lines[f"{split.attention.repeat} devices share each KV head: each keeps its keys and values"] = None
        if isinstance(mlp, DenseConfig):
            if split.mlp == WHOLE:
                lines[f"an MLP of width {mlp.width} does not divide over {size} devices: whole on each"] = None
            continue
        if "f" in split.mlp.names:
            lines[f"{mlp.experts} experts on {size} devices: each holds a part of the width of all"] = None
        elif split.mlp == WHOLE:
            lines[f"{mlp.experts} experts do not divide over {size} devices: whole on each"] = None
        if mlp.shared_width and split.shared == WHOLE:
            lines[f"shared experts of width {mlp.shared_width} do not divide over {size} devices: whole on each"] = None
    notes += lines

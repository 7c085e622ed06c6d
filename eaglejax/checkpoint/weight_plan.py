"""Where each weight of a model comes from: tensor names and shapes, and the place of each in our arrays.

A plan is made from the config alone and checked against the headers of the files before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eaglejax.models.config import DenseConfig, GQAConfig, LayerConfig, MLAConfig, MoEConfig, TargetConfig
from eaglejax.models.families import ExpertNames, Family
from eaglejax.models.packed import Packing


@dataclass(frozen=True)
class View:
    """How the values of a tensor lie in a leaf: seen in another shape, cut along its axes, its axes in another order.

    Any block of the leaf is so a block of the tensor, and no more than that need be read.

    Attributes:
        shape: the tensor's own axes, split where a leaf has them apart ([h c, d] as [h, c, d]).
        order: axis i of the leaf is axis order[i] of that shape.
        start: where the leaf begins along each axis of that shape.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    start: tuple[int, ...]

    def source(self, index: Sequence[slice]) -> tuple[slice, ...]:
        """The block of the tensor, in the axes of `shape`, that holds the block `index` of the leaf."""
        parts = [slice(0, 0)] * len(self.shape)
        for part, axis in zip(index, self.order, strict=True):
            parts[axis] = slice(part.start + self.start[axis], part.stop + self.start[axis])
        return tuple(parts)


def plain(shape: Sequence[int]) -> View:
    """A tensor as it lies."""
    return View(tuple(shape), tuple(range(len(shape))), (0,) * len(shape))


def seen(*shape: int, order: tuple[int, ...] | None = None, start: tuple[int, ...] | None = None) -> View:
    """A view with the axes in their order and nothing cut, unless said."""
    view = plain(shape)
    return View(view.shape, order or view.order, start or view.start)


@dataclass(frozen=True)
class Part:
    """One tensor of a checkpoint and where its values go in a leaf.

    Attributes:
        name, shape: of the tensor; the shape that the config asks for.
        place: index into the leaf, () for all of it.
        view: how the tensor lies in that place, None: as it is.
        padded: the first axis may be longer (a vocabulary padded for some hardware); the rows beyond are never read.
        packed: shape and view of its quantised form where that lies otherwise (gpt-oss).
        dtype: what the bytes are read as, None: what the file says.
        packing: set where this part is the `values` of a quantised tensor.
        scales: set where this part is the `scale` of a quantised tensor.
        beside: further tensors that belong to it and hold no weights (weight_shape).
    """

    name: str
    shape: tuple[int, ...]
    place: tuple[int, ...] = ()
    view: View | None = None
    padded: bool = False
    packed: PackedForm | None = None
    dtype: str | None = None
    packing: Packing | None = None
    scales: Scales | None = None
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class PackedForm:
    """A tensor's quantised form where it lies otherwise than the plain one."""

    shape: tuple[int, ...]
    view: View


@dataclass(frozen=True)
class Scales:
    """The scales of a quantised tensor: `shape` and `view` are the tensor's own, in weights; `blocks` says how many
    weights share a scale along each of its axes, `grid` how many scales there are, `per_byte` how many weights lie in
    an element of the values."""

    shape: tuple[int, ...]
    view: View
    blocks: tuple[int, ...]
    grid: tuple[int, ...]
    per_byte: int


@dataclass(frozen=True)
class Stems:
    """What the names of a checkpoint begin with: those of the model, of its head, of its layers (an index follows)."""

    model: str
    head: str
    layers: str


# A leaf is filled by the first of its recipes of which the checkpoint holds any tensor.
Recipe = tuple[Part, ...]
Plan = dict[str, tuple[Recipe, ...]]


def whole(name: str, *shape: int) -> tuple[Recipe, ...]:
    """A leaf that is one tensor as it lies."""
    return ((Part(name, shape),),)


def pair(first: str, second: str, *shape: int) -> tuple[Recipe, ...]:
    """A leaf of two tensors, one after the other along a new first axis."""
    return ((Part(first, shape, (0,)), Part(second, shape, (1,))),)


def target_plan(config: TargetConfig, family: Family, stems: Stems) -> Plan:
    """The plan of a whole target."""
    vocab, size = config.vocab_size, config.hidden_size
    table = lambda name: ((Part(name, (vocab, size), padded=True),),)
    plan: Plan = {"embedding.weight": table(f"{stems.model}embed_tokens.weight")}
    plan["norm.scale"] = whole(f"{stems.model}norm.weight", size)
    if not config.tie_embeddings:
        plan["head.weight"] = table(f"{stems.head}lm_head.weight")
    for index, layer in enumerate(config.layers):
        inner = block_plan(layer, size, size, f"{stems.layers}{index}.", family.names)
        plan |= {f"layers.{index}.{leaf}": recipes for leaf, recipes in inner.items()}
    return plan


def block_plan(layer: LayerConfig, in_features: int, size: int, prefix: str, names: ExpertNames) -> Plan:
    """The plan of one block; attention reads `in_features` and gives `size`."""
    attention = latent_plan if isinstance(layer.attention, MLAConfig) else gqa_plan
    plan: Plan = {"input_norm.scale": whole(f"{prefix}input_layernorm.weight", size)}
    plan["post_norm.scale"] = whole(f"{prefix}post_attention_layernorm.weight", size)
    inner = attention(layer.attention, in_features, size, f"{prefix}self_attn.")  # pyright: ignore[reportArgumentType]
    plan |= {f"attention.{leaf}": recipes for leaf, recipes in inner.items()}
    if isinstance(layer.mlp, MoEConfig):
        inner = moe_plan(layer.mlp, size, prefix, names)
    else:
        inner = dense_plan(layer.mlp, size, f"{prefix}mlp.")
    return plan | {f"mlp.{leaf}": recipes for leaf, recipes in inner.items()}


def gqa_plan(config: GQAConfig, in_features: int, out_features: int, prefix: str) -> Plan:
    """q, k, v and output projections, with the biases, per-head norms and sinks of the config."""
    width, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    plan: Plan = {
        "q.weight": whole(f"{prefix}q_proj.weight", width, in_features),
        "kv.weight": pair(f"{prefix}k_proj.weight", f"{prefix}v_proj.weight", kv, in_features),
        "out.weight": whole(f"{prefix}o_proj.weight", out_features, width),
    }
    if config.qkv_bias:
        plan["q.bias"] = whole(f"{prefix}q_proj.bias", width)
        plan["kv.bias"] = pair(f"{prefix}k_proj.bias", f"{prefix}v_proj.bias", kv)
    if config.output_bias:
        plan["out.bias"] = whole(f"{prefix}o_proj.bias", out_features)
    if config.qk_norm:
        plan["q_norm.scale"] = whole(f"{prefix}q_norm.weight", config.head_dim)
        plan["k_norm.scale"] = whole(f"{prefix}k_norm.weight", config.head_dim)
    if config.sinks:
        plan["sinks"] = whole(f"{prefix}sinks", config.heads)
    return plan


def latent_plan(config: MLAConfig, in_features: int, out_features: int, prefix: str) -> Plan:
    """Latent attention; kv_b_proj is cut into its key and value parts, which the absorbed form needs apart."""
    heads, latent = config.heads, config.kv_lora_rank
    q_width = heads * (config.nope_dim + config.rope_dim)
    both = (heads * (config.nope_dim + config.value_dim), latent)
    width = config.nope_dim + config.value_dim
    part = lambda start: (
        (Part(f"{prefix}kv_b_proj.weight", both, view=seen(heads, width, latent, start=(0, start, 0))),),
    )
    plan: Plan = {
        "kv_a.weight": whole(f"{prefix}kv_a_proj_with_mqa.weight", latent + config.rope_dim, in_features),
        "kv_a_norm.scale": whole(f"{prefix}kv_a_layernorm.weight", latent),
        "key_up": part(0),
        "value_up": part(config.nope_dim),
        "out.weight": whole(f"{prefix}o_proj.weight", out_features, heads * config.value_dim),
    }
    if config.q_lora_rank is None:
        plan["q.weight"] = whole(f"{prefix}q_proj.weight", q_width, in_features)
    else:
        plan["q_a.weight"] = whole(f"{prefix}q_a_proj.weight", config.q_lora_rank, in_features)
        plan["q_a_norm.scale"] = whole(f"{prefix}q_a_layernorm.weight", config.q_lora_rank)
        plan["q_b.weight"] = whole(f"{prefix}q_b_proj.weight", q_width, config.q_lora_rank)
    if config.bias:
        plan["kv_a.bias"] = whole(f"{prefix}kv_a_proj_with_mqa.bias", latent + config.rope_dim)
        plan["out.bias"] = whole(f"{prefix}o_proj.bias", out_features)
        if config.q_lora_rank is not None:
            plan["q_a.bias"] = whole(f"{prefix}q_a_proj.bias", config.q_lora_rank)
    return plan


def dense_plan(config: DenseConfig, size: int, prefix: str) -> Plan:
    """A gated MLP."""
    gate, up, down = (f"{prefix}{name}_proj" for name in ("gate", "up", "down"))
    plan: Plan = {
        "gate_up.weight": pair(f"{gate}.weight", f"{up}.weight", config.width, size),
        "down.weight": whole(f"{down}.weight", size, config.width),
    }
    if config.bias:
        plan["gate_up.bias"] = pair(f"{gate}.bias", f"{up}.bias", config.width)
        plan["down.bias"] = whole(f"{down}.bias", size)
    return plan


def moe_plan(config: MoEConfig, size: int, prefix: str, names: ExpertNames) -> Plan:
    """Router, experts (one tensor each, or fused as transformers 5 holds them) and shared experts."""
    count = config.experts
    # transformers 5 calls the block "mlp" in every family
    routers = [f"{prefix}{names.router}"] + [f"{prefix}mlp.gate"] * (names.block != "mlp")
    plan: Plan = {"router.weight": tuple((Part(f"{router}.weight", (count, size)),) for router in routers)}
    if config.router_bias:
        plan["router.bias"] = whole(f"{prefix}{names.router}.bias", count)
    if config.correction_bias:
        plan["router.correction"] = whole(f"{prefix}{names.router}.e_score_correction_bias", count)
    fused = _transposed_experts if names.transposed else _fused_experts
    plan |= {f"experts.{leaf}": (recipe,) for leaf, recipe in fused(config, size, f"{prefix}mlp.experts.").items()}
    if not names.fused_only:
        single = _single_experts(config, size, f"{prefix}{names.block}.experts.", names)
        for leaf, recipe in single.items():
            plan[f"experts.{leaf}"] = (recipe, *plan[f"experts.{leaf}"])
    if config.shared_width:
        shared = dense_plan(DenseConfig(config.shared_width), size, f"{prefix}{names.shared}.")
        plan |= {f"shared.{leaf}": recipes for leaf, recipes in shared.items()}
    if config.shared_gate:
        plan["shared_gate"] = whole(f"{prefix}{names.shared}_gate.weight", 1, size)
    return plan


def _single_experts(config: MoEConfig, size: int, prefix: str, names: ExpertNames) -> dict[str, Recipe]:
    gate_up, down = [], []
    for expert in range(config.experts):
        for place, name in enumerate((names.gate, names.up)):
            gate_up.append(Part(f"{prefix}{expert}.{name}.weight", (config.width, size), (expert, place)))
        down.append(Part(f"{prefix}{expert}.{names.down}.weight", (size, config.width), (expert,)))
    return {"gate_up": tuple(gate_up), "down": tuple(down)}


def _fused_experts(config: MoEConfig, size: int, prefix: str) -> dict[str, Recipe]:
    count, width = config.experts, config.width
    halves = seen(count, 2, width, size)
    return {
        "gate_up": (Part(f"{prefix}gate_up_proj", (count, 2 * width, size), view=halves),),
        "down": (Part(f"{prefix}down_proj", (count, size, width)),),
    }


def _transposed_experts(config: MoEConfig, size: int, prefix: str) -> dict[str, Recipe]:
    """[e, in, out], gate and up taking turns along out (gpt-oss); the quantised form is [e, out, in]."""
    count, width = config.experts, config.width
    apart = seen(count, size, width, 2, order=(0, 3, 2, 1))
    apart_bias = seen(count, width, 2, order=(0, 2, 1))
    turned = seen(count, width, size, order=(0, 2, 1))
    rows = PackedForm((count, 2 * width, size), seen(count, width, 2, size, order=(0, 2, 1, 3)))
    packed_down = PackedForm((count, size, width), plain((count, size, width)))
    recipes: dict[str, Recipe] = {
        "gate_up": (Part(f"{prefix}gate_up_proj", (count, size, 2 * width), view=apart, packed=rows),),
        "down": (Part(f"{prefix}down_proj", (count, width, size), view=turned, packed=packed_down),),
    }
    if config.expert_bias:
        recipes["gate_up_bias"] = (Part(f"{prefix}gate_up_proj_bias", (count, 2 * width), view=apart_bias),)
        recipes["down_bias"] = (Part(f"{prefix}down_proj_bias", (count, size)),)
    return recipes

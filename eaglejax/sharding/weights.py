"""Bytes of a model's weights on one device, by component."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from eaglejax.models.packed import Packing
from eaglejax.sharding.local_shapes import Leaf

# the order of a table
COMPONENTS = (
    "attention", "dense MLP", "experts", "shared experts", "router", "norms", "fc", "embedding", "head", "target ids",
)  # fmt: skip


@dataclass(frozen=True)
class Weight:
    """One array of weights of one device. `values`: how many weights it holds, none in the scales of packed ones; `packed`: two arrays
    (values and scales) stand for one weight."""

    path: str
    component: str
    shape: tuple[int, ...]
    values: int
    bytes: int
    packed: bool

    @property
    def layer(self) -> int | None:
        """The number of its layer, None outside of any."""
        first, _, rest = self.path.partition(".")
        return int(rest.partition(".")[0]) if first == "layers" else None


def component(path: str) -> str:
    """The part of a model that a weight belongs to."""
    parts = path.split(".")
    if any(part == "norm" or part.endswith("_norm") or part == "capture_norms" for part in parts):
        return "norms"
    if "router" in parts:
        return "router"
    if "experts" in parts:
        return "experts"
    if "shared" in parts or "shared_gate" in parts:
        return "shared experts"
    if "attention" in parts:
        return "attention"
    if "mlp" in parts:
        return "dense MLP"
    return {"fusion": "fc", "embedding": "embedding", "head": "head", "target_ids": "target ids"}[parts[0]]


def weigh(leaves: Iterable[Leaf], packings: Mapping[str, Packing] | None = None) -> list[Weight]:
    """Every array with its bytes.

    Arguments:
        packings: of the packed weights, by the path of the plain one; they are the leaves PATH.values and PATH.scale.
    """
    weights = []
    for leaf in leaves:
        owner, _, name = leaf.path.rpartition(".")
        packing = (packings or {}).get(owner) if name in ("values", "scale") else None
        held = prod(leaf.shape)
        count = held if packing is None else held * packing.per_byte if name == "values" else 0
        size = held * leaf.itemsize
        weights.append(Weight(leaf.path, component(leaf.path), leaf.shape, count, size, packing is not None))
    return weights


def by_component(weights: Iterable[Weight]) -> dict[str, int]:
    """Bytes of each component that is there, in the order of `COMPONENTS`."""
    sums: dict[str, int] = {}
    for weight in weights:
        sums[weight.component] = sums.get(weight.component, 0) + weight.bytes
    return {name: sums[name] for name in COMPONENTS if name in sums}

"""Bytes of a model's weights on one device, by component."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from eaglejax.sharding.local_shapes import Leaf
from eaglejax.sharding.storage import Storage

# the order of a table
COMPONENTS = (
    "attention", "dense MLP", "experts", "shared experts", "router", "norms", "fc", "embedding", "head", "target ids",
)  # fmt: skip


@dataclass(frozen=True)
class Weight:
    """One weight of one device: values, its logical name of a part, and the bytes it takes, scales included."""

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


def weigh(leaves: Iterable[Leaf], storage: Storage | None = None) -> list[Weight]:
    """Every weight with the bytes it takes as `storage` has it."""
    weights = []
    for leaf in leaves:
        packed = storage is not None and storage.covers(leaf.path)
        values = prod(leaf.shape)
        size = sum(storage.byte_count(leaf.shape)) if packed and storage else values * leaf.itemsize
        weights.append(Weight(leaf.path, component(leaf.path), leaf.shape, values, size, packed))
    return weights


def by_component(weights: Iterable[Weight]) -> dict[str, int]:
    """Bytes of each component that is there, in the order of `COMPONENTS`."""
    sums: dict[str, int] = {}
    for weight in weights:
        sums[weight.component] = sums.get(weight.component, 0) + weight.bytes
    return {name: sums[name] for name in COMPONENTS if name in sums}

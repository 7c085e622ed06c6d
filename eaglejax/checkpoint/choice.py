"""Which tensors of a checkpoint fill which leaf, each checked by its header before anything is read or allocated."""

from __future__ import annotations

import re
from collections.abc import Mapping

from eaglejax.checkpoint.quantised import Quantisation
from eaglejax.checkpoint.quantised_parts import is_there, quantised_parts, same_packing, stored_form, stray_scale
from eaglejax.checkpoint.reader import CheckpointReader, TensorInfo
from eaglejax.checkpoint.weight_plan import Part, Plan, Recipe
from eaglejax.errors import CheckpointError
from eaglejax.models.packed import Packing

FLOATS = ("F64", "F32", "F16", "BF16")
# leaves that `models.packed.PackedWeight` may stand for: projections and experts; not the embedding, routers, norms
QUANTISABLE = re.compile(
    r"(^|\.)(head|(q|kv|out|q_a|q_b|kv_a|gate_up|down)|fc)\.weight$|\.experts\.(gate_up|down)$|\.(key|value)_up$"
)


def quantisable(leaf: str) -> bool:
    """Whether a leaf may be kept quantised."""
    return QUANTISABLE.search(leaf) is not None


def choose(plan: Plan, reader: CheckpointReader, quantisation: Quantisation | None = None) -> dict[str, Recipe]:
    """For each leaf the recipe that the checkpoint holds; every name, shape and dtype is checked against the headers.

    A leaf X that is quantised there gives two: X.values and X.scale, the leaves of the `PackedWeight` in its place.
    """
    chosen: dict[str, Recipe] = {}
    faults: list[CheckpointError] = []
    for leaf, recipes in plan.items():
        recipe = next((r for r in recipes if any(is_there(part, reader) for part in r)), recipes[0])
        forms = [stored_form(part, reader) if quantisable(leaf) else None for part in recipe]
        if all(form is None for form in forms):
            chosen[leaf] = recipe
            faults += [fault for part in recipe if (fault := _fault(part, reader)) is not None]
            continue
        pairs = []
        for part, form in zip(recipe, forms, strict=True):
            if form is None:
                faults.append(_fault(part, reader) or _plain_among(part, leaf, reader))
                continue
            try:
                pairs.append(quantised_parts(part, form, reader, quantisation))
            except CheckpointError as fault:
                faults.append(fault)
        if len(pairs) == len(recipe):
            same_packing([values for values, _ in pairs], leaf)
        chosen[f"{leaf}.values"] = tuple(values for values, _ in pairs)
        chosen[f"{leaf}.scale"] = tuple(scale for _, scale in pairs)
    if faults:
        first, more = faults[0], len(faults) - 1
        what = f"{first.what} (and {more} more tensors at fault)" if more else first.what
        raise CheckpointError(what, where=first.where, found=first.found, expected=first.expected, fix=first.fix)
    return chosen


def packings(chosen: Mapping[str, Recipe]) -> dict[str, Packing]:
    """How the quantised leaves of `choose` are packed, by the path of the plain leaf."""
    return {
        leaf.removesuffix(".values"): recipe[0].packing
        for leaf, recipe in chosen.items()
        if recipe[0].packing is not None
    }


def _fault(part: Part, reader: CheckpointReader) -> CheckpointError | None:
    """What is wrong with a plain tensor."""
    info, name = reader.tensors.get(part.name), f"tensor {part.name!r}"
    if info is None:
        return CheckpointError(f"{name} is missing", where=reader.path, found="nothing", expected=list(part.shape))
    if not _fits(info, part.shape, part.padded):
        what, found = f"{name} has the wrong shape", list(info.shape)
        return CheckpointError(what, where=info.file, found=found, expected=list(part.shape))
    if info.dtype not in FLOATS:
        return CheckpointError(
            f"{name} has a dtype that cannot be read", where=info.file, found=info.dtype, expected=_one_of(FLOATS)
        )
    return stray_scale(part, reader)


def _one_of(names: tuple[str, ...]) -> str:
    return f"one of {', '.join(names)}"


def _plain_among(part: Part, leaf: str, reader: CheckpointReader) -> CheckpointError:
    info = reader.tensors[part.name]
    return CheckpointError(
        f"tensor {part.name!r} is not quantised, and others of {leaf} are",
        where=info.file,
        found=info.dtype,
        expected="one form for all of them",
    )


def _fits(info: TensorInfo, shape: tuple[int, ...], padded: bool) -> bool:
    if padded and len(info.shape) == len(shape):
        return info.shape[0] >= shape[0] and info.shape[1:] == shape[1:]
    return info.shape == shape

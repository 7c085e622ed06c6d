"""Which weights of a quantised checkpoint stay packed on a device, told from its config alone: a plan has no files to look into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from eaglejax.checkpoint.choice import quantisable
from eaglejax.checkpoint.quantised import Scheme, find_quantisation
from eaglejax.checkpoint.quantised_parts import leaf_rows
from eaglejax.checkpoint.weight_plan import PackedForm, Part, Stems, plain, target_plan
from eaglejax.errors import ConfigError
from eaglejax.models.packed import Kind, Packing
from eaglejax.models.target_config import TargetReading

# as such checkpoints are released; a file may hold others
SCALES: Mapping[Kind, str] = {"fp8": "float32", "int8": "bfloat16", "int4": "bfloat16", "mxfp4": "uint8"}


@dataclass(frozen=True)
class Storage:
    """`name`: the packing in words. `packings`: of the packed weights, by the path of the plain leaf."""

    name: str
    packings: Mapping[str, Packing]


def read_storage(reading: TargetReading) -> Storage | None:
    """The storage that a config states; None where nothing is quantised. Raises ConfigError for a form that cannot be read."""
    quantisation = find_quantisation(reading.quantisation)
    if quantisation is None:
        return None
    model, head = reading.family.prefixes[0]
    packings: dict[str, Packing] = {}
    name = ""
    for leaf, recipes in target_plan(reading.config, reading.family, Stems(model, head, f"{model}layers.")).items():
        # releases keep the head plain, also where their config does not except it (DeepSeek-V3)
        if not quantisable(leaf) or leaf == "head.weight":
            continue
        # the forms of one leaf: a tensor per expert, or all experts in one
        for recipe in recipes:
            scheme = quantisation.scheme(recipe[0].name.removesuffix(".weight"))
            if scheme is not None:
                packings[leaf] = _packing(recipe[0], scheme, quantisation.where)
                name = _name(scheme)
                break
    return Storage(name, packings) if packings else None


def _packing(part: Part, scheme: Scheme, where: str) -> Packing:
    form = part.packed or PackedForm(part.shape, part.view or plain(part.shape))
    *_, out, width = form.shape
    if not scheme.divides(width):
        raise ConfigError(
            f"groups of {scheme.columns} do not divide the rows of {part.name}",
            where=where,
            found=f"{width} weights a row",
            expected=f"a multiple of {scheme.columns}, or the module in its list of what is not quantised",
        )
    return Packing(scheme.kind, leaf_rows(form, scheme.rows or out), scheme.columns or width, SCALES[scheme.kind])


def _name(scheme: Scheme) -> str:
    kind = scheme.kind.upper()
    if scheme.columns == 0:
        return f"{kind} with one scale a {'row' if scheme.rows else 'tensor'}"
    if scheme.rows == 1:
        return f"{kind} in groups of {scheme.columns}"
    return f"{kind} in blocks of {scheme.rows} x {scheme.columns}"

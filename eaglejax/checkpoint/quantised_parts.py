"""The tensors of a quantised weight: found by their names, checked against config and headers, as parts of a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from eaglejax.checkpoint.quantised import Quantisation, Scheme
from eaglejax.checkpoint.tensors import CheckpointReader, TensorInfo
from eaglejax.checkpoint.weight_plan import PackedForm, Part, Scales, plain
from eaglejax.errors import CheckpointError
from eaglejax.models.packed import Packing

QUANTISED = ("F8_E4M3", "I8")
VALUES = {"fp8": "F8_E4M3", "int8": "I8", "int4": "I32", "mxfp4": "U8"}
# the dtypes of scales, and as what each is kept
SCALES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E8M0": "float32"}
ENDINGS = {"_packed": "compressed-tensors pack-quantized", "_blocks": "mxfp4"}
SCALE_ENDINGS = ("_scale_inv", "_scale")


def stored_form(part: Part, reader: CheckpointReader) -> str | None:
    """The ending of the quantised values of a tensor ("" where they have its own name), or None: it is plain or
    missing."""
    for ending in ENDINGS:
        if part.name + ending in reader.tensors:
            return ending
    info = reader.tensors.get(part.name)
    return "" if info is not None and info.dtype in QUANTISED else None


def is_there(part: Part, reader: CheckpointReader) -> bool:
    """Whether the checkpoint holds the tensor, plain or quantised."""
    return part.name in reader.tensors or stored_form(part, reader) is not None


def stray_scale(part: Part, reader: CheckpointReader) -> CheckpointError | None:
    """The refusal of a plain tensor with a scale beside it, which would have to be applied, or None."""
    for ending in SCALE_ENDINGS:
        if part.name.endswith(".weight") and part.name + ending in reader.tensors:
            info = reader.tensors[part.name]
            return CheckpointError(
                f"tensor {part.name!r} is not quantised and has scales",
                where=info.file,
                found=f"{info.dtype} beside {part.name}{ending}",
                expected=f"{' or '.join(QUANTISED)}, or no scales",
            )
    return None


def quantised_parts(
    part: Part, ending: str, reader: CheckpointReader, quantisation: Quantisation | None
) -> tuple[Part, Part]:
    """The parts of a quantised tensor that fill `values` and `scale` of a `PackedWeight`.

    Raises CheckpointError with file, tensor, found and expected: no quantization_config, one that says otherwise, a
    missing tensor, a wrong shape or dtype, a group size that does not divide.
    """
    scheme = _scheme(part, ending, reader, quantisation)
    form = part.packed or PackedForm(part.shape, part.view or plain(part.shape))
    layout = _Layout(part, scheme, form, reader)
    return layout.values(), layout.scale()


def _scheme(part: Part, ending: str, reader: CheckpointReader, quantisation: Quantisation | None) -> Scheme:
    info = reader.tensors[part.name + ending]
    if quantisation is None:
        raise CheckpointError(
            f"tensor {info.name!r} is quantised, and config.json has no quantization_config",
            where=info.file,
            found=f"{info.dtype} {list(info.shape)}",
            fix="use the config.json that was released with these weights",
        )
    module = part.name.removesuffix(".weight")
    scheme = quantisation.scheme(module)
    found = f"{info.dtype} {info.name}"
    if scheme is None:
        raise CheckpointError(
            f"tensor {info.name!r} is quantised, but quantization_config leaves {module} plain",
            where=info.file,
            found=found,
            expected=f"as in {quantisation.where}",
            fix="use the config.json that was released with these weights",
        )
    if (scheme.values, VALUES[scheme.kind]) != (ending, info.dtype):
        raise CheckpointError(
            f"tensor {info.name!r} is not quantised as quantization_config says",
            where=info.file,
            found=found,
            expected=f"{VALUES[scheme.kind]} {part.name}{scheme.values}",
            fix="use the config.json that was released with these weights",
        )
    return scheme


@dataclass(frozen=True)
class _Layout:
    """One quantised tensor in the file. `form`: its shape [.., out, in] in weights, and the view of that."""

    part: Part
    scheme: Scheme
    form: PackedForm
    reader: CheckpointReader

    @property
    def blocks(self) -> tuple[int, ...]:
        """Weights that share a scale along each axis of the tensor."""
        *lead, out, width = self.form.shape
        rows, columns = self.scheme.rows or out, self.scheme.columns or width
        return (*(1 for _ in lead), rows, columns)

    def values(self) -> Part:
        info = self.reader.tensors[self.part.name + self.scheme.values]
        shape, view = self.form.shape, self.form.view
        width = shape[-1]
        self._divides(width, info)
        match self.scheme.kind:
            case "int4":
                expected, row, dtype = (*shape[:-1], math.ceil(width / 8)), 4 * math.ceil(width / 8), "U8"
            case "mxfp4":
                per = self.scheme.columns
                expected, row, dtype = (*shape[:-1], width // per, per // 2), width // 2, None
            case "fp8" | "int8":
                expected, row, dtype = shape, width, None
        self._check_shape(info, expected)
        # a row of the file may end in padding; a padded vocabulary has more rows
        lead = (info.shape[0], *view.shape[1:-1]) if self.part.padded else view.shape[:-1]
        seen = replace(view, shape=(*lead, row))
        beside = (self._weight_shape(),) if self.scheme.kind == "int4" else ()
        packing = Packing(self.scheme.kind, leaf_rows(self.form, self.blocks[-2]), self.blocks[-1], self._scale_dtype())
        return replace(self.part, name=info.name, view=seen, dtype=dtype, packing=packing, beside=beside)

    def scale(self) -> Part:
        info = self._scale_info()
        *lead, out, width = self.form.shape
        if self.part.padded:
            out = self.reader.tensors[self.part.name + self.scheme.values].shape[0]
        *_, rows, columns = self.blocks
        grid = (*lead, math.ceil(out / rows), math.ceil(width / columns))
        allowed: list[tuple[int, ...]] = [grid]
        if grid[-1] == 1:
            allowed.append(grid[:-1])
        if math.prod(grid) == 1:
            allowed += [(1,), ()]
        if info.shape not in allowed:
            raise CheckpointError(
                f"tensor {info.name!r} has the wrong shape",
                where=info.file,
                found=f"{list(info.shape)}{' (transposed?)' if info.shape == grid[::-1] else ''}",
                expected=f"{list(grid)}: a scale for every {rows} x {columns} weights of {[*lead, out, width]}",
            )
        view = self.form.view
        if self.part.padded:
            view = replace(view, shape=(out, *view.shape[1:]))
        per_byte = 2 if self.scheme.kind in ("int4", "mxfp4") else 1
        scales = Scales((*lead, out, width), view, self.blocks, grid, per_byte)
        return replace(self.part, name=info.name, view=None, scales=scales)

    def _check_shape(self, info: TensorInfo, expected: tuple[int, ...]) -> None:
        found = (expected[0], *info.shape[1:]) if self.part.padded and info.shape[0] >= expected[0] else info.shape
        if found != expected:
            raise CheckpointError(
                f"tensor {info.name!r} has the wrong shape",
                where=info.file,
                found=f"{info.dtype} {list(info.shape)}",
                expected=f"{info.dtype} {list(expected)} for weights {list(self.form.shape)}",
            )

    def _divides(self, width: int, info: TensorInfo) -> None:
        if not self.scheme.divides(width):
            size = self.scheme.columns
            raise CheckpointError(
                f"tensor {info.name!r}: groups of {size} do not divide its rows",
                where=info.file,
                found=f"{width} weights a row",
                expected=f"a multiple of {size}",
            )

    def _scale_info(self) -> TensorInfo:
        name = self.part.name + self.scheme.scale
        info = self.reader.tensors.get(name)
        if info is None:
            values = self.reader.tensors[self.part.name + self.scheme.values]
            other = next((n for e in SCALE_ENDINGS if (n := self.part.name + e) in self.reader.tensors), None)
            raise CheckpointError(
                f"tensor {name!r}, the scales of {values.name!r}, is missing",
                where=values.file,
                found=other or "nothing",
                expected=name,
                fix="download the whole checkpoint again, or use the config.json that was released with it",
            )
        allowed = ("U8",) if self.scheme.kind == "mxfp4" else tuple(SCALES)
        if info.dtype not in allowed:
            raise CheckpointError(
                f"tensor {name!r} has a dtype that cannot be a scale",
                where=info.file,
                found=info.dtype,
                expected=" or ".join(allowed),
            )
        return info

    def _scale_dtype(self) -> str:
        return SCALES.get(self._scale_info().dtype, "uint8")

    def _weight_shape(self) -> str:
        """The tensor that repeats the shape of the weights, where the form has one; it must not contradict."""
        name = f"{self.part.name}_shape"
        info = self.reader.tensors.get(name)
        packed = self.reader.tensors[self.part.name + self.scheme.values]
        if info is None:
            raise CheckpointError(f"tensor {name!r} is missing", where=packed.file, expected="the shape of the weights")
        said = self.reader.read(name) if info.size == len(self.form.shape) else np.zeros(0)
        want = [packed.shape[0], self.form.shape[-1]] if self.part.padded else list(self.form.shape)
        if not np.issubdtype(said.dtype, np.integer) or said.tolist() != want:
            raise CheckpointError(
                f"tensor {name!r} contradicts config.json",
                where=info.file,
                found=f"{info.dtype} {said.tolist() or list(info.shape)}",
                expected=f"weights {want}",
            )
        return name


def leaf_rows(form: PackedForm, rows: int) -> int:
    """How many rows of the leaf share a scale for certain, where `rows` of the tensor do: less where the view cuts blocks."""
    view = form.view
    axis = view.order[-2]
    group = next(group for group in axis_groups(form.shape, view.shape) if axis in group)
    if axis != group[-1]:
        return 1  # rows of the leaf are not neighbours in the file
    inner = view.shape[axis] if len(group) > 1 else 0
    return math.gcd(rows, inner, view.start[axis])


def axis_groups(shape: tuple[int, ...], split: tuple[int, ...]) -> list[list[int]]:
    """Which axes of `split` make up each axis of `shape`, of which it is a reshape that only splits axes."""
    groups, axis = [], 0
    for size in shape:
        group, product = [], 1
        while product < size or not group:
            group.append(axis)
            product *= split[axis]
            axis += 1
        assert product == size, (shape, split)
        groups.append(group)
    return groups


def same_packing(parts: list[Part], leaf: str) -> None:
    """All tensors of one leaf must be quantised alike, since they lie in one array."""
    first = parts[0]
    for part in parts:
        if part.packing != first.packing:
            raise CheckpointError(
                f"tensors of {leaf} are quantised in different ways",
                found=f"{first.name}: {_say(first.packing)}; {part.name}: {_say(part.packing)}",
                expected="one form for all of them",
            )


def _say(packing: Packing | None) -> str:
    if packing is None:
        return "plain"
    return f"{packing.kind}, {packing.scale} scales for {packing.rows} x {packing.columns} weights"

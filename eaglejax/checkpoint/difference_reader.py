"""A difference laid over its base: one table of tensors, under the names that the whole model would be released with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from eaglejax.checkpoint.byte_runs import full_index
from eaglejax.checkpoint.difference import (
    DOWN,
    FILE,
    GATE,
    UP,
    correction_name,
    router_name,
    scale_name,
    stored_name,
)
from eaglejax.checkpoint.difference_compose import Composition
from eaglejax.checkpoint.safetensors_file import read_header
from eaglejax.checkpoint.source import Source
from eaglejax.checkpoint.tensors import CheckpointReader, TensorInfo, cut_block
from eaglejax.errors import CheckpointError
from eaglejax.models.config import MoEConfig

# the name of each projection in the whole model, and in the file
PROJECTIONS = {"gate_proj": GATE, "up_proj": UP, "down_proj": DOWN}
ROUTER_FORMS = ("F32", "BF16")
FFN = re.compile(r"model\.layers\.(\d+)\.mlp\.(?=(gate|up|down)_proj\.)")


@dataclass(frozen=True)
class _Expert:
    """Where the weight of one expert lies: `values`, `scale`: names in the file. `transposed`: it is [in, out] there."""

    values: str
    scale: str
    index: int
    transposed: bool


class DifferenceReader(CheckpointReader):
    """The whole model: the base's tensors, its FFNs as shared experts where there are routed ones, and these.

    Routed experts are read as float32, each its int8 value times the scale of its row.
    """

    def __init__(self, folder: Path, composition: Composition, source: Source, base: CheckpointReader):
        """`source`, `base`: where the base lies, and its reader. Raises CheckpointError for a file of differences that
        is not what the config says."""
        file = folder / FILE
        own = CheckpointReader(file, *read_header(file))
        _check_file(file, own, composition)
        self._base, self._own = base, own
        self._base_name: dict[str, str] = {}
        self._expert: dict[str, _Expert] = {}
        tensors: dict[str, TensorInfo] = {}
        for name, info in base.tensors.items():
            whole = _whole_name(name, composition.moe_layers)
            self._base_name[whole] = name
            tensors[whole] = replace(info, name=whole)
        for layer in composition.moe_layers:
            tensors |= {name: own.tensors[name] for name in (router_name(layer), correction_name(layer))}
            for name, part in PROJECTIONS.items():
                stored = own.tensors[stored_name(layer, part)]
                count, width, hidden = stored.shape
                shape = (hidden, width) if part == DOWN else (width, hidden)
                for index in range(count):
                    whole = f"model.layers.{layer}.mlp.experts.{index}.{name}.weight"
                    offset = stored.offset + index * width * hidden
                    tensors[whole] = TensorInfo(whole, shape, "F32", file, offset, stored="I8")
                    self._expert[whole] = _Expert(stored.name, scale_name(layer, part), index, part == DOWN)
        super().__init__(folder, tensors, own.metadata)
        self.hf_config = composition.values
        self.gguf_tokenizer = base.gguf_tokenizer
        self.text_folder = None if base.gguf_tokenizer is not None else source.folder
        self.notes = (
            f"a difference on the base {composition.name} ({source.path}), whose FFNs are the shared experts",
            f"{len(self._expert) // 3} routed experts in {len(composition.moe_layers)} layers, int8 with a scale for each "
            f"row, {file.stat().st_size:,} bytes in {file}",
        )

    @property
    def bytes_read(self) -> int:
        return self._base.bytes_read + self._own.bytes_read

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        return self._block(name, (slice(None),) * len(self.info(name).shape))

    def read_rows(self, name: str, start: int, stop: int) -> Shaped[np.ndarray, "..."]:
        info = self.info(name)
        self._check_rows(info, start, stop)
        return self._block(name, (slice(start, stop), *(slice(None),) * (len(info.shape) - 1)))

    def read_block(
        self, name: str, index: Sequence[slice], *, shape: Sequence[int] | None = None, dtype: str | None = None
    ) -> Shaped[np.ndarray, "..."]:
        """As for any reader. Of an expert seen in another shape, the whole is read and cut."""
        self.info(name)
        if name in self._expert:
            plain = shape is None and dtype is None
            return self._block(name, index) if plain else cut_block(self.read(name), index, shape, dtype)
        reader, inner = self._place(name)
        return reader.read_block(inner, index, shape=shape, dtype=dtype)

    def _place(self, name: str) -> tuple[CheckpointReader, str]:
        """The reader that has a tensor which is stored as it is read, and its name there."""
        return (self._base, self._base_name[name]) if name in self._base_name else (self._own, name)

    def _block(self, name: str, index: Sequence[slice]) -> Shaped[np.ndarray, "..."]:
        expert = self._expert.get(name)
        if expert is None:
            reader, inner = self._place(name)
            # a scalar or a whole tensor is one read, whatever the form
            whole = all(part == slice(None) for part in index)
            return reader.read(inner) if whole else reader.read_block(inner, index)
        cut = full_index(index, self.tensors[name].shape)
        rows, columns = reversed(cut) if expert.transposed else cut
        one = slice(expert.index, expert.index + 1)
        values = self._own.read_block(expert.values, (one, rows, columns))[0].astype(np.float32)
        scale = self._own.read_block(expert.scale, (one, rows))[0]
        # what is not finite is told where weights are checked
        with np.errstate(invalid="ignore", over="ignore"):
            values *= scale[:, None]
        return np.ascontiguousarray(values.T) if expert.transposed else values


def _whole_name(name: str, moe_layers: tuple[int, ...]) -> str:
    """The name of one of the base's tensors in the whole model."""
    match = FFN.match(name)
    if match is None or int(match[1]) not in moe_layers:
        return name
    return f"model.layers.{match[1]}.mlp.shared_experts.{name[match.end() :]}"


def _check_file(file: Path, own: CheckpointReader, composition: Composition) -> None:
    """Every tensor of the form is there, in the shape and dtype that the config asks for, and no other."""
    wanted: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}
    hidden = composition.target.hidden_size
    for layer in composition.moe_layers:
        moe = composition.target.layers[layer].mlp
        assert isinstance(moe, MoEConfig)
        wanted[router_name(layer)] = ((moe.experts, hidden), ROUTER_FORMS)
        wanted[correction_name(layer)] = ((moe.experts,), ROUTER_FORMS)
        for part in PROJECTIONS.values():
            wanted[stored_name(layer, part)] = ((moe.experts, moe.width, hidden), ("I8",))
            wanted[scale_name(layer, part)] = ((moe.experts, moe.width), ("F32",))
    fix = "take config.json and the weights from the same difference"
    if missing := [name for name in wanted if name not in own.tensors]:
        what = f"{len(missing)} of the {len(wanted)} tensors of a difference are missing"
        raise CheckpointError(what, where=file, found=f"no {missing[0]!r}", fix=fix)
    if extra := sorted(own.tensors.keys() - wanted.keys()):
        what = f"{len(extra)} tensors have no place in the difference that config.json describes"
        raise CheckpointError(what, where=file, found=", ".join(extra[:3]), fix=fix)
    for name, (shape, dtypes) in wanted.items():
        info = own.tensors[name]
        if info.shape != shape or info.dtype not in dtypes:
            raise CheckpointError(
                f"tensor {name!r} is not what config.json describes",
                where=file,
                found=f"{info.dtype} {list(info.shape)}",
                expected=f"{' or '.join(dtypes)} {list(shape)}",
                fix=fix,
            )

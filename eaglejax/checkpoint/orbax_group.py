"""One group of tensors as one Orbax save. Imports orbax: imported only where something is saved."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Shaped

# Slices for 2, 4, 8 or 16 devices begin and end with a chunk where the first axis divides by 16.
CHUNKS = 16
# larger tensors are cut finer, so that a slice for more devices stays cheap
CHUNK_BYTES = 4 << 20
# smaller ones are one chunk
WHOLE_BYTES = 64 << 10
# A group's bytes are spread over files of this size: a file is written once this much is there.
FILE_BYTES = 256 << 20


def chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Shape of the chunks that a tensor is stored in: whole rows of the first axis, cut along later axes only where a
    single row is larger than a chunk may be."""
    chunk = list(shape)
    if math.prod(shape) * itemsize <= WHOLE_BYTES:
        return tuple(chunk)
    for axis, size in enumerate(shape):
        row = math.prod(chunk[axis + 1 :]) * itemsize
        count = CHUNKS
        while count < size and math.ceil(size / count) * row > CHUNK_BYTES:
            count *= 2
        chunk[axis] = max(1, math.ceil(size / count))
        if chunk[axis] * row <= CHUNK_BYTES:
            break
    return tuple(chunk)


class _Handler(ocp.type_handlers.NumpyHandler):
    """Orbax's own handler of numpy arrays, with the chunks above and a checksum on each. (Orbax would cut along its
    largest axes, or into single rows.)"""

    def __init__(self, written: Callable[[int], None]):
        # the arrays may be views of mapped files: copies of a whole group are what must not happen
        super().__init__(deepcopy_host_arrays=False)
        self._written = written

    async def _open_and_write(self, value: np.ndarray, tspec: dict[str, Any], ts_context: Any) -> None:
        metadata = tspec["metadata"]
        chunk = list(chunk_shape(value.shape, value.dtype.itemsize))
        metadata["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": chunk}}
        metadata["codecs"] = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        await super()._open_and_write(value, tspec, ts_context)
        self._written(value.nbytes)


def save_group(
    folder: Path, tensors: Mapping[str, Shaped[np.ndarray, "..."]], written: Callable[[int], None] = lambda n: None
) -> None:
    """Saves `tensors` under their names as the Orbax checkpoint `folder`, which must not exist.

    Nothing is compressed: packed and 8-bit weights hardly shrink, and reading is what must be quick.

    Arguments:
        tensors: none of size 0, which Orbax cannot save.
        written: called with the bytes of each tensor once it is written.
    """
    if not tensors:
        folder.mkdir()
        return
    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, _Handler(written)), (jax.Array, ocp.type_handlers.ArrayHandler())
    )
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=True, use_zarr3=True, use_compression=False, type_handler_registry=registry
    )
    with ocp.Checkpointer(handler) as checkpointer:
        arguments = ocp.args.PyTreeSave(dict(tensors), ocdbt_target_data_file_size=FILE_BYTES)
        checkpointer.save(folder.absolute(), args=arguments)

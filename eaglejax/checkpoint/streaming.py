"""Fills a model shard by shard: every device gets its part straight from the bytes of the files."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from eaglejax.checkpoint.byte_runs import block_bytes
from eaglejax.checkpoint.leaf_blocks import Index, bytes_needed, read_leaf_block
from eaglejax.checkpoint.tensors import CheckpointReader
from eaglejax.checkpoint.weight_plan import Recipe
from eaglejax.models.layers import leaves
from eaglejax.sharding.layout import spec_of, whole_shape

# a jax.Device, which is no type to a checker; None: the default device, where nothing is committed to one
Device = Any
log = logging.getLogger("eaglejax")
# bytes of shards that may be read ahead of the one that is placed
AHEAD = 256 << 20
# loads of fewer bytes need no progress bar
SMALL = 200_000_000


@dataclass
class LoadStats:
    """What a load read. `bytes_needed`: what the shards of this process are made of, each distinct one once."""

    bytes_read: int = 0
    bytes_needed: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        rate = self.bytes_read / self.seconds / 1e9 if self.seconds else 0.0
        return (
            f"read {self.bytes_read:,} bytes of the files for {self.bytes_needed:,} bytes of tensors in {self.seconds:.1f} s "
            f"({rate:.2f} GB/s)"
        )


@dataclass(frozen=True)
class _Shard:
    """One distinct block of a leaf: `index` into the leaf as the files hold it, and the devices that keep it."""

    leaf: str
    index: Index
    devices: tuple[Device, ...]
    step: tuple[int, int]
    nbytes: int
    needed: int


def leaf_sharding(variable: nnx.Variable, mesh: Mesh) -> NamedSharding:
    """How a leaf lies over the mesh by its metadata `mesh_axes`."""
    return NamedSharding(mesh, spec_of(variable))


def source_index(variable: nnx.Variable, shape: tuple[int, ...], index: Sequence[slice]) -> Index:
    """The block of the weights as the files hold them that fills the block `index` of the global leaf.

    Along an axis with `repeats` r, devices 0 to r - 1 hold the first block, the next r the second, and so on.
    """
    repeats = variable.get_metadata().get("repeats") or (1,) * len(shape)
    cut = []
    for part, size, local, repeat in zip(index, shape, variable.shape, repeats, strict=True):
        start, stop = part.start or 0, size if part.stop is None else part.stop
        if repeat > 1:
            assert stop - start == local, (variable, index)
            start = start // local // repeat * local
            stop = start + local
        cut.append(slice(start, stop))
    return tuple(cut)


def fill(
    module: nnx.Module, chosen: Mapping[str, Recipe], reader: CheckpointReader, mesh: Mesh | None = None
) -> LoadStats:
    """Fills every leaf of an abstract module; a leaf without a recipe is an error of the plan, not of the file.

    Arguments:
        chosen: `target_loader.choose`'s recipes, leaf by leaf.
        mesh: leaves are laid over it by their metadata `mesh_axes` and `repeats` (`leaf_sharding`); a process reads
            the shards of its own devices and no others, each once. None: one device.

    Beside the arrays themselves the host holds one shard, or up to 256 MiB of shards read ahead, and 64 MiB in which
    stored values are converted.
    """
    variables = leaves(module)
    assert variables.keys() == chosen.keys(), sorted(variables.keys() ^ chosen.keys())
    shards = {leaf: _shards(leaf, variables, chosen[leaf], reader, mesh) for leaf in variables}
    stats = LoadStats(bytes_needed=sum(shard.needed for group in shards.values() for shard in group))
    before, start = reader.bytes_read, time.perf_counter()
    jobs = [shard for group in shards.values() for shard in group]

    def read(shard: _Shard) -> np.ndarray:
        dtype = np.dtype(variables[shard.leaf].dtype)
        return read_leaf_block(chosen[shard.leaf], reader, shard.index, dtype, shard.step)

    with _progress(stats.bytes_needed) as advance, ThreadPoolExecutor(2) as pool:
        blocks = _ahead(pool, read, jobs)
        for leaf, variable in variables.items():
            arrays: dict[Device, jax.Array] = {}
            for shard in shards[leaf]:
                # no name may outlive its turn: the block is freed as soon as the devices have it
                arrays |= _place(next(blocks), shard.devices)
                advance(shard.needed)
            if mesh is None:
                variable.set_value(arrays[None])
                continue
            sharding, shape = leaf_sharding(variable, mesh), whole_shape(variable, mesh)
            ordered = [arrays[d] for d in sharding.addressable_devices_indices_map(shape)]
            variable.set_value(jax.make_array_from_single_device_arrays(shape, sharding, ordered))
    stats.bytes_read, stats.seconds = reader.bytes_read - before, time.perf_counter() - start
    return stats


def place_whole(array: Any, variable: nnx.Variable, mesh: Mesh | None) -> jax.Array:
    """A whole array as the value of a leaf: copied to every device that the leaf's metadata asks for.

    Without mesh axes in the metadata that is all of it on each device of the mesh, also where `array` itself lies
    over the mesh. An array that already lies as the leaf asks is taken as it is, not copied.
    """
    if mesh is None:
        return jnp.asarray(array)
    sharding, shape = leaf_sharding(variable, mesh), whole_shape(variable, mesh)
    if isinstance(array, jax.Array):
        assert array.shape == shape, (array.shape, shape)
        if array.sharding.is_equivalent_to(sharding, array.ndim):
            return array
        if array.sharding.device_set == sharding.device_set:
            # a compiled copy also works where a process sees only its own part
            return jax.jit(lambda whole: whole, out_shardings=sharding)(array)
        return jax.device_put(array, sharding)
    whole = (slice(None),) * len(shape)
    block = lambda index: array[source_index(variable, shape, index or whole)]
    return jax.make_array_from_callback(shape, sharding, block)


def _shards(
    leaf: str, variables: Mapping[str, Any], recipe: Recipe, reader: CheckpointReader, mesh: Mesh | None
) -> list[_Shard]:
    """The distinct blocks of a leaf that the devices of this process hold."""
    variable, step = variables[leaf], (1, 1)
    if recipe[0].scales is not None:
        values = variables[leaf.removesuffix(".scale") + ".values"]
        width = values.shape[-1] * recipe[0].scales.per_byte
        step = (values.shape[-2] // variable.shape[-2], width // variable.shape[-1])
    holders: dict[tuple[tuple[int, int], ...], list[Device]] = {}
    shape = variable.shape if mesh is None else whole_shape(variable, mesh)
    whole = (slice(None),) * len(shape)
    places: Mapping[Device, Any] = {None: whole}
    if mesh is not None:
        places = dict(leaf_sharding(variable, mesh).addressable_devices_indices_map(shape))
    for device, index in places.items():
        source = source_index(variable, shape, index or whole)
        # slices cannot be keys before Python 3.12
        holders.setdefault(tuple((part.start, part.stop) for part in source), []).append(device)
    shards = []
    for ends, devices in holders.items():
        index = tuple(slice(*pair) for pair in ends)
        nbytes = block_bytes(index, np.dtype(variable.dtype).itemsize)
        shards.append(_Shard(leaf, index, tuple(devices), step, nbytes, bytes_needed(recipe, reader, index, step)))
    return shards


def _ahead(pool: ThreadPoolExecutor, read: Any, jobs: list[_Shard]) -> Iterator[np.ndarray]:
    """The blocks of all shards in their order, read ahead as far as `AHEAD` bytes allow."""
    waiting: deque[tuple[Future, int]] = deque()
    held, left = 0, deque(jobs)
    while left or waiting:
        while left and (not waiting or held + left[0].nbytes <= AHEAD):
            shard = left.popleft()
            waiting.append((pool.submit(read, shard), shard.nbytes))
            held += shard.nbytes
        future, nbytes = waiting.popleft()
        yield future.result()
        del future
        # only now: while a block is being placed it is still held
        held -= nbytes


def _place(block: np.ndarray, devices: tuple[Device, ...]) -> dict[Device, jax.Array]:
    return {device: jax.block_until_ready(jax.device_put(block, device)) for device in devices}


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar with bytes and bytes a second on a terminal, a line in the log elsewhere, nothing for a small load."""
    if total < SMALL:
        yield lambda count: None
        return
    if not sys.stderr.isatty():
        log.info("reading %.1f GB of weights", total / 1e9)
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("weights", total=total)
        yield lambda count: bar.advance(task, count)

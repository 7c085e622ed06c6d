"""A pair with the shape of a real one and random weights, made on the devices: to time what nobody wants to download.

Times are the real ones; text and acceptance mean nothing (`speculation/simulated.py` makes up the latter).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, DTypeLike

from eaglejax.config import PLAIN
from eaglejax.engine import EagleJaxEngine
from eaglejax.errors import ConfigError
from eaglejax.kernels import select, tile_store
from eaglejax.kernels.unserved import unserved
from eaglejax.load_report import LoadReport
from eaglejax.loading import Pair
from eaglejax.models.capture import CaptureReading
from eaglejax.models.draft import Draft
from eaglejax.models.layers import leaves
from eaglejax.models.packed import Kind, Packing
from eaglejax.models.target import Target
from eaglejax.run_config import RunConfig
from eaglejax.sharding.fit import Capacity, check_fit, needs_of
from eaglejax.sharding.layout import place, spec_of, whole_shape
from eaglejax.sharding.local_shapes import LocalModel, local_draft, local_target
from eaglejax.sharding.mesh import MODEL, axis_size, build_mesh
from eaglejax.sharding.plan_models import PlanModels, read_models
from eaglejax.sharding.rules import Placement

DEVIATION = 0.02  # of every weight, as models are initialised
# of embeddings: with smaller ones the layers' results, alike for all rows, soon drown what tells tokens apart, the rows of a tree choose
# the same experts, and verification looks cheaper than it is
EMBEDDED = 1.0
UNIFORM = 73.9  # standard deviation of a random byte
# standard deviation of what random values of a packed weight stand for, before their scale
PACKED: Mapping[Kind, float] = {"fp8": 1.0, "int8": UNIFORM, "int4": 4.6, "mxfp4": 2.9}
EMBEDDING = "embedding.weight"


def random_engine(
    settings: RunConfig, draft: str | None, *, slots: int, seed: int = 0
) -> tuple[EagleJaxEngine, str | None]:
    """An engine of the shape that `settings.model` names, set to plain decoding, and what its draft is called.

    Arguments:
        draft: as in `plan_models.read_models`.

    Raises ConfigError and CheckpointError as `read_models` and `random_pair` do.
    """
    models = read_models(settings.model, draft)
    limit = models.target.max_position
    max_len = min(settings.max_len, limit) if limit else settings.max_len
    pair = random_pair(
        models,
        dtype=settings.dtype,
        capacity=Capacity(PLAIN, max_len, slots),
        mesh=build_mesh(settings.mesh),
        placement=Placement(settings.expert_split, settings.draft_placement),
        seed=seed,
    )
    return EagleJaxEngine(pair, speculation=None, max_len=max_len, slots=slots), models.draft_name


def random_pair(
    models: PlanModels,
    *,
    dtype: str,
    capacity: Capacity,
    mesh: Mesh | None = None,
    placement: Placement | None = None,
    seed: int = 0,
) -> Pair:
    """The pair that configs describe, packed where its weights are released packed, without a tokenizer.

    Arguments:
        capacity: what has to fit beside the weights.

    Raises ConfigError where weights and caches do not fit the free memory, before anything is allocated.
    """
    select.chosen_kernels()  # refused before anything is made
    placement = placement or Placement()
    size, packings = axis_size(mesh, MODEL), models.storage.packings if models.storage else {}
    target = local_target(models.target, size, dtype, placement.experts, packings)
    draft = None
    if models.draft is not None:
        draft = local_draft(models.draft, size if placement.draft == "sharded" else 1, dtype)
    report = LoadReport()
    shares = draft is not None and _shares_embedding(models, target, draft)
    needs = needs_of(
        target, draft, {EMBEDDING} if shares else set(), packings, capacity, jnp.dtype(dtype).itemsize, mesh
    )
    try:
        check_fit(needs, mesh, report)
    except ConfigError as error:
        raise ConfigError(
            f"random weights of this size do not fit; {error}",
            where=models.name,
            fix="a smaller config, or more devices",
        ) from None
    assert isinstance(target.module, Target)
    fill_randomly(target.module, mesh, seed, packings)
    report.note("target", f"{models.name}: RANDOM weights of its shape (seed {seed}), {dtype}")
    pair = Pair(models.name, target.module, None, (), jnp.dtype(dtype), report=report, mesh=mesh)
    if draft is not None:
        assert isinstance(draft.module, Draft) and models.draft is not None
        fill_randomly(draft.module, mesh, seed + 1)
        words = models.draft.draft_vocab_size
        draft.module.target_ids.set_value(place(np.arange(words, dtype=np.int32), mesh))
        if shares:
            draft.module.embedding.weight.set_value(target.module.embedding.weight[...])
        pair.draft, pair.capture = draft.module, CaptureReading(models.draft.boundaries)
        report.note("draft", f"{models.draft_name}: RANDOM weights of its shape (seed {seed + 1})")
    for line in (*target.notes, *(draft.notes if draft is not None else ())):
        report.note("mesh", line)
    for line in (*select.describe(), *unserved(pair.target, capacity.max_len)):
        report.note("kernels", line)
    tile_store.note_tiles(report)
    return pair


def _shares_embedding(models: PlanModels, target: LocalModel, draft: LocalModel) -> bool:
    """Whether the draft's embedding is the target's own array: released heads hold none, and both must lie alike on the devices."""
    assert models.draft is not None
    return not models.draft.own_embedding and target.vocab_split == draft.vocab_split


def fill_randomly(
    module: nnx.Module, mesh: Mesh | None, seed: int, packings: Mapping[str, Packing] | None = None
) -> None:
    """Seeded random weights in place of an abstract module's, each made where it lies; norms are 1."""
    scales = {f"{path}.scale": packing for path, packing in (packings or {}).items()}
    values = {f"{path}.values" for path in packings or {}}
    compiled: dict[tuple[Any, ...], Callable[[Array], Array]] = {}  # layers are alike: few programs make all
    for number, (name, variable) in enumerate(sorted(leaves(module).items())):
        shape, dtype, spec = whole_shape(variable, mesh), jnp.dtype(variable.dtype), spec_of(variable)
        if name in scales:
            make, what = _scale, scales[name]
        elif name in values:
            make, what = _packed, None
        elif name.endswith("scale"):
            make, what = _ones, None
        else:
            make, what = _noise, EMBEDDED if name == EMBEDDING else DEVIATION
        kind = (make, what, shape, dtype, spec)
        if kind not in compiled:
            lies = None if mesh is None else NamedSharding(mesh, spec)
            compiled[kind] = jax.jit(partial(make, shape=shape, dtype=dtype, what=what), out_shardings=lies)
        variable.set_value(compiled[kind](jax.random.fold_in(jax.random.key(seed), number)))


def _ones(key: Array, *, shape: tuple[int, ...], dtype: DTypeLike, what: None) -> Array:
    return jnp.ones(shape, dtype)


def _noise(key: Array, *, shape: tuple[int, ...], dtype: DTypeLike, what: float) -> Array:
    # uniform and of one byte each: a normal draw of a large model takes minutes
    noise = jax.random.bits(key, shape, jnp.uint8).astype(jnp.float32)
    return ((noise - 127.5) * (what / UNIFORM)).astype(dtype)


def _packed(key: Array, *, shape: tuple[int, ...], dtype: DTypeLike, what: None) -> Array:
    if jnp.issubdtype(dtype, jnp.floating):  # random bits would hold NaN
        return _noise(key, shape=shape, dtype=dtype, what=1.0)
    return jax.lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint8), dtype)


def _scale(key: Array, *, shape: tuple[int, ...], dtype: DTypeLike, what: Packing) -> Array:
    factor = DEVIATION / PACKED[what.kind]
    # mxfp4's scales are exponents
    return jnp.full(shape, 127 + round(math.log2(factor)) if what.scale == "uint8" else factor, dtype)

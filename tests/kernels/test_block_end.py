"""Where a block ends, for Hopper GPUs without one: the experts' parts, the residual addition and the next norm in one kernel."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from eaglejax.kernels import select
from eaglejax.kernels.experts_gpu_shape import Parts, summed
from eaglejax.kernels.row_kernels import sums_parts
from eaglejax.models import block as blocks
from eaglejax.models.block import Block
from eaglejax.models.config import DenseConfig, GQAConfig, LayerConfig, MoEConfig, RopeConfig, TargetConfig
from eaglejax.models.layers import rms_norm
from eaglejax.models.moe import MoE
from eaglejax.models.rows import KVRows, causal_step
from eaglejax.models.split import LayerSplit, Over
from eaglejax.models.target import Target

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernels are written for jax 0.11's Pallas")
D, EPS = 192, 1e-6  # rows of 192 are not whole 128s
# heads of 32: attention, norms of heads and rotation stay in jnp
ATTENTION = GQAConfig(3, 1, 32, RopeConfig(theta=10000.0, rotary_dim=32))
MIXTURE = MoEConfig(16, 2, 64)
MIXTURES = {
    "routed": MIXTURE,
    "biases": replace(MIXTURE, expert_bias=True, expert_activation="gpt_oss", router_bias=True),
    "shared": replace(MIXTURE, shared_width=64),
}
NO_CACHE = KVRows(*(jnp.zeros((1, 0, 1, 32), jnp.bfloat16),) * 2)


def filled(module, seed=0):
    """Random weights; scales of norms about 1."""
    rng = np.random.default_rng(seed)
    graph, state = nnx.split(module)

    def fill(path, leaf):
        scale = "scale" in str(path)
        values = rng.standard_normal(leaf.shape) * (0.2 if scale else leaf.shape[-1] ** -0.5) + scale
        return jnp.asarray(values, leaf.dtype)

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(fill, state))


def block(mlp, split=None):
    return Block(LayerConfig(ATTENTION, mlp), D, EPS, dtype=jnp.bfloat16, split=split)


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


@pytest.fixture(autouse=True)
def parts_left(monkeypatch):
    """As with "pallas", but for the projections' kernel, which is not looked at here."""
    monkeypatch.setenv(select.VARIABLE, "auto")
    monkeypatch.setattr(blocks, "sums_parts", lambda: True)


@pytest.fixture
def interpreted(monkeypatch):
    """Programs are made of the kernels of a GPU, which are interpreted; a function that says whether races were found."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
    from jax.experimental.pallas import mosaic_gpu

    from eaglejax.kernels import add_norm_gpu, experts_gpu, route_gpu

    plgpu: Any = mosaic_gpu  # typed otherwise in jax 0.10
    params = plgpu.InterpretGPUParams(detect_races=True)
    for module, names in (
        (add_norm_gpu, ("add_norm_gpu",)),
        (experts_gpu, ("experts_gpu", "experts_of_tables")),
        (route_gpu, ("route_gpu",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, functools.partial(getattr(module, name), interpret=params))
    with select.compiling_for("gpu"):
        yield lambda: interpret_pallas_call.get_races().races_found


def the_way_before(monkeypatch):
    """Parts are summed before they are added, and the norm is made of what comes out."""
    unsummed = MoE.unsummed

    def whole(self, x):
        out = unsummed(self, x)
        return summed(out, x.reshape(-1, D)).reshape(x.shape) if isinstance(out, Parts) else out

    monkeypatch.setattr(MoE, "unsummed", whole)


def ulps(got, want):
    def ordered(x):
        bits = np.asarray(x).view(np.int16).astype(np.int32)
        return np.where(bits < 0, -(bits & 0x7FFF), bits)

    return np.abs(ordered(got) - ordered(want))


@pytest.mark.parametrize("rows", [1, 9, 17])  # 17: routed by XLA
@pytest.mark.parametrize("name", list(MIXTURES))
def test_a_block_ends_as_before(name, rows, interpreted, monkeypatch):
    layer, scale, x = filled(block(MIXTURES[name])), 1 + draw(5, D) / 4, draw(6, 1, rows, D)
    step = causal_step(jnp.zeros(1, jnp.int32), rows)
    run = lambda: jax.jit(lambda x: layer(x, step, NO_CACHE, next_scale=scale)[:2])(x)
    stream, normed = run()
    assert not interpreted()
    the_way_before(monkeypatch)
    want, want_normed = run()
    assert np.abs(np.asarray(stream - x, np.float32)).max() > 0.1
    np.testing.assert_array_equal(ulps(stream, want), 0)
    assert want_normed is None and (normed is None) == (name == "shared")
    if normed is not None:
        # not compiled as one: XLA's CPU would leave roundings to bfloat16 out
        differ = ulps(normed, rms_norm(stream, scale, EPS))
        assert differ.max() <= 2 and (differ > 0).mean() < 0.01


def target(mlps) -> Target:
    layers = tuple(LayerConfig(ATTENTION, mlp) for mlp in mlps)
    config = TargetConfig("test", 64, D, layers, EPS, tie_embeddings=True, max_position=64)
    return Target(config, dtype=jnp.bfloat16)


def test_a_target_says_the_same(interpreted):
    model = filled(target([DenseConfig(96), MIXTURES["routed"], MIXTURES["routed"], MIXTURES["biases"]]))
    step = causal_step(jnp.zeros(1, jnp.int32), 3)

    def run():
        graph, state = nnx.split(model)

        def forward(state, tokens):
            made = nnx.merge(graph, state)
            out = made(tokens, step, made.empty_caches(1, 0), (1, 2, 4))
            return made.logits(out.hidden, out.normed), made.logits(out.hidden), out.hidden, out.captured

        return jax.jit(forward)(state, jnp.asarray([[3, 40, 7]], jnp.int32))

    logits, again, hidden, captured = run()
    assert not interpreted()
    with select.kernels("xla"):
        want, _, _, wanted = run()
    np.testing.assert_array_equal(ulps(captured[-1], hidden), 0)
    close = lambda got, want: np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=0, atol=0.03 * float(jnp.abs(want).max())
    )
    close(logits, want)
    close(again, want)
    for one, other in zip(captured, wanted, strict=True):
        close(one, other)


HALF = Over("model", ("f",), 2)
TWICE = replace(MIXTURE, width=128)


@pytest.mark.parametrize(
    ("mlp", "split", "rows", "count"),
    [
        (MIXTURE, None, 2, 2),
        (MIXTURE, None, 64, 2),
        (MIXTURE, None, 65, 0),  # more than the kernels take
        (MIXTURES["biases"], None, 2, 2),
        (MIXTURES["shared"], None, 2, 1),
        (TWICE, LayerSplit(mlp=HALF), 2, 1),  # the devices' sums are still to be added
        (DenseConfig(96), None, 2, 1),
    ],
)
def test_which_blocks_end_in_the_kernel(mlp, split, rows, count, monkeypatch):
    """The first addition and norm of a block, behind the attention, are a kernel wherever the rows are few."""
    graph, state = nnx.split(nnx.eval_shape(lambda: block(mlp, split)))
    step = causal_step(jnp.zeros(1, jnp.int32), rows)

    def run(state, x, normed, scale):
        return nnx.merge(graph, state)(x, step, NO_CACHE, normed=normed, next_scale=scale)[:2]

    if split is not None:
        mesh = jax.sharding.AbstractMesh((2,), ("model",))
        run = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16)
    given = (state, shape(1, rows, D), shape(1, rows, D), shape(D))
    counted = lambda: str(jax.make_jaxpr(lambda *x: run(*x))(*given)).count("name=add_norm_gpu")
    with select.compiling_for("gpu"):
        assert counted() == count
        monkeypatch.setattr(blocks, "sums_parts", sums_parts)
        assert counted() == min(count, 1)  # unless Pallas is asked for by name


def test_alike_layers_share_one_trace():
    """Though each is given the scale of another norm."""
    graph, state = nnx.split(nnx.eval_shape(lambda: target([DenseConfig(96)] + 3 * [MIXTURE])))
    step = causal_step(jnp.zeros(1, jnp.int32), 5)

    def run(state, tokens):
        made = nnx.merge(graph, state)
        out = made(tokens, step, made.empty_caches(1, 0))
        return out.hidden, made.logits(
            out.hidden, out.normed
        )  # a result that nobody wants would make the last layer another

    with select.compiling_for("gpu"):
        traced = jax.jit(run).trace(state, jax.ShapeDtypeStruct((1, 5), jnp.int32))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # of the experts and their router four; two additions with their norms: of the attention's result and of the experts' parts
    assert text.count("custom_call @mosaic_gpu") == 6
    # the dense layer, the first with experts, which makes its own norm, and the others
    assert text.count("func.func private @_run") == 3

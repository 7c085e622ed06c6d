"""Trial 46: the MoE block on 2, 4 and 8 devices against one, at row counts that no axis divides, and its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from eaglejax.models.config import MoEConfig
from eaglejax.models.moe import MoE
from eaglejax.models.split import WHOLE, Over
from eaglejax.sharding.layout import weight_specs
from eaglejax.sharding.mesh import MODEL, build_mesh
from eaglejax.sharding.spmd import on_mesh

FEATURES = 32
CONFIG = MoEConfig(
    experts=8, topk=3, width=16, score="sigmoid", groups=2, topk_groups=2, correction_bias=True, shared_width=32
)


def parts(size: int, split: str) -> tuple[Over, Over]:
    if size == 1:
        return WHOLE, WHOLE
    return Over(MODEL, (split,), size), Over(MODEL, ("f",), size)


def build(size: int, split: str) -> MoE:
    over, shared = parts(size, split)
    return nnx.eval_shape(lambda: MoE(CONFIG, FEATURES, dtype=jnp.float32, over=over, shared_over=shared))


def weights(seed: int = 0) -> list[np.ndarray]:
    """Whole weights in the order of the leaves; the shared expert's are large, so that counting it twice would show."""
    graph = nnx.state(build(1, "e"))
    rng, made = np.random.default_rng(seed), []
    for path, leaf in nnx.to_flat_state(graph):
        scale = 0.8 if "shared" in map(str, path) else 0.2
        made.append((scale * rng.standard_normal(leaf.shape)).astype(np.float32))
    return made


def block(size: int, split: str = "e"):
    """rows [n, d] and weights -> [n, d], compiled for a mesh of `size` devices."""
    graph, state = nnx.split(build(size, split))
    tree = jax.tree.structure(state)

    def run(leaves, rows):
        return nnx.merge(graph, jax.tree.unflatten(tree, leaves))(rows[None])[0]

    mesh = build_mesh(f"model={size}") if size > 1 else None
    return on_mesh(mesh, run, (weight_specs(state), P()), P())


def rows_of(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, FEATURES)).astype(np.float32)


@pytest.mark.parametrize("split", ["e", "f"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_trial_46_same_sums_at_any_number_of_rows(size, split):
    made = weights()
    one, many = block(1), block(size, split)
    for count in (1, 3, 5, 8, 33):
        want, got = (np.asarray(run(made, rows_of(count))) for run in (one, many))
        assert np.abs(want).max() > 1
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=str(count))


def test_trial_46_a_shared_expert_counted_on_every_device_would_show():
    made, count = weights(), 5
    wrong = [8 * w if w.shape == (FEATURES, 32) else w for w in made]  # its down projection
    want = np.asarray(block(1)(made, rows_of(count)))
    assert np.abs(np.asarray(block(1)(wrong, rows_of(count))) - want).max() > 1


@pytest.mark.parametrize("size", [2, 8])
def test_trial_46_rows_of_nan_touch_no_other(size):
    """Unused rows may hold anything: the others are the same to the bit."""
    made, rows, used = weights(), rows_of(9), [0, 1, 2, 4, 5]
    run = block(size)
    clean = np.asarray(run(made, rows))[used]
    rows[[3, 6, 7, 8]] = np.nan
    np.testing.assert_array_equal(np.asarray(run(made, rows))[used], clean)


@pytest.mark.parametrize("size", [2, 8])
def test_trial_46_gradients_are_those_of_one_device(size):
    made, rows = weights(), rows_of(5)
    direction = rows_of(6)[:5]

    def loss(run):
        # two rows are padding, and mean nothing to the loss
        return lambda leaves, x: jnp.where(jnp.arange(5)[:, None] < 3, run(leaves, x) * direction, 0).sum()

    want, got = (
        jax.grad(loss(block(n)), argnums=(0, 1))([jnp.asarray(w) for w in made], jnp.asarray(rows)) for n in (1, size)
    )
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.isfinite(mine).all()
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    assert np.abs(np.asarray(got[1])[:3]).max() > 0 and not np.asarray(got[1])[3:].any()

"""Checkpoints of a run: what is kept, what comes back, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax.errors import CheckpointError
from eaglejax.training.checkpoints import BEST, LAST, Checkpoints


@pytest.fixture
def made(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    yield checkpoints
    checkpoints.close()


def state(value):
    return {"weights": {"a.b": jnp.full((3,), value, jnp.float32)}, "step": jnp.int32(value)}


def test_the_last_ones_are_kept_and_come_back_exactly(made):
    for step in (1, 2, 3):
        made.save(LAST, step, state(step / 3), {"n": step})
    assert made.steps(LAST) == [2, 3] and made.latest() == 3 and made.facts(2) == {"n": 2}
    back = made.state(3, jax.tree.map(jnp.zeros_like, state(0)))
    np.testing.assert_array_equal(back["weights"]["a.b"], state(1.0)["weights"]["a.b"])


def test_the_best_is_one_whatever_its_step(made):
    """A run that went back to an earlier checkpoint may find its best at an earlier step."""
    made.save_best(6, state(6), {})
    made.save_best(4, state(4), {})
    assert made.steps(BEST) == [4]
    made.save_best(9, state(9), {})
    assert made.steps(BEST) == [9]


def test_a_broken_checkpoint_is_refused_with_what_to_do(made, tmp_path):
    made.save(LAST, 1, state(1), {})
    for file in (tmp_path / LAST / "1" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="step 1 cannot be read .*remove .*the run goes on from the one before"):
        made.state(1, state(0))

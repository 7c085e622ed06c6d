"""Checkpoints of a run: what is kept, what comes back, what is refused."""

import asyncio
import logging
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax.errors import CheckpointError
from eaglejax.training import checkpoints
from eaglejax.training.checkpoints import BEST, LAST, Checkpoints, reason


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


def test_a_full_disk_is_known_before_the_write(made, monkeypatch):
    made.save(LAST, 4, state(4), {})
    monkeypatch.setattr(checkpoints, "free_space", lambda folder: 10)
    # what the run goes on from is the last one, whichever kind could not be written
    with pytest.raises(CheckpointError, match="step 6 cannot be written: the disk is full.*it goes on from step 4"):
        made.save(BEST, 6, state(6), {})
    assert made.steps(BEST) == [] and made.steps(LAST) == [4]


def test_a_failed_write_says_one_thing(made, monkeypatch, caplog, capsys):
    """The cause stands at the end of a long reason; what threads and event loops say beside it is kept away."""

    class Left:
        def __del__(self):
            raise RuntimeError("Event loop is closed")

    def fails(*given, **named):
        logging.getLogger("absl").error("_SignalingThread.run() raised an exception")
        loop = asyncio.new_event_loop()
        loop.create_future().set_exception(OSError("never retrieved"))
        loop.close()
        left = Left()
        left.itself = left  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError("RESOURCE_EXHAUSTED: " + "somewhere deep / " * 40 + "No space left on device [28]")

    monkeypatch.setattr(made._managers[LAST], "save", fails)
    hook, level = sys.unraisablehook, logging.getLogger("absl").level
    with pytest.raises(CheckpointError, match=r"RESOURCE_EXHAUSTED.*No space left on device \[28\]"):
        made.save(LAST, 1, state(1), {})
    assert not caplog.records and "Event loop" not in capsys.readouterr().err
    assert sys.unraisablehook is hook and logging.getLogger("absl").level == level


def test_a_short_reason_stays_whole():
    assert reason(OSError("a\n  b")) == "a b" and len(reason(OSError("x" * 900))) < 310

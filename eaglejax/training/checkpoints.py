"""Checkpoints of a training run: Orbax folders that appear whole or not at all.

    checkpoints/STEP/   the last `keep` of them: all that the next step depends on
    best/STEP/          the one with the longest accepted drafts so far

Each holds `state` (arrays) and `facts` (JSON: what run it belongs to, evaluations so far). A newer one is complete
before an older one goes, so a kill or a full disk loses no complete checkpoint.
"""

from __future__ import annotations

import gc
import logging
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from eaglejax.errors import CheckpointError

LAST, BEST = "checkpoints", "best"


def free_space(folder: Path) -> int:
    """Bytes that can still be written there."""
    return shutil.disk_usage(folder).free


def reason(error: Exception) -> str:
    """An error in one line, of a long one beginning and end: the cause stands last."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:120]} ... {text[-170:]}"


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps to itself what a failed write has its threads and event loops complain about, at once and when they are
    thrown away: the one error that matters is raised."""
    logs = [logging.getLogger(name) for name in ("asyncio", "absl")]
    levels, unraisable = [log.level for log in logs], sys.unraisablehook
    for log in logs:
        log.setLevel(logging.CRITICAL + 1)
    sys.unraisablehook = lambda *what: None
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
        sys.unraisablehook = unraisable


class Checkpoints:
    """The checkpoints in a run's folder."""

    def __init__(self, folder: Path, keep: int):
        self.folder = folder
        self._managers = {
            name: ocp.CheckpointManager(
                (folder / name).absolute(),
                item_names=("state", "facts"),
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=count,
                    enable_async_checkpointing=False,
                    cleanup_tmp_directories=True,
                ),
            )
            for name, count in ((LAST, keep), (BEST, None))
        }

    def latest(self, name: str = LAST) -> int | None:
        """The step of the newest complete checkpoint, or None."""
        return self._managers[name].latest_step()

    def steps(self, name: str) -> list[int]:
        """The steps of all complete checkpoints, ascending."""
        return sorted(self._managers[name].all_steps())

    def save_best(self, step: int, state: Any, facts: dict[str, Any]) -> None:
        """As `save`; the other ones go, also one of a later step, which a run left that was stopped and went back."""
        self.save(BEST, step, state, facts)
        for other in self.steps(BEST):
            if other != step:
                self._managers[BEST].delete(other)

    def save(self, name: str, step: int, state: Any, facts: dict[str, Any]) -> None:
        """Write a checkpoint; one of the same step is the same and stays.

        Raises CheckpointError where it cannot be written; those before it are still there.
        """
        manager = self._managers[name]
        if step in manager.all_steps():
            return
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), facts=ocp.args.JsonSave(facts))
        fix = f"free space there and run the same command: it goes on from step {self.latest() or 0}"
        need, free = sum(leaf.nbytes for leaf in jax.tree.leaves(state)), free_space(self.folder)
        if free < need:
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written: the disk is full",
                where=self.folder / name,
                found=f"{free / 1e9:.3f} GB free",
                expected=f"{need / 1e9:.3f} GB",
                fix=fix,
            )
        failed = None
        with quiet():
            try:
                manager.save(step, args=items, force=True)
                manager.wait_until_finished()
            except Exception as error:  # orbax and tensorstore raise what the disk's fault becomes on the way
                failed = reason(error)
            if failed is not None:
                gc.collect()  # with nothing of the error kept: the loops go now, not later with their complaints
        if failed is not None:
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written ({failed})", where=self.folder / name, fix=fix
            )

    def facts(self, step: int, name: str = LAST) -> dict[str, Any]:
        """What a checkpoint says of its run."""
        return self._restore(name, step, facts=ocp.args.JsonRestore()).facts

    def state(self, step: int, like: Any, name: str = LAST) -> Any:
        """A checkpoint's arrays, in the tree and of the shapes of `like`."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self._restore(name, step, state=ocp.args.StandardRestore(abstract)).state

    def _restore(self, name: str, step: int, **items: Any) -> Any:
        try:
            return self._managers[name].restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be read ({reason(error)})",
                where=self.folder / name,
                fix=f"remove {self.folder / name / str(step)}: the run goes on from the one before",
            ) from error

    def close(self) -> None:
        for manager in self._managers.values():
            manager.close()

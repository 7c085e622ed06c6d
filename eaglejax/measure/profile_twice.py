"""Phases timed without a trace: a part of the cycle is done twice inside the compiled loop, and the cycle grows by what it costs.

For devices whose trace cannot be mapped to phases, such as loops that run as one command buffer. Which part is doubled is chosen when the
programs are made: they get a target or a draft that runs it a second time, on inputs that wait for the first, and goes on with the second
result, which is the same. The figures are differences of two runs, and are called so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from eaglejax.config import Auto, Speculation
from eaglejax.loading import Pair
from eaglejax.measure.timing import Spread, alternate
from eaglejax.models.draft import Draft, DraftOutput
from eaglejax.models.rows import KVRows, Step
from eaglejax.models.target import Target, TargetOutput
from eaglejax.speculation.cache import true_after
from eaglejax.speculation.programs import Programs
from eaglejax.wave import Job, Wave

LAYERS, HEAD = "layers", "head"
NAMES = {
    ("draft", LAYERS): "draft: extension and steps",
    ("draft", HEAD): "draft: heads of all levels",
    ("target", LAYERS): "verify: embedding and layers",
    ("target", HEAD): "verify: head",
}


class TwiceTarget(Target):
    """A target that runs its layers, or its head, twice. It holds the weights of the other one; nothing is copied."""

    def __init__(self, target: Target, part: str):
        for name in ("config", "split", "dtype", "embedding", "layers", "norm", "head"):
            setattr(self, name, getattr(target, name))
        self.part = part

    def __call__(
        self, tokens: Int[Array, "b t"], step: Step, caches: list[KVRows], boundaries: tuple[int, ...] = ()
    ) -> TargetOutput:
        once = super().__call__(tokens, step, caches, boundaries)
        if self.part != LAYERS:
            return once
        return super().__call__(_waiting(tokens, once.hidden), step, caches, boundaries)

    def logits(
        self, hidden: Float[Array, "*lead d"], normed: Float[Array, "*lead d"] | None = None
    ) -> Float[Array, "*lead v"]:
        once = super().logits(hidden, normed)
        if self.part != HEAD:
            return once
        return super().logits(_waiting(hidden, once), None if normed is None else _waiting(normed, once))


class TwiceDraft(Draft):
    """Likewise for a draft; its layers are those of the extension and of every step."""

    def __init__(self, draft: Draft, part: str):
        for name in (
            "config",
            "split",
            "dtype",
            "embedding",
            "fusion",
            "first",
            "others",
            "norm",
            "head",
            "target_ids",
        ):
            setattr(self, name, getattr(draft, name))
        self.part = part

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        hidden: Float[Array, "b t d"],
        step: Step,
        caches: list[KVRows],
        earlier: list[KVRows] | None = None,
    ) -> DraftOutput:
        once = super().__call__(tokens, hidden, step, caches, earlier)
        if self.part != LAYERS:
            return once
        return super().__call__(_waiting(tokens, once.hidden), hidden, step, caches, earlier)

    def logits(self, hidden: Float[Array, "b t d"]) -> Float[Array, "b t w"]:
        once = super().logits(hidden)
        return once if self.part != HEAD else super().logits(_waiting(hidden, once))


def _waiting(value: Shaped[Array, "*n"], first: Float[Array, "*m"]) -> Shaped[Array, "*n"]:
    """`value`, but not before all of `first` is there, and in a way that XLA cannot see through."""
    return jnp.where(true_after(first.max()[None, None, None])[0], value, jnp.zeros_like(value))


@dataclass(frozen=True)
class Twice:
    """`cycle`: seconds of a cycle as it is. `parts`: name -> seconds more that it takes when that part is done twice, by the medians."""

    cycle: Spread
    parts: dict[str, float]

    def to_text(self) -> str:
        """A table for people."""
        whole = self.cycle.median
        rows = [f"{name:<30}{1e3 * more:>9.3f}{100 * more / whole:>7.1f}%" for name, more in self.parts.items()]
        told = sum(self.parts.values()) / whole
        return "\n".join(
            [
                "untraced, each part done twice inside the loop: what the cycle grows by (a difference of two runs)",
                f"{'part':<30}{'ms':>9}{'share':>8}",
                *rows,
                f"together {100 * told:.1f} % of a cycle of {1e3 * whole:.3f} ms; drawing, accepting and committing are not timed this way",
            ]
        )

    def to_json(self) -> dict[str, Any]:
        return {"cycle_seconds": self.cycle.to_json(), "parts_seconds": self.parts}


def run_count(spec: Speculation | Auto, repeats: int) -> int:
    """Runs that `time_twice` makes: the cycle as it is and with each part doubled, warm runs counted."""
    return (1 + (len(NAMES) if spec.num_steps else 2)) * (1 + repeats)


def time_twice(
    pair: Pair,
    jobs: Sequence[Job],
    spec: Speculation,
    max_len: int,
    slots: int,
    *,
    repeats: int,
    done: Callable[[], object] = lambda: None,
) -> Twice:
    """Cycles as they are and with each part done twice, in turns, after a warm turn that compiles.

    Arguments: as for `take_profile`; `done` is called after each of `run_count` runs.
    """
    boundaries = pair.capture.boundaries if pair.capture is not None else ()
    drafted = pair.draft is not None and spec.num_steps > 0
    kinds = [kind for kind in NAMES if kind[0] == "target" or drafted]

    def programs(kind: tuple[str, str] | None) -> Programs:
        target, draft = pair.target, pair.draft
        if kind is not None and kind[0] == "target":
            target = TwiceTarget(target, kind[1])
        elif kind is not None and draft is not None:
            draft = TwiceDraft(draft, kind[1])
        return Programs(target, draft, boundaries, spec, max_len, pair.dtype, pair.mesh)

    tasks = {kind: partial(_cycle_seconds, programs(kind), jobs, slots) for kind in (None, *kinds)}
    times = {kind: Spread.of(values) for kind, values in alternate(tasks, repeats=repeats, done=done).items()}
    return Twice(times[None], {NAMES[kind]: times[kind].median - times[None].median for kind in kinds})


def _cycle_seconds(programs: Programs, jobs: Sequence[Job], slots: int) -> float:
    answers = Wave(programs, jobs, None, slots).run()
    return answers[0].stats.decode_seconds / max(answer.stats.cycles for answer in answers)

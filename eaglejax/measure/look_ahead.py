"""The calibration run: plain decoding that grows the widest trees below every token on the way, and verifies none of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from eaglejax.config import PLAIN, Speculation
from eaglejax.measure.replay import GrownTree, Text
from eaglejax.sharding.layout import fetch
from eaglejax.sharding.mesh import DATA
from eaglejax.speculation.draft import extend, grow
from eaglejax.speculation.loop import attempt, settle
from eaglejax.speculation.programs import Programs
from eaglejax.speculation.state import Models, State
from eaglejax.wave import Job, Wave

STEPS_PER_CALL = 8


def whole_pool(steps: int, topk: int) -> Speculation:
    """The tree that keeps every candidate it grows."""
    return Speculation(steps, topk, 1 + topk + (steps - 1) * topk**2)


def look_ahead_step(models: Models, state: State, specs: Sequence[Speculation]) -> tuple[State, list]:
    """One plain step, and the trees below its root before it. [b, n] arrays: tokens, parents, depths, scores of each tree."""
    assert models.draft is not None
    count, positions = state.pending_count, state.length - 1
    tokens, features = state.pending_tokens, state.pending_features
    draft_cache, tip = extend(models.draft, state.draft_cache, tokens, features, positions - count, count)
    state = replace(state, draft_cache=draft_cache, pending_count=jnp.zeros_like(count))
    root = jnp.take_along_axis(state.tokens, jnp.maximum(positions, 0)[:, None], axis=-1)[:, 0]
    trees = [grow(models.draft, draft_cache, tip, root, positions, state.request, spec) for spec in specs]
    found = [part for tree in trees for part in (tree.tokens, tree.parents, tree.depths, tree.scores)]
    return settle(state, attempt(models, state, tip, PLAIN)), found


class LookAhead:
    """The calibration's program: compiled once for any requests.

    Arguments:
        programs: of a chain or tree of the pair; only its prefill and its state are used.
        specs: the trees to grow at every token.
    """

    def __init__(self, programs: Programs, specs: Sequence[Speculation]):
        self.programs, self.specs = programs, list(specs)

        def run(models, state):
            return lax.scan(lambda state, _: look_ahead_step(models, state, specs), state, length=STEPS_PER_CALL)

        self._step = programs.custom(run, [P(None, DATA)] * 4 * len(self.specs))

    def run(self, jobs: Sequence[Job], advance: Callable[[int], object]) -> list[list[Text]]:
        """For each of the specs the texts of the jobs with its trees. `advance`: told the steps that have run, for a progress bar."""
        width = self.programs.slots_for(len(jobs), len(jobs))
        state = Wave(self.programs, jobs, None, width).prefilled()
        grown: list[list] = []
        budget = max(job.sampling.max_new_tokens for job in jobs) - 1
        for _ in range(0, budget, STEPS_PER_CALL):
            state, found = self._step(state)
            found = [fetch(part) for part in found]
            grown += [[part[index] for part in found] for index in range(STEPS_PER_CALL)]
            advance(STEPS_PER_CALL)
            if fetch(state.done).all():
                break
        tokens, lengths = fetch(state.tokens), fetch(state.length)
        self.programs.keep(state)
        answers = [[int(i) for i in tokens[slot, len(job.prompt) : lengths[slot]]] for slot, job in enumerate(jobs)]
        return [
            [
                Text(answer, [_tree(grown[place], tree, slot) for place in range(len(answer) - 1)])
                for slot, answer in enumerate(answers)
            ]
            for tree in range(len(self.specs))
        ]


def _tree(found: list[np.ndarray], tree: int, slot: int) -> GrownTree:
    return GrownTree(*(part[slot] for part in found[4 * tree : 4 * tree + 4]))

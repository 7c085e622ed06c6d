"""How long the drafts are that the target accepts, by the serving engine itself on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eaglejax.config import Sampling, Speculation
from eaglejax.engine import EagleJaxEngine
from eaglejax.models.draft import Draft


@dataclass(frozen=True)
class Acceptance:
    """tau: mean over prompts of the tokens a cycle emits, bonus included. unconditional: share of cycles that accept at
    level 1, 2, ..; conditional: of those that accepted at the level before. NaN where there was no cycle."""

    tau: float
    unconditional: list[float]
    conditional: list[float]
    prompts: int
    cycles: int


def accepted(
    engine: EagleJaxEngine, prompts: Sequence[Sequence[int]], tree: Speculation, new_tokens: int
) -> Acceptance:
    """Greedy answers of up to `new_tokens` tokens to the prompts, decoded with the engine's draft."""
    budgets = [min(new_tokens, engine.max_len - len(prompt)) for prompt in prompts]
    asked = [Sampling(max_new_tokens=budget, temperature=0.0) for budget in budgets]
    answers = engine.generate([list(prompt) for prompt in prompts], asked, speculation=tree)
    stats = [answer.stats for answer in answers if answer.stats.cycles]
    cycles = sum(one.cycles for one in stats)
    if not cycles:
        nothing = [float("nan")] * tree.num_steps
        return Acceptance(float("nan"), nothing, nothing, len(prompts), 0)
    every = np.asarray([count for one in stats for count in one.accepted_per_cycle])
    reached = [float(np.mean(every >= level)) for level in range(tree.num_steps + 1)]
    conditional = [b / a if a else float("nan") for a, b in zip(reached, reached[1:], strict=False)]
    return Acceptance(float(np.mean([one.tau for one in stats])), reached[1:], conditional, len(prompts), cycles)


class Evaluator:
    """An engine whose draft's weights change."""

    def __init__(self, engine: EagleJaxEngine, prompts: Sequence[Sequence[int]], tree: Speculation, new_tokens: int):
        self._engine, self._prompts, self._tree, self._new_tokens = engine, prompts, tree, new_tokens

    def __call__(self, draft: Draft) -> Acceptance:
        """As the engine would serve this draft."""
        self._engine.use_draft(draft)
        return accepted(self._engine, self._prompts, self._tree, self._new_tokens)

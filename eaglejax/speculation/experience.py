"""What "auto" carries from one wave of requests to the next: how hard texts were lately, and what speculation has won or lost.

Host side, plain numpy. It changes which trees are grown, never a token. Text of one kind often comes in a row: an answer that begins where
the last one ended need not find out again. What is carried is bounded both ways, so that a change of the text costs little.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float, Int

from eaglejax.speculation.adapt import ALLOWANCE, PRIOR, SHARE, Belief, fresh_belief

FORGET = 0.3  # how much of the prior is mixed into what the last wave believed
MOST = 2.0  # plain steps of credit at most: what a wave may lose of what others have won


@dataclass
class Experience:
    """Of the waves so far. weights: how likely each difficulty is. credit: plain steps that a slot may lose at first."""

    weights: Float[np.ndarray, " e"] = field(default_factory=lambda: np.asarray(PRIOR, np.float32))
    credit: float = ALLOWANCE

    def begin(self, slots: int, choices: int) -> Belief:
        """What a wave believes before its first cycle."""
        return fresh_belief(slots, choices, self.weights, self.credit)

    def learn(
        self,
        difficulty: Float[np.ndarray, "b e"],
        spent: Float[np.ndarray, " b"],
        credit: Float[np.ndarray, " b"],
        made: Int[np.ndarray, " b"],
        taken: Bool[np.ndarray, " b"],
    ) -> None:
        """A wave's end: the fields of its belief, the tokens its cycles made, and which slots had a request."""
        taken = taken & (spent > 0)
        if not taken.any():
            return
        top = difficulty.max(axis=-1, keepdims=True)
        each = np.exp(difficulty - top)
        seen = (each / each.sum(axis=-1, keepdims=True))[taken].mean(axis=0)
        self.weights = (FORGET * np.asarray(PRIOR) + (1 - FORGET) * seen).astype(np.float32)
        left = (made - (1 - SHARE) * spent + credit)[taken].mean()
        self.credit = float(np.clip(left, 0.0, MOST))

"""What "acceptance" means, counted one way everywhere: cycles of all answers are pooled, never averaged answer by answer.

A count is the accepted draft tokens of one cycle, the bonus token not among them. Nothing heavy is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

TAU = "tokens emitted per cycle, the bonus token included, before any cut by a stop or the budget; all cycles pooled"
ACCEPTED = "accepted draft tokens per cycle, the bonus token not included (tau - 1)"
UNCONDITIONAL = "at level j: cycles that accepted a token at level j, of all cycles"
CONDITIONAL = (
    "at level j: cycles that accepted a token at level j, of those that accepted at level j - 1 (level 1: of all)"
)


@dataclass(frozen=True)
class Acceptance:
    """Of the cycles of any number of answers. NaN where there is nothing to divide by.

    `cycles`: slots that ran one, counted one by one. `unconditional`, `conditional`: by level, level 1 first.
    """

    cycles: int
    accepted: int
    unconditional: tuple[float, ...]
    conditional: tuple[float, ...]

    @classmethod
    def of(cls, answers: Sequence[Sequence[int]], levels: int) -> Acceptance:
        """Arguments: the counts of every answer's cycles; the levels of the tree."""
        counts = [count for answer in answers for count in answer]
        reached = [sum(count >= level for count in counts) for level in range(levels + 1)]
        return cls(
            len(counts),
            sum(counts),
            tuple(share(n, reached[0]) for n in reached[1:]),
            tuple(share(n, above) for above, n in zip(reached, reached[1:], strict=False)),
        )

    @property
    def tau(self) -> float:
        """See `TAU`."""
        return share(self.cycles + self.accepted, self.cycles)

    @property
    def accepted_per_cycle(self) -> float:
        """See `ACCEPTED`."""
        return share(self.accepted, self.cycles)


def share(part: int | float, whole: int | float) -> float:
    """part / whole; NaN of nothing."""
    return part / whole if whole else math.nan

"""What a call gives back: answers with their counts, trees, teacher-forced scores."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int


@dataclass(frozen=True)
class Stats:
    """Counts and times of one answer.

    accepted_per_cycle: accepted draft tokens of every cycle, the bonus token not counted, before any cut by a stop or the budget.
        The first token comes from the prefill and belongs to no cycle. Plain decoding counts each step as a cycle with 0 accepted.
    cycles_by_choice: with "auto" the cycles of each choice, plain decoding first, then its trees; empty with a fixed tree. A stop string
        takes cycles off the other counts, not off these.
    prefill_seconds, decode_seconds: wall time of the wave the request was served in, compilation included where it happened.
    """

    seed: int
    prompt_tokens: int
    new_tokens: int
    accepted_per_cycle: list[int]
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    cycles_by_choice: list[int] = field(default_factory=list)

    @property
    def cycles(self) -> int:
        """Rounds of drafting and verification; plain decoding counts each step as one."""
        return len(self.accepted_per_cycle)

    @property
    def tau(self) -> float:
        """Mean tokens per cycle, the bonus token counted, before any cut; NaN where no cycle ran."""
        return sum(self.accepted_per_cycle) / self.cycles + 1 if self.cycles else math.nan

    @property
    def tokens_per_second(self) -> float:
        """New tokens after the first, over the decode time; NaN where there are none."""
        return (self.new_tokens - 1) / self.decode_seconds if self.new_tokens > 1 and self.decode_seconds else math.nan

    def accepted_at_level(self, levels: int) -> list[float]:
        """Share of all cycles that accepted a token at level 1, 2, .. (unconditional)."""
        return [
            sum(a >= level for a in self.accepted_per_cycle) / max(self.cycles, 1) for level in range(1, levels + 1)
        ]


@dataclass(frozen=True)
class Generation:
    """One answer.

    text: without special tokens and without a stop string. token_ids: with the EOS or stop id that ended it; with a stop string, up to
        the token that completes the match.
    finish_reason: "stop" (stop_reason says which: EOS id, stop id or stop string) or "length".
    """

    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    prompt_token_ids: list[int]
    stats: Stats


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer; the pieces of `text` join to the answer's text. `generation` is set on the last one."""

    text: str
    token_ids: list[int]
    generation: Generation | None = None


@dataclass(frozen=True)
class Score:
    """A teacher-forced pass of the target: row i has seen tokens 0..i. `experts`: by layer, those that each row's router chose, ascending;
    empty for a dense target."""

    logits: Float[np.ndarray, "t v"]
    boundaries: dict[int, Float[np.ndarray, "t d"]] = field(repr=False)  # residual stream after b blocks
    experts: dict[int, Int[np.ndarray, "t k"]] = field(repr=False, default_factory=dict)


@dataclass(frozen=True)
class DraftScore:
    """A teacher-forced pass of the draft: row i has token i + 1 beside the target's features of position i."""

    logits: Float[np.ndarray, "t w"]
    hidden: Float[np.ndarray, "t d"]  # before the final norm


@dataclass(frozen=True)
class Tree:
    """A draft tree of n nodes, parents before children; node 0 is the root, the last given token."""

    tokens: Int[np.ndarray, " n"]
    parents: Int[np.ndarray, " n"]
    depths: Int[np.ndarray, " n"]
    scores: Float[np.ndarray, " n"]
    mask: Bool[np.ndarray, "n n"]

"""Speculative decoding beside plain decoding: the same tokens, and where not, why not (docs/losslessness.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from eaglejax.config import Auto, Sampling, Speculation
from eaglejax.generation import Generation
from eaglejax.measure.judge import Judge
from eaglejax.measure.rounding import Divergence

TOKENS_PER_ROUNDING = 10_000  # float32: one rounding case in so many tokens, rounded up
RATIO = 1.5  # bfloat16: divergences per token, of those of the control
CHANCE = 0.01  # of calling a ratio too high that is not
SAMPLINGS = {
    "T=0": {"temperature": 0.0},
    "T=0.8": {"temperature": 0.8},
    "T=0.8 top_p=0.95 top_k=20": {"temperature": 0.8, "top_p": 0.95, "top_k": 20},
}
Job = tuple[list[int], Sampling]
Answer = Callable[[Sequence[Job]], list[Generation]]


@dataclass
class Row:
    """One line of the table: a tree, a number of slots, a sampling.

    shape: "plain" for plain decoding with other neighbours, "control" for plain decoding with dummy rows, else the tree's name.
    tokens: compared, up to the first divergence of every answer, that token included. accepted: drafted tokens, over `cycles`.
    """

    shape: str
    slots: int
    sampling: str
    tokens: int = 0
    accepted: int = 0
    cycles: int = 0
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Tokens per cycle, bonus included."""
        return self.accepted / self.cycles + 1 if self.cycles else math.nan

    @property
    def speculative(self) -> bool:
        """Whether anything was drafted in this row."""
        return self.shape not in ("plain", "control")


def make_jobs(prompts: Sequence[list[int]], tokens: int, samplings: Sequence[str]) -> list[Job]:
    """Every prompt under every sampling, side by side, each prompt with a seed of its own; EOS is run past."""
    return [
        (prompt, Sampling(max_new_tokens=tokens, seed=1000 + number, ignore_eos=True, **SAMPLINGS[name]))
        for number, prompt in enumerate(prompts)
        for name in samplings
    ]


def answer(
    generate: Callable[..., list[Generation]],
    jobs: Sequence[Job],
    slots: int,
    advance: Callable[[int], Any] = lambda n: None,
) -> list[Generation]:
    """Answers to jobs, `slots` of them together; the last wave is filled up with the first jobs, so that every wave is as wide.

    Arguments:
        generate: takes prompts and samplings. advance: called with the number of answers made.
    """
    jobs = list(jobs)
    filled = (jobs + jobs * slots)[: -(-len(jobs) // slots) * slots]
    answers: list[Generation] = []
    for first in range(0, len(filled), slots):
        wave = filled[first : first + slots]
        answers += generate([ids for ids, _ in wave], [asked for _, asked in wave])
        advance(min(slots, len(jobs) - first))
    return answers[: len(jobs)]


def compare(
    shape: str,
    slots: int,
    samplings: Sequence[str],
    jobs: Sequence[Job],
    reference: Sequence[Generation],
    found: Sequence[Generation],
    judge: Judge,
) -> list[Row]:
    """A row for each sampling: answers of one shape beside those of plain decoding, every first divergence judged."""
    rows = [Row(shape, slots, name) for name in samplings]
    for index, ((_, asked), plain, own) in enumerate(zip(jobs, reference, found, strict=True)):
        row = rows[index % len(samplings)]
        row.cycles += own.stats.cycles
        row.accepted += sum(own.stats.accepted_per_cycle)
        divergence = judge.divergence(index, plain, own, asked)
        row.tokens += len(plain.token_ids) if divergence is None else divergence.index + 1
        row.divergences += [divergence] if divergence else []
    return rows


def failures(rows: Sequence[Row], dtype: str, least_tau: float = 0.0) -> list[str]:
    """What is wrong with the table, in words; empty when all is well.

    Arguments:
        dtype: decides the rule: a rounding case per 10,000 tokens in float32, `RATIO` times the control's in bfloat16.
        least_tau: a tree below this speculated nothing.
    """
    told = []
    everything = [(row, found) for row in rows for found in row.divergences if row.shape != "control"]
    for row, found in everything:
        if not found.rounding:
            told.append(f"not rounding: {row.shape}, {row.slots} slot(s), {row.sampling}: {found}")
    tokens = sum(row.tokens for row in rows if row.shape != "control")
    if dtype == "float32":
        allowed = math.ceil(tokens / TOKENS_PER_ROUNDING)
        if len(everything) > allowed:
            told.append(f"{len(everything)} divergences in {tokens} tokens; at most {allowed} may be rounding")
    elif (rate := rate_of(rows)) is not None and rate.too_high:
        told.append(rate.told())
    for row in rows:
        if row.speculative and not row.tau >= least_tau:
            told.append(f"tau {row.tau:.2f} of {row.shape}, {row.slots} slot(s), {row.sampling} is below {least_tau}")
    return told


@dataclass(frozen=True)
class Rate:
    """Divergences of speculation and of its control, with the tokens in which each was looked for."""

    found: int
    tokens: int
    control: int
    control_tokens: int

    @property
    def ratio(self) -> float:
        """Divergences per token over the control's; 1 where there are none at all."""
        if not self.control:
            return math.inf if self.found else 1.0
        return self.found / self.tokens * self.control_tokens / self.control

    @property
    def chance(self) -> float:
        """Probability of so many divergences or more among all that were seen, were the true ratio `RATIO`."""
        from scipy.special import bdtrc

        share = RATIO * self.tokens / (RATIO * self.tokens + self.control_tokens)
        return 1.0 if not self.found else float(bdtrc(self.found - 1, self.found + self.control, share))

    @property
    def too_high(self) -> bool:
        """Whether it is above `RATIO` by more than chance explains."""
        return self.ratio > RATIO and self.chance < CHANCE

    @property
    def undecided(self) -> bool:
        """Whether it is above `RATIO`, but so few were seen that chance explains it."""
        return self.ratio > RATIO and not self.too_high

    def told(self) -> str:
        """The two rates in words."""
        per = lambda count, tokens: f"{1000 * count / max(tokens, 1):.2f} per 1,000 tokens ({count} in {tokens})"
        ratio = "" if math.isinf(self.ratio) else f", {self.ratio:.2f} times as many"
        verdict = (
            f"above {RATIO} by chance or not: more tokens would tell" if self.undecided else f"at most {RATIO} pass"
        )
        return (
            f"divergences from plain decoding: {per(self.found, self.tokens)}; plain decoding with as many rows: "
            f"{per(self.control, self.control_tokens)}{ratio}; {verdict}"
        )


def rate_of(rows: Sequence[Row]) -> Rate | None:
    """The rates of a table; None without a control."""
    control = [row for row in rows if row.shape == "control"]
    own = [row for row in rows if row.speculative]
    if not control or not own:
        return None
    count = lambda rows: sum(len(row.divergences) for row in rows)
    total = lambda rows: sum(row.tokens for row in rows)
    return Rate(count(own), total(own), count(control), total(control))


def table(rows: Sequence[Row]) -> str:
    """The rows as text, divergences below."""
    lines = [f"{'shape':8} {'slots':>5}  {'sampling':26} {'tokens':>7} {'diverged':>8} {'rounding':>8} {'tau':>5}"]
    for row in rows:
        rounding = sum(found.rounding for found in row.divergences)
        counts = f"{row.tokens:7} {len(row.divergences):8} {rounding:8} {row.tau:5.2f}"
        lines.append(f"{row.shape:8} {row.slots:5}  {row.sampling:26} {counts}")
    lines += [f"  {row.shape}, {row.slots} slot(s), {row.sampling}: {d}" for row in rows for d in row.divergences]
    return "\n".join(lines)


def shape_name(spec: Speculation | Auto) -> str:
    """ "chain", "tree" or "auto"."""
    if isinstance(spec, Auto):
        return "auto"
    return "chain" if spec.topk == 1 else "tree"

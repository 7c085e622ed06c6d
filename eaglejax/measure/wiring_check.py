"""Which wiring a draft was trained for: measured on the target's own text, told only where chance cannot explain it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from eaglejax.loading import Pair
from eaglejax.measure.teacher_forced import Foretold, TeacherForced, Text
from eaglejax.measure.wirings import Change, Wiring, Wirings

STEPS = 4
BLOCK = 8  # neighbouring places are alike: they are one observation
LEAST_BLOCKS = 6
CHANCE = 1e-3  # of one false finding among all comparisons of a check
SIGMAS = 3.0  # by which the tokens of two better wirings must differ for the worse one to be out of the question
MARGIN = 0.02  # tokens per cycle: what is smaller is no finding, however sure
LOW = 0.3  # position-0 accuracy below which two changes are tried where no single one helps
BLINDING = ("capture", "vocabulary")  # kinds that are listed before the others
ENOUGH = 256  # places from which what cannot be told apart is alike, as far as it matters
NOTHING = 0.05  # position-0 accuracy below which nothing can be told of a draft


@dataclass(frozen=True)
class Figure:
    """What a draft foretells under one wiring."""

    wiring: Wiring
    foretold: Foretold

    @property
    def accuracies(self) -> list[float]:
        """Share of the places at which position 0, 1, .. of a chain is the target's choice, the true tokens before it given."""
        return [float(row.mean()) if row.size else 0.0 for row in self.foretold.hits]

    @property
    def runs(self) -> Float[np.ndarray, " places"]:
        """Drafted tokens in a row that would be accepted from each place on."""
        return np.cumprod(self.foretold.hits, axis=0).sum(0).astype(np.float64)

    @property
    def tokens_per_cycle(self) -> float:
        """Of a chain as long as the steps, grown at every place: tau, teacher-forced."""
        return 1 + (float(self.runs.mean()) if self.runs.size else 0.0)


@dataclass(frozen=True)
class Gain:
    """How many more tokens per cycle one wiring gives than another, and how sure it is that it foretells better.

    sigmas: the mean difference of the log-probabilities of the target's choices over its standard error, blocks of neighbouring places
        being the observations. (First choices alone would tell the same, from many times the text.) needed: what chance alone
        reaches in one of 1000 checks.
    """

    tokens: float
    sigmas: float
    needed: float

    @property
    def sure(self) -> bool:
        """Whether it is above the margin and beyond chance."""
        return self.tokens >= MARGIN and self.sigmas > self.needed


def gain(one: Figure, other: Figure, comparisons: int) -> Gain:
    """What `one` gives over `other`; `comparisons`: how many such questions are asked at once."""
    from scipy.special import stdtrit

    difference = (one.foretold.scores - other.foretold.scores).mean(0)
    tokens = float((one.runs - other.runs).mean()) if difference.size else 0.0
    blocks = len(difference) // BLOCK
    if blocks < LEAST_BLOCKS:
        return Gain(tokens, 0.0, np.inf)
    return Gain(tokens, _sigmas(difference), float(stdtrit(blocks - 1, 1 - CHANCE / max(comparisons, 1))))


def _sigmas(difference: Float[np.ndarray, " places"]) -> float:
    """A mean over its standard error, blocks of neighbouring places being the observations."""
    blocks = len(difference) // BLOCK
    means = np.array([part.mean() for part in np.array_split(difference, blocks)])
    mean, error = float(means.mean()), float(means.std(ddof=1)) / np.sqrt(blocks)
    return float(mean / error if error > 0 else np.inf * np.sign(mean) if mean else 0.0)


def _told_apart(top: Figure, other: Figure, comparisons: int) -> bool:
    """Whether `other`, a better wiring than the loaded one, is still a worse one than `top`: by what both foretell, or by the tokens."""
    found = gain(top, other, comparisons)
    return found.sure or (found.tokens >= MARGIN and _sigmas(top.runs - other.runs) > SIGMAS)


@dataclass(frozen=True)
class WiringCheck:
    """The figures of every wiring that was tried, and what follows from them.

    figures: the loaded wiring first. best: the wiring to take: the loaded one unless another is better beyond chance; of several that
        cannot be told apart the one with fewest changes. equals: the others that cannot be told from it.
    source: what text was measured on. covered: share of the target's choices that the draft's vocabulary holds.
    """

    figures: tuple[Figure, ...]
    best: Figure
    gained: Gain | None
    equals: tuple[Figure, ...]
    places: int
    source: str
    covered: float

    @property
    def loaded(self) -> Figure:
        """The wiring that was loaded."""
        return self.figures[0]

    @property
    def wrong(self) -> bool:
        """Whether the draft was trained for another wiring than the loaded one."""
        return self.best is not self.loaded

    @property
    def blind(self) -> bool:
        """Whether the draft foretells next to nothing under any wiring."""
        return max(figure.accuracies[0] for figure in self.figures) < NOTHING

    @property
    def rivals(self) -> int:
        """How many others the best could be told from: those of as many changes."""
        return sum(figure is not self.best and _as_simple(figure, self.best) for figure in self.figures)

    @property
    def too_few(self) -> bool:
        """Whether places are so few that most of the others cannot be told from the loaded wiring, which is then not known to be right."""
        return not self.wrong and self.places < ENOUGH and 3 * len(self.equals) > 2 * self.rivals

    def verdict(self) -> str:
        """One sentence, with figures and, where something is wrong, the override that mends it."""
        loaded = (
            f"{self.loaded.tokens_per_cycle:.2f} tokens per cycle, position 0 right {self.loaded.accuracies[0]:.1%}"
        )
        where = f"teacher-forced over {self.places} places of {self.source}"
        if not self.places:
            return "cannot be told: no places to measure at, the texts are too short; eaglejax check --tokens=512, and a larger --max_len"
        if not self.wrong and self.blind:
            return f"cannot be told: the draft foretells next to nothing under any wiring ({loaded}, {where})"
        if self.too_few:
            return (
                f"{self.places} places are too few: {len(self.equals)} of {self.rivals} cannot be told from it ({loaded}, {where}); "
                "eaglejax check --tokens=512"
            )
        if not self.wrong:
            return f"as the draft was trained, as far as {len(self.figures) - 1} others tell ({loaded}, {where})"
        assert self.gained is not None
        best, wiring = self.best, self.best.wiring
        return (
            f"the draft was trained for another wiring than the loaded one: {wiring.name}. It gives {best.tokens_per_cycle:.2f} tokens "
            f"per cycle, position 0 right {best.accuracies[0]:.1%}; loaded: {loaded} ({where}; {min(self.gained.sigmas, 99):.0f} standard "
            f"errors apart). Load it with {wiring.keyword}, or {wiring.flags}"
        )


def check_wiring(
    pair: Pair,
    texts: Sequence[Text],
    source: str,
    advance: Callable[[int], Any] = lambda n: None,
    steps: int = STEPS,
) -> WiringCheck:
    """Measure every plausible wiring of a loaded pair: one change at a time, then a second one beside the best.

    Where no single change helps and the draft is right less than `LOW` of the time, pairs of changes are tried: two faults at once can hide
    each other.

    Arguments:
        texts: of the target's own making. source: what they are, in words. advance: called with 1 after every wiring. steps: tokens
            drafted at every place; two tell every kind of fault, more tell smaller ones.
    """
    wirings = Wirings(pair)
    singles = wirings.singles()
    run = Measured(pair, texts, source, [wirings.loaded, *singles], steps=steps, advance=advance)
    loaded = run.figure(wirings.loaded)
    figures = [loaded, *map(run.figure, singles)]
    best, _ = _choose(figures)
    if best is not loaded:
        second = _extended(wirings, best.wiring.changes, singles)
    elif loaded.accuracies[0] < LOW:
        second = _pairs(wirings, singles)
    else:
        second = []
    figures += map(run.figure, second)
    return run.judged(figures)


class Measured:
    """The figures of wirings over one pass of the target."""

    def __init__(
        self,
        pair: Pair,
        texts: Sequence[Text],
        source: str,
        wirings: Sequence[Wiring],
        *,
        steps: int = STEPS,
        advance: Callable[[int], Any] = lambda n: None,
    ):
        """Arguments: wirings: those that may be asked for read no other boundaries than these."""
        self._forced = TeacherForced(pair, texts, [b for wiring in wirings for b in wiring.boundaries], steps)
        self._source, self._advance = source, advance

    def figure(self, wiring: Wiring) -> Figure:
        """What the draft foretells under a wiring."""
        made = Figure(wiring, self._forced.foretold(wiring))
        self._advance(1)
        return made

    def judged(self, figures: Sequence[Figure]) -> WiringCheck:
        """What follows from some figures, the first being the wiring that was loaded."""
        best, gained = _choose(figures)
        comparisons = len(figures) - 1
        alike = [
            figure
            for figure in figures
            if figure is not best and not gain(best, figure, comparisons).sure and _as_simple(figure, best)
        ]
        covered = self._forced.covered(best.wiring)
        return WiringCheck(tuple(figures), best, gained, tuple(alike), self._forced.count, self._source, covered)


def _as_simple(figure: Figure, best: Figure) -> bool:
    return len(figure.wiring.changes) <= max(len(best.wiring.changes), 1)


def _extended(wirings: Wirings, changes: tuple[Change, ...], singles: Iterable[Wiring]) -> list[Wiring]:
    """The best change with one more of another kind."""
    kinds = {change.kind for change in changes}
    more = [single.changes[0] for single in singles if single.changes[0].kind not in kinds]
    made = [wirings.apply(*changes, change) for change in more]
    return [wiring for wiring in made if wiring is not None]


def _pairs(wirings: Wirings, singles: Sequence[Wiring]) -> list[Wiring]:
    """Any two changes of different kinds, one of them of the captures or the map: these make a draft blind to all else."""
    changes = [single.changes[0] for single in singles]
    both = [(a, b) for i, a in enumerate(changes) for b in changes[i + 1 :] if a.kind != b.kind and a.kind in BLINDING]
    made = [wirings.apply(*two) for two in both]
    return [wiring for wiring in made if wiring is not None]


def _choose(figures: Sequence[Figure]) -> tuple[Figure, Gain | None]:
    """The figure to take, and what it gains over the first: the best that is better beyond chance, else the first.

    Of those that cannot be told from the best, the one with fewest changes, in the order in which they are listed.
    """
    loaded, comparisons = figures[0], len(figures) - 1
    gains = {index: gain(figure, loaded, comparisons) for index, figure in enumerate(figures) if index}
    better = [index for index, found in gains.items() if found.sure]
    if not better:
        return loaded, None
    top = max(better, key=lambda index: gains[index].tokens)
    alike = [index for index in better if not _told_apart(figures[top], figures[index], comparisons)]
    chosen = min(alike, key=lambda index: (len(figures[index].wiring.changes), index))
    return figures[chosen], gains[chosen]

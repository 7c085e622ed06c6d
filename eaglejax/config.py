"""What a caller can set: the tree (`Speculation`) and the request (`Sampling`). Both are checked at construction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from eaglejax.errors import ConfigError

MAX_STEPS, MAX_NODES, MAX_TREES = 32, 256, 4
INT32 = 2**31 - 1

if TYPE_CHECKING:
    Whole: TypeAlias = int
    Real: TypeAlias = float
    Flag: TypeAlias = bool
    Strings: TypeAlias = Sequence[str]
    Ids: TypeAlias = Sequence[int]
else:
    # checked at construction in words of their own; numbers may come as text, from command lines
    Whole = Real = Flag = Strings = Ids = Any


def whole_number(name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as an int in [low, high]; numbers written as text are taken, as they come from command lines."""
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            value = value or "''"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigError(
            "not a whole number", where=name, found=repr(value), expected=f"a whole number of at least {low}"
        )
    value = int(value.__index__())
    if value < low or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"{low} to {high}"
        raise ConfigError("out of range", where=name, found=value, expected=span)
    return value


def real_number(name: str, value: Any, low: Real, high: Real, *, above: bool = False) -> float:
    """`value` as a float in [low, high], or in (low, high] with `above`; numbers written as text are taken."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError("not a number", where=name, found=repr(value)[:80], expected=f"{low:g} to {high:g}") from None
    if not low <= number <= high or (above and number == low):
        span = f"above {low:g}, up to {high:g}" if above else f"{low:g} to {high:g}"
        raise ConfigError("out of range", where=name, found=value, expected=span)
    return number


def yes_or_no(name: str, value: Any) -> bool:
    """`value` where it is a bool."""
    if not isinstance(value, bool):
        raise ConfigError("not true or false", where=name, found=repr(value), expected="True or False")
    return value


@dataclass(frozen=True)
class Speculation:
    """The draft tree of each cycle (EAGLE-2's dynamic tree, arXiv:2406.16858, in SGLang's units).

    Arguments:
        num_steps: S, levels of the tree below its root. 0 is plain decoding.
        topk: K, children kept per level. 1 is a chain.
        num_draft_tokens: N, nodes verified, the root (the last committed token) included. None: S + 1 for a chain, else
            the whole pool of candidates up to 64. A chain is always S + 1.
        score_temperature: divides the draft's logits before the scores are taken; 1 is the reference's tree exactly.
            One number, or one per level.
        coupled: at temperature > 0 the draft's choice uses the noise that the target will draw with. The text is the same either way.
        coupling: c, divides (logits / T + noise) in the coupled score.
    """

    num_steps: Whole = 3
    topk: Whole = 1
    num_draft_tokens: Whole | None = None
    score_temperature: Real | Sequence[float] = 1.0
    coupled: Flag = True
    coupling: Real = 1.0

    def __post_init__(self):
        put = lambda name, value: object.__setattr__(self, name, value)
        put("num_steps", whole_number("num_steps", self.num_steps, 0, MAX_STEPS))
        put("topk", whole_number("topk", self.topk, 1, 64))
        steps, topk = self.num_steps, self.topk
        pool = self.pool_size
        if self.num_draft_tokens is None:
            put("num_draft_tokens", steps + 1 if topk == 1 else min(64, pool + 1))
        nodes = whole_number("num_draft_tokens", self.num_draft_tokens, 1, MAX_NODES)
        put("num_draft_tokens", nodes)
        if steps == 0 and nodes != 1:
            raise ConfigError(
                "plain decoding (num_steps 0) verifies one node", where="num_draft_tokens", found=nodes, expected=1
            )
        if topk == 1 and nodes != steps + 1:
            raise ConfigError(
                "a chain (topk 1) verifies num_steps + 1 nodes, the root included",
                where="num_draft_tokens",
                found=nodes,
                expected=steps + 1,
            )
        if steps and nodes < 2:
            raise ConfigError(
                "a tree holds at least its root and one candidate",
                where="num_draft_tokens",
                found=nodes,
                expected="2 or more",
            )
        if nodes - 1 > pool:
            raise ConfigError(
                "the tree cannot be filled: topk + (num_steps - 1) * topk^2 candidates are grown and num_draft_tokens - 1 kept",
                where="num_draft_tokens",
                found=nodes,
                expected=f"at most {pool + 1} for num_steps {steps}, topk {topk}",
            )
        scale = self.score_temperature
        many = isinstance(scale, Sequence) and not isinstance(scale, str)
        scales = tuple(scale) if many else (scale,) * max(steps, 1)  # pyright: ignore[reportArgumentType]
        if len(scales) != max(steps, 1):
            raise ConfigError(
                "must be one positive number, or one per level",
                where="score_temperature",
                found=scale,
                expected=f"{steps} numbers > 0",
            )
        put("score_temperature", tuple(real_number("score_temperature", x, 0, 1e4, above=True) for x in scales))
        put("coupling", real_number("coupling", self.coupling, 0, 1e4, above=True))
        put("coupled", yes_or_no("coupled", self.coupled))

    @property
    def pool_size(self) -> int:
        """Candidates grown below the root: K + (S - 1) K^2."""
        return self.topk + (self.num_steps - 1) * self.topk**2 if self.num_steps else 0

    @property
    def nodes(self) -> int:
        """N, the root included."""
        assert self.num_draft_tokens is not None
        return self.num_draft_tokens

    def temperature_of(self, level: int) -> float:
        """The score temperature of a level, 1 being the children of the root."""
        scales = self.score_temperature
        assert isinstance(scales, tuple)
        return scales[level - 1]

    def describe(self) -> str:
        """The setting in words."""
        if self.num_steps == 0:
            return "plain decoding"
        shape = "chain" if self.topk == 1 else "tree"
        return f"{shape} ({self.num_steps}, {self.topk}, {self.nodes}): num_steps, topk, num_draft_tokens"


PLAIN = Speculation(num_steps=0)


@dataclass(frozen=True)
class Auto:
    """Trees among which the loop chooses as it goes; plain decoding is always one of the choices (`speculation/adapt.py`).

    Arguments:
        trees: one to four of them; each is compiled, all into one program.
        window: draft rows that a slot keeps while plain decoding runs; the draft is run over them when they are full.
    """

    trees: tuple[Speculation, ...]
    window: Whole = 32

    def __post_init__(self):
        put = lambda name, value: object.__setattr__(self, name, value)
        trees = tuple(self.trees)
        if not 1 <= len(trees) <= MAX_TREES or not all(isinstance(t, Speculation) and t.num_steps for t in trees):
            raise ConfigError(
                "not trees to choose among", where="trees", found=trees, expected=f"1 to {MAX_TREES} of num_steps >= 1"
            )
        if len(set(trees)) < len(trees):
            raise ConfigError("a tree is given twice", where="trees", found=trees)
        put("trees", trees)
        put("window", whole_number("window", self.window, self.num_steps + 2, 1024))

    @property
    def choices(self) -> tuple[Speculation, ...]:
        """Plain decoding, then the trees: a choice is an index into these."""
        return (PLAIN, *self.trees)

    @property
    def num_steps(self) -> int:
        """Levels of the deepest tree."""
        return max(tree.num_steps for tree in self.trees)

    @property
    def topk(self) -> int:
        """Children per level of the broadest tree."""
        return max(tree.topk for tree in self.trees)

    @property
    def nodes(self) -> int:
        """Nodes of the largest tree, the root included."""
        return max(tree.nodes for tree in self.trees)

    @property
    def guess(self) -> Speculation:
        """How the draft's first guess is scored, as the first tree does it."""
        first = self.trees[0]
        return Speculation(
            1, 1, score_temperature=first.temperature_of(1), coupled=first.coupled, coupling=first.coupling
        )

    def describe(self) -> str:
        """The setting in words."""
        shapes = ", ".join(f"({t.num_steps}, {t.topk}, {t.nodes})" for t in self.trees)
        return f'"auto": plain decoding or one of {shapes}, chosen as it goes'


@dataclass(frozen=True)
class Sampling:
    """One request. Filters apply in the order temperature, top_k, top_p, min_p, on every token alike.

    Arguments:
        max_new_tokens: tokens to make at most, EOS or stop id included.
        temperature: 0 is argmax.
        top_k: 0 keeps all. top_p: 1 keeps all. min_p: 0 keeps all.
        seed: None draws a fresh seed per request (returned in stats.seed); a given seed holds for each prompt by itself.
        stop: strings that end the text before the match; None or empty for none.
        stop_token_ids: ids that end it; the id is kept in token_ids and, like EOS, adds nothing to the text.
        ignore_eos: run on past EOS; stop_token_ids still stop.
    """

    max_new_tokens: Whole = 128
    temperature: Real = 0.0
    top_k: Whole = 0
    top_p: Real = 1.0
    min_p: Real = 0.0
    seed: Whole | None = None
    stop: Strings = field(default_factory=list)
    stop_token_ids: Ids = field(default_factory=list)
    ignore_eos: Flag = False

    def __post_init__(self):
        put = lambda name, value: object.__setattr__(self, name, value)
        put("max_new_tokens", whole_number("max_new_tokens", self.max_new_tokens, 0, INT32))
        put("top_k", whole_number("top_k", self.top_k, 0, INT32))
        put("temperature", real_number("temperature", self.temperature, 0, 1e4))
        put("top_p", real_number("top_p", self.top_p, 0, 1, above=True))
        put("min_p", real_number("min_p", self.min_p, 0, 1))
        put("ignore_eos", yes_or_no("ignore_eos", self.ignore_eos))
        if self.seed is not None:
            put("seed", whole_number("seed", self.seed, 0, 2**63 - 1))
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if value is None:
                put(name, ())
            value = getattr(self, name)
            if not isinstance(value, Sequence) or (isinstance(value, str | bytes) and name != "stop"):
                raise ConfigError("not a list", where=name, found=repr(value), expected="a list, empty for none")
        stop = [self.stop] if isinstance(self.stop, str) else list(self.stop)
        if not all(isinstance(s, str) and s for s in stop):
            raise ConfigError("stop strings must be non-empty text", where="stop", found=self.stop)
        put("stop", tuple(stop))
        ids = [whole_number("stop_token_ids", i, 0, INT32) for i in self.stop_token_ids]
        put("stop_token_ids", tuple(ids))

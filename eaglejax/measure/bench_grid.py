"""The cells of a bench: which trees, how many requests together, at which temperature. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eaglejax.config import PLAIN, Speculation, real_number, whole_number
from eaglejax.errors import ConfigError


@dataclass(frozen=True)
class Skipped:
    """A cell, or several, that could not be measured, and why."""

    cell: str
    reason: str


@dataclass(frozen=True)
class Cell:
    """One setting on one prompt set."""

    prompts: str
    slots: int
    temperature: float
    spec: Speculation

    @property
    def group(self) -> tuple[str, int, float]:
        """What cells that are compared with each other, and with plain decoding, share."""
        return self.prompts, self.slots, self.temperature

    @property
    def tree(self) -> str:
        """The tree as num_steps,topk,num_draft_tokens."""
        return tree_text(self.spec)

    def describe(self) -> str:
        return f"{self.prompts}, {self.slots} slots, temperature {self.temperature:g}, {self.tree}"


def tree_text(spec: Speculation) -> str:
    """A tree as it is written on command lines; "plain" for none."""
    return f"{spec.num_steps},{spec.topk},{spec.nodes}" if spec.num_steps else "plain"


@dataclass(frozen=True)
class Grid:
    """All combinations, plain decoding first in each group.

    `trees`: without doubles, plain decoding not among them. `skipped`: combinations that are no tree.
    """

    prompts: tuple[str, ...]
    trees: tuple[Speculation, ...]
    slots: tuple[int, ...]
    temperatures: tuple[float, ...]
    skipped: tuple[Skipped, ...] = ()

    def groups(self) -> list[list[Cell]]:
        """Cells that take turns: those of one prompt set, number of slots and temperature."""
        return [
            [Cell(prompts, slots, temperature, spec) for spec in (PLAIN, *self.trees)]
            for prompts in self.prompts
            for slots in self.slots
            for temperature in self.temperatures
        ]


def make_grid(
    *,
    prompts: Sequence[str],
    num_steps: Sequence[int | str],
    topk: Sequence[int | str],
    num_draft_tokens: Sequence[int | str | None],
    slots: Sequence[int | str],
    temperatures: Sequence[float | str],
) -> Grid:
    """num_steps x topk x num_draft_tokens for every prompt set, number of slots and temperature.

    A chain (topk 1) has num_steps + 1 nodes and plain decoding (num_steps 0) one, whatever `num_draft_tokens` says, so they are cells of
    their own once. None there stands for `Speculation`'s own choice.

    Raises ConfigError for an axis without a value, and for values that are no numbers in range.
    """
    axes: dict[str, Sequence[object]] = dict(
        prompts=prompts, num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens, slots=slots,
        temperature=temperatures,
    )  # fmt: skip
    for name, values in axes.items():
        if not values:
            raise ConfigError("an empty grid", where=name, found="no value", expected="one or more, such as 1,3,5")
    steps = [whole_number("num_steps", value, 0) for value in num_steps]
    widths = [whole_number("topk", value, 1) for value in topk]
    nodes = [None if value is None else whole_number("num_draft_tokens", value, 1) for value in num_draft_tokens]
    wanted: dict[tuple[int, int, int | None], None] = {}
    for step in steps:
        for width in widths:
            for count in nodes if width > 1 else [None]:
                wanted[step, width, count] = None
    trees, skipped = possible_trees(list(wanted))
    return _grid(prompts, trees, slots, temperatures, skipped)


def possible_trees(wanted: Sequence[tuple[int, int, int | None]]) -> tuple[list[Speculation], list[Skipped]]:
    """Of (num_steps, topk, num_draft_tokens) what can be a tree, and what cannot with the reason; plain decoding is in every group."""
    trees: dict[Speculation, None] = {}
    skipped: dict[str, Skipped] = {}
    for step, width, count in wanted:
        if not step:
            continue
        try:
            trees[Speculation(step, width, count)] = None
        except ConfigError as error:
            shown = f"{step},{width}" + (f",{count}" if count is not None else "")
            skipped[shown] = Skipped(f"every cell of the tree {shown}", str(error))
    return list(trees), list(skipped.values())


def grid_of_trees(
    trees: Sequence[Speculation],
    *,
    prompts: Sequence[str],
    slots: Sequence[int | str],
    temperatures: Sequence[float | str],
    skipped: Sequence[Skipped] = (),
) -> Grid:
    """The trees given, in place of a grid of their numbers. Raises as `make_grid` does. skipped: what else was asked for and is no tree."""
    distinct = [spec for spec in dict.fromkeys(trees) if spec.num_steps]
    return _grid(prompts, distinct, slots, temperatures, skipped)


def _grid(prompts, trees, slots, temperatures, skipped) -> Grid:
    once = lambda values: tuple(dict.fromkeys(values))
    return Grid(
        once(prompts),
        tuple(trees),
        once(whole_number("slots", value, 1, 4096) for value in slots),
        once(real_number("temperature", value, 0, 1e4) for value in temperatures),
        tuple(skipped),
    )

"""Cells of a grid: doubles once, plain decoding in every group, trees that cannot be told with the rule, empty axes refused."""

from __future__ import annotations

import pytest

from eaglejax import Speculation
from eaglejax.errors import ConfigError
from eaglejax.measure.bench_grid import PLAIN, grid_of_trees, make_grid

AXES = dict(
    prompts=["qa"],
    num_steps=[0, 1, 3],
    topk=[1, 2],
    num_draft_tokens=[4, 9, 200],
    slots=[1, 4],
    temperatures=[0.0, 0.8],
)


def test_cells():
    grid = make_grid(**AXES)
    # chains once each whatever num_draft_tokens says; (1, 2) holds 3 nodes at most, (3, 2) 11
    assert grid.trees == (Speculation(1, 1), Speculation(3, 1), Speculation(3, 2, 4), Speculation(3, 2, 9))
    assert [one.cell for one in grid.skipped] == [
        "every cell of the tree 1,2,4",
        "every cell of the tree 1,2,9",
        "every cell of the tree 1,2,200",
        "every cell of the tree 3,2,200",
    ]
    assert "cannot be filled" in grid.skipped[0].reason and "1 to 256" not in grid.skipped[0].reason
    groups = grid.groups()
    assert len(groups) == 4 and all(group[0].spec == PLAIN and len(group) == 5 for group in groups)
    assert [group[0].group for group in groups] == [("qa", 1, 0), ("qa", 1, 0.8), ("qa", 4, 0), ("qa", 4, 0.8)]
    assert groups[3][3].describe() == "qa, 4 slots, temperature 0.8, 3,2,4" and groups[0][0].tree == "plain"


def test_text_is_read_and_doubles_are_dropped():
    grid = make_grid(
        **AXES | dict(num_steps=["3", "3"], topk=["1"], num_draft_tokens=[None], slots=["2", "2"], prompts=["qa", "qa"])
    )
    assert grid.trees == (Speculation(3, 1),) and grid.slots == (2,) and grid.prompts == ("qa",)
    only_plain = make_grid(**AXES | dict(num_steps=[0]))
    assert only_plain.trees == () and [len(group) for group in only_plain.groups()] == [1] * 4
    given = grid_of_trees([Speculation(3, 1), PLAIN, Speculation(3, 1)], prompts=["qa"], slots=[1], temperatures=[0.0])
    assert given.trees == (Speculation(3, 1),)


@pytest.mark.parametrize("name", list(AXES))
def test_empty_axes_are_refused(name):
    with pytest.raises(ConfigError, match=f"{'temperature' if name == 'temperatures' else name}: an empty grid"):
        make_grid(**AXES | {name: []})


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(num_steps=["x"]), "num_steps: not a whole number"),
        (dict(topk=[0]), "topk: out of range"),
        (dict(num_draft_tokens=[0]), "num_draft_tokens: out of range"),
        (dict(slots=[0]), "slots: out of range"),
        (dict(temperatures=["hot"]), "temperature: not a number"),
        (dict(temperatures=[-1.0]), "temperature: out of range"),
    ],
)
def test_values_that_are_no_numbers_in_range(change, said):
    with pytest.raises(ConfigError, match=said):
        make_grid(**AXES | change)

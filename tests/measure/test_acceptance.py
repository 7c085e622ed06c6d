"""Trial 35: every word for acceptance has one meaning, on accept runs made by hand."""

from __future__ import annotations

import math

import pytest

from eaglejax.measure import acceptance
from eaglejax.measure.acceptance import Acceptance
from eaglejax.measure.bench_result import DEFINITIONS

RUNS = [3, 0, 1, 5]  # five levels


def test_trial_35_each_figure_by_name():
    found = Acceptance.of([RUNS], 5)
    assert found.tau == 13 / 4 == 3.25  # 4 + 1 + 2 + 6, the bonus tokens included
    assert found.accepted_per_cycle == 9 / 4
    assert found.unconditional == (3 / 4, 2 / 4, 2 / 4, 1 / 4, 1 / 4)
    assert found.conditional == (3 / 4, 2 / 3, 1, 1 / 2, 1)
    assert (found.cycles, found.accepted) == (4, 9)


def test_trial_35_two_rows_are_pooled_by_rounds():
    found = Acceptance.of([[1], [0, 0, 1]], 1)
    assert found.tau == 6 / 4  # the mean of the rows' means would be (2 + 4 / 3) / 2
    assert found.unconditional == (2 / 4,)
    assert Acceptance.of([RUNS, RUNS[:1]], 5).tau == (13 + 4) / 5


def test_trial_35_the_definitions_are_printed():
    assert "bonus token included" in DEFINITIONS["tau"] and "pooled" in DEFINITIONS["tau"]
    assert "of all" in DEFINITIONS["accepted, of all"] and "of those" in DEFINITIONS["accepted, of reaching"]
    assert "not included" in acceptance.ACCEPTED


def test_nothing_to_divide_by():
    assert math.isnan(Acceptance.of([], 2).tau) and all(map(math.isnan, Acceptance.of([[]], 2).conditional))
    assert Acceptance.of([[0, 0]], 2).unconditional == (0, 0)
    assert math.isnan(Acceptance.of([[0, 0]], 2).conditional[1])
    assert Acceptance.of([[0]], 0) == Acceptance(1, 0, (), ())  # plain decoding
    assert Acceptance.of([[0]], 0).tau == pytest.approx(1)

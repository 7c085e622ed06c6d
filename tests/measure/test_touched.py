"""Experts on the busiest device: design figures, simulation, brute force."""

from itertools import combinations, product

import numpy as np
import pytest

from eaglejax.measure.touched import busiest_touched, mean_touched


@pytest.mark.parametrize(("rows", "busiest", "mean"), [(1, 2.6, 1.0), (4, 6.7, 3.9), (16, 18.3, 13.7)])
def test_kimi_on_eight_devices(rows, busiest, mean):
    """The figures of docs/design.md, section 6 (18 there, rounded)."""
    assert busiest_touched(384, 8, rows, 8) == pytest.approx(busiest, abs=0.05)
    assert mean_touched(384, 8, rows) / 8 == pytest.approx(mean, abs=0.05)


@pytest.mark.parametrize(
    ("experts", "topk", "rows", "devices"), [(6, 2, 1, 3), (6, 2, 2, 3), (4, 2, 3, 2), (5, 2, 2, 5)]
)
def test_against_every_possible_routing(experts, topk, rows, devices):
    sets = list(combinations(range(experts), topk))
    shares = [
        max(len([e for e in set().union(*chosen) if e // (experts // devices) == d]) for d in range(devices))
        for chosen in product(sets, repeat=rows)
    ]
    assert busiest_touched(experts, topk, rows, devices) == pytest.approx(np.mean(shares), rel=1e-9)


@pytest.mark.parametrize(
    ("experts", "topk", "rows", "devices"), [(128, 8, 4, 8), (384, 8, 6, 8), (256, 8, 16, 4), (8, 2, 3, 8)]
)
def test_against_a_simulation(experts, topk, rows, devices):
    random = np.random.default_rng(1)
    trials = 4000
    touched = np.zeros((trials, experts), bool)
    for _ in range(rows):
        chosen = np.argsort(random.random((trials, experts)), axis=1)[:, :topk]
        touched[np.arange(trials)[:, None], chosen] = True
    simulated = touched.reshape(trials, devices, -1).sum(2).max(1)
    error = 4 * simulated.std() / trials**0.5 + 1e-9
    assert abs(busiest_touched(experts, topk, rows, devices) - simulated.mean()) < error


def test_groups_crowd_the_devices():
    """DeepSeek-V3 routes to 4 of 8 groups, which are 4 of 8 devices: one row then loads the busiest more."""
    free, grouped = busiest_touched(256, 8, 1, 8), busiest_touched(256, 8, 1, 8, 8, 4)
    # by hand, of one row: 8 experts over 4 blocks of 32 in place of 8
    assert grouped == pytest.approx(busiest_touched(128, 8, 1, 4), abs=0.05)
    assert grouped > free + 0.5


def test_edges():
    assert busiest_touched(8, 8, 3, 4) == 2
    assert busiest_touched(16, 2, 10_000, 4) == pytest.approx(4)
    assert busiest_touched(16, 2, 1, 1) == 2
    assert busiest_touched(16, 2, 1, 16) == 1

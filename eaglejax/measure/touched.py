"""How many experts a step touches on the busiest device, when routing is random.

Expert-parallel devices wait for one another, so a step costs what its busiest device reads, not the mean. Each of `rows` rows chooses
`topk` different experts of `experts`, every choice equally likely; an expert that several rows chose is read once.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

SEED = 20250
DRAWS = 20_000_000  # random numbers of one simulation at most
MOST_TRIALS = 20_000


def mean_touched(experts: int, topk: int, rows: int) -> float:
    """Expected number of different experts that `rows` rows touch on all devices together."""
    return experts * (1 - (1 - topk / experts) ** rows)


@lru_cache(maxsize=256)
def busiest_touched(experts: int, topk: int, rows: int, devices: int, groups: int = 1, topk_groups: int = 1) -> float:
    """Expected number of different experts that are touched on the device that holds most of them.

    Device i holds the i-th block of experts / devices experts. With one group the figure is exact; where groups of experts are chosen
    first (DeepSeek-V3) it is the mean of a seeded simulation in which `topk_groups` groups, then experts within them, are equally likely.
    """
    assert experts % devices == 0, (experts, devices)
    if devices == 1 and groups == 1:
        return mean_touched(experts, topk, rows)
    if groups > 1:
        return _simulated(experts, topk, rows, devices, groups, topk_groups)
    sizes = _union_sizes(experts, topk, rows)
    likely = [size for size in range(experts + 1) if sizes[size] > 1e-12]
    return float(sum(sizes[size] * _expected_most(experts, devices, size) for size in likely))


def _union_sizes(experts: int, topk: int, rows: int) -> np.ndarray:
    """Probability of each number of different experts after `rows` rows: a row adds those of its `topk` that are new."""
    chance = np.zeros(experts + 1)
    chance[0] = 1.0
    for _ in range(rows):
        after = np.zeros_like(chance)
        for size in np.nonzero(chance > 1e-15)[0].tolist():
            new = np.arange(max(0, topk - size), min(topk, experts - size) + 1)
            after[size + new] += chance[size] * np.exp(
                _log_choose(experts - size, new) + _log_choose(size, topk - new) - _log_choose(experts, topk)
            )
        chance = after / after.sum()
    return chance


@lru_cache(maxsize=4096)
def _expected_most(experts: int, devices: int, size: int) -> float:
    """Expected largest share when a random set of `size` experts falls on `devices` blocks of equal width.

    By symmetry the union of the rows' choices, given its size, is a random set of that size. P(largest <= m) counts such sets by the
    product of the devices' truncated generating functions, here in probabilities of independent draws with the same mean.
    """
    width = experts // devices
    share = size / experts
    if share in (0.0, 1.0):
        return float(width * share)
    counts = np.arange(width + 1)
    log_one = _log_choose(width, counts) + counts * np.log(share) + (width - counts) * np.log1p(-share)
    one = np.exp(log_one)
    whole = np.exp(_log_choose(experts, size) + size * np.log(share) + (experts - size) * np.log1p(-share))
    least = -(-size // devices)  # the largest share is never below the mean
    expected = float(least)
    for most in range(least, min(size, width)):
        at_most = _power(one[: most + 1], devices, size)[size] / whole
        expected += 1 - min(float(at_most), 1.0)
    return expected


def _power(terms: np.ndarray, exponent: int, degree: int) -> np.ndarray:
    """A polynomial to a power, up to `degree`."""
    product, square = np.ones(1), terms
    while exponent:
        if exponent & 1:
            product = np.convolve(product, square)[: degree + 1]
        square = np.convolve(square, square)[: degree + 1]
        exponent >>= 1
    return np.pad(product, (0, max(0, degree + 1 - len(product))))


def _log_choose(n: int, k: int | np.ndarray) -> np.ndarray | np.float64:
    table = _log_factorials(n)
    return table[n] - table[k] - table[n - k]


@lru_cache(maxsize=64)
def _log_factorials(most: int) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, most + 1, dtype=np.float64)))])


def _simulated(experts: int, topk: int, rows: int, devices: int, groups: int, topk_groups: int) -> float:
    """The mean over seeded random routings."""
    trials = int(np.clip(DRAWS // (rows * experts), 200, MOST_TRIALS))
    random = np.random.default_rng(SEED)
    touched = np.zeros((trials, experts), bool)
    each = np.arange(trials)[:, None]
    for _ in range(rows):
        scores = random.random((trials, experts), dtype=np.float32)
        if groups > 1:
            chosen = np.argsort(random.random((trials, groups), dtype=np.float32), axis=1)[:, :topk_groups]
            open_groups = np.zeros((trials, groups), bool)
            open_groups[each, chosen] = True
            scores[~np.repeat(open_groups, experts // groups, axis=1)] = -1
        touched[each, np.argpartition(-scores, topk - 1, axis=1)[:, :topk]] = True
    return float(touched.reshape(trials, devices, -1).sum(axis=2).max(axis=1).mean())

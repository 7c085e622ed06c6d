"""Answers that are mostly one repeated n-gram are told from those that are not."""

from __future__ import annotations

import numpy as np
import pytest

from eaglejax.measure.repetition import mostly_repeated, repeated_share

TEXT = [int(i) for i in np.random.default_rng(0).integers(0, 10**6, 200)]  # no n-gram twice


@pytest.mark.parametrize("size", [1, 2, 5, 20])
def test_share_of_the_longest_loop(size):
    loop = (TEXT[:size] * 100)[:60]
    assert repeated_share(loop) == 1
    assert repeated_share(TEXT[20:80] + loop) == 0.5
    assert repeated_share(TEXT[20:60] + loop) == 0.6
    assert mostly_repeated(TEXT[20:60] + loop) and not mostly_repeated(TEXT[20:80] + loop)


def test_what_is_no_loop():
    assert repeated_share(TEXT) == 0 and repeated_share([]) == 0 and repeated_share([1]) == 0
    assert repeated_share(TEXT[:40] * 2) == 0  # twice is no loop
    assert repeated_share(TEXT[:30] * 3) == 1
    assert not mostly_repeated([7] * 8)  # too short to say
    assert mostly_repeated([7] * 16)

"""The sentences around a profile's table, on made-up figures."""

import pytest

from eaglejax.measure.profile_report import _beside_floor, _distortion, _in_short
from eaglejax.measure.profile_result import PhaseTime, Profile
from eaglejax.measure.timing import Spread


def made_up(**fields) -> Profile:
    """A profile of which only these fields are there."""
    profile = object.__new__(Profile)
    for name, value in fields.items():
        object.__setattr__(profile, name, value)
    return profile


@pytest.mark.parametrize(
    "untraced, traced, told",
    [
        ((10.0, 11.0), (5.0, 5.5), "distortion 2.00;"),
        ((5.0, 5.1), (7.0, 7.2), "distortion 0.71;"),  # the traced runs were the faster ones, all of them
        ((10.0, 12.0), (9.0, 11.0), "distortion 1.10 (within the noise: the ranges overlap);"),
        ((10.0,), (5.0,), "distortion 2.00 (one run of each: how much of it is noise cannot be told);"),
    ],
)
def test_noise_is_claimed_where_ranges_overlap(untraced, traced, told):
    profile = made_up(untraced=Spread.of(untraced), traced=Spread.of(traced), same_tokens=True)
    assert _distortion(profile).startswith(told)


class Floor:
    def __init__(self, total: float):
        self.total = total


def phase(name: str, seconds: float, floor: float | None = None) -> PhaseTime:
    one = object.__new__(PhaseTime)
    values = {"name": name, "busy": seconds, "waiting": 0.0, "floor": None if floor is None else Floor(floor)}
    for field, value in values.items():
        object.__setattr__(one, field, value)
    return one


def test_in_short():
    phases = (
        phase("draft extend", 0.6e-3, 0.3e-3),
        phase("draft step 1", 0.4e-3, 0.1e-6),
        phase("verify: attention", 3e-3, 1e-3),
        phase("verify: MLP", 5e-3, 4e-3),
        phase("verify: norms", 0.8e-3, 1e-9),
        phase("commit", 0.2e-3),
    )
    text = _in_short(made_up(phases=phases, cycle_seconds=10e-3, tau=2.5))
    assert text.startswith(
        "in short: verify 88 % (MLP 50 %, 1.2 x its floor; attention 30 %, 3.0 x its floor), draft 10 %"
    )
    assert "commit" not in text and "2.50 tokens" in text
    assert _beside_floor(phases[1]) is None  # a floor of less than a microsecond

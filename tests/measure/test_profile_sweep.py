"""The sweep of a profile: every instant of the wall time has one owner, whatever overlaps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaglejax.measure.profile_events import Op, Span
from eaglejax.measure.profile_sweep import HOST_DISPATCH, HOST_RETURN, UNNAMED, sweep


def op(begin, end, phase):
    return Op(0, "x", float(begin), float(end), phase)


def test_running_waiting_and_host():
    times = sweep([op(10, 20, "a"), op(24, 30, "b"), op(30, 40, "a")], Span("w", 0.0, 50.0))
    assert times.busy == {HOST_DISPATCH: 10, "a": 20, "b": 6, HOST_RETURN: 10}
    assert times.waiting == {"b": 4}  # nothing ran, and b came next
    assert times.ops == {"a": 2, "b": 1}


def test_operations_at_the_same_time_share_it():
    times = sweep([op(0, 10, "a"), op(4, 10, "b"), op(6, 8, "a")], Span("w", 0.0, 10.0))
    # 0-4 a alone; 4-6 halves; 6-8 thirds, two of them a's; 8-10 halves
    assert times.busy["a"] == pytest.approx(4 + 1 + 4 / 3 + 1)
    assert times.busy["b"] == pytest.approx(1 + 2 / 3 + 1)
    assert times.busy[HOST_DISPATCH] == times.busy[HOST_RETURN] == 0


def test_what_reaches_over_the_window_is_cut_and_what_has_no_phase_is_told():
    times = sweep([op(-5, 5, None), op(8, 20, "a"), op(30, 40, "a")], Span("w", 0.0, 10.0))
    assert times.busy == {HOST_DISPATCH: 0, UNNAMED: 5, "a": 2, HOST_RETURN: 0}
    assert times.waiting == {"a": 3}


def test_no_operation_at_all_is_the_hosts():
    assert sweep([], Span("w", 3.0, 10.0)).busy == {HOST_DISPATCH: 7}


@given(
    st.lists(
        st.tuples(st.integers(-20, 120), st.integers(0, 60), st.sampled_from(["a", "b", None])), min_size=1, max_size=30
    )
)
def test_everything_adds_up_to_the_window(spans):
    times = sweep([op(begin, begin + length, phase) for begin, length, phase in spans], Span("w", 0.0, 100.0))
    assert times.total == pytest.approx(100)
    assert all(value >= 0 for part in (times.busy, times.waiting) for value in part.values())


def test_scaled_and_added():
    times = sweep([op(0, 10, "a")], Span("w", 0.0, 10.0))
    times.add(sweep([op(0, 10, "b")], Span("w", 0.0, 10.0)))
    half = times.scaled(0.5)
    assert half.busy["a"] == half.busy["b"] == 5 and half.ops == {"a": 0.5, "b": 0.5} and half.total == 10

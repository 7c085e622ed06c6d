"""Trial 42: the host does nothing per cycle; per round of a stream it makes one call, whatever the models hold."""

import sys
from collections import Counter
from pathlib import Path

import flax
import jax
import pairs
import pytest
from flax import nnx

from eaglejax import Sampling

FLAX = str(Path(flax.__file__).parent)
WARM = Sampling(max_new_tokens=60, ignore_eos=True)


class Calls:
    """Python functions of flax entered while it is on, by name."""

    def __init__(self):
        self.flax = Counter()

    def _enter(self, frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(FLAX):
            self.flax[frame.f_code.co_qualname] += 1

    def __enter__(self):
        sys.setprofile(self._enter)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)


@pytest.fixture(scope="module")
def counted(ring):
    """The ring with its programs wrapped: how often each was called."""
    programs, counts = ring._programs_for(pairs.FIVE), Counter()
    kept = {name: getattr(programs, name) for name in ("_prefill", "_decode", "_fresh")}
    for name, function in kept.items():

        def call(*arguments, name=name, function=function):
            counts[name] += 1
            return function(*arguments)

        setattr(programs, name, call)
    yield ring, counts
    for name, function in kept.items():
        setattr(programs, name, function)


def run(ring, tokens: int):
    return ring.generate([[5, 9, 20]], Sampling(max_new_tokens=tokens, ignore_eos=True), speculation=pairs.FIVE)[0]


def test_trial_42_one_call_for_all_cycles(counted):
    ring, counts = counted
    run(ring, 60)
    seen = []
    for tokens in (6, 60):
        counts.clear()
        with Calls() as calls:
            answer = run(ring, tokens)
        assert counts == {"_prefill": 1, "_decode": 1}
        seen.append((answer.stats.cycles, sum(calls.flax.values())))
    (few, small), (many, large) = seen
    assert many >= few + 8
    assert small == large == 0, "a module was flattened"


def test_trial_42_the_watch_sees_a_module_flattened(ring):
    """The trials here can fail."""
    with Calls() as calls:
        jax.tree.leaves(nnx.state(ring._pair.target))
    assert sum(calls.flax.values()) > 10


def test_trial_42_a_round_of_a_stream_is_one_call(counted):
    ring, counts = counted
    list(ring.stream([5, 9, 20], WARM, speculation=pairs.FIVE, cycles=1))
    counts.clear()
    seen = []
    with Calls() as calls:
        for _ in ring.stream([5, 9, 20], WARM, speculation=pairs.FIVE, cycles=1):
            seen.append((counts["_decode"], sum(calls.flax.values())))
    rounds = [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in zip(seen, seen[1:], strict=False)]
    assert len(rounds) >= 8
    assert {called for called, _ in rounds} == {1}
    # no state of a module is flattened: a model of a thousand weights costs the host what one of ten does
    assert {flattened for _, flattened in rounds} == {0}, calls.flax

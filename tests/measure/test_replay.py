"""Replaying smaller trees on a recorded text, by hand and against real decoding."""

import sys
from pathlib import Path

import numpy as np
import pytest

from eaglejax import Sampling, Speculation
from eaglejax.measure.look_ahead import LookAhead, whole_pool
from eaglejax.measure.replay import GrownTree, Text, first_guesses, path_ranks, replay, settings
from eaglejax.wave import Job

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
import pairs  # noqa: E402


def tree(*nodes):
    """Nodes as (token, parent, depth, score); the root first."""
    columns = [np.asarray(column) for column in zip((0, -1, 0, 0.0), *nodes, strict=True)]
    return GrownTree(columns[0], columns[1], columns[2], columns[3].astype(np.float32))


# level 1: 5 and 6; below 5: 7 and 8, below 6: 9 and 7
BROAD = tree((5, 0, 1, -0.1), (6, 0, 1, -1.0), (7, 1, 2, -0.3), (8, 1, 2, -2.0), (9, 2, 2, -1.1), (7, 2, 2, -3.0))


def test_the_path_and_its_ranks():
    # scores from the best: 5, 7, 6, 9, 8, 7
    assert path_ranks(BROAD, [5, 7], 2, 2) == [0, 1]
    assert path_ranks(BROAD, [6, 9], 2, 2) == [2, 3]
    assert path_ranks(BROAD, [6, 7], 2, 2) == [2, 5]
    assert path_ranks(BROAD, [6, 8], 2, 2) == [2]
    assert path_ranks(BROAD, [4, 7], 2, 2) == []
    # one child of each: the other branch is never grown
    assert path_ranks(BROAD, [6, 9], 2, 1) == [] and path_ranks(BROAD, [5, 7], 2, 1) == [0, 1]
    # one level: fewer candidates to be behind
    assert path_ranks(BROAD, [6, 9], 1, 2) == [1]


def test_cycles_jump_over_what_they_accept():
    text = Text([3, 5, 7, 1, 6, 9, 2, 0, 0, 0], [BROAD] * 9)
    told = replay([text], 2, 2, [3, 4, 5])
    # roots 3 (5 7), 1 (6 9), 2 and what follows (nothing)
    assert told[5].counts == (2, 2, 0)  # N = 5 holds 5, 7, 6, 9
    assert told[4].counts == (2, 1, 0, 0)  # without 9: the next root is 9
    assert told[3].counts == (2, 0, 0, 0, 0)[: len(told[3].counts)]
    assert told[5].tau == pytest.approx(1 + 4 / 3) and told[5].reach == pytest.approx((2 / 3, 2 / 3))
    assert first_guesses([text]) == pytest.approx(1 / 9)


def test_the_settings_can_all_be_grown():
    made = settings(7, 5, 4, 64)
    assert len(made) == len(set(made)) > 30
    assert {spec.topk for spec in made} == {1, 2, 4} and max(spec.nodes for spec in made) == 64


@pytest.mark.slow
def test_replayed_cycles_are_the_real_ones(tmp_path):
    """A chain, and a tree of the topk that was grown, sampled: every cycle accepts what the replay says."""
    engine = pairs.load(*pairs.write_random(tmp_path, "qwen3_moe"), tuning="none")
    asked, sampling = pairs.prompts([4, 11]), Sampling(max_new_tokens=48, temperature=0.9, seed=7)
    jobs = [Job(prompt, sampling, 7, ()) for prompt in asked]
    specs, steps = [pairs.CHAIN, whole_pool(3, 4)], []
    chains, broad = LookAhead(engine._programs_for(pairs.CHAIN), specs).run(jobs, steps.append)
    assert sum(steps) >= 47
    for spec, texts in ((pairs.CHAIN, chains), (Speculation(3, 4, 8), broad)):
        answers = engine.generate(asked, sampling, speculation=spec)
        assert [text.tokens for text in texts] == pairs.ids(answers)
        told = [replay([text], spec.num_steps, spec.topk, [spec.nodes])[spec.nodes] for text in texts]
        for answer, replayed in zip(answers, told, strict=True):
            real = answer.stats.accepted_per_cycle
            assert len(real) - 4 <= len(replayed.counts) <= len(real)
            assert list(replayed.counts) == real[: len(replayed.counts)], spec
        assert sum(sum(one.counts) for one in told) > 10

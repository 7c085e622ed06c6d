"""Trial 08: where capture layer ids stand, what they count, and targets too small for the default."""

import kit_m
import numpy as np
import pairs
import pytest

from eaglejax import Sampling, loading
from eaglejax.errors import ConfigError

P = kit_m.sharp(kit_m.ring())
RIGHT = (2, 4, 5)
IDS = "eagle_aux_hidden_state_layer_ids"
FREE = Sampling(max_new_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(kit_m.write_target(tmp_path_factory.mktemp("eight") / "target", P, layers=8))


@pytest.fixture(scope="module")
def right(target, tmp_path_factory):
    """Ids at the top level: boundaries as they stand."""
    folder = tmp_path_factory.mktemp("top")
    return pairs.load(target, draft(folder, {IDS: list(RIGHT)}), speculation=pairs.CHAIN)


def draft(folder, config) -> str:
    return str(kit_m.write_draft(folder / "draft", P, RIGHT, **config))


def accepted(engine) -> set[int]:
    return {a for counts in pairs.counts(engine.generate([[5], [20], [40], [50]], FREE)) for a in counts}


READINGS = {
    "nested, outputs": {"eagle_config": {IDS: [1, 3, 4]}},
    "absent": {},
    "both the same": {IDS: [2, 4, 5], "eagle_config": {IDS: [2, 4, 5]}},
}


@pytest.mark.parametrize("name", READINGS)
def test_trial_08_every_way_of_writing_the_same_layers(right, target, tmp_path, name):
    """Ids nested, absent (2, L//2, L-3) or given twice alike: the same boundaries, printed, and all accepted."""
    engine = pairs.load(target, draft(tmp_path, READINGS[name]))
    assert engine._pair.capture.boundaries == RIGHT and "[2, 4, 5]" in str(engine.load_report)
    assert accepted(pairs.share_programs(engine, right)) == {3}


def test_trial_08_wrong_layers_accept_nothing(target, tmp_path):
    """The same draft one block early: this pair would show it."""
    engine = pairs.load(target, draft(tmp_path, {IDS: list(RIGHT)}), capture=(1, 3, 4))
    answers = engine.generate([[5], [20], [40], [50]], FREE)
    assert np.mean([a for counts in pairs.counts(answers) for a in counts]) < 0.2
    assert pairs.ids(answers)[0] == pairs.walk(kit_m.ring(), 5, 30)  # and the text is right all the same


def test_trial_08_an_ambiguous_list_is_measured(right, target, tmp_path):
    """Nested ids that fit both ways: the reading under which the draft is right is taken, and both figures are told."""
    engine = pairs.load(target, draft(tmp_path, {"eagle_config": {IDS: [2, 4, 5]}}))
    report = str(engine.load_report)
    assert "AMBIGUOUS" in report and "Took input" in report and engine._pair.capture.boundaries == RIGHT
    assert accepted(pairs.share_programs(engine, right)) == {3}


REFUSED = {
    "both but different": ({IDS: [2, 4, 5], "eagle_config": {IDS: [2, 4, 6]}}, 8),
    "id 99": ({IDS: [2, 4, 99]}, 8),
    "negative": ({IDS: [-1, 4, 5]}, 8),
    **{f"no ids, {n} blocks": ({}, n) for n in (2, 3, 4, 6)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_trial_08_impossible_layers(tmp_path, monkeypatch, name):
    """Contradictions, ids outside the target, and defaults that would repeat or run backwards are refused at once."""
    config, blocks = REFUSED[name]
    folder = str(kit_m.write_target(tmp_path / "target", P, layers=blocks))
    monkeypatch.setattr(loading, "build_target", lambda *_: pytest.fail("the target's weights were read"))
    with pytest.raises(ConfigError, match=IDS):
        pairs.load(folder, draft(tmp_path, config))

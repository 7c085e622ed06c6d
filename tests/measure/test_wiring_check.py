"""Wrong wiring planted in pairs whose draft is always right when it is wired as made: each fault is named, and its fix restores tau."""

from dataclasses import replace

import kit_m
import numpy as np
import pairs
import pytest
import wired_pairs

from eaglejax import Sampling
from eaglejax.measure.check import _wiring_items
from eaglejax.measure.teacher_forced import Foretold
from eaglejax.measure.wiring_check import Figure, check_wiring, gain
from eaglejax.measure.wirings import Wirings

# ids that also pass for offsets: ascending, and i + ids[i] within the vocabulary
KNOWN = [*range(3, 13), *range(15, 27)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("wired")


@pytest.fixture(scope="module")
def target(folder):
    return wired_pairs.write_target(folder)


@pytest.fixture(scope="module")
def plain(folder):
    return wired_pairs.write_draft(folder / "plain")


@pytest.fixture(scope="module")
def turned(folder):
    return wired_pairs.write_draft(folder / "turned", wired_pairs.turned(), rope_theta=wired_pairs.THETA)


@pytest.fixture(scope="module")
def cut(folder):
    """A draft of 22 ids whose d2t holds ids, and nothing in the file says so."""
    tensors = {"d2t": np.asarray(KNOWN, np.int64)}
    made = kit_m.draft_tensors(wired_pairs.P, wired_pairs.RIGHT, ids=KNOWN) | tensors
    made = {name: value for name, value in made.items() if name != "t2d"}
    return str(kit_m.write_folder(folder / "cut", kit_m.draft_config(len(KNOWN), **wired_pairs.IDS), made))


def checked(target, draft, **settings):
    engine = pairs.load(target, draft, **settings)
    # a draft that looks back has to find the ring there
    texts = wired_pairs.ring_texts() if "turned" in draft else wired_pairs.random_texts()
    return check_wiring(engine._pair, texts, "made text", steps=2)


# fault: (the draft, how it is loaded, the fix in words of Python, tokens per cycle when it is mended)
FAULTS = {
    "captures one later": ("plain", {"capture": (3, 5, 6)}, {"capture": (2, 4, 5)}, 3.0),
    "captures one earlier": ("plain", {"capture": (1, 3, 4)}, {"capture": (2, 4, 5)}, 3.0),
    "the embedding captured": ("plain", {"capture": (0, 4, 5)}, {"capture": (2, 4, 5)}, 3.0),
    "norm_output": ("plain", {"draft_config": {"norm_output": True}}, {"draft_config": {"norm_output": False}}, 3.0),
    "norm_before_residual": (
        "plain",
        {"draft_config": {"norm_before_residual": True}},
        {"draft_config": {"norm_before_residual": False}},
        3.0,
    ),
    "rope_theta": (
        "turned",
        {"draft_config": {"rope_theta": 10000.0}},
        {"draft_config": {"rope_theta": wired_pairs.THETA}},
        2.4,
    ),
    "pairs of channels": (
        "turned",
        {"draft_config": {"rope_pairing": "interleaved"}},
        {"draft_config": {"rope_pairing": "halves"}},
        2.4,
    ),
    "d2t as an index": ("cut", {}, {"draft_config": {"d2t": "ids"}}, 1.3),
    "captures and a norm": (
        "plain",
        {"capture": (3, 5, 6), "draft_config": {"norm_before_residual": True}},
        {"capture": (2, 4, 5), "draft_config": {"norm_before_residual": False}},
        3.0,
    ),
}


QUICK = ("captures one later", "norm_before_residual", "rope_theta", "d2t as an index")


@pytest.mark.parametrize("fault", [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in FAULTS])
def test_a_planted_fault_is_named_and_mended(request, target, fault):
    name, settings, fix, mended = FAULTS[fault]
    draft = request.getfixturevalue(name)
    found = checked(target, draft, **settings)
    assert found.wrong and found.gained is not None and found.gained.sure
    assert found.best.tokens_per_cycle >= mended > found.loaded.tokens_per_cycle + 0.2
    for key, value in fix.items():
        assert f"{key}={value}" in found.best.wiring.keyword and f"{key}={value}" in found.verdict()
        assert f"--{key}=" in found.best.wiring.flags
    # what it says, done: nothing is better any more
    again = checked(target, draft, **fix)
    assert not again.wrong and again.loaded.tokens_per_cycle == found.best.tokens_per_cycle, again.verdict()
    assert "as the draft was trained" in again.verdict()


@pytest.mark.slow
def test_the_fix_restores_tau(target, plain):
    """Served, not only teacher-forced: accepted tokens per cycle under the fault and under what the check prints."""
    right = pairs.load(target, plain)
    asked = Sampling(max_new_tokens=30, ignore_eos=True)
    tau = lambda engine: engine.generate([[5], [20], [40], [50]], asked)[0].stats.tau
    wrong = pairs.load(target, plain, capture=(3, 5, 6))
    found = check_wiring(wrong._pair, wired_pairs.random_texts(), "made text", steps=2)
    mended = pairs.share_programs(pairs.load(target, plain, capture=found.best.wiring.boundaries), right)
    assert tau(wrong) < 1.2 and tau(mended) == tau(right) == 4.0


@pytest.mark.parametrize("name", ["plain", "turned"])
def test_no_false_alarm_on_the_right_pair(request, target, name):
    found = checked(target, request.getfixturevalue(name))
    assert not found.wrong and not found.blind and found.best is found.loaded
    assert found.loaded.tokens_per_cycle == max(figure.tokens_per_cycle for figure in found.figures) > 2.4


def test_few_places_are_no_proof_that_a_wiring_is_right(target, plain):
    """A warning in the doctor, and no verdict; told again once there are places enough."""
    pair = pairs.load(target, plain)._pair
    texts = wired_pairs.random_texts()
    few = check_wiring(pair, [replace(texts[0], token_ids=texts[0].token_ids[:21])], "made text", steps=2)
    assert few.too_few and not few.wrong and not few.blind and 0 < few.places < 48
    assert f"{few.places} places are too few: {few.rivals} of {few.rivals} cannot be told from it" in few.verdict()
    assert "--tokens=512" in few.verdict() and _wiring_items(few)[0].status == "warning"
    none = check_wiring(pair, [replace(texts[0], token_ids=texts[0].token_ids[:1])], "made text", steps=2)
    assert none.places == 0 and "no places" in none.verdict() and "--tokens=512" in none.verdict()
    assert [item.status for item in _wiring_items(none)] == ["warning"]
    whole = check_wiring(pair, texts, "made text", steps=2)
    assert not whole.too_few and _wiring_items(whole)[0].status == "ok"


def test_a_draft_that_foretells_nothing_is_said_to_tell_nothing(target, folder):
    """A draft of noise has no wiring that is better beyond chance."""
    rng = np.random.default_rng(3)
    tensors = kit_m.draft_tensors(wired_pairs.P, wired_pairs.RIGHT)
    noise = {name: rng.normal(0, 0.1, value.shape).astype(np.float32) for name, value in tensors.items()}
    draft = wired_pairs.write_draft(folder / "noise", noise)
    found = checked(target, draft)
    assert not found.wrong, found.verdict()


def figure(scores, hits=None) -> Figure:
    scores = np.asarray(scores, float)[None]
    made = object.__new__(Figure)  # the wiring plays no part
    object.__setattr__(made, "foretold", Foretold(scores > -1 if hits is None else hits, scores))
    return made


def test_chance_is_no_finding():
    """The better of two wirings that differ by noise alone is almost never called so; a small true difference is, with enough places."""
    rng = np.random.default_rng(0)
    draw = lambda mean, places: rng.normal(mean, 1.0, places)
    false = sum(gain(figure(draw(0, 400)), figure(draw(0, 400)), 10).sure for _ in range(500))
    assert false == 0
    assert gain(figure(draw(0.5, 1000)), figure(draw(0, 1000)), 10).sure
    assert not gain(figure(draw(0.5, 40)), figure(draw(0, 40)), 10).sure  # five blocks: too few to know


def test_a_sure_difference_that_costs_nothing_is_no_finding():
    """Better log-probabilities with the same first choices lose no token: nobody has to act."""
    rng = np.random.default_rng(0)
    base = rng.normal(-3, 0.1, 400)
    hits = np.ones((1, 400), bool)
    found = gain(figure(base + 0.5, hits), figure(base, hits), 10)
    assert found.sigmas > found.needed and found.tokens == 0 and not found.sure


def test_every_wiring_is_one_the_loader_takes(target, plain):
    """The override of each listed wiring, given to the engine, loads exactly that network; impossible ones are not listed."""
    engine = pairs.load(target, plain)
    listed = Wirings(engine._pair).singles()
    names = [wiring.name for wiring in listed]
    assert len(set(names)) == len(names) >= 8
    assert not any("fc_norm" in name or "norm_before_fc" in name or "d2t" in name for name in names)
    for wiring in listed:
        changed = wiring.changes[0]
        capture = changed.capture or "auto"
        again = pairs.load(target, plain, capture=capture, draft_config=dict(changed.keys) or None)
        assert again._pair.draft.config == wiring.plan.config
        assert again._pair.capture.boundaries == wiring.boundaries

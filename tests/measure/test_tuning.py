"""Stored tunings: kept, found again, refused for another machine or pair; `tune` from end to end on a small pair."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from eaglejax import Auto, Sampling, Speculation
from eaglejax.adaptive import UNTUNED
from eaglejax.errors import ConfigError
from eaglejax.measure.cost_curve import ROWS, CostCurve, _behind, _prefilled
from eaglejax.measure.cycle_costs import Costs
from eaglejax.measure.replay import Replayed, Text, settings
from eaglejax.measure.tune import Found, choose_trees, tune
from eaglejax.measure.tune_report import tune_report
from eaglejax.measure.tuning import Acceptance, Row, Tuning, holds_for, read_tuning, stored_path
from eaglejax.models.config import DenseConfig, GQAConfig, LayerConfig, MoEConfig, RopeConfig, TargetConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
import pairs  # noqa: E402

TREES = (Speculation(2, 1), Speculation(2, 2, 4))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return pairs.write_random(tmp_path_factory.mktemp("tuning"), "qwen3_moe")


@pytest.fixture(scope="module")
def engine(folders):
    return pairs.load(*folders, slots=2, tuning="none")


@pytest.fixture(scope="module")
def made(engine):
    reach = ((0.5, 0.2), (0.7, 0.4))
    row = Row(2, 1, 3, 1.7, 2.0, 850.0, 800.0)
    plain = Row(0, 1, 1, 1.0, 1.0, 1000.0)
    return Tuning(
        holds_for(engine._pair, 2),
        TREES,
        32,
        Costs((1.5, 1.9), 0.3, 0.1, 1.0, 2.0),
        {"greedy": Acceptance(reach, 0.5), "sampled": Acceptance(reach, 0.4)},
        {"greedy": (row, plain), "sampled": (row,)},
    )


def test_a_tuning_comes_back_as_it_was(made, tmp_path):
    made.save(tmp_path / "deep" / "file.json")
    assert read_tuning(tmp_path / "deep" / "file.json") == made
    text = tune_report(made, tmp_path)
    assert "2, 1, 3" in text and "800.0" in text and "(2, 2, 4): 1.90" in text and str(tmp_path) in text


@pytest.mark.parametrize(
    "spoil",
    [
        lambda stored: stored.pop("trees"),
        lambda stored: stored.update(version=0),
        lambda stored: stored["costs"].update(trees=[1.0]),
        lambda stored: stored["costs"].update(trees=[0.0, 1.0]),
        lambda stored: stored["acceptance"].update(greedy=None),
        lambda stored: stored["holds_for"].update(moon=1),
        lambda stored: stored.update(trees=[[0, 1, 1], [2, 2, 4]]),
        lambda stored: stored.update(trees=[["2", 1, 3], [2, 2, 4]]),
        lambda stored: stored.update(window=True),
        # every class, not the greedy one alone
        lambda stored: stored["acceptance"].update(sampled={"reach": [[0.5, 0.2]], "first_guess": 0.5}),
        lambda stored: stored["acceptance"]["sampled"].update(reach=[[0.5, 0.2], [0.5]]),
        lambda stored: stored["acceptance"]["sampled"].update(reach=[[0.5, 0.2], [0.5, "0.2"]]),
        lambda stored: stored["acceptance"]["sampled"].update(first_guess=None),
        lambda stored: stored["acceptance"].update(lukewarm=stored["acceptance"]["greedy"]),
        # numbers that are none, or that no measurement gives
        lambda stored: stored["acceptance"]["greedy"].update(reach=[[0.5, math.nan], [0.7, 0.4]]),
        lambda stored: stored["acceptance"]["greedy"].update(reach=[[0.5, 0.2], [1.7, 0.4]]),
        lambda stored: stored["acceptance"]["greedy"].update(reach=[[0.5, 0.2], [True, 0.4]]),
        lambda stored: stored["acceptance"]["greedy"].update(first_guess=math.nan),
        lambda stored: stored["acceptance"]["greedy"].update(first_guess=-0.1),
        lambda stored: stored["costs"].update(trees=[math.inf, 1.0]),
        lambda stored: stored["costs"].update(trees=["1.0", 1.0]),
        lambda stored: stored["costs"].update(trees=[10**400, 1.0]),
        lambda stored: stored["costs"].update(catch_up=math.nan),
        lambda stored: stored["costs"].update(catch_up=-1),
        lambda stored: stored["costs"].update(plain_ms="1 ms"),
        lambda stored: stored["costs"].update(seconds=None),
        lambda stored: stored["rows"]["greedy"][0].update(tau=math.nan),
        lambda stored: stored["rows"]["greedy"][0].update(measured="fast"),
        lambda stored: stored["rows"]["greedy"][0].update(predicted=None),
        lambda stored: stored["rows"]["greedy"][0].update(topk=True),
        lambda stored: stored["rows"].update(greedy=[]),
        lambda stored: stored["rows"].pop("sampled"),
        lambda stored: stored["holds_for"].update(slots=2.5),
        lambda stored: stored["holds_for"].update(device=7),
        lambda stored: stored.update(acceptance=[]),
    ],
)
def test_broken_files_are_refused_with_their_name(made, tmp_path, spoil):
    stored = made.to_json()
    spoil(stored)
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=r"broken\.json"):
        read_tuning(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="not a tuning"):
        read_tuning(path)
    path.write_text("[" * 200_000)
    with pytest.raises(ConfigError, match="not a tuning"):
        read_tuning(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tuning(tmp_path / "none.json")


def test_a_damaged_tuning_is_left_out_of_the_cache_and_refused_by_name(folders, made, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLEJAX_CACHE", str(tmp_path))
    stored = made.to_json()
    stored["acceptance"]["sampled"]["first_guess"] = math.nan
    path = stored_path(made.holds_for)
    path.parent.mkdir()
    for text in (json.dumps(stored), "[" * 200_000):
        path.write_text(text)
        found = pairs.load(*folders, slots=2, speculation="auto")
        assert found.speculation == UNTUNED and "the stored tuning is left out" in str(found.load_report)
        with pytest.raises(ConfigError, match=f"{path.name}: not a tuning"):
            pairs.load(*folders, slots=2, speculation="auto", tuning=str(path))


def test_stored_tunings_are_found_and_others_left_out(folders, made, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLEJAX_CACHE", str(tmp_path))
    untuned = pairs.load(*folders, slots=2, speculation="auto")
    assert untuned.speculation == UNTUNED and "no tuning fits" in str(untuned.load_report)
    path = stored_path(made.holds_for)
    made.save(path)
    tuned = pairs.load(*folders, slots=2, speculation="auto")
    assert tuned.speculation == made.auto and "of the tuning" in str(tuned.load_report)
    assert pairs.load(*folders, slots=2, speculation="auto", tuning="measure").speculation == UNTUNED
    # the same file, by hand, for another machine: refused where it was asked for, left out with a warning where it was found
    other = replace(made, holds_for=replace(made.holds_for, device="other card", draft_fingerprint="0"))
    other.save(path)
    assert "left out" in str(pairs.load(*folders, slots=2, speculation="auto").load_report)
    with pytest.raises(ConfigError, match=r"device other card, here cpu.*|draft_fingerprint"):
        pairs.load(*folders, slots=2, speculation="auto", tuning=str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        pairs.load(*folders, slots=2, speculation="auto", tuning=str(tmp_path / "missing.json"))


@pytest.mark.parametrize("named", [False, True])
def test_another_number_of_slots_uses_its_acceptance_and_says_so(folders, made, tmp_path, monkeypatch, named):
    monkeypatch.setenv("EAGLEJAX_CACHE", str(tmp_path))
    one = replace(made, holds_for=replace(made.holds_for, slots=1))
    assert stored_path(one.holds_for) == stored_path(made.holds_for)
    path = tmp_path / "one.json" if named else stored_path(one.holds_for)
    one.save(path)
    engine = pairs.load(*folders, slots=3, speculation="auto", tuning=str(path) if named else "auto")
    assert engine.speculation == made.auto
    assert "tuned with 1 slot: costs for 3 measured at first use" in str(engine.load_report)
    assert "left out" not in str(engine.load_report)


@pytest.mark.slow
def test_costs_of_another_number_of_slots_are_measured_and_acceptance_is_the_tunings(folders, made, tmp_path):
    one = replace(made, holds_for=replace(made.holds_for, slots=1))
    one.save(tmp_path / "one.json")
    engine = pairs.load(*folders, slots=2, speculation="auto", tuning=str(tmp_path / "one.json"))
    assert engine._adaptive is not None and isinstance(engine.speculation, Auto)
    programs = engine._programs_for(engine.speculation)
    own, other = (engine._adaptive._tables(programs, width, False) for width in (1, 2))
    assert own.cost.tolist() == pytest.approx([1, *made.costs.trees])
    assert other.cost.tolist() != own.cost.tolist() and "for 2 slots: a plain step" in str(engine.load_report)
    assert np.array_equal(own.tokens, other.tokens) and np.array_equal(own.guess, other.guess)


def test_other_kernels_and_another_jax_do_not_fit(folders, made, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLEJAX_CACHE", str(tmp_path))
    assert (made.holds_for.kernels, made.holds_for.jax) == ("jnp", jax.__version__)
    path = tmp_path / "own.json"
    for change in ({"kernels": "xla"}, {"jax": "0.1"}):
        replace(made, holds_for=replace(made.holds_for, **change)).save(path)
        with pytest.raises(ConfigError, match="{} {}, here".format(*next(iter(change.items())))):
            pairs.load(*folders, slots=2, speculation="auto", tuning=str(path))
    # a tuning of before an upgrade of jax is found, and told
    replace(made, holds_for=replace(made.holds_for, jax="0.1")).save(stored_path(made.holds_for))
    assert "jax 0.1, here" in str(pairs.load(*folders, slots=2, speculation="auto").load_report)
    # costs of before were timed in another way
    path.write_text(json.dumps({**made.to_json(), "version": 1}))
    with pytest.raises(ConfigError, match="not a tuning of this version; found 1; expected 3"):
        pairs.load(*folders, slots=2, speculation="auto", tuning=str(path))


def test_a_file_is_replaced_whole_or_not_at_all(made, tmp_path, monkeypatch):
    path = tmp_path / "kept.json"
    made.save(path)
    whole = Path.write_text

    def torn(self, text, *rest, **more):
        whole(self, text[:20])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", torn)
    with pytest.raises(ConfigError, match="No space left"):
        made.save(path)
    assert read_tuning(path) == made and list(tmp_path.iterdir()) == [path]


def test_fingerprints_tell_other_weights(engine, tmp_path_factory):
    other = pairs.load(*pairs.write_random(tmp_path_factory.mktemp("latent"), "deepseek_v3"), tuning="none")
    assert holds_for(engine._pair, 2).differences(holds_for(other._pair, 2))
    assert holds_for(engine._pair, 2) == holds_for(engine._pair, 2)


def target(mlp) -> TargetConfig:
    attention = GQAConfig(heads=4, kv_heads=2, head_dim=16, rope=RopeConfig(10000.0, 16))
    return TargetConfig("t", 64, 32, (LayerConfig(attention, mlp),) * 2, 1e-6, tie_embeddings=False, max_position=64)


def test_costs_between_the_measured_rows():
    points, draft = {1: 10.0, 4: 16.0, 16: 28.0}, {1: (2.0, 1.0), 4: (3.0, 2.0)}
    dense = CostCurve(1, points, draft, 9.5, target(DenseConfig(48)), 1)
    assert dense.cycle_ms(Speculation(num_steps=0)) == 9.5
    assert dense.cycle_ms(Speculation(3, 1)) == pytest.approx(2 + 2 * 1 + 16)
    assert dense.verify_ms(10) == pytest.approx(22)
    assert dense.cycle_ms(Speculation(2, 2, 4)) == pytest.approx(2 + 1 / 3 + 1 + 1 / 3 + 16)
    # experts are touched fast at first: two rows cost more than a straight line says
    mixture = MoEConfig(experts=16, topk=4, width=16, score="softmax")
    sparse = CostCurve(1, points, draft, 9.5, target(mixture), 1)
    touched = [16 * (1 - 0.75**rows) for rows in (1, 2, 4)]
    share = (touched[1] - touched[0]) / (touched[2] - touched[0])
    assert sparse.verify_ms(2) == pytest.approx(10 + 6 * share, rel=1e-2)
    assert sparse.verify_ms(2) > dense.verify_ms(2) + 0.5


def test_costs_are_measured_where_answers_stand():
    text = lambda tokens: Text(list(range(tokens)), [])
    found = Found(Sampling(), [text(tokens) for tokens in (40, 40, 20, 20, 2, 2, 8, 8)], [])
    asked = [[0] * tokens for tokens in (5, 50, 30, 10, 3, 4, 90, 80)]
    # prompt and half of the answer; waves from the shortest to the longest
    assert found.contexts(asked, 2) == [[4, 5], [25, 70], [94, 84]]
    assert found.contexts(asked, 4) == [[25, 70, 40, 20], [4, 5, 94, 84]]
    assert found.contexts(asked, 8) == [[25, 70, 40, 20, 4, 5, 94, 84]]


def test_every_number_of_rows_that_is_predicted_is_measured():
    assert {tree.nodes for tree in settings(7, 5, 4, 64)} <= set(ROWS)


def test_a_state_may_stand_behind_fewer_tokens_than_it_was_prefilled_with(engine):
    programs = engine._programs_for(Speculation(2, 1))
    state = _prefilled(programs, Sampling(), [[5, 20], [9, 12]])
    prompts = [row[:length].tolist() for row, length in zip(np.asarray(state.tokens), (6, 12), strict=True)]
    state = programs.decode(_behind(programs, state, [6, 12]), 4, np.zeros(2, bool))
    told = engine.generate(prompts, Sampling(max_new_tokens=4, ignore_eos=True), speculation=None)
    for row, prompt, answer in zip(np.asarray(state.tokens), prompts, told, strict=True):
        assert row[len(prompt) : len(prompt) + 4].tolist() == answer.token_ids
    programs.keep(state)


def test_the_report_tells_the_error_beside_plain_decoding(made):
    rows = (Row(2, 1, 3, 1.5, 1.0, 1500.0, 1000.0, 1.5), Row(0, 1, 1, 1.0, 1.0, 1000.0, 800.0, 1.25))
    text = tune_report(replace(made, rows={"greedy": rows, "sampled": rows[1:]}))
    assert "by 37.5 % (median of 2 settings; beside plain decoding 20.0 %)" in text
    assert "by 25.0 % (median of 1 settings)" in text


def test_the_trees_of_auto_are_the_best_for_several_texts():
    curve = CostCurve(1, {1: 1.0, 16: 1.3}, {1: (0.1, 0.1), 4: (0.15, 0.15)}, 0.0, target(DenseConfig(48)), 1)
    short, long = Speculation(1, 1), Speculation(6, 1)
    told = {
        short: Replayed(1.5, (0.5,), ()),
        long: Replayed(2.6, (0.5, 0.4, 0.3, 0.2, 0.1, 0.1), ()),
    }
    chosen = choose_trees([(told, curve)])
    assert set(chosen) == {short, long}
    # a class whose draws make rows dear gets a tree of its own
    dear = CostCurve(1, {1: 1.0, 16: 40.0}, {1: (0.1, 0.1), 4: (0.15, 0.15)}, 0.0, target(DenseConfig(48)), 1)
    always = {long: told[long], short: Replayed(1.5, (0.5,), ())}
    assert choose_trees([(always, dear)]) == (short,)


@pytest.mark.slow
def test_tune_from_end_to_end(folders):
    engine = pairs.load(*folders, slots=1, speculation="auto", tuning="measure")
    asked = pairs.prompts([6])
    tuning = tune(engine, asked, max_new_tokens=40, temperature=0, confirm=5, rows=(1, 8))
    rows = tuning.rows["greedy"]
    assert sum(row.num_steps == 0 for row in rows) == 1
    measured = [row for row in rows if row.measured is not None]
    assert all(row.measured == pytest.approx(1e3 * row.tau / row.measured_ms, rel=0.25) for row in measured)
    assert 5 <= len(measured) <= 6 and any(row.num_steps == 0 for row in measured)
    assert [row.measured for row in measured] == sorted((row.measured for row in measured), reverse=True)
    # what was replayed is what really happens
    tree = next(row for row in measured if row.topk in (1, 4) and row.num_steps)
    answer = engine.generate(asked, Sampling(max_new_tokens=40, ignore_eos=True), speculation=tree.tree)[0]
    assert answer.stats.tau == pytest.approx(tree.tau, rel=0.25)
    assert Tuning.from_json(json.loads(json.dumps(tuning.to_json())), "here") == tuning
    with pytest.raises(ConfigError, match="nothing to tune"):
        tune(pairs.load(folders[0], None, speculation=None), asked)
    with pytest.raises(ConfigError, match="max_new_tokens"):
        tune(engine, asked, max_new_tokens=4)

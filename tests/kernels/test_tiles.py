"""Stored tiles: that kernels take them, that every candidate is right and lowers for a card, that files which do not fit are left out."""

import json
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from eaglejax.errors import ConfigError, EagleJaxError
from eaglejax.kernels import tile_store, tiles
from eaglejax.kernels.tile_candidates import candidates, rule
from eaglejax.kernels.tile_store import Found, Here, mark, note_tiles, stored, stored_path, write
from eaglejax.kernels.tiles import Key
from eaglejax.kernels.tree_attention_shape import left_bytes, ranges
from eaglejax.load_report import LoadReport
from eaglejax.measure import kernel_cases, tune_kernels
from eaglejax.measure.kernel_cases import Case, make_case
from eaglejax.measure.tune_kernels import time_choices, to_text, tune_key

NEW = jax.__version_info__ >= (0, 11)
pallas = pytest.mark.skipif(not NEW, reason="the kernels are written for jax 0.11's Pallas")
HERE = Here("NVIDIA H200", "0.11.2", "0.11.2")
SMALL = {
    "attention": (Key("attention", (1, 2, 1, 64, 64, 0, 128)), (64, 3, 64)),
    "gateup": (Key("gateup", (2, 1, 128, 64)), (64, 3, 1)),
    "down": (Key("down", (2, 1, 128, 128)), (64, 8, 2)),
    "route": (Key("route", (16, 2, 256)), (64, 2, 2)),
    "project": (Key("project", (256, 64)), (64, 8, 2)),
}
# of Qwen3-30B-A3B, and latent attention
LARGE = [
    Key("attention", (1, 32, 4, 128, 128, 0, 8192)),
    Key("attention", (1, 16, 1, 576, 512, 1, 8192)),
    Key("gateup", (128, 8, 2048, 768)),
    Key("down", (128, 8, 2048, 768)),
    Key("route", (128, 8, 2048)),
    Key("project", (2048, 4096, 1024)),
]


def found(key, choice):
    return Found(key, choice, (1, 4), (10.0, 12.0), (9.0, 10.5), "2026-01-02")


@pytest.fixture
def card(monkeypatch, tmp_path):
    """As on a card of HERE's kind, with a cache folder of its own; returns the file of its tiles."""
    monkeypatch.setenv("EAGLEJAX_CACHE", str(tmp_path))
    monkeypatch.delenv(tile_store.VARIABLE, raising=False)
    monkeypatch.setattr(tile_store, "here", lambda: HERE)
    tile_store._once.cache_clear()
    yield stored_path(HERE.device)
    tile_store._once.cache_clear()
    jax.clear_caches()  # what was traced with these


def traced(case):
    """What of a program tells how it is cut. Traced anew: an environment variable is no part of jax's key."""
    fresh = lambda x, layer: case.run(x, layer)
    return str(jax.make_jaxpr(fresh)(case.start, case.layers[0]))


@pallas
@pytest.mark.parametrize("name", list(SMALL))
def test_a_stored_choice_is_what_the_kernel_takes(card, name, monkeypatch):
    key, choice = SMALL[name]
    case = make_case(key, 3)
    assert choice in candidates(key) and choice != rule(key, 3)
    by_rule = traced(case)
    write(card, HERE, {key: found(key, choice)})
    tile_store._once.cache_clear()
    jax.clear_caches()
    by_file = traced(case)
    assert by_file != by_rule
    grids = [re.findall(r"grid=\(([^)]*)\)", text)[:2] for text in (by_rule, by_file)]
    expected = {"attention": ("1, 1, 2", "1, 1, 3"), "route": ("1, 4", "1, 2"), "down": ("2, 1", "2, 2")}
    if name in expected:
        assert all(grid in of for grid, of in zip(expected[name], grids, strict=True))
    jax.clear_caches()
    monkeypatch.setenv(tile_store.VARIABLE, "rule")
    assert traced(case) == by_rule
    with tiles.using({key: choice}):
        assert traced(case) == by_file


@pallas
@pytest.mark.parametrize("name", list(SMALL))
def test_every_candidate_is_right_and_the_fastest_wins(name, monkeypatch):
    """Interpreted, with a search for races; the timer is made up."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax.experimental.pallas import mosaic_gpu

    from eaglejax.kernels import experts_gpu

    plgpu: Any = mosaic_gpu  # typed otherwise in jax 0.10
    monkeypatch.setattr(kernel_cases, "MOST_LAYERS", 2)
    monkeypatch.setattr(experts_gpu, "BLOCKS", 2)  # the interpreter takes as long as there are blocks
    key, choice = SMALL[name]
    timer = lambda case, choices: [[7.0 if each == choice else 10.0] * 3 for each in choices]
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        measured = tune_key(key, (3,), timer)
        races = gpu_callbacks.get_races() if hasattr(gpu_callbacks, "get_races") else None
        gpu_callbacks.reset_gpu_interpret_mode_state()
    assert measured.dropped == () and measured.tried == len(candidates(key))
    assert (measured.found.choice, measured.found.rule_us, measured.found.best_us) == (choice, (10.0,), (7.0,))
    assert races is None or not races.races_found
    experts_gpu._gateup.cache_clear()


@pallas
@pytest.mark.parametrize("key", LARGE, ids=str)
def test_candidates_lower_for_a_card(key):
    """Layouts and shared memory are checked by the lowering, with the most rows, which leave least room. One of those is taken that have
    the same tiles: that with most buffers, fewest parts of a sum or fewest ranges to merge. (All of them lower, which takes minutes.)"""
    rows = {"attention": 8, "route": 16}.get(key.kernel, 64)
    kept = []

    def leaves():
        case = make_case(key, rows)
        flat, structure = jax.tree.flatten((case.start, case.layers[0]))
        kept[:] = case.run, structure
        return flat

    shapes = jax.eval_shape(leaves)  # the arrays are never made
    run, structure = kept
    least, size = (1, lambda each: (each[0], each[2])) if key.kernel == "attention" else (2, lambda each: each[0])
    hardest = {size(each): each for each in sorted(candidates(key), key=lambda each: (-each[least], each[1]))}
    for choice in hardest.values():
        with tiles.using({key: choice}):
            traced = jax.jit(lambda *flat: run(*structure.unflatten(flat))).trace(*shapes)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def fake(key, results):
    """A case whose kernel gives what `results` says of a choice."""

    def run(x, layer):
        what = results.get(tiles.chosen(key), 1.0)
        if what == "fails":
            raise RuntimeError("no such instruction\nat line 1")
        return x * layer * what

    return Case(key, 1, [jnp.ones(4), jnp.ones(4)], jnp.arange(1.0, 5.0), run, lambda x, layer: x * layer)


def test_wrong_candidates_never_win(monkeypatch):
    key = SMALL["project"][0]
    best, wrong, failing, *_ = candidates(key)
    monkeypatch.setattr(tune_kernels, "make_case", lambda key, rows: fake(key, {wrong: 1.1, failing: "fails"}))
    given = []

    def timer(case, choices):
        given.append(choices)
        return [[{wrong: 1.0, failing: 1.0, best: 5.0}.get(each, 10.0)] * 3 for each in choices]

    measured = tune_key(key, (1, 4), timer)
    assert measured.found.choice == best and all(wrong not in each and failing not in each for each in given)
    assert len(measured.dropped) == 2 and "relative error 0.1" in measured.dropped[0]
    assert "does not compile: no such instruction (1 rows)" in measured.dropped[1]
    assert "step" in to_text([measured], HERE) and "left out" in to_text([measured], HERE)
    monkeypatch.setattr(tune_kernels, "make_case", lambda key, rows: fake(key, {None: 1.1}))
    with pytest.raises(EagleJaxError, match="wrong here: relative error 0.1"):
        tune_key(key, (1,), timer)


def test_the_rule_stays_unless_a_candidate_is_faster_and_never_slower(monkeypatch):
    key = SMALL["project"][0]
    first, second, *_ = candidates(key)
    times = {1: {first: 9.9, second: 7.0}, 4: {first: 9.9, second: 10.5}}
    timer = lambda case, choices: [[times[case.rows].get(each, 10.0)] * 3 for each in choices]
    monkeypatch.setattr(tune_kernels, "make_case", lambda key, rows: replace(fake(key, {}), rows=rows))
    assert tune_key(key, (1, 4), timer).found.choice is None  # by a hair; slower for four rows
    assert tune_key(key, (1,), timer).found.choice == second


def test_timing_runs_each_in_one_loop():
    key = SMALL["project"][0]
    spans = time_choices(fake(key, {}), [None, *candidates(key)[:2]], trips=3, repeats=2)
    assert [len(each) for each in spans] == [2, 2, 2] and all(value > 0 for each in spans for value in each)


def test_one_choice_for_all_numbers_of_rows():
    """A key has no rows, and what sets the order of a sum is the same for all of them."""
    key = Key("attention", (1, 32, 4, 128, 128, 0, 8192))
    with tiles.using({key: (64, 16, 32)}):
        assert {ranges(1, t, 32, 4, 128, 128, False, 5000) for t in (1, 4, 8, 32)} == {(64, 16, 32)}
        few = left_bytes(1, 1, 32, 4, 128, 128, False, 8192)
    assert few == 4 * 16 * 8 * 129 * 4
    assert left_bytes(1, 1, 32, 4, 128, 128, False, 8192) == 4 * 33 * 8 * 129 * 4


def test_files_are_read_once_and_told(card):
    assert stored().choices == {} and mark() == ""
    report = LoadReport(quiet=True)
    note_tiles(report)
    assert "by rule (none that fit are stored" in str(report) and not report.warnings
    (key, choice), (other, _) = SMALL["down"], SMALL["route"]
    write(card, HERE, {key: found(key, choice)})
    write(card, HERE, {other: found(other, None)})  # added
    assert stored().choices == {}  # no file was there as this process looked
    tile_store._once.cache_clear()
    assert stored().choices == {key: choice} and set(stored().found) == {key, other} and mark() == ", stored tiles"
    report = LoadReport(quiet=True)
    note_tiles(report)
    assert f"tiles: stored ones for 1 of 2 measured shapes (2026-01-02), by rule for all others: {card}" in str(report)
    assert [path.name for path in card.parent.iterdir()] == ["nvidia-h200.json"]  # nothing half-written beside it


def _spoil(values, *path):
    *path, last, value = path
    at = values
    for name in path:
        at = at[name]
    at[last] = value


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("device", "NVIDIA H100"), "tiles of another device; found 'NVIDIA H100'; expected NVIDIA H200"),
        (("jax", "0.11.1"), "tiles of another version of jax; found '0.11.1'"),
        (("jaxlib", None), "tiles of another version of jaxlib; found None"),
        (("version", 0), "not tiles of this version; found 0; expected 1"),
        (("tiles", 0, "kernel", "softmax"), "no such kernel, 'softmax'"),
        (("tiles", 0, "choice", {"step": 96, "stages": 8, "parts": 2}), "no choice for down experts 2"),
        (("tiles", 0, "shape", {"experts": 2}), "no shape of down"),
        (("tiles", 0, "shape", "d", -128), "no shape of down"),
        (("tiles", 0, "rule_us", [1.0]), "rows, times or date"),
        (("tiles", 0, "rows", ["1", 4]), "rows: '1' is no number"),
        (("tiles", None), "not a file of tiles"),
        (None, "not a file of tiles"),
    ],
)
def test_what_does_not_fit_is_left_out_with_a_reason(card, change, said, monkeypatch):
    key, choice = SMALL["down"]
    write(card, HERE, {key: found(key, choice)})
    values = json.loads(card.read_text())
    if change is None:
        card.write_text(card.read_text()[:-20])
    else:
        _spoil(values, *change)
        card.write_text(json.dumps(values))
    assert stored().choices == {} and said in stored().left_out
    report = LoadReport(quiet=True)
    note_tiles(report)
    assert "stored tiles are not used, the kernels' rules are: " in report.warnings[0] and said in report.warnings[0]
    # by name it is refused
    monkeypatch.setenv(tile_store.VARIABLE, str(card))
    with pytest.raises(ConfigError, match=re.escape(said)):
        stored()
    write(card, HERE, {key: found(key, choice)})  # and replaced by what is measured here
    tile_store._once.cache_clear()
    assert stored().choices == {key: choice}


def test_a_file_that_is_not_there_is_refused_by_name(card, monkeypatch, tmp_path):
    monkeypatch.setenv(tile_store.VARIABLE, str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="cannot be read; found No such file"):
        stored()


def test_several_processes_take_no_file_that_was_only_found(card, monkeypatch):
    key, choice = SMALL["down"]
    write(card, HERE, {key: found(key, choice)})
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert stored().choices == {}
    report = LoadReport(quiet=True)
    note_tiles(report)
    assert "tiles: by rule (several processes" in str(report)
    monkeypatch.setenv(tile_store.VARIABLE, str(card))
    assert stored().choices == {key: choice}


def test_nothing_is_looked_at_where_no_kernel_runs(monkeypatch, tmp_path):
    monkeypatch.setenv(tile_store.VARIABLE, str(tmp_path / "none.json"))
    assert tile_store.here() is None and stored().choices == {} and mark() == ""
    report = LoadReport(quiet=True)
    note_tiles(report)
    assert "is not used: no GPU (cpu)" in str(report)

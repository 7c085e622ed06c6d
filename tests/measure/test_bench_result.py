"""Every figure of a bench, worked out by hand from made-up runs; then the outputs, which must all say what they are."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest
from bench_made_up import CHAIN, NAMES, TEXT, TREE, answer, result, run

from eaglejax.errors import ConfigError
from eaglejax.measure.bench_plots import check_plots, draw_plots
from eaglejax.measure.bench_report import csv_rows, to_json, to_text, write_csv
from eaglejax.measure.bench_result import CellResult, best, verdict


def test_figures_of_a_cell():
    plain, chain, tree = result().cells
    assert plain.tokens_per_second.values == (12, 12) and plain.ratio.values == (1, 1) and plain.acceptance.tau == 1
    assert chain.tokens_per_second.values == (24, 18) and chain.ratio.values == pytest.approx((2, 1.5))
    assert chain.cycle_ms.values == pytest.approx((100, 400 / 3))
    assert chain.first_token_ms.values == (250, 750, 250, 750)
    # both answers and both repeats pooled: 15 + 20 of 10 + 10 cycles
    assert chain.acceptance.tau == pytest.approx((15 + 10 + 20 + 10) / 20)
    assert chain.compile_seconds == 2.75 and tree.compile_seconds == 3
    assert tree.ratio.values == pytest.approx(((24 + 7) / 8 / 12,) * 2)


def test_seconds_times_rate_are_tokens():
    for cell in result().cells:
        for one in cell.runs:
            assert one.decode_seconds * one.tokens_per_second == pytest.approx(one.decode_tokens)
            everything = sum(one.first_token) + one.decode_seconds
            assert everything * one.tokens_per_second_with_prefill == pytest.approx(one.tokens)


def test_trial_37_tau_over_the_round_predicts_the_speed():
    plain, chain, _ = result().cells
    assert plain.predicted_tokens_per_second == pytest.approx(12)
    # one slot: tau / round; the 55 tokens of its cycles are 48 after the cut by the budget
    assert chain.predicted_tokens_per_second == pytest.approx((2.75 / 0.1 + 2.75 / (0.4 / 3)) / 2)


def test_trial_37_the_best_row_is_named_and_none_where_none_is():
    found = result()
    group = found.groups()[0]
    assert best(group) is group[1]
    assert verdict(group) == "qa, 1 slot, temperature 0: best is 5,1,6, 1.75 x plain (1.50-2.00)"
    slow = [group[0], group[2]]
    assert best(slow) is None and verdict(slow).endswith("no draft is faster than plain decoding")
    assert verdict(group[:1]).endswith("only plain decoding was measured")
    doubtful = replace(group[1], runs=(run([[4] * 6] * 2, 2.0), run([[4] * 6] * 2, 6.0)))
    assert "within the spread of the repeats" in verdict([group[0], doubtful])


def test_the_first_difference_is_told():
    _, chain, tree = result().cells
    assert chain.difference is None
    assert tree.difference is not None
    assert vars(tree.difference) == dict(prompt="qa[5]", position=7, plain=TEXT[7], found=5)
    shorter = replace(tree, runs=(run([[1] * 12, [2] * 8], 8.0, [TEXT, TEXT[:3]]),) * 2)
    assert vars(shorter.difference) == dict(prompt="qa[5]", position=3, plain=TEXT[3], found=None)


def test_trial_38_loops_are_flagged_and_left_out_of_a_second_tau():
    plain, chain, _ = result().cells
    loop = answer([5, 5, 5, 5], [7, 8] * 12)
    looping = replace(chain, runs=tuple(replace(one, answers=(one.answers[0], loop)) for one in chain.runs))
    assert chain.repeated == () and looping.repeated == (NAMES[1],)
    assert looping.acceptance.tau == pytest.approx((15 + 10 + 24) / 14)
    assert looping.acceptance_without_repeated.tau == pytest.approx(2.5)


def test_text_says_everything():
    text = to_text(result())
    for part in (
        "m, draft d: 1 x cpu (2 cores), cpu; float32; no mesh; python 3, jax 0",
        "prompts qa (2 of each), 25 new tokens at most, chat template, seed 0",
        "plain  12.0 (12.0-12.0)", "5,1,6  21.0 (18.0-24.0)  1.75 (1.50-2.00)  2.75", "  same", "differ: qa[5] token 7: 5 for 107",
        "qa, 1 slots, temperature 0, 2,2,6: of all 100 40; of reaching 100 40", "best is 5,1,6",
        "every cell of the tree 1,2,9: num_draft_tokens", "warning: something",
        "5,1,6: draft 30.00, verify 60.00, other 26.67 of 116.67", "bonus token included", "no compilation",
    ):  # fmt: skip
        assert part in text, part
    assert "SIMULATED" not in text


def test_json_and_csv(tmp_path):
    said = json.loads(json.dumps(to_json(result()), allow_nan=False))
    assert (
        said["simulated_acceptance"] is None
        and said["definitions"]["tau"]
        and said["environment"]["dtype"] == "float32"
    )
    plain, chain, tree = said["cells"]
    assert chain["acceptance"]["tau"] == 2.75 and len(chain["acceptance"]["by_level_of_all_cycles"]) == 5
    assert chain["ratio_to_plain"]["median"] == pytest.approx(1.75) and chain["tokens_equal_plain"] is True
    assert plain["tokens_equal_plain"] is None and tree["first_difference"]["position"] == 7
    assert [one["decode_tokens"] for one in chain["runs"]] == [48, 48] and chain["runs"][1]["compile_seconds"] == 0.25
    assert said["best"][0]["tree"] == "5,1,6" and said["skipped"][0]["cell"].endswith("1,2,9")
    write_csv(result(), tmp_path / "b.csv")
    with (tmp_path / "b.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["num_draft_tokens"] for row in rows] == ["1", "6", "6"] and rows[1]["tokens"] == "same"
    assert float(rows[1]["ratio_to_plain"]) == pytest.approx(1.75) and float(rows[1]["tokens_per_second_min"]) == 18
    with pytest.raises(ConfigError, match="cannot be written"):
        write_csv(result(), tmp_path / "absent" / "b.csv")


def test_simulated_acceptance_is_said_in_every_output():
    made = result(simulated=(0.8, 0.5))
    text = to_text(made)
    assert text.startswith("SIMULATED acceptance (conditional rates by level 0.8, 0.5; ")
    assert "5,1,6 SIMULATED" in text and "not compared" in text and "same" not in text.split("\n\n")[1]
    assert "(SIMULATED acceptance)" in text  # the verdict
    said = to_json(made)
    assert said["simulated_acceptance"] == [0.8, 0.5]
    assert [cell["simulated_acceptance"] for cell in said["cells"]] == [None, [0.8, 0.5], [0.8, 0.5]]
    assert said["cells"][2]["tokens_equal_plain"] is None and said["cells"][2]["first_difference"] is None
    assert [row["simulated_acceptance"] for row in csv_rows(made)] == ["", "0.8000 0.5000", "0.8000 0.5000"]


def test_plots(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    titles: list[str] = []
    draw = Figure.savefig

    def remembered(figure, *args, **more):
        titles.append(" ".join([axes.get_title() for axes in figure.axes] + [figure.get_suptitle()]))
        draw(figure, *args, **more)

    monkeypatch.setattr(Figure, "savefig", remembered)
    for made, simulated in ((result(), False), (result(simulated=(0.8,)), True)):
        titles.clear()
        paths = draw_plots(made, tmp_path)
        assert [path.name for path in paths] == ["speedup.png", "acceptance.png", "cost.png"]
        assert all(path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for path in paths)
        assert [("SIMULATED acceptance" in title) for title in titles] == [simulated] * 3
        assert all("m, cpu, float32" in title for title in titles)
    assert draw_plots(result(cells=result().cells[:1]), tmp_path) == []  # nothing to compare


def test_plots_without_matplotlib_are_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"matplotlib is missing; pip install 'eaglejax\[plots\]'"):
        check_plots(tmp_path)


def test_plain_alone_can_be_reported():
    made = result(cells=result().cells[:1], skipped=(), warnings=())
    assert isinstance(made.cells[0], CellResult) and CHAIN != TREE
    assert "only plain decoding was measured" in to_text(made) and to_json(made)["best"][0]["tree"] is None

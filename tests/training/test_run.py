"""A run of thirty steps: the loss falls, a stopped run goes on bit for bit, and what is reported is what is served."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_run import rows_of, settings, stop_after, target_folder, write_answers

from eaglejax import EagleJaxEngine, Speculation
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.training.evaluate import accepted
from eaglejax.training.run import train


@pytest.fixture(scope="module")
def files(tmp_path_factory, data):
    return write_answers(tmp_path_factory.mktemp("data"), data)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, data, files):
    """A run without a stop, what it said, and how it ended."""
    out, said = tmp_path_factory.mktemp("runs") / "straight", []
    return out, said, train(settings(out, data, files), said.append)


def test_loss_falls_and_figures_are_kept(straight):
    out, said, outcome = straight
    steps = rows_of(out, "training.csv")
    losses = [float(row["loss"]) for row in steps]
    assert [int(row["step"]) for row in steps] == list(range(1, 31)) and outcome.step == 30
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    assert outcome.reason == "steps" and any("carry loss" in line for line in said)
    assert [int(row["step"]) for row in rows_of(out, "evaluation.csv")] == [15, 30]
    assert (out / "curves.svg").read_text().count("<polyline") == 2
    assert sorted(int(p.name) for p in (out / "checkpoints").iterdir()) == [25, 30]
    assert [int(p.name) for p in (out / "best").iterdir()] == [outcome.best_step]


def test_a_stopped_run_goes_on_bit_for_bit(straight, tmp_path, data, files):
    out = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        train(settings(out, data, files), progress=stop_after(18))
    assert len(rows_of(out, "training.csv")) == 18
    said = []
    outcome = train(settings(out, data, files), said.append)
    assert "goes on from step 15" in said
    for name in ("training.csv", "evaluation.csv"):
        assert (out / name).read_bytes() == (straight[0] / name).read_bytes()
    assert (outcome.best_step, outcome.best_tau) == (straight[2].best_step, straight[2].best_tau)
    ours, theirs = (load_file(folder / "draft" / "model.safetensors") for folder in (out, straight[0]))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


def test_reported_acceptance_is_that_of_the_served_folder(straight, data, files):
    out, _, outcome = straight
    engine = EagleJaxEngine.from_pretrained(
        target_folder(data), draft=str(out / "draft"), speculation=Speculation(3, 1, 4), max_len=48, slots=4
    )
    prompts = [json.loads(line)["prompt_ids"] for line in files[1].read_text().splitlines()]
    found = accepted(engine, prompts, Speculation(3, 1, 4), 12)
    assert found.tau == outcome.best_tau and found.cycles
    (row,) = [row for row in rows_of(out, "evaluation.csv") if int(row["step"]) == outcome.best_step]
    assert [float(row[f"accepted_{j}"]) for j in (1, 2, 3)] == found.unconditional


def test_muon_towards_int8(straight, tmp_path, data, files):
    """The other optimiser and the rounding of the export: stopped and gone on with, and reported as the int8 folder is served."""
    changes = dict(optimiser="muon", int8=True, steps=8, save_every=2, evaluate_every=8)
    whole = train(settings(tmp_path / "whole", data, files, **changes))
    with pytest.raises(KeyboardInterrupt):
        train(settings(tmp_path / "stopped", data, files, **changes), progress=stop_after(5))
    train(settings(tmp_path / "stopped", data, files, **changes))
    for name in ("training.csv", "evaluation.csv"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    rounded, plain = (rows_of(out, "training.csv")[0]["loss"] for out in (tmp_path / "whole", straight[0]))
    assert rounded != plain and float(rounded) == pytest.approx(float(plain), rel=1e-2)

    folder = whole.draft
    stored = load_file(folder / "model.safetensors")
    assert stored["fc.weight"].dtype == np.int8 and stored["lm_head.weight"].dtype == np.int8
    tree = Speculation(3, 1, 4)
    engine = EagleJaxEngine.from_pretrained(
        target_folder(data), draft=str(folder), speculation=tree, max_len=48, slots=4
    )
    prompts = [json.loads(line)["prompt_ids"] for line in files[1].read_text().splitlines()]
    assert accepted(engine, prompts, tree, 12).tau == whole.best_tau
    # a checkpoint of the run is no checkpoint of one with another optimiser
    with pytest.raises(ConfigError, match="optimiser"):
        train(settings(tmp_path / "whole", data, files, **{**changes, "optimiser": "adamw"}))


def test_another_run_in_the_folder_is_refused(straight, data, files):
    with pytest.raises(ConfigError, match=r"belongs to another run; found rate begun with 0\.003, now 0\.01;"):
        train(settings(straight[0], data, files, rate=0.01))
    with pytest.raises(ConfigError, match="mlp begun with 64, now 32"):
        train(settings(straight[0], data, files, mlp=32))


def test_two_steps_of_one_batch_are_a_step_of_two(tmp_path, data, files):
    """Accumulated gradients are the mean of the batches': the first step's weights are those of a batch of both."""
    common = dict(steps=1, save_every=1, evaluate_every=1)
    out = [tmp_path / "whole", tmp_path / "halves"]
    train(settings(out[0], data, files, batch=2, **common))
    train(settings(out[1], data, files, batch=1, accumulate=2, **common))
    losses = [float(rows_of(folder, "training.csv")[0]["loss"]) for folder in out]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    ours, theirs = (load_file(folder / "draft" / "model.safetensors") for folder in out)
    # Adam's first step is the gradient's sign: compare where that is certain
    for name in ("lm_head.weight", "fc.weight"):
        assert np.mean(np.abs(ours[name] - theirs[name]) < 1e-5) > 0.97, name


def test_a_full_disk_loses_no_checkpoint(straight, tmp_path, data, files, monkeypatch):
    out = tmp_path / "full"
    shutil.copytree(straight[0], out)
    shutil.rmtree(out / "checkpoints" / "30")
    before = sorted(p.name for p in (out / "checkpoints").iterdir())

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(CheckpointError, match="step 30 cannot be written"):
        train(settings(out, data, files))
    monkeypatch.undo()
    assert [name for name in sorted(p.name for p in (out / "checkpoints").iterdir()) if name.isdigit()] == before
    assert train(settings(out, data, files)).step == 30
    assert (out / "training.csv").read_bytes() == (straight[0] / "training.csv").read_bytes()


def test_training_too_long_on_too_little_shows_and_stops(tmp_path, data):
    """A draft goes on with four answers: held-out acceptance falls while the loss does too; the best is kept, not the
    last, and the run ends by itself."""
    many = write_answers(tmp_path, data, 64)
    common = dict(rate=1e-2, evaluate_every=20, save_every=1000, batch=4)
    good = train(settings(tmp_path / "good", data, many, steps=40, vocab=64, **common))
    few = tmp_path / "few.jsonl"
    few.write_text("".join(many[0].read_text().splitlines(keepends=True)[:4]))
    start = dict(start=str(good.draft), mlp=None, vocab=None, boundaries=None)
    out = tmp_path / "worse"
    outcome = train(settings(out, data, (few, many[1]), steps=200, patience=4, **common, **start))
    taus = [float(row["tau"]) for row in rows_of(out, "evaluation.csv")]
    losses = [float(row["loss"]) for row in rows_of(out, "training.csv")]
    assert taus[0] == good.best_tau and taus[-1] < taus[0] - 0.2 and losses[-1] < losses[0]
    assert outcome.reason == "patience" and outcome.step == outcome.best_step + 80 < 200
    assert outcome.best_tau == max(taus) and [int(p.name) for p in (out / "best").iterdir()] == [outcome.best_step]

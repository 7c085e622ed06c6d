"""Training on a mesh is training on one device: the same losses, checkpoints that any mesh goes on from, the same draft."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from small_run import rows_of, settings, stop_after, write_answers

from eaglejax.training import programs, trainer
from eaglejax.training.run import train

MESH = "data=2,model=2"
RUN = dict(steps=8, save_every=4, evaluate_every=8, evaluate_tokens=6, batch=4)
STEPS = 6  # of a run that ends before its first evaluation
FAMILIES = {
    # rows that four devices share, or only those along data
    "dense": dict(batch=4),
    "moe": dict(batch=2, model="glm4_moe", head="target", objective="acceptance", accumulate=2),
}


@dataclass
class Taken:
    """Losses of the first steps, the folder of the run, bytes that a step needs on each device, and the last state."""

    losses: list[float]
    folder: Path
    need: int
    state: trainer.TrainState


@pytest.fixture(scope="module")
def files(tmp_path_factory, data):
    return write_answers(tmp_path_factory.mktemp("data"), data)


@pytest.fixture(scope="module")
def first_steps(tmp_path_factory, data, files):
    """Takes the first steps of a run of a family on a mesh, and stops."""
    known = {}

    def take(family, mesh):
        if (family, mesh) not in known:
            changes = {**RUN, **FAMILIES[family], "steps": 9}
            if "model" in changes:
                changes["model"] = str(data / "targets" / changes["model"])
            out, needs, states = tmp_path_factory.mktemp("runs"), [], []
            check, call = programs.check_fits, programs.TrainStep.__call__

            def step(self, *given):
                made = call(self, *given)
                states[:] = [made[0]]
                return made

            with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(programs, "check_fits", lambda *given: needs.append(check(*given)) or needs[-1])
                patch.setattr(programs.TrainStep, "__call__", step)
                train(settings(out, data, files, mesh=mesh, **changes), progress=stop_after(STEPS))
            known[family, mesh] = Taken(losses_of(out), out, needs[0], states[0])
        return known[family, mesh]

    return take


@pytest.fixture(scope="module")
def straight(tmp_path_factory, data, files):
    """Runs without a stop, on one device and on the mesh."""
    outs = {mesh: tmp_path_factory.mktemp("straight") / "run" for mesh in (None, MESH)}
    return {mesh: (out, train(settings(out, data, files, mesh=mesh, **RUN))) for mesh, out in outs.items()}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, data, files):
    """The folder of a run on the mesh that was stopped after its sixth step."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(KeyboardInterrupt):
        train(settings(out, data, files, mesh=MESH, **RUN), progress=stop_after(6))
    assert len(rows_of(out, "training.csv")) == 6
    return out


def losses_of(folder):
    return [float(row["loss"]) for row in rows_of(folder, "training.csv")]


def weights_of(folder):
    return load_file(folder / "draft" / "model.safetensors")


def assert_near(ours, theirs):
    """Two runs whose sums are rounded in another order: losses, gradients' norms, and the drafts."""
    np.testing.assert_allclose(losses_of(ours), losses_of(theirs), rtol=0, atol=1e-5)
    norms = [[float(row["gradient_norm"]) for row in rows_of(out, "training.csv")] for out in (ours, theirs)]
    np.testing.assert_allclose(*norms, rtol=1e-4)
    found, expected = weights_of(ours), weights_of(theirs)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-4, err_msg=name)


SLOW = [
    pytest.param(family, mesh, marks=pytest.mark.slow)
    for family, mesh in [("dense", "data=4,model=2"), ("dense", "model=8"), ("moe", "data=2"), ("moe", "model=4")]
]


@pytest.mark.parametrize(
    ("family", "mesh"), [("dense", "data=2"), ("dense", MESH), ("dense", "model=4"), ("moe", MESH), *SLOW]
)
def test_losses_are_those_of_one_device(first_steps, family, mesh):
    one, many = first_steps(family, None), first_steps(family, mesh)
    assert len(one.losses) == STEPS and len(set(one.losses)) == STEPS
    np.testing.assert_allclose(many.losses, one.losses, rtol=0, atol=1e-5)
    for column in ("gradient_norm", "accuracy_0", "accuracy_2"):
        found, expected = ([float(row[column]) for row in rows_of(run.folder, "training.csv")] for run in (many, one))
        np.testing.assert_allclose(found, expected, rtol=1e-4, err_msg=column)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_device_has_the_same_weights_and_moments(first_steps, family):
    """Bit for bit, also where some of them took the same rows."""
    for leaf in jax.tree.leaves(first_steps(family, MESH).state):
        first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        assert len(others) == 3 and first.shape == leaf.shape
        assert all(np.array_equal(first, other) for other in others)


def test_the_memory_of_a_step_is_that_of_one_device(first_steps):
    """A quarter of the rows on each device: what a step needs there is less, not the sum of all."""
    assert first_steps("dense", MESH).need < 0.8 * first_steps("dense", None).need


def test_the_trained_draft_is_that_of_one_device(straight):
    (one, alone), (out, outcome) = straight[None], straight[MESH]
    assert_near(out, one)
    assert (outcome.step, outcome.reason, outcome.best_step) == (8, "steps", 8)
    # accepted counts are whole numbers: near weights accept the same
    assert outcome.best_tau == alone.best_tau and rows_of(out, "evaluation.csv") == rows_of(one, "evaluation.csv")


@pytest.mark.parametrize("mesh", [MESH, None, pytest.param("model=4", marks=pytest.mark.slow)])
def test_a_run_stopped_on_a_mesh_goes_on(straight, stopped, tmp_path, data, files, mesh):
    """On the same mesh bit for bit, elsewhere within rounding."""
    out, said = tmp_path / "run", []
    shutil.copytree(stopped, out)
    train(settings(out, data, files, mesh=mesh, **RUN), said.append)
    assert "goes on from step 4" in said
    straight_on, _ = straight[MESH]
    assert_near(out, straight_on)
    if mesh == MESH:
        for name in ("training.csv", "evaluation.csv"):
            assert (out / name).read_bytes() == (straight_on / name).read_bytes()
        for name, value in weights_of(straight_on).items():
            np.testing.assert_array_equal(weights_of(out)[name], value, err_msg=name)


def test_a_run_stopped_on_one_device_goes_on_on_a_mesh(straight, tmp_path, data, files):
    out, said = tmp_path / "run", []
    shutil.copytree(straight[None][0], out)
    for name in ("checkpoints/8", "best", "draft"):
        shutil.rmtree(out / name)
    with pytest.raises(KeyboardInterrupt):
        train(settings(out, data, files, mesh="model=4", **RUN), said.append, stop_after(7))
    assert "goes on from step 4" in said
    np.testing.assert_allclose(losses_of(out), losses_of(straight[None][0])[:7], rtol=0, atol=1e-5)


def test_prompts_are_answered_on_the_mesh(tmp_path, data, files):
    """The same answers as on one device, so that either may go on with them."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": [5 + n, 9, 3]}) + "\n" for n in range(3)))
    written = []
    for mesh in (MESH, None):
        changes = {**RUN, "batch": 2, "regenerate": True, "temperature": 0.9, "answer_tokens": 9}
        asked = settings(tmp_path / str(mesh), data, (prompts, files[1]), mesh=mesh, **changes)
        with pytest.raises(KeyboardInterrupt):
            train(asked, progress=stop_after(3))
        written.append((tmp_path / str(mesh) / "answers.jsonl").read_bytes())
    assert written[0] == written[1] and len(written[0].splitlines()) == 4


@pytest.mark.slow
def test_a_draft_is_gone_on_with_on_a_mesh(straight, tmp_path, data, files):
    """Its first evaluation, before any step, is that of one device."""
    out, draft = {}, str(straight[None][0] / "draft")
    for mesh in (None, "data=2,model=4"):
        out[mesh] = tmp_path / str(mesh)
        changes = dict(RUN, start=draft, mlp=None, vocab=None, boundaries=None, mesh=mesh)
        train(settings(out[mesh], data, files, **changes))
    assert_near(*out.values())
    assert [int(row["step"]) for row in rows_of(out[None], "evaluation.csv")] == [0, 8]
    assert rows_of(out[None], "evaluation.csv")[0] == rows_of(out["data=2,model=4"], "evaluation.csv")[0]

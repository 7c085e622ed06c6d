"""Both layouts load back identically, each with capture ids as its readers count them."""

import json
import shutil
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_run import settings, target_folder, write_answers

from eaglejax.checkpoint.draft_loader import read_draft
from eaglejax.checkpoint.target_loader import load_target
from eaglejax.cli.main import run
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.load_report import LoadReport
from eaglejax.models.capture import IDS_KEY
from eaglejax.models.config import GQAConfig, RopeConfig
from eaglejax.training.convert_draft import convert_draft
from eaglejax.training.export import check_form, write_draft
from eaglejax.training.run import train
from eaglejax.training.shape import draft_shape
from eaglejax.training.weights import first_weights, trained_weights

BOUNDARIES = (1, 2, 3)


@pytest.fixture(scope="module")
def target(data):
    return load_target(target_folder(data), dtype="float32", report=LoadReport())


def made(target, own_head, **flags):
    """A draft's config, weights and vocabulary."""
    config = replace(draft_shape(target.config, 40, 48, own_head=own_head, boundaries=BOUNDARIES), **flags)
    ids = np.sort(np.random.default_rng(2).choice(64, 40, replace=False)).astype(np.int32)
    head = np.asarray(target.embedding.weight[...])[ids]
    weights = first_weights(config, head, np.ones(32, np.float32), [1.0, 2.0, 3.0], seed=4)
    rng = np.random.default_rng(7)
    return config, {p: v + 0.01 * rng.standard_normal(v.shape).astype(np.float32) for p, v in weights.items()}, ids


def scores(folder, target):
    """Whatever a draft makes of fixed input."""
    report = LoadReport()
    loaded = read_draft(folder, dtype="float32", target=target, report=report)
    rng = np.random.default_rng(0)
    features = jnp.asarray(rng.standard_normal((1, 6, 96)), jnp.float32)
    draft = loaded.draft
    return np.asarray(draft.logits(draft.fuse(features))), loaded, report


@pytest.mark.parametrize("own_head", [True, False])
def test_layouts_load_back_identically(target, tmp_path, own_head):
    config, weights, ids = made(target, own_head)
    plain, speculators, whole = (tmp_path / name for name in ("plain", "speculators", "whole"))
    write_draft(plain, config, weights, ids)
    with pytest.raises(ConfigError, match="holds embedding and head"):
        write_draft(tmp_path / "no", config, weights, ids, form="speculators")
    embedding = np.asarray(target.embedding.weight[...])
    write_draft(speculators, config, weights, ids, form="speculators", embedding=embedding, head=embedding[ids])
    write_draft(whole, config, weights, ids, embedding=embedding, head=embedding[ids])
    right, loaded, _ = scores(plain, target)
    assert loaded.config.own_head is own_head and not loaded.config.own_embedding
    for folder in (speculators, whole):
        found, again, report = scores(folder, target)
        np.testing.assert_array_equal(found, right)
        assert again.capture.boundaries == BOUNDARIES and not again.capture.ambiguous and not report.warnings
        back, ours = trained_weights(again.draft), trained_weights(loaded.draft)
        assert all(np.array_equal(back[path], value) for path, value in ours.items())
    names = load_file(speculators / "model.safetensors").keys()
    assert {"layers.0.hidden_norm.weight", "embed_tokens.weight", "lm_head.weight"} <= names
    assert not any(name.startswith("midlayer") for name in names)


def test_capture_ids_by_each_reader_s_convention(target, tmp_path):
    """SpecForge and SGLang count layer outputs under eagle_config; speculators and vLLM boundaries at the top."""
    config, weights, ids = made(target, True)
    write_draft(tmp_path / "a", config, weights, ids)
    values = json.loads((tmp_path / "a" / "config.json").read_text())
    assert values["eagle_config"] == {IDS_KEY: [0, 1, 2], "use_aux_hidden_state": True}
    assert values[IDS_KEY] == [1, 2, 3] == values["eaglejax"]["boundaries"]
    # without our manifest, each convention alone still gives the same boundaries
    del values["eaglejax"]
    for name, capture in ((IDS_KEY, "auto"), ("eagle_config", "output")):
        alone = {key: value for key, value in values.items() if key not in (IDS_KEY, "eagle_config") or key == name}
        (tmp_path / "a" / "config.json").write_text(json.dumps(alone))
        loaded = read_draft(tmp_path / "a", dtype="float32", target=target, capture=capture, report=LoadReport())
        assert loaded.capture.boundaries == BOUNDARIES
    embedding = np.asarray(target.embedding.weight[...])
    write_draft(tmp_path / "b", config, weights, ids, form="speculators", embedding=embedding, verifier="org/target")
    values = json.loads((tmp_path / "b" / "config.json").read_text())
    assert values[IDS_KEY] == [1, 2, 3] and "eagle_config" not in values
    assert values["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert values["norm_before_residual"] is False
    # the embedding is no layer's output: then only the top level can say it
    write_draft(tmp_path / "c", replace(config, boundaries=(0, 1, 2)), weights, ids)
    assert "eagle_config" not in json.loads((tmp_path / "c" / "config.json").read_text())


@pytest.mark.parametrize("form", ["safeailab", "speculators"])
@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_flags_of_the_forward_pass_are_written(target, tmp_path, form, flag):
    config, weights, ids = made(target, True, **{flag: True})
    embedding = np.asarray(target.embedding.weight[...])
    write_draft(tmp_path / "a", config, weights, ids, form=form, embedding=embedding)
    loaded = read_draft(tmp_path / "a", dtype="float32", target=target, report=LoadReport())
    assert replace(loaded.config, own_embedding=False) == config


def test_what_a_layout_cannot_say_is_refused(target):
    config, _, _ = made(target, True)
    attention = config.layers[0].attention
    assert isinstance(attention, GQAConfig)
    for changed, word in (
        (replace(attention, qk_norm=True), "qk_norm"),
        (replace(attention, window=64), "window"),
        (replace(attention, rope=RopeConfig(1e4, 8, "linear", factor=2.0)), "RoPE scaling"),
    ):
        with pytest.raises(ConfigError, match=word):
            check_form(replace(config, layers=(replace(config.layers[0], attention=changed),)), "safeailab")
    with pytest.raises(ConfigError, match="int8"):
        check_form(config, "speculators", int8=True)
    with pytest.raises(ConfigError, match="no final_norm"):
        check_form(replace(config, final_norm=False), "safeailab")


@pytest.mark.parametrize("own_head", [True, False])
def test_export_command(target, tmp_path, data, capsys, own_head):
    config, weights, ids = made(target, own_head)
    source = tmp_path / "run"
    write_draft(source / "draft", config, weights, ids)  # as a training run leaves it
    model = f"--model={target_folder(data)}"
    steps = [(source, "speculators", []), (tmp_path / "speculators", "safeailab", []), (source, "int8", ["--int8"])]
    for folder, name, more in steps:
        to = "speculators" if name == "speculators" else "safeailab"
        assert run(["export", str(folder), str(tmp_path / name), f"--to={to}", model, "--json", *more]) == 0
        assert json.loads(capsys.readouterr().out)["to"] == to
    right = scores(source / "draft", target)[0]
    for name in ("speculators", "safeailab"):
        np.testing.assert_array_equal(scores(tmp_path / name, target)[0], right)
    rounded = scores(tmp_path / "int8", target)[0]
    assert 0 < np.abs(rounded - right).max() < 0.05 * np.abs(right).max()
    assert ("lm_head.weight" in load_file(tmp_path / "int8" / "model.safetensors")) is own_head


def test_export_refuses(target, tmp_path, data, capsys):
    config, weights, ids = made(target, False)
    write_draft(tmp_path / "a", config, weights, ids)
    with pytest.raises(CheckpointError, match="already there"):
        convert_draft(str(tmp_path / "a"), tmp_path / "a", model=None, form="safeailab")
    with pytest.raises(CheckpointError, match="embedding"):
        convert_draft(str(tmp_path / "a"), tmp_path / "b", model=None, form="safeailab")
    assert not (tmp_path / "b").exists()
    assert run(["export", str(tmp_path / "a"), str(tmp_path / "b"), "--to=safeailab"]) == 1
    assert "no embedding; name the target: --model=NAME" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    place = str(tmp_path / "file" / "b")
    assert run(["export", str(tmp_path / "a"), place, "--to=safeailab", f"--model={target_folder(data)}"]) == 1
    assert "file: cannot be written; found " in capsys.readouterr().err
    assert run(["export", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "--to" in capsys.readouterr().err
    assert run(["export", str(tmp_path / "a"), "--to=safeailab"]) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_knows_its_target(tmp_path, data, capsys, dtype):
    """As README has it: without --model; another target than the run's is refused."""
    out = tmp_path / "run"
    files = write_answers(tmp_path, data)
    train(settings(out, data, files, steps=1, evaluate_every=1, evaluate_prompts=2, evaluate_tokens=4, dtype=dtype))
    assert run(["export", str(out), str(tmp_path / "a"), "--to=speculators"]) == 0
    assert run(["export", str(out), str(tmp_path / "b"), "--to=speculators", f"--model={target_folder(data)}"]) == 0
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
    capsys.readouterr()
    another = tmp_path / "another"
    shutil.copytree(target_folder(data), another)
    weights = load_file(another / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 2
    save_file(weights, another / "model.safetensors", metadata={"format": "pt"})
    assert run(["export", str(out), str(tmp_path / "c"), "--to=safeailab", f"--model={another}"]) == 1
    assert "is not the target that this run was trained for" in capsys.readouterr().err
    # a target that has moved is asked for
    facts = next((out / "best").glob("*/facts/metadata"))
    facts.write_text(facts.read_text().replace(target_folder(data), "/moved/away"))
    assert run(["export", str(out), str(tmp_path / "d"), "--to=safeailab"]) == 1
    assert "found /moved/away; name it: --model=NAME" in capsys.readouterr().err
    assert not (tmp_path / "c").exists() and not (tmp_path / "d").exists()

"""Runs that cannot be meant are refused before the first step; a run may begin from prompts, or from a draft."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_run import settings, write_answers

from eaglejax.errors import CheckpointError, ConfigError, PromptError
from eaglejax.training import memory
from eaglejax.training.run import train

QUICK = dict(steps=2, save_every=2, evaluate_every=2, evaluate_prompts=2, evaluate_tokens=6)


@pytest.fixture(scope="module")
def files(tmp_path_factory, data):
    return write_answers(tmp_path_factory.mktemp("data"), data)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"vocab": 65}, ConfigError, "vocab: must lie within the target's vocabulary; found 65"),
        ({"boundaries": None}, ConfigError, "no usual captures"),
        ({"boundaries": (1, 2, 4)}, ConfigError, "not boundaries of the target"),
        ({"boundaries": (1, 1, 2)}, ConfigError, "not boundaries of the target"),
        ({"row_length": 600}, PromptError, "longer than the target's context; found 600; expected at most 512"),
        ({"model": "/nowhere"}, CheckpointError, "/nowhere"),
    ],
)
def test_settings_that_do_not_fit_the_target(tmp_path, data, files, changes, error, message):
    with pytest.raises(error) as refused:
        train(settings(tmp_path / "run", data, files, **changes))
    assert message in str(refused.value)
    assert not (tmp_path / "run" / "draft").exists()


def test_text_that_does_not_fit(tmp_path, data, files):
    other, bare = tmp_path / "other.jsonl", tmp_path / "bare.jsonl"
    other.write_text(json.dumps({"prompt_ids": [3, 70], "token_ids": [4]}) + "\n")
    bare.write_text(json.dumps({"prompt_ids": [3, 4]}) + "\n")
    with pytest.raises(PromptError, match="another tokenizer; found 70"):
        train(settings(tmp_path / "run", data, (other, files[1])))
    with pytest.raises(PromptError, match="token_ids"):
        train(settings(tmp_path / "run", data, (bare, files[1])))
    with pytest.raises(ConfigError, match="too little text to set some of it aside"):
        train(replace(settings(tmp_path / "run", data, files), held_out=None))


def test_a_step_that_does_not_fit_is_refused_with_an_estimate(tmp_path, data, files, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: 10_000)
    with pytest.raises(ConfigError, match=r"does not fit .* GB beside weights and text; expected at most 0.000 GB"):
        train(settings(tmp_path / "run", data, files))
    assert len((tmp_path / "run" / "training.csv").read_text().splitlines()) == 1  # no step was taken


def test_prompts_are_answered_first_and_a_draft_is_gone_on_with(tmp_path, data, files):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt_ids": [5 + n, 9, 3]} for n in range(6)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = settings(
        tmp_path / "first", data, (prompts, files[1]), regenerate=True, temperature=0.9, answer_tokens=9, **QUICK
    )
    train(first)
    answers = (tmp_path / "first" / "answers.jsonl").read_text().splitlines()
    assert len(answers) == 7 and json.loads(answers[0])["temperature"] == 0.9
    # the shape and the vocabulary are the earlier draft's, and may not be given anew
    start = str(tmp_path / "first" / "draft")
    again = settings(tmp_path / "second", data, files, start=start, mlp=None, vocab=None, boundaries=None, **QUICK)
    said = []
    train(again, said.append)
    assert any(line.startswith("step 0: tau") for line in said)
    ours, before = (json.loads((tmp_path / n / "draft" / "config.json").read_text()) for n in ("second", "first"))
    assert ours == before
    with pytest.raises(ConfigError, match="vocab: is that of the draft to go on from; found 40"):
        train(replace(again, out=str(tmp_path / "third"), vocab=40))


def test_bfloat16_run_keeps_float32_weights(tmp_path, data, files):
    outcome = train(settings(tmp_path / "run", data, files, dtype="bfloat16", **QUICK))
    weights = load_file(outcome.draft / "model.safetensors")
    fc = weights["fc.weight"]
    assert fc.dtype == np.float32 and np.mean((fc.view(np.uint32) & 0xFFFF) != 0) > 0.9

"""`eaglejax bench` from flags to outputs: real pairs, shapes with random weights, and everything it refuses."""

from __future__ import annotations

import csv
import json

import pytest
from alphabet import CAPTURE, write_draft, write_target

from eaglejax.cli.main import run
from eaglejax.sharding import fit

SMALL = ["--limit=1", "--repeats=1", "--max_new_tokens=6", "--max_len=128"]
LAYOUT = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2,
    "vocab_size": 96, "hidden_act": "silu", "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_compile_cache(monkeypatch):
    # the compilation cache is a setting of the whole process, and other tests run in this one
    monkeypatch.setattr("eaglejax.cli.compile_cache.use_compile_cache", lambda: None)


@pytest.fixture(scope="module")
def pair(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("alphabet")
    target, draft = write_target(folder / "target", data / "text" / "letters"), write_draft(folder / "draft")
    return [f"--model={target}", f"--draft={draft}", CAPTURE]


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shape")
    target = {**LAYOUT, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 7}
    draft = {**LAYOUT, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 64}
    (folder / "target.json").write_text(json.dumps(target))
    (folder / "draft.json").write_text(json.dumps(draft))
    return [f"--model={folder / 'target.json'}", f"--draft={folder / 'draft.json'}"]


@pytest.mark.slow
def test_a_pair_is_measured(pair, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "abc"}\n')
    out = [f"--csv={tmp_path / 'b.csv'}", "--json"]
    asked = [
        *pair,
        f"--prompts={tmp_path / 'p.jsonl'}",
        "--num_steps=0,2",
        "--topk=1,2",
        "--num_draft_tokens=99",
        *SMALL,
    ]
    assert run(["bench", *asked, *out]) == 0
    said = json.loads(capsys.readouterr().out)
    plain, chain = said["cells"]
    assert (plain["num_steps"], chain["num_steps"], chain["num_draft_tokens"]) == (0, 2, 3)
    assert chain["tokens_equal_plain"] is True
    assert chain["acceptance"]["by_level_of_all_cycles"] == [1, 0]  # right for the first drafted token alone
    assert said["skipped"][0]["cell"] == "every cell of the tree 2,2,99" and said["settings"]["seed"] == 0
    with (tmp_path / "b.csv").open() as file:
        assert [row["tau"] for row in csv.DictReader(file)] == ["1.0", "2.0"]


def test_a_shape_with_simulated_acceptance(shape, capsys):
    assert run(["bench", *shape, "--tree=2,1,3", "--simulate_acceptance=1,0", "--noignore_eos", *SMALL]) == 0
    text = capsys.readouterr().out
    assert text.startswith("SIMULATED acceptance (conditional rates by level 1, 0;")
    assert "RANDOM weights" in text and "2,1,3 SIMULATED" in text and "of all 100 0; of reaching 100 0" in text
    assert "random" in text and "not compared" in text


@pytest.mark.slow
def test_a_shape_without_it_says_what_its_ratios_are(shape, capsys):
    assert run(["bench", *shape, "--num_steps=0", *SMALL]) == 0
    assert "random weights: a draft is never right" in capsys.readouterr().out


def test_a_shape_that_does_not_fit_is_refused(shape, monkeypatch, capsys):
    monkeypatch.setattr(fit, "machine_free", lambda: 1000)
    assert run(["bench", *shape, *SMALL]) == 1
    assert "random weights of this size do not fit" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, code, said",
    [
        (["--prompts=mtbench"], 1, "no such prompt set; found 'mtbench'; expected one of gsm8k, "),
        (["--prompts=mt_bench,"], 2, "--prompts: an empty grid, or an empty value in it; found 'mt_bench,'"),
        (["--num_steps="], 2, "--num_steps: an empty grid"),
        (["--num_steps=1,x"], 2, "--num_steps: not a whole number; found 'x'"),
        (["--slots=0"], 2, "--slots: out of range; found 0"),
        (["--temperature=-1"], 2, "--temperature: out of range; found -1"),
        (["--tree=3"], 2, "--tree: no tree; found '3'"),
        (["--tree=1,2"], 2, "--tree: no tree; found '1,2'; expected num_steps,topk,num_draft_tokens such as 3,1,4"),
        (["--tree=3,1,x"], 2, "--tree: num_draft_tokens: not a whole number"),
        (
            ["--tree=3,1,9"],
            2,
            "--tree: no tree that can be; found every cell of the tree 3,1,9: num_draft_tokens: a chain",
        ),
        (
            ["--num_steps=3", "--topk=4", "--num_draft_tokens=99"],
            2,
            "--num_steps: no tree that can be; found every cell of",
        ),
        (["--max_len=64", "--max_new_tokens=64"], 2, "--max_new_tokens: no prompt has room beside so many; found 64"),
        (["--tree=3,1,4", "--topk=2"], 2, "--tree and --topk exclude each other"),
        (["--draft=none", "--num_steps=3"], 2, "--draft: a tree needs a draft"),
        (["--repeats=0"], 2, "--repeats: out of range; found 0"),
        (["--limit=-1"], 2, "--limit: out of range; found -1"),
        (["--num_steps=0", "--simulate_acceptance=0.5"], 2, "acceptance belongs to a tree"),
        (["--simulate_acceptance=0.5,2"], 2, "--simulate_acceptance: out of range; found 2"),
        (["--max_new_tokens=1"], 2, "--max_new_tokens: the first token comes from the prefill"),
        (["--max_new_tokens=x"], 2, "--max_new_tokens: not a whole number"),
        (["--csv=/nowhere/at/all.csv"], 1, "csv: /nowhere/at/all.csv: cannot be written"),
        (["--tuning=none"], 2, "Unknown command line flag 'tuning'"),
        (["--coordinator=a:1"], 2, "Unknown command line flag 'coordinator'"),
    ],
)
def test_refusals(words, code, said, capsys):
    assert run(["bench", *words]) == code
    assert said in capsys.readouterr().err


def test_captures_belong_to_drafts_with_weights(shape, capsys):
    assert run(["bench", *shape, "--capture=input"]) == 2
    assert "this model is its config alone" in capsys.readouterr().err


def test_a_refused_run_leaves_no_file(tmp_path, capsys):
    assert run(["bench", "--model=/no/such/model", f"--draft={tmp_path}", f"--csv={tmp_path / 'b.csv'}"]) == 1
    assert "/no/such/model" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_impossible_tree_is_skipped_and_the_rest_runs(shape, capsys):
    asked = ["--tree=4,4,99", "--tree=2,1,3", "--json", *SMALL]
    assert run(["bench", *shape, *asked]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [cell["num_steps"] for cell in said["cells"]] == [0, 2]
    assert [one["cell"] for one in said["skipped"]] == ["every cell of the tree 4,4,99"]
    assert "cannot be filled" in said["skipped"][0]["reason"]


def test_no_tree_measured_is_exit_code_1(shape, capsys, monkeypatch):
    monkeypatch.setattr(
        "eaglejax.measure.bench._ungrowable", lambda engine, cell: "no" if cell.spec.num_steps else None
    )
    assert run(["bench", *shape, "--tree=2,1,3", *SMALL]) == 1
    out, err = capsys.readouterr()
    assert "plain" in out and "no tree that was asked for could be measured; found random, 1 slots" in err


@pytest.mark.parametrize("command", ["bench", "tune", "profile"])
def test_a_broken_line_of_prompts_is_refused_before_loading(command, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "abc"}\n{"prompt": \n')
    assert run([command, "--model=/no/such/model", f"--draft={tmp_path}", f"--prompts={tmp_path / 'p.jsonl'}"]) == 1
    assert f"{tmp_path / 'p.jsonl'} line 2: not valid JSON" in capsys.readouterr().err

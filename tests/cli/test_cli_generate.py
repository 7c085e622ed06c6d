"""The runner from flags to answers, on a pair of tiny models whose answers are known (see alphabet.py)."""

import io
import json
import os
import subprocess
import sys

import pytest
from alphabet import CAPTURE, LETTERS, write_draft, write_target

from eaglejax.checkpoint.reader import CheckpointReader
from eaglejax.cli import session
from eaglejax.cli.main import run


@pytest.fixture(scope="module")
def pair(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("alphabet")
    return write_target(folder / "target", data / "text" / "letters"), write_draft(folder / "draft")


@pytest.fixture(scope="module")
def opened():
    return {}


@pytest.fixture(autouse=True)
def one_engine_per_setting(monkeypatch, opened):
    """Command lines of one setting share an engine and its compiled programs; a process has just one command line."""
    make = session.EagleJaxEngine.from_pretrained

    def remembered(**arguments):
        key = repr(sorted(arguments.items()))
        if key not in opened:
            opened[key] = make(**arguments)
        return opened[key]

    monkeypatch.setattr(session.EagleJaxEngine, "from_pretrained", remembered)
    # the compilation cache is a setting of the whole process, and other tests run in this one
    monkeypatch.setattr(session, "use_compile_cache", lambda: None)


@pytest.fixture
def plain(pair):
    return [f"--model={pair[0]}", "--max_len=64", "--slots=2"]


@pytest.fixture
def chain(pair, plain):
    return [*plain, f"--draft={pair[1]}", CAPTURE, "--num_steps=3", "--nocheck_wiring"]


def answers(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_one_prompt_prints_its_text_and_the_figures_apart(capsys, chain):
    assert run(["generate", "--prompt=abc", "--max_new_tokens=9", *chain]) == 0
    out, err = capsys.readouterr()
    assert out == "defghijkl\n"
    assert "9 tokens: first after" in err and "tokens/s" in err
    assert "chain (3, 1, 4)" in err
    assert "tau 2.00 tokens per cycle, bonus included, over 4 cycles" in err
    assert "accepted at level 1, 2, 3: 100, 0, 0 % of all cycles (100, 0, - % of those that reach it)" in err


def test_without_a_draft_decoding_is_plain(capsys, plain):
    assert run(["generate", "--prompt=abc", "--max_new_tokens=9", "--nostream", *plain]) == 0
    out, err = capsys.readouterr()
    assert out == "defghijkl\n"
    assert "plain decoding, 8 steps" in err


def test_json_holds_the_answer_and_its_counts(capsys, chain):
    assert run(["generate", "--token_ids=0,1,2", "--max_new_tokens=9", "--seed=5", "--json", *chain]) == 0
    (answer,) = answers(capsys)
    assert answer["text"] == "defghijkl" and answer["token_ids"] == list(range(3, 12))
    assert (answer["finish_reason"], answer["stop_reason"]) == ("length", None)
    assert (answer["prompt_tokens"], answer["new_tokens"], answer["seed"]) == (3, 9, 5)
    assert (answer["num_steps"], answer["topk"], answer["num_draft_tokens"]) == (3, 1, 4)
    assert answer["accepted_per_cycle"] == [1] * 4 and answer["tau"] == 2
    assert answer["accepted_by_level_of_all_cycles"] == [1, 0, 0]
    assert answer["accepted_by_level_of_cycles_that_reach_it"] == [1, 0, None]
    assert answer["decode_seconds"] > 0


def test_compilation_is_in_no_rate(capsys, chain):
    chain.append("--max_len=48")  # an engine that no other test has warmed up
    assert run(["generate", "--prompt=a", "--max_new_tokens=40", "--json", *chain]) == 0
    (answer,) = answers(capsys)
    assert 0 < answer["first_token_compile_seconds"] < answer["first_token_seconds"]
    # a tiny model decodes 40 tokens in far less time than its program takes to compile
    assert answer["decode_seconds"] < answer["decode_compile_seconds"]
    assert answer["tokens_per_second"] == pytest.approx(39 / answer["decode_seconds"], rel=0.01)
    assert run(["generate", "--prompt=a", "--max_new_tokens=40", "--json", *chain]) == 0
    (answer,) = answers(capsys)
    assert answer["first_token_compile_seconds"] + answer["decode_compile_seconds"] < 0.05


def test_several_prompts_answer_in_order_whatever_their_kind(capsys, chain, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "a", "id": 1}\n{"token_ids": [25]}\n{"messages": [{"role": "user", "content": "xyz"}]}\n'
        '{"turns": ["0"]}\n{"prompt": "5"}\n'
    )
    assert run(["generate", f"--prompt_file={path}", "--max_new_tokens=4", "--json", *chain]) == 0
    made = answers(capsys)
    assert [a["index"] for a in made] == [0, 1, 2, 3, 4]
    assert [a["text"] for a in made] == ["bcde", "ABCD", "ABCD", "1234", "6789"]


def test_several_prompts_share_their_figures(capsys, plain):
    assert run(["generate", "--prompt=a", "--prompt=b", "--prompt=c", "--max_new_tokens=3", *plain]) == 0
    out, err = capsys.readouterr()
    assert out == "[0] bcd\n[1] cde\n[2] def\n"
    assert "3 answers, 9 tokens in" in err and "plain decoding, 6 steps" in err


def test_a_bad_prompt_among_many_is_refused_before_any_answer(capsys, plain):
    # the third prompt would only run in the second wave
    assert run(["generate", "--token_ids=1", "--token_ids=2", "--token_ids=3,64", *plain]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "prompts[2]" in err and "found 64" in err and "0 to 63" in err


def test_stop_strings_eos_and_stop_ids_reach_the_engine(capsys, chain):
    assert run(["generate", "--prompt=abc", "--stop=zz", "--stop=gh", "--json", *chain]) == 0
    (answer,) = answers(capsys)
    assert (answer["text"], answer["finish_reason"], answer["stop_reason"]) == ("def", "stop", "gh")
    assert answer["token_ids"] == [3, 4, 5, 6, 7] and answer["new_tokens"] == 5
    assert run(["generate", "--prompt=6", "--json", *chain]) == 0
    (answer,) = answers(capsys)
    assert (answer["token_ids"], answer["stop_reason"]) == ([59, 60, 61, 62, 63], 63)
    assert run(["generate", "--prompt=8", "--ignore_eos", "--stop_token_ids=1,2", "--json", *chain]) == 0
    (answer,) = answers(capsys)
    assert (answer["token_ids"], answer["stop_reason"]) == ([61, 62, 63, 0, 1], 1)


def test_chat_and_system_go_through_the_template(capsys, plain):
    assert run(["generate", "--prompt=B", "--chat", "--system=A", "--json", "--max_new_tokens=2", *plain]) == 0
    (answer,) = answers(capsys)
    assert answer["prompt_tokens"] == 2 and answer["text"] == "CD"


def test_a_run_config_is_enough(capsys, pair, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        f'[model]\nmodel = "{pair[0]}"\ndraft = "{pair[1]}"\ncapture = [1, 2, 3]\n'
        "[speculation]\nnum_steps = 3\n[sampling]\nmax_new_tokens = 5\n[engine]\nmax_len = 64\nslots = 2\n"
    )
    assert run(["generate", "--prompt=a", f"--config={path}", "--json"]) == 0
    (answer,) = answers(capsys)
    assert (answer["text"], answer["accepted_per_cycle"], answer["num_steps"]) == ("bcdef", [1, 1], 3)


def test_report_tells_what_was_loaded(capsys, chain):
    assert run(["generate", "--prompt=a", "--max_new_tokens=1", "--report", *chain]) == 0
    out, err = capsys.readouterr()
    assert out == "b\n"
    assert "speculation:" in err and "boundaries [1, 2, 3]" in err


def test_chat_reads_piped_lines_and_remembers(capsys, chain, monkeypatch):
    lines = "a\n/nonsense\n\n/reset\nK\n/exit\nnot read\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert run(["chat", "--max_new_tokens=3", *chain]) == 0
    out, err = capsys.readouterr()
    assert out == "bcd\nLMN\n"
    assert err.count("tau 2.00") == 2 and "unknown command /nonsense" in err


def test_chat_keeps_the_conversation(capsys, plain, monkeypatch):
    seen = []
    stream = session.Session.stream
    monkeypatch.setattr(
        session.Session, "stream", lambda self, prompt, *rest: seen.append(prompt) or stream(self, prompt, *rest)
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nk\n"))
    assert run(["chat", "--system=z", "--max_new_tokens=2", *plain]) == 0
    assert capsys.readouterr().out == "bc\nlm\n"
    assert [(m["role"], m["content"]) for m in seen[1]] == [
        ("system", "z"),
        ("user", "a"),
        ("assistant", "bc"),
        ("user", "k"),
    ]


def test_a_conversation_longer_than_max_len_ends_piped_input(capsys, plain, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("a" * 65 + "\n"))
    assert run(["chat", *plain]) == 1
    assert "the prompt is too long" in capsys.readouterr().err


def test_ctrl_c_is_exit_code_130(capsys, plain, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(session.Session, "stream", interrupted)
    assert run(["generate", "--prompt=a", *plain]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("model.safetensors", lambda b: b[:-1024], "incomplete"),
        ("model.safetensors", lambda b: b"", "empty"),
        ("config.json", lambda b: b[: len(b) // 2], "cut off after"),
        ("tokenizer.json", lambda b: b[:40], "tokenizer.json"),
    ],
)
def test_tampered_files_are_refused_with_one_message(capsys, data, tmp_path, file, change, words):
    target = write_target(tmp_path / "target", data / "text" / "letters")
    (target / file).write_bytes(change((target / file).read_bytes()))
    assert run(["generate", "--prompt=a", f"--model={target}"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "Traceback" not in err
    assert err.startswith("error: ") and str(target / file) in err and words in err


@pytest.mark.parametrize(
    ("flags", "needs"),
    [
        (["generate", "--prompt=a"], "the prompt"),
        (["generate", "--prompt=a", "--chat"], "the prompt"),
        (["generate", "--token_ids=1,2", "--stop=a"], "--stop"),
        (["chat"], "chat"),
    ],
)
def test_text_without_a_tokenizer_is_refused_before_weights_are_read(capsys, data, tmp_path, monkeypatch, flags, needs):
    target = write_target(tmp_path / "target", data / "text" / "letters")
    for file in target.glob("tokenizer*"):
        file.unlink()
    monkeypatch.setattr(CheckpointReader, "read", lambda self, name: pytest.fail(f"{name} was read"))
    assert run([*flags, f"--model={target}"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"error: {target}: this checkpoint has no tokenizer; found text ({needs})")
    assert "tokenizer.json" in err and "--token_ids" in err


def test_token_ids_need_no_tokenizer(capsys, data, tmp_path):
    target = write_target(tmp_path / "target", data / "text" / "letters")
    (target / "tokenizer.json").unlink()
    assert (
        run(["generate", "--token_ids=0,1", "--max_new_tokens=3", "--json", f"--model={target}", "--max_len=64"]) == 0
    )
    (answer,) = answers(capsys)
    assert answer["token_ids"] == [2, 3, 4]


def test_a_draft_in_the_targets_place_is_named_before_its_missing_tokenizer(capsys, pair):
    assert run(["generate", "--prompt=a", f"--model={pair[1]}"]) == 1
    assert "this is a draft, not a target" in capsys.readouterr().err


def test_a_draft_that_is_the_target_is_refused(capsys, pair, plain):
    assert run(["generate", "--prompt=a", f"--draft={pair[0]}", *plain]) == 1
    err = capsys.readouterr().err
    assert "the draft is the target itself" in err and str(pair[0]) in err


def test_a_second_process_takes_its_programs_from_the_cache(pair, tmp_path):
    environment = {**os.environ, "EAGLEJAX_CACHE": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-m", "eaglejax", "generate", f"--model={pair[0]}", "--max_len=64", "--json"]
    command += [f"--draft={pair[1]}", CAPTURE, "--prompt=abc", "--max_new_tokens=9"]
    made = [json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout) for _ in "12"]
    assert any((tmp_path / "compiled").iterdir())
    assert [a["text"] for a in made] == ["defghijkl"] * 2
    seconds = [a["first_token_compile_seconds"] + a["decode_compile_seconds"] for a in made]
    assert seconds[1] < 0.7 * seconds[0], seconds
    assert LETTERS.startswith("abc" + made[0]["text"])

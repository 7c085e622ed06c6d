"""Command lines: what is wrong usage (exit code 2), what is refused input (1), how flags and a file go together."""

import logging
import subprocess
import sys
import time

import pytest

from eaglejax import Sampling, Speculation
from eaglejax.cli.flags import UsageError, define
from eaglejax.cli.main import run
from eaglejax.cli.prompts import read_flags
from eaglejax.cli.settings import read_settings
from eaglejax.errors import PromptError

GROUPS = ("prompts", "system", "model", "speculation", "sampling", "output", "run")


def flags(*words: str):
    values = define(GROUPS)
    values(["eaglejax", *words])
    return values


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no command given"),
        (["generat"], "unknown command 'generat'. Did you mean generate?"),
        (["serve"], "There are: generate, chat"),
        (["generate"], "give prompts in one way"),
        (["generate", "--prompt=x", "--temprature=1"], "Did you mean: temperature"),
        (["generate", "--prompt=x", "hello"], "unexpected argument 'hello'"),
        (["generate", "--prompt"], "Missing value for flag"),
        (["generate", "--prompt=x", "--token_ids=1"], "--prompt and --token_ids"),
        (["generate", "--token_ids=1,a"], "--token_ids: not token ids; found '1,a'"),
        (["generate", "--prompt=x", "--top_p=1.5"], "--top_p: out of range; found 1.5; expected above 0, up to 1"),
        (["generate", "--prompt=x", "--temperature=hot"], "--temperature: not a number; found 'hot'"),
        (["generate", "--prompt=x", "--max_new_tokens=-1"], "--max_new_tokens: out of range; found -1"),
        (["generate", "--prompt=x", "--max_new_tokens=1.5"], "--max_new_tokens: not a whole number"),
        (["generate", "--prompt=x", "--stop="], "--stop: stop strings must be non-empty text"),
        (["generate", "--prompt=x", "--stop_token_ids=-2"], "--stop_token_ids: out of range; found -2"),
        (["generate", "--prompt=x", "--num_steps=3", "--num_draft_tokens=9"], "--num_draft_tokens: a chain"),
        (["generate", "--prompt=x", "--num_steps=1", "--topk=2", "--num_draft_tokens=64"], "cannot be filled"),
        (["generate", "--prompt=x", "--speculation=none", "--topk=2"], "--speculation: a mode and a tree"),
        (
            ["generate", "--prompt=x", "--speculation=fast"],
            "--speculation: unknown mode; found 'fast'; expected \"auto\"",
        ),
        (["generate", "--prompt=x", "--draft=none", "--num_steps=2"], "--num_steps: a tree needs a draft"),
        (["generate", "--prompt=x", "--model=elsewhere", "--topk=2"], "--topk: a tree needs a draft"),
        (["generate", "--prompt=x", "--capture=3,b"], "--capture: not a reading of captured layers; found '3,b'"),
        (["generate", "--prompt=x", "--draft_config={a"], "--draft_config: not JSON; found '{a'"),
        (["generate", "--prompt=x", "--draft_config=3"], "--draft_config: wrong kind of value; found 3"),
        (["generate", "--prompt=x", "--dtype=int8"], "--dtype: not a compute dtype; found int8"),
        (["generate", "--prompt=x", "--max_len=0"], "--max_len: out of range; found 0"),
        (["generate", "--prompt=x", "--system=y"], "--system needs a conversation"),
        (["generate", "--prompt=x", "--prompt=y", "--stream"], "--stream prints one answer"),
        (["generate", "--prompt=x", "--json", "--stream"], "--stream prints one answer"),
        (["generate", "--prompt=x", "--chat=perhaps"], "flag --chat"),
        (["chat", "--prompt=x"], "Unknown command line flag 'prompt'"),
    ],
)
def test_wrong_usage_is_exit_code_2(capsys, words, said):
    assert run(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "--help" in err


def test_wrong_usage_and_help_do_not_wait_for_jax():
    # a fresh interpreter: this one has jax already
    script = (
        "import sys; from eaglejax.cli.main import run; "
        "codes = run(['generate', '--prompt=x', '--top_p=7']), run(['generate', '--help']), run(['--help']); "
        "assert codes == (2, 0, 0), codes; assert 'jax' not in sys.modules and 'numpy' not in sys.modules"
    )
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    assert time.perf_counter() - begin < 5  # 0.2 s where nothing else runs


def test_help_names_every_flag_of_the_command(capsys):
    assert run(["generate", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"--{name}=" in out or f"--[no]{name}" in out for name in define(GROUPS))


def test_faults_in_the_file_are_refused_input_and_in_flags_wrong_usage(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text("[sampling]\ntop_p = 7\n")
    assert run(["generate", "--prompt=x", f"--config={path}"]) == 1
    assert f"error: {path}: [sampling] top_p: out of range; found 7" in capsys.readouterr().err
    assert run(["generate", "--prompt=x", f"--config={path}", "--top_p=8"]) == 2
    assert "--top_p: out of range; found 8" in capsys.readouterr().err


def test_flags_win_over_the_file_key_by_key(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\nmodel = "t"\ndraft = "d"\n[speculation]\nnum_steps = 4\ntopk = 2\n'
        "[sampling]\ntemperature = 0.5\nseed = 3\n[engine]\nslots = 8\n"
    )
    assert read_settings(flags(f"--config={path}")).sampling == Sampling(temperature=0.5, seed=3)
    settings = read_settings(flags(f"--config={path}", "--seed=4", "--num_steps=2", "--model=u", "--slots=1"))
    assert (settings.model, settings.draft, settings.slots) == ("u", "d", 1)
    assert settings.sampling == Sampling(temperature=0.5, seed=4)
    assert settings.speculation == Speculation(num_steps=2, topk=2)
    assert read_settings(flags(f"--config={path}", "--speculation=none")).speculation is None
    path.write_text('[speculation]\nmode = "none"\n')
    assert read_settings(flags(f"--config={path}", "--num_steps=2")).speculation == Speculation(num_steps=2)


def test_numbers_come_as_text_and_none_is_unset():
    settings = read_settings(
        flags(
            "--num_steps=3",
            "--topk=2",
            "--num_draft_tokens=None",
            "--seed=None",
            "--top_k=5",
            "--stop_token_ids=[1, 2]",
        )
    )
    assert settings.speculation == Speculation(num_steps=3, topk=2)
    assert settings.sampling == Sampling(top_k=5, stop_token_ids=[1, 2])
    assert settings.draft == "smollm2-eagle3"


def test_keys_of_the_draft_s_config_come_as_json():
    settings = read_settings(flags('--draft_config={"rope_theta": 1e4, "norm_output": false}'))
    assert settings.draft_config == {"rope_theta": 10000.0, "norm_output": False}


def test_defaults_speculate_with_the_built_in_draft_only():
    assert read_settings(flags()).draft == "smollm2-eagle3"
    assert read_settings(flags("--speculation=none")).draft is None
    assert read_settings(flags("--model=other")).draft is None
    assert read_settings(flags("--draft=None")).draft is None


def test_prompts_of_a_command_line(tmp_path):
    said = {"role": "user", "content": "a"}
    told = {"role": "system", "content": "s"}
    assert read_flags(flags("--prompt=a", "--prompt=b")) == ["a", "b"]
    assert read_flags(flags("--token_ids=1,2", "--token_ids=3")) == [[1, 2], [3]]
    assert read_flags(flags("--prompt=a", "--chat")) == [[said]]
    assert read_flags(flags("--prompt=a", "--chat", "--system=s")) == [[told, said]]
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"token_ids": [4]}\n{"messages": [{"role": "user", "content": "a"}]}\n')
    assert read_flags(flags(f"--prompt_file={path}")) == ["a", [4], [said]]
    path.write_text('{"turns": ["a", "b"]}\n{"messages": [{"role": "system", "content": "own"}]}')
    own = [{"role": "system", "content": "own"}]
    assert read_flags(flags(f"--prompt_file={path}", "--system=s")) == [[told, said], own]
    path.write_text('{"token_ids": [4]}\n')
    with pytest.raises(UsageError, match="--system needs a conversation"):
        read_flags(flags(f"--prompt_file={path}", "--system=s"))


def test_empty_prompts_are_refused_before_a_model_is_loaded(tmp_path, capsys):
    assert run(["generate", "--prompt=", "--model=nowhere"]) == 1
    assert "error: --prompt: the prompt is empty" in capsys.readouterr().err
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert run(["generate", f"--prompt_file={path}", "--model=nowhere"]) == 1
    assert f"error: {path} line 2: an empty line" in capsys.readouterr().err


def test_a_traceback_is_shown_where_asked_for():
    with pytest.raises(PromptError):
        run(["generate", "--prompt=", "--traceback"])


@pytest.mark.parametrize("command", [["generate", "--prompt=x"], ["chat"], ["check"], ["profile"]])
def test_a_tuning_that_is_not_there_is_refused_by_every_command(command, capsys, tmp_path):
    assert run([*command, f"--tuning={tmp_path}/none.json", "--num_steps=2"]) == 1
    assert (
        f"--tuning: no such file; found '{tmp_path}/none.json'; expected auto, none, measure" in capsys.readouterr().err
    )
    file = tmp_path / "run.toml"
    file.write_text('[engine]\ntuning = "mesure"\n')
    assert run([*command, f"--config={file}"]) == 1
    assert f"{file}: [engine] tuning: no such file; found 'mesure'" in (err := capsys.readouterr().err)
    assert "did you mean measure?" in err


@pytest.mark.parametrize("beside", ["--num_steps=2", "--speculation=none", "--draft=none"])
def test_a_tuning_that_nothing_reads_is_told(beside, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("eaglejax"), "propagate", True)
    (tmp_path / "t.json").write_text("{}")
    settings = read_settings(flags("--prompt=x", f"--tuning={tmp_path}/t.json", beside))
    assert settings.tuning == f"{tmp_path}/t.json"
    assert (
        f"--tuning: not used: only --speculation=auto with a draft chooses by a tuning; found {tmp_path}" in caplog.text
    )
    caplog.clear()
    read_settings(flags("--prompt=x", f"--tuning={tmp_path}/t.json"))
    read_settings(flags("--prompt=x", "--tuning=none", beside))
    assert not caplog.text

"""`eaglejax profile`: a table and JSON from a small pair, refusals (1), wrong usage (2)."""

import importlib.util
import json

import kit_m
import pytest
from type_checks import jaxtyping_off

from eaglejax.cli.main import run
from eaglejax.errors import ConfigError
from eaglejax.measure.profile_picture import check_picture


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(kit_m.write_target(tmp_path_factory.mktemp("profile"), kit_m.sharp(kit_m.ring()), layers=2))


def words(target, *more):
    return ["profile", f"--model={target}", "--token_ids=3,4,5", "--max_len=32", "--repeats=1", *more]


def test_json_of_plain_decoding(target, tmp_path, capsys):
    with jaxtyping_off():
        assert run(words(target, "--json", "--max_new_tokens=6", f"--trace_dir={tmp_path / 'trace'}")) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["cycles"] == 5 and out["num_steps"] == 0 and out["tau"] == 1 and out["same_tokens"]
    assert 0.95 < out["named_share"] < 1.05 and out["distortion"] > 0
    assert {"verify: attention", "verify: MLP", "verify: head", "commit"} <= {p["name"] for p in out["phases"]}
    assert "draft" not in out["groups"] and "draft prefill" not in {p["name"] for p in out["prefill"]}
    assert out["hardware"]["bytes_per_second"] > 0 and out["twice"] is None
    assert list((tmp_path / "trace").glob("plugins/profile/*/*.xplane.pb"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--repeats=0"], "--repeats: out of range; found 0"),
        (["--prompts=mt_bench"], "--prompts names a set of prompts, and others are given"),
        (["--num_processes=2"], "several processes need --coordinator, --process_id too"),
        (["--twice=perhaps"], "flag --twice"),
    ],
)
def test_wrong_usage(target, capsys, more, said):
    assert run(words(target, *more)) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ["--coordinator=h:1", "--num_processes=2", "--process_id=0"],
            "--num_processes: a profile is taken by one process",
        ),
        (["--trace_dir=/dev/null/trace"], "trace_dir /dev/null/trace: cannot be written; found Not a directory"),
        (["--stop_token_ids=1", "--max_new_tokens=1"], "no cycle to profile"),
        (["--token_ids=5,6", "--slots=1"], "more prompts than slots"),
    ],
)
def test_refused(target, capsys, more, said):
    assert run(words(target, *more)) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--stop=x"], "stop strings make the host stop the loop"),
        (["--max_new_tokens=1"], "no cycle to profile"),
        (["--token_ids=5,6", "--slots=1"], "more prompts than slots"),
    ],
)
def test_refused_before_anything_is_loaded(tmp_path, capsys, more, said):
    (tmp_path / "none").mkdir()
    trace = tmp_path / "trace"
    assert run(words(str(tmp_path / "none"), f"--trace_dir={trace}", *more)) == 1
    assert said in capsys.readouterr().err and not trace.exists()


def test_refused_sets(target, capsys):
    assert run(["profile", f"--model={target}", "--prompts=mtbench"]) == 1
    assert "did you mean mt_bench?" in capsys.readouterr().err


def test_pictures_are_refused_before_anything_runs(tmp_path):
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(ConfigError, match=r'pictures need matplotlib.*pip install "eaglejax\[plots\]"'):
            check_picture(tmp_path / "a.png")
        return
    check_picture(tmp_path / "a.png")
    with pytest.raises(ConfigError, match="no kind of picture"):
        check_picture(tmp_path / "a.txt")
    with pytest.raises(ConfigError, match="no such folder"):
        check_picture(tmp_path / "none" / "a.png")

"""`eaglejax convert`: what it says, and what is wrong usage."""

import json
import subprocess
import sys

import pytest

from eaglejax.checkpoint.reader import open_checkpoint
from eaglejax.cli.main import run


@pytest.fixture
def target(data):
    return data / "targets" / "llama_tied_linear"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give SOURCE and TARGET"),
        (["a"], "give SOURCE and TARGET"),
        (["a", "b"], "--to: the form to convert to; found None; expected orbax or safetensors"),
        (["a", "b", "--to=gguf"], "--to: the form to convert to; found 'gguf'; expected orbax or safetensors"),
        (["a", "b", "c", "--to=orbax"], "unexpected argument 'c'"),
        (["a", "b", "--to=orbax", "--max_shard_gb=two"], "--max_shard_gb: not a number; found 'two'"),
        (["a", "b", "--to=orbax", "--max_shard_gb=0"], "--max_shard_gb: out of range; found 0; expected above 0"),
        (["a", "b", "--to=orbax", "--max_shard_gb=nan"], "--max_shard_gb: out of range"),
        (["a", "b", "--to=orbax", "--quantize=int3"], "--quantize: unknown; found 'int3'; expected int8 or int4"),
        (["a", "b", "--too=orbax"], "Did you mean: to"),
    ],
)
def test_wrong_usage(capsys, words, said):
    assert run(["convert", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and "eaglejax convert --help" in err


def test_help(capsys):
    assert run(["convert", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: eaglejax convert SOURCE TARGET --flag=value")
    assert all(flag in out for flag in ("--to=", "--max_shard_gb=", "--[no]json"))


def test_there_and_back(target, tmp_path, capsys):
    assert run(["convert", str(target), str(tmp_path / "o"), "--to=orbax", "--max_shard_gb=0.00002"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{tmp_path / 'o'}: ") and "MB/s)" in out and "groups" in out
    assert err == "not taken along: expected.safetensors\n"
    assert run(["convert", str(tmp_path / "o"), str(tmp_path / "s"), "--to=safetensors", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["to"], values["files"], values["kept"], values["already_done"]) == ("safetensors", 1, 0, False)
    assert values["bytes"] == values["written_bytes"] > 0
    one, two = open_checkpoint(target), open_checkpoint(tmp_path / "s")
    assert one.tensors.keys() == two.tensors.keys()
    assert all(one.read(name).tobytes() == two.read(name).tobytes() for name in one.tensors)
    assert run(["convert", str(tmp_path / "o"), str(tmp_path / "s"), "--to=safetensors"]) == 0
    assert "already there" in capsys.readouterr().out


def test_what_is_not_quantised_is_named(target, tmp_path, capsys):
    """The tiny target's widths are no multiples of 32, but for some."""
    pytest.importorskip("qwix")
    words = ["convert", str(target), str(tmp_path / "q"), "--to=safetensors", "--quantize=int4"]
    assert run(words) == 0
    said = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("not quantised: "))
    assert run([*words, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)["left_plain"]
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert said.startswith(f"not quantised: {plain['count']} projections (") and 0 < len(plain["names"]) <= 3
    assert all(name in said for name in plain["names"])
    ignored = config["quantization_config"]["ignore"]
    assert all(name.removesuffix(".weight") in ignored for name in plain["names"])


def test_refusals_are_exit_code_1(target, tmp_path, capsys):
    assert run(["convert", str(target), str(target / "o"), "--to=orbax"]) == 1
    assert "error: " in (err := capsys.readouterr().err) and "the target lies inside the source" in err
    assert run(["convert", "smollm3", str(tmp_path / "o"), "--to=orbax"]) == 1
    assert "smollm3: no such file or folder, and no built-in name" in capsys.readouterr().err


def test_a_fresh_process_is_silent_and_asks_for_no_device(target, tmp_path):
    """Neither jax's nor orbax's own messages reach the terminal, and no accelerator is looked for."""
    script = (
        "import sys; from eaglejax.cli.main import run; "
        f"code = run(['convert', {str(target)!r}, {str(tmp_path / 'o')!r}, '--to=orbax', '--json']); "
        "import jax; assert jax.config.jax_platforms == 'cpu'; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert json.loads(done.stdout)["to"] == "orbax"


def test_eaglejax_is_imported_without_orbax():
    code = (
        "import sys; import eaglejax, eaglejax.checkpoint.convert, eaglejax.cli.convert\n"
        "assert not {'orbax.checkpoint', 'tensorstore'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

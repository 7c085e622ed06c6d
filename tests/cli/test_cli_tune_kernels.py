"""`eaglejax tune_kernels`: what is refused, what is listed, and what is stored when the measuring is made up."""

import json

import jax
import pytest

from eaglejax.cli.main import run
from eaglejax.kernels import select, tile_store
from eaglejax.kernels.tile_candidates import candidates
from eaglejax.kernels.tile_store import Found, Here
from eaglejax.measure import tune_kernels
from eaglejax.measure.kernel_cases import keys_of, rows_for
from eaglejax.measure.tune_kernels import Measured
from eaglejax.sharding.plan_models import read_models

MODEL = "--model=qwen3-30b-a3b"
pallas = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernels are written for jax 0.11's Pallas")


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ((), 2, "--model is needed"),
        ((MODEL, "--rows=1,x"), 2, "--rows: not a whole number"),
        ((MODEL, "--rows=65"), 2, "--rows: out of range; found 65"),
        ((MODEL, "--slots=0"), 2, "--slots: out of range"),
        ((MODEL, "--expert_split=half"), 2, "--expert_split: unknown; found 'half'"),
        ((MODEL,), 1, "no kernel of ours can run here, so there is nothing to measure: no GPU (cpu)"),
        ((MODEL, "--out=/dev/null/a.json"), 1, "--out /dev/null/a.json: cannot be written"),
    ],
)
def test_refusals(capsys, flags, code, said):
    assert run(["tune_kernels", *flags]) == code
    assert said in capsys.readouterr().err


@pallas
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((MODEL, "--mesh=model=0"), "--mesh"),
        ((MODEL, "--mesh=data=2", "--slots=3"), "--slots: not whole shares of data=2; found 3"),
        (("--model=qwen4",), "no such config"),
    ],
)
def test_models_and_meshes_that_cannot_be(capsys, flags, said):
    assert run(["tune_kernels", "--print", *flags]) > 0
    assert said in capsys.readouterr().err


@pallas
def test_what_would_be_measured_is_listed_without_a_card(capsys, monkeypatch):
    assert run(["tune_kernels", MODEL, "--print", "--max_len=2048,8192", "--slots=1,4"]) == 0
    out = capsys.readouterr().out
    assert "no kernel of ours runs here, so nothing stored is looked at: no GPU (cpu)" in out
    assert out.count("attention slots") == 4 and "project" not in out
    assert (
        "down experts 128, topk 8, d 2048, f 768\n  rule (one row): step 192, stages 5, parts 4; 12 candidates" in out
    )
    monkeypatch.setenv(select.VARIABLE, "pallas")
    assert run(["tune_kernels", MODEL, "--print"]) == 0
    assert "project d 2048, out1 4096, out2 1024" in capsys.readouterr().out
    monkeypatch.setenv(select.VARIABLE, "xla")
    assert run(["tune_kernels", MODEL, "--print"]) == 1
    assert "XLA was asked for" in capsys.readouterr().err


@pallas
def test_what_a_mesh_and_packing_leave_out(capsys):
    assert run(["tune_kernels", "--model=kimi-k2.5", "--mesh=model=8", "--draft=none", "--print"]) == 0
    out, err = capsys.readouterr()
    assert "heads 8, kv_heads 1, width 576" in out and "gateup" not in out and "route" not in out
    assert "packed experts have their rule alone" in err


@pallas
def test_what_is_measured_is_stored_as_it_comes(capsys, monkeypatch, tmp_path):
    """Into an own cache folder, as if on a card."""
    here = Here("NVIDIA H200", jax.__version__, "0.0")
    monkeypatch.setenv("EAGLEJAX_CACHE", str(tmp_path))
    monkeypatch.setattr(tile_store, "here", lambda: here)
    asked = {}

    def measure(key, rows):
        if key.kernel == "route":
            raise KeyboardInterrupt
        asked[key] = rows
        choice = candidates(key)[0]
        found = Found(key, choice, rows, (2.0,) * len(rows), (1.0,) * len(rows), "2026-01-02")
        return Measured(found, 3, ("step 64: relative error 0.3 (1 rows)",))

    monkeypatch.setattr(tune_kernels, "tune_key", measure)
    assert run(["tune_kernels", MODEL, "--draft=none"]) == 130
    file = tmp_path / "tiles" / "nvidia-h200.json"
    stored = json.loads(file.read_text())
    assert {one["kernel"] for one in stored["tiles"]} == {"attention", "gateup", "down"}
    assert stored["device"] == "NVIDIA H200" and stored["jax"] == jax.__version__
    assert stored["tiles"][0]["shape"]["cached"] == 8192 and stored["tiles"][0]["choice"]["tile"] == 64
    assert set(asked.values()) == {(1, 4, 8)}
    capsys.readouterr()
    assert run(["tune_kernels", MODEL, "--draft=none", "--print"]) == 0
    out = capsys.readouterr().out
    assert f"stored in {file}" in out and "1 rows 1.00 us (rule 2.00)" in out and "stored: nothing" in out
    own = tmp_path / "own.json"
    monkeypatch.setattr(tune_kernels, "tune_key", lambda key, rows: Measured(_rule(key, rows), 3))
    assert run(["tune_kernels", MODEL, "--draft=none", f"--out={own}", "--rows=2", "--slots=8"]) == 0
    out = capsys.readouterr().out
    assert "NVIDIA H200" in out and "rule (3)" in out and f"stored in {own}" in out
    rows = {one["kernel"]: one["rows"] for one in json.loads(own.read_text())["tiles"]}
    assert rows == {"attention": [2], "gateup": [16], "down": [16], "route": [16]}
    file.write_text("{")
    assert run(["tune_kernels", MODEL, "--print"]) == 1
    assert "not a file of tiles" in capsys.readouterr().err


def _rule(key, rows):
    return Found(key, None, rows, (2.0,) * len(rows), (2.0,) * len(rows), "2026-01-02")


@pallas
def test_rows_are_those_that_are_served():
    models = read_models("qwen3-30b-a3b", None)
    with select.compiling_for("gpu"):
        keys = {key.kernel: key for key in keys_of(models.target, [1], [512, 8192])}
    assert set(keys) == {"attention", "gateup", "down", "route"} and keys["attention"].named()["cached"] == 8192
    assert rows_for(keys["attention"], [1, 32, 33], [4]) == (1, 32)
    assert rows_for(keys["route"], [1, 8], [1, 4]) == (1, 4, 8)
    assert rows_for(keys["down"], [1, 8], [1, 4, 16]) == (1, 4, 8, 16, 32)

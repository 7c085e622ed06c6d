"""`eaglejax train`: settings from file and flags, refusals with their exit codes, and a run that is killed."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from eaglejax.cli.main import run

SETTINGS = """
vocab = 40
mlp = 32
boundaries = [1, 2, 3]
row_length = 32
batch = 2
steps = 12
unroll = 2
dtype = "float32"
save_every = 2
evaluate_every = 6
evaluate_tokens = 6
tree = [2, 1, 3]
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory, data):
    """A TOML file of a tiny run: random answers, since only the machinery is looked at."""
    folder, rng = tmp_path_factory.mktemp("files"), np.random.default_rng(0)
    rows = [
        {"prompt_ids": rng.integers(3, 60, 4).tolist(), "token_ids": rng.integers(3, 60, 9).tolist()} for _ in range(24)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = f'model = "{data / "targets" / "llama_tied_linear"}"\ndata = "{folder / "data.jsonl"}"\n'
    (folder / "run.toml").write_text(model + SETTINGS)
    return folder / "run.toml"


def test_a_run_from_a_file_with_flags_over_it(files, tmp_path, capsys):
    assert run(["train", f"--config={files}", f"--out={tmp_path}/run", "--steps=3", "--json"]) == 0
    printed = capsys.readouterr()
    outcome = json.loads(printed.out)
    assert outcome["step"] == 3 and outcome["draft"] == f"{tmp_path}/run/draft"
    assert "tokens carry loss" in printed.err and "2 prompts held out" in printed.err
    assert len((tmp_path / "run" / "training.csv").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--mesh=tensor=8"], 2, "--mesh: not a mesh; found 'tensor=8'"),
        (["--mesh=data=4"], 1, "run.toml: batch: the rows of a batch do not divide over the data axis"),
        (["--mesh=model=16"], 1, "mesh: a mesh of 16 devices, and there are 8"),
        (["--steps=none", "--rate=-1"], 2, "--rate: out of range"),
        (["--config=/no/such.toml"], 1, "/no/such.toml: cannot be read"),
        (["--vocab=100"], 1, "error: --vocab: must lie within the target's vocabulary; found 100; expected 1..64"),
        (["--data=/no/such.jsonl"], 1, "/no/such.jsonl: cannot be read"),
        (["surplus"], 2, "surplus"),
    ],
)
def test_refusals(files, tmp_path, capsys, flags, code, message):
    assert run(["train", f"--config={files}", f"--out={tmp_path}/run", *flags]) == code
    assert message in capsys.readouterr().err


def test_the_fault_of_a_file_is_told_by_its_key(files, tmp_path, capsys):
    broken = tmp_path / "broken.toml"
    broken.write_text(files.read_text().replace("steps = 12", "steps = 0"))
    assert run(["train", f"--config={broken}", f"--out={tmp_path}/run"]) == 1
    assert f"{broken}: steps: out of range; found 0" in capsys.readouterr().err


def test_a_killed_run_goes_on(files, tmp_path):
    """SIGKILL while checkpoints are written every step: the same command ends as a straight run does."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "eaglejax", "train", f"--config={files}", f"--out={out}", "--save_every=1"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.time() + 300
    while time.time() < until and process.poll() is None and not (out / "checkpoints" / "4").exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    again = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert "goes on from step" in again.stderr
    straight = tmp_path / "straight"
    assert run(["train", f"--config={files}", f"--out={straight}"]) == 0
    assert (out / "training.csv").read_bytes() == (straight / "training.csv").read_bytes()
    assert not [p.name for p in (out / "checkpoints").iterdir() if not p.name.isdigit()]


def test_a_terminated_run_says_how_to_go_on(files, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "eaglejax", "train", f"--config={files}", f"--out={out}", "--save_every=1"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [*command, "--steps=100000"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    until = time.time() + 300
    while time.time() < until and process.poll() is None and not (out / "checkpoints").exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 143 and "stopped: the same command goes on from the last checkpoint" in said


def test_no_acceptance_is_null(files, tmp_path, capsys, monkeypatch):
    """Where every held-out answer ends at once there is no tau; NaN is no JSON."""
    from eaglejax.training import evaluate

    nothing = evaluate.Acceptance(float("nan"), [float("nan")] * 2, [float("nan")] * 2, 2, 0)
    monkeypatch.setattr(evaluate, "accepted", lambda *given: nothing)
    flags = ["train", f"--config={files}", "--steps=1"]
    assert run([*flags, f"--out={tmp_path}/a", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["best_tau"] is None and "Infinity" not in printed.out
    assert "no acceptance on 2 held-out prompts" in printed.err
    assert run([*flags, f"--out={tmp_path}/b"]) == 0
    assert "no acceptance found at any step of 1 (all steps taken)" in capsys.readouterr().out

"""Trial 49: two processes of four devices each give the same tokens, and refuse together where they would hang."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from eaglejax.errors import ConfigError
from eaglejax.sharding.processes import time_limit

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "engine"))
import pairs  # noqa: E402


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return pairs.write_random(tmp_path_factory.mktemp("pair"), "qwen3_moe")


def run(job: str, pair, **environment: str) -> list[dict]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    settings = os.environ | {"XLA_FLAGS": quick, "JAX_PLATFORMS": "cpu"} | environment
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "run_process.py"), port, str(index), job, *pair],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=settings,
        )
        for index in range(2)
    ]  # fmt: skip
    outputs = []
    for process in processes:
        try:
            out, err = process.communicate(timeout=280)
        except subprocess.TimeoutExpired:
            for other in processes:
                other.kill()
                other.communicate()
            pytest.fail(f"{job}: hangs")
        outputs.append((out, err))
    return [result_of(out, err) for out, err in outputs]


def result_of(out: str, err: str) -> dict:
    # a CPU's collectives print to standard output as well
    lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
    assert lines, err[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))


def test_same_tokens_in_both_processes_and_on_one_device(pair):
    first, second = run("same_text", pair)
    assert first == second
    engine = pairs.load(*pair, speculation=pairs.Speculation(3, 2, 8), max_len=64)
    answers = engine.generate([[5, 9, 20, 3], [7], [40, 41]], pairs.Sampling(max_new_tokens=16))
    for mesh, made in first.items():
        assert made["greedy"] == pairs.ids(answers), mesh
        assert made["accepted"] == pairs.counts(answers), mesh
        assert made["streamed"] == answers[0].token_ids, mesh
        seed = made["sampled"][1]
        again = engine.generate([[5, 9, 20, 3]], pairs.Sampling(max_new_tokens=8, temperature=1.0, seed=seed))
        assert made["sampled"][0] == again[0].token_ids, mesh


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ("different_prompts", "generate: the processes do not ask for the same"),
        ("different_settings", "from_pretrained: the processes do not ask for the same"),
        ("short_of_memory", "does not fit; found this machine's memory:"),
        ("a_seed_in_one", "generate: the processes do not ask for the same"),
        ("a_stream_left_in_one", "the processes do not ask for the same"),
        ("a_bad_draft_in_one", "from_pretrained: the processes do not ask for the same"),
        ("no_mesh", "2 processes need a mesh over all their devices"),
        ("part_of_the_devices", "several processes use all of their devices"),
    ],
)
def test_refused_in_both(pair, job, said):
    for result in run(job, pair):
        assert said in result["refused"]


def test_what_one_refuses_is_told_to_the_other(pair):
    asking, refusing = run("a_bad_prompt_in_one", pair, EAGLEJAX_PROCESS_TIMEOUT_S="60")
    assert "9999" in refusing["refused"] and "the processes" not in refusing["refused"]
    assert "process 1: refused here: generate: " in asking["refused"] and "9999" in asking["refused"]


def test_a_lone_process_gives_up_in_time(pair):
    flags = [f"--model={pair[0]}", "--token_ids=5,9", "--mesh=model=2", "--num_processes=2", "--process_id=0"]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        flags.append(f"--coordinator=localhost:{free.getsockname()[1]}")
    settings = os.environ | {"EAGLEJAX_PROCESS_TIMEOUT_S": "4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "eaglejax", "generate", *flags],
        env=settings,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert "error: not all of the 2 processes came within 4 s; found process 0" in done.stderr


@pytest.mark.parametrize("text", ["soon", "inf", "0", "-3", "nan"])
def test_a_time_limit_that_is_none(monkeypatch, text):
    monkeypatch.setenv("EAGLEJAX_PROCESS_TIMEOUT_S", text)
    with pytest.raises(ConfigError, match="EAGLEJAX_PROCESS_TIMEOUT_S: not a time limit"):
        time_limit()


def test_a_process_that_stays_away_is_named(pair):
    waiting, away = run("one_stays_away", pair, EAGLEJAX_PROCESS_TIMEOUT_S="3")
    assert "process 1 has not come to this point within 3 s" in waiting["refused"]
    assert away == {}


def test_the_runner_prints_once(pair):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    target, draft = pair
    flags = [
        f"--model={target}",
        f"--draft={draft}",
        "--token_ids=5,9,20,3",
        "--max_new_tokens=8",
        "--max_len=64",
        "--json",
    ]
    flags += ["--mesh=model=8", f"--coordinator=localhost:{port}", "--num_processes=2"]
    settings = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "eaglejax", "generate", *flags, f"--process_id={index}"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=settings,
        )
        for index in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=200) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert len(json.loads(outputs[0][0])["token_ids"]) == 8
    assert outputs[1][0] == ""

"""A sharded load reads what it needs once, and holds little beside the arrays."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import write_safetensors, write_shards

from eaglejax.checkpoint import streaming
from eaglejax.checkpoint.byte_runs import block_runs, full_index
from eaglejax.checkpoint.reader import open_checkpoint

HERE = Path(__file__).parent


def big_checkpoint(folder: Path, megabytes: int) -> Path:
    """bfloat16 tensors cut in every way, in two files."""
    rng = np.random.default_rng(0)
    rows = megabytes * 1_000_000 // 4 // 2 // 4096 // 8 * 8
    make = lambda *shape: rng.integers(0, 2**14, shape, np.uint16).view(ml_dtypes.bfloat16)
    first = {"rows_0": make(rows, 4096), "columns_0": make(rows, 4096)}
    second = {"experts_0": make(8, rows // 8, 4096), "heads_0": make(rows // 16 * 16, 4096)}
    return write_shards(folder, [first, second])


def run_tool(folder: Path, *fault: str) -> dict:
    root = HERE.parents[1]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(HERE / "streaming_tool.py"), str(folder), *fault]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("megabytes", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_bytes_and_memory_of_a_load_on_eight_devices(tmp_path, megabytes):
    folder = big_checkpoint(tmp_path, megabytes)
    cost = run_tool(folder)
    assert cost["needed"] <= cost["read"] <= 1.05 * cost["needed"]
    assert cost["needed"] == cost["arrays"]
    assert cost["beside"] < 1.5 * cost["largest"] + (64 << 20), cost
    # the bound is one that reading everything first breaks
    fault = run_tool(folder, "whole")
    assert fault["beside"] > 1.5 * fault["largest"] + (64 << 20), fault


@pytest.mark.parametrize(
    "index",
    [
        (slice(1, 3), slice(0, 4), slice(0, 5)),
        (slice(0, 3), slice(1, 3), slice(0, 5)),
        (slice(0, 3), slice(1, 4), slice(2, 3)),
        (slice(2, 2), slice(1, 4), slice(2, 3)),
        (slice(None), slice(None), slice(None)),
    ],
)
def test_read_block(tmp_path, index):
    values = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    write_safetensors(tmp_path / "model.safetensors", {"pad": np.zeros(3, np.uint8), "w": values})
    reader = open_checkpoint(tmp_path)
    got = reader.read_block("w", index)
    np.testing.assert_array_equal(got, values[index])
    assert got.nbytes <= reader.bytes_read <= 1.05 * got.nbytes
    # the same bytes in another shape and dtype
    as_bytes = (slice(3, 7), slice(1, 15))
    want = values.reshape(12, 5).view(np.uint8)[as_bytes]
    np.testing.assert_array_equal(reader.read_block("w", as_bytes, shape=(12, 20), dtype="U8"), want)
    with pytest.raises(IndexError):
        reader.read_block("w", (slice(0, 4), slice(0, 4), slice(0, 5)))


def test_runs_that_lie_close_are_read_in_one():
    index = full_index((slice(0, 3), slice(0, 99)), (3, 100))
    offsets, run = block_runs((3, 100), 2, index)
    assert (offsets.tolist(), run) == ([0, 200, 400], 198)
    offsets, run = block_runs((3, 100), 2, full_index((slice(1, 3), slice(0, 100)), (3, 100)))
    assert (offsets.tolist(), run) == ([200], 400)


def test_a_close_gap_is_counted(tmp_path):
    values = np.arange(3000, dtype=np.int16).reshape(30, 100)
    write_safetensors(tmp_path / "model.safetensors", {"w": values})
    reader = open_checkpoint(tmp_path)
    np.testing.assert_array_equal(reader.read_block("w", (slice(0, 30), slice(0, 99))), values[:, :99])
    assert reader.bytes_read == 30 * 200 - 2


def test_progress_is_a_line_where_there_is_no_terminal(caplog):
    with caplog.at_level(logging.INFO, "eaglejax"), streaming._progress(3_000_000_000) as advance:
        advance(1)
    assert "3.0 GB of weights" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "eaglejax"), streaming._progress(1000) as advance:
        advance(1)
    assert not caplog.text


def test_progress_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with streaming._progress(3_000_000_000) as advance:
        advance(3_000_000_000)
    shown = capsys.readouterr().err
    assert "weights" in shown and "3.0/3.0 GB" in shown

"""SmolLM2 with the first draft against plain decoding, by tools/check_lossless.py: two prompts, four at a
time, and under `-m slow` the full matrix.

In a process of its own: the tests' quick-compile flags would make decoding slow.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "tools" / "check_lossless.py"


def run(tmp_path, smollm2_path, *arguments, timeout):
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
    out = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-W", "error", str(PATH), "--json", str(out), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    return json.loads(out.read_text())


def check(figures, prompts, settings):
    """The run compared what it was to compare, and speculated: with speculation switched off tau is 1."""
    rows = figures["rows"]
    assert figures["prompts"] == prompts and len(rows) == settings and not figures["failures"]
    for row in rows:
        assert row["tokens"] == prompts * 64 or row["divergences"]
        if row["shape"] != "plain":
            assert row["tau"] > 1.1 and row["cycles"] < prompts * 63, row


def test_a_part_is_lossless(tmp_path, smollm2_path):
    check(run(tmp_path, smollm2_path, "--part", "1/25", "--slots", "4", timeout=2400), 2, 6)


@pytest.mark.slow
def test_the_full_matrix_is_lossless(tmp_path, smollm2_path):
    check(run(tmp_path, smollm2_path, "--plain", timeout=6 * 3600), 50, 15)

"""The notebooks run from top to bottom, on a small budget."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_runs(name, smollm2_path):
    tool = [sys.executable, str(ROOT / "tools" / "run_notebooks.py"), "--small", name]
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "NPROC")}
    environment["EAGLEJAX_SMOLLM2"] = str(smollm2_path)
    done = subprocess.run(tool, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert name in done.stdout


def test_there_are_four_with_pictures():
    assert [name[0] for name in NOTEBOOKS] == ["1", "2", "3", "4"]
    for name in NOTEBOOKS:
        assert '"image/png"' in (ROOT / "notebooks" / name).read_text(), f"{name} is stored without its pictures"

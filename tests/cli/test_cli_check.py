"""`eaglejax check`: wrong usage, and exit code 1 with the fix where a pair is wired wrongly."""

import json
import sys
from pathlib import Path

import pytest

from eaglejax.cli import session
from eaglejax.cli.main import run

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("", "engine", "measure")]
import wired_pairs  # noqa: E402


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tokens=none_of_these"], "--tokens: not a whole number"),
        (["--tokens=63"], "--tokens: out of range; found 63; expected 64 to"),
        (["--draft=none"], "no draft is named"),
        (["--coordinator=localhost:1"], "coordinator"),
    ],
)
def test_wrong_usage(words, said, capsys):
    """Several processes are refused like any flag that check does not have."""
    assert run(["check", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_wrong_wiring_is_exit_code_1(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(session, "use_compile_cache", lambda: None)
    pair = [
        f"--model={wired_pairs.write_target(tmp_path)}",
        f"--draft={wired_pairs.write_draft(tmp_path / 'draft')}",
        "--max_len=128",
        "--tokens=128",
        "--nolossless",
    ]
    assert run(["check", *pair, "--capture=3,5,6", "--json"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert not found["ok"] and found["wiring"]["fix"]["flags"] == "--capture=2,4,5" and "WRONG: wiring" in err
    # as it says
    assert run(["check", *pair, found["wiring"]["fix"]["flags"]]) == 0
    assert "as the draft was trained" in capsys.readouterr().out

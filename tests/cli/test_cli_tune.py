"""`eaglejax tune`: what is refused before anything is loaded."""

import pytest

from eaglejax.cli.main import run


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (("--max_new_tokens=none of it",), 2, "--max_new_tokens"),
        (("--max_new_tokens=15",), 2, "--max_new_tokens: out of range; found 15; expected at least 16"),
        (("--max_len=32", "--max_new_tokens=32"), 2, "--max_new_tokens: no prompt has room beside so many; found 32"),
        (("--temperature=-1",), 2, "--temperature"),
        (("--confirm=0",), 2, "--confirm"),
        (("--prompts=mt_bank",), 1, "did you mean mt_bench"),
        (("--draft=none",), 1, "nothing to tune without a draft"),
        (("--num_steps=3",), 2, "num_steps"),
        (("--tuning=none",), 2, "Unknown command line flag 'tuning'"),
        (("--coordinator=localhost:1",), 2, "coordinator"),
    ],
)
def test_refusals(capsys, flags, code, said):
    assert run(["tune", *flags]) == code
    assert said in capsys.readouterr().err


def test_a_refused_run_leaves_no_file_and_no_folder(tmp_path, capsys):
    assert (
        run(["tune", "--model=/no/such/model", f"--draft={tmp_path}", f"--out={tmp_path / 'a' / 'b' / 'c.json'}"]) == 1
    )
    assert "/no/such/model" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "kept.json").write_text("kept")
    assert run(["tune", "--model=/no/such/model", f"--draft={tmp_path}", f"--out={tmp_path / 'kept.json'}"]) == 1
    assert [file.read_text() for file in tmp_path.iterdir()] == ["kept"]
    capsys.readouterr()
    for out in (tmp_path, "/dev/null/a/b.json"):
        assert run(["tune", f"--out={out}"]) == 1
        assert f"--out {out}: cannot be written; found " in capsys.readouterr().err


def test_help_names_every_flag(capsys):
    assert run(["tune", "--help"]) == 0
    out = capsys.readouterr().out
    for flag in ("--prompts", "--out", "--max_new_tokens", "--temperature", "--confirm", "--slots"):
        assert flag in out
    assert "--tuning" not in out

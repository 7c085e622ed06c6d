"""`eaglejax tune`: what is refused before anything is loaded."""

import pytest

from eaglejax.cli.main import run


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (("--max_new_tokens=none of it",), 2, "--max_new_tokens"),
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


def test_help_names_every_flag(capsys):
    assert run(["tune", "--help"]) == 0
    out = capsys.readouterr().out
    for flag in ("--prompts", "--out", "--max_new_tokens", "--temperature", "--confirm", "--slots"):
        assert flag in out
    assert "--tuning" not in out

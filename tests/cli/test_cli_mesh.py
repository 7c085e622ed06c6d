"""The flags of a mesh and of several processes: refused by name before anything is loaded."""

import json

import pytest

from eaglejax.cli.main import REFUSED, WRONG_USAGE, run


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--mesh=model=64"], REFUSED, "a mesh of 64 devices, and there are 8 (cpu)"),
        (["--mesh=banana"], REFUSED, "mesh: not a mesh; found 'banana'"),
        (["--draft_placement=all"], WRONG_USAGE, "--draft_placement: unknown choice; found 'all'; expected replicated or sharded"),
        (["--expert_split=heads"], WRONG_USAGE, "--expert_split: unknown choice; found 'heads'"),
        (["--coordinator=localhost:1"], WRONG_USAGE, "several processes need --num_processes, --process_id too"),
        (["--coordinator=localhost:1", "--num_processes=2", "--process_id=5"], WRONG_USAGE, "--process_id: out of range"),
    ],
)  # fmt: skip
def test_refused(capsys, flags, code, said):
    assert run(["generate", "--prompt=x", *flags]) == code
    out, err = capsys.readouterr()
    assert said in err and out == "" and "Traceback" not in err


def test_a_config_file_names_the_mesh(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text('[engine]\nmesh = "model=64"\n')
    assert run(["generate", "--prompt=x", f"--config={path}"]) == REFUSED
    assert "a mesh of 64 devices" in capsys.readouterr().err
    path.write_text('[engine]\nexpert_split = "heads"\n')
    assert run(["generate", "--prompt=x", f"--config={path}"]) == REFUSED
    assert f"{path}: [engine] expert_split: unknown choice" in capsys.readouterr().err


def test_answers_without_a_tokenizer_are_ids(capsys, data):
    flags = [f"--model={data / 'e2e_mixtral' / 'target'}", "--max_new_tokens=4", "--max_len=32", "--ignore_eos"]
    assert run(["generate", "--token_ids=5,9", *flags, "--json"]) == 0
    ids = json.loads(capsys.readouterr().out)["token_ids"]
    assert run(["generate", "--token_ids=5,9", *flags]) == 0
    assert capsys.readouterr().out == ",".join(map(str, ids)) + "\n"
    assert run(["generate", "--token_ids=5,9", "--token_ids=5,9", *flags]) == 0
    assert capsys.readouterr().out.splitlines() == [f"[{i}] " + ",".join(map(str, ids)) for i in range(2)]

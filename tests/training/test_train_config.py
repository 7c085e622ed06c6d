"""Settings of a run: read from a file, checked before anything is loaded."""

from pathlib import Path

import pytest

from eaglejax.errors import ConfigError
from eaglejax.training.losses import OBJECTIVES
from eaglejax.training.train_config import FREE, TrainConfig, build, read_file
from eaglejax.training.trainer import OPTIMISERS


def made(**values):
    return build({"out": "o", "data": "d.jsonl", **values}, lambda name: f"--{name}")


def test_choices_are_those_of_the_trainer():
    for name, known in (("objective", OBJECTIVES), ("optimiser", OPTIMISERS)):
        for choice in known:
            made(**{name: choice})
        with pytest.raises(ConfigError, match=f"{name}.*{' or '.join(known)}"):
            made(**{name: "other"})


def test_text_and_numbers_become_settings(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('out = "o"\ndata = ["a.jsonl", "b.jsonl"]\nrate = 1e-3\nboundaries = [2, 15, 27]\nsteps = 20\n')
    from_file = build(read_file(file), str)
    from_flags = made(data="a.jsonl,b.jsonl", rate="1e-3", boundaries="2,15,27", steps="20")
    assert from_file == from_flags
    assert from_file.data == ("a.jsonl", "b.jsonl") and from_file.boundaries == (2, 15, 27)
    assert from_file.speculation.num_draft_tokens == 8


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mesh": "model=8,tensor=2"}, "--mesh: not a mesh; found 'model=8,tensor=2'"),
        ({"mesh": "data=8"}, "--batch: the rows of a batch do not divide over the data axis of the mesh; found 4 rows"),
        ({"steps": "0"}, "--steps: out of range; found 0; expected 1 or more"),
        ({"steps": "1.5"}, "--steps: unusable; found '1.5'; expected a whole number"),
        ({"rate": "nan"}, "--rate: unusable"),
        ({"rate": 0}, "--rate: out of range"),
        ({"rate": True}, "--rate: unusable"),
        ({"regenerate": 1}, "--regenerate: unusable"),
        ({"head": "both"}, "--head: unknown; found both; expected own or target"),
        ({"dtype": "float16"}, "--dtype: unknown"),
        ({"boundaries": "2,x"}, "--boundaries: unusable"),
        ({"tree": "7,1"}, "--tree: not a tree"),
        ({"tree": "3,1,9"}, "num_draft_tokens"),
        ({"warmup": 1}, "--warmup: out of range"),
        ({"row_length": 3}, "--row_length: out of range; found 3; expected 4 or more"),
        ({"evaluate_tokens": 1}, "--evaluate_tokens: out of range; found 1; expected 2 or more"),
        ({"boundaries": ()}, "--boundaries: empty"),
        ({"boundaries": "a"}, "found 'a'; expected whole numbers such as 2,15,27"),
        ({"data": ()}, "--data: no training text"),
    ],
)
def test_impossible_settings_are_refused(values, message):
    with pytest.raises(ConfigError) as error:
        made(**values)
    assert message in str(error.value)


def test_whole_numbers_stay_exact():
    large = 2**53 + 1
    assert made(seed=str(large)).seed == made(seed=large).seed == large
    assert made(steps="1e3").steps == 1000


def test_a_head_that_is_not_named_is_an_own_one():
    """But beside an earlier draft, whose head decides: then only a named one can be wrong."""
    assert made().head is None and made().binding() == made(head="own").binding()
    assert made(head="target").binding()["head"] == "target"


def test_files_are_refused(tmp_path):
    file = tmp_path / "run.toml"
    for text, message in (
        ("step = 3", "unknown key; found step"),
        ("a = ", "not valid TOML"),
        ("[run]\n", "unknown key"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_file(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_file(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="folder of its own"):
        build({"data": "d.jsonl"}, str)


def test_the_stored_settings_are_a_run():
    file = Path(__file__).parent.parent.parent / "configs" / "training" / "smollm2.toml"
    config = build({**read_file(file), "out": "o", "data": "d.jsonl"}, str)
    assert config.head == "target" and config.regenerate and config.vocab == 16384


def test_what_binds_a_resumed_run():
    binding = made().binding()
    assert {"rate", "steps", "seed", "batch", "head"} <= binding.keys() and not binding.keys() & set(FREE)
    assert made(rate=1e-3).binding() != binding and made(keep=5).binding() == binding
    assert TrainConfig("o", ("d.jsonl",)).binding() == binding
    # younger keys bind where they say something new, so that older checkpoints can be gone on with
    assert "optimiser" not in binding and made(optimiser="muon").binding()["optimiser"] == "muon"
    assert "int8" not in binding and made(int8=True).binding()["int8"] is True

"""Answers written as they come: a stopped run goes on and writes what a straight one writes."""

import json

import pytest
from small_run import target_folder

from eaglejax import EagleJaxEngine, Sampling
from eaglejax.errors import CheckpointError, ConfigError, PromptError
from eaglejax.training.regenerate import regenerate

PROMPTS = [[5, 9], [7, 11, 13], [20], [21, 22], [30, 31, 32, 33]]
FACTS = {"target": "t"}


@pytest.fixture(scope="module")
def engine(data):
    return EagleJaxEngine.from_pretrained(target_folder(data), max_len=32, slots=2)


def answer(engine, file, **changes):
    given = {"temperature": 0.8, "new_tokens": 6, "seed": 3, "facts": FACTS}
    return regenerate(engine, PROMPTS, file, **{**given, **changes})


def test_answers_are_the_engine_s(engine, tmp_path):
    file = tmp_path / "a.jsonl"
    seen = []
    assert answer(engine, file, advance=seen.append) == 0 and sum(seen) == len(PROMPTS)
    header, *rows = map(json.loads, file.read_text().splitlines())
    assert header["temperature"] == 0.8 and [row["n"] for row in rows] == list(range(5))
    for n, row in enumerate(rows):
        (alone,) = engine.generate(PROMPTS[n], Sampling(max_new_tokens=6, temperature=0.8, seed=3 + n))
        assert (row["prompt_ids"], row["token_ids"]) == (PROMPTS[n], alone.token_ids)


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_a_stopped_run_goes_on(engine, tmp_path, cut):
    """However the file was cut: in a line, or after one."""
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    answer(engine, whole)
    part.write_bytes(whole.read_bytes()[:-cut])
    before = answer(engine, part)
    assert 0 < before < len(PROMPTS) and part.read_bytes() == whole.read_bytes()
    assert answer(engine, part) == len(PROMPTS)


def test_answers_of_another_run_are_refused(engine, tmp_path):
    file = tmp_path / "a.jsonl"
    answer(engine, file)
    with pytest.raises(ConfigError, match="temperature begun with 0.8, now 0.0"):
        answer(engine, file, temperature=0.0)
    with pytest.raises(ConfigError, match="target begun with 't', now 'u'"):
        answer(engine, file, facts={"target": "u"})


def changed(lines, what):
    """The file's lines (a header, five answers) as a slip of the hand leaves them."""
    return {
        "garbage first": ["garbage", *lines[1:]],
        "a list first": ["[1]", *lines[1:]],
        "no header": lines[1:],
        "a line twice": [*lines[:3], lines[2], *lines[3:]],
        "a line too few": [*lines[:2], *lines[3:]],
        "a line too many": [*lines, lines[-1]],
        "garbage in a line": [*lines[:2], lines[2][:9], *lines[3:]],
        "another prompt": [*lines[:2], lines[2].replace("[7, 11, 13]", "[7, 11, 14]"), *lines[3:]],
        "no answer": [*lines[:2], lines[2].replace('"token_ids"', '"tokens"'), *lines[3:]],
    }[what]


@pytest.fixture(scope="module")
def whole(engine, tmp_path_factory):
    file = tmp_path_factory.mktemp("whole") / "a.jsonl"
    answer(engine, file)
    return file.read_text().splitlines()


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("garbage first", 1),
        ("a list first", 1),
        ("no header", 1),
        ("a line twice", 4),
        ("a line too few", 3),
        ("a line too many", 7),
        ("garbage in a line", 3),
        ("another prompt", 3),
        ("no answer", 3),
    ],
)
def test_a_damaged_file_is_refused_and_kept(engine, whole, tmp_path, what, line):
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(changed(whole, what)) + "\n")
    before = file.read_bytes()
    with pytest.raises(PromptError, match=f"a.jsonl, line {line}: is damaged.*remove {file}"):
        answer(engine, file)
    assert file.read_bytes() == before


def test_a_file_of_something_else_is_not_written_over(engine, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("my notes")  # one line, without an end
    with pytest.raises(PromptError, match="is damaged"):
        answer(engine, file)
    assert file.read_text() == "my notes"


def test_answers_of_an_unknown_row_length(engine, whole, tmp_path):
    """A file of before the header said it: its answers may have been cut elsewhere."""
    file, header = tmp_path / "a.jsonl", json.loads(whole[0])
    assert header.pop("row_length") == 32
    file.write_text("\n".join([json.dumps(header), *whole[1:]]) + "\n")
    with pytest.raises(ConfigError, match='for which row_length.*expected 32; .*add "row_length" to its first line'):
        answer(engine, file)


def test_a_disk_that_cannot_be_written(engine, tmp_path):
    with pytest.raises(CheckpointError, match="a.jsonl.* cannot be written; found No such file"):
        answer(engine, tmp_path / "none" / "a.jsonl")

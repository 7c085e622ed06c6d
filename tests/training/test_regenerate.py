"""Answers written as they come: a stopped run goes on and writes what a straight one writes."""

import json

import pytest
from small_run import target_folder

from eaglejax import EagleJaxEngine, Sampling
from eaglejax.errors import ConfigError
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

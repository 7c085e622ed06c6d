"""The built-in prompt sets, files of one's own, random ids, and the refusal of what is neither."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from eaglejax.errors import PromptError
from eaglejax.measure.prompt_sets import FOLDER, RANDOM_COUNT, check_set, known_sets, read_prompts, spread


def test_built_in_sets_hold_conversations():
    assert known_sets() == ["gsm8k", "humaneval", "mt_bench", "qa", "random"]
    for name in known_sets()[:-1]:
        prompts = read_prompts(name)
        assert len(prompts) == 80
        assert all(p.content[0]["role"] == "user" and p.content[0]["content"] for p in prompts), name
        assert [p.name for p in prompts[:2]] == [f"{name}[0]", f"{name}[1]"]
    assert read_prompts("mt_bench")[0].content[0]["content"].startswith("Compose an engaging travel blog post")


def test_licences_stand_beside_the_sets():
    said = (FOLDER / "README.md").read_text()
    assert all(f"{name}.jsonl" in said for name in known_sets()[:-1])
    assert "Permission is hereby granted" in said and "CC BY-SA 3.0" in said


def test_a_few_prompts_are_spread_over_the_set():
    assert list(spread(80, 4)) == [0, 20, 40, 60]
    assert list(spread(3, 5)) == [0, 1, 2] and list(spread(3, 0)) == [0, 1, 2]
    assert [p.number for p in read_prompts("mt_bench", 8)] == list(range(0, 80, 10))  # one of each category


def test_random_ids_are_repeatable():
    first, again = read_prompts("random", 5, vocab_size=50, seed=1), read_prompts("random", 5, vocab_size=50, seed=1)
    assert first == again and len(first) == 5
    assert first != read_prompts("random", 5, vocab_size=50, seed=2)
    ids = [i for p in read_prompts("random", vocab_size=50) for i in p.content]
    assert len(ids) == RANDOM_COUNT * 64 and set(ids) == set(range(50))
    with pytest.raises(PromptError, match="need a vocabulary"):
        read_prompts("random", 5)


def test_files_of_ones_own(tmp_path: Path):
    lines = '{"prompt": "one"}\n{"turns": ["two", "more"]}\n{"token_ids": [3]}\n'
    (tmp_path / "mine.jsonl").write_text(lines)
    (tmp_path / "mine.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    user = lambda text: [{"role": "user", "content": text}]
    for name in ("mine.jsonl", "mine.jsonl.gz"):
        assert [p.content for p in read_prompts(tmp_path / name)] == [user("one"), user("two"), [3]]
        assert [p.content for p in read_prompts(tmp_path / name, chat=False)] == ["one", "two", [3]]


def test_unknown_sets_are_refused_by_name():
    with pytest.raises(PromptError, match=r"found 'mtbench'; expected one of gsm8k, .*did you mean mt_bench\?"):
        check_set("mtbench")
    with pytest.raises(PromptError, match="no such prompt set"):
        read_prompts("/nowhere/prompts.jsonl")

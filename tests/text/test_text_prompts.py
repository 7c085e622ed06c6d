"""Prompts in every form users write them, and the refusals."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from synthetic_vocabularies import byte_level_bpe, save_folder

from eaglejax.errors import CheckpointError, PromptError
from eaglejax.text.prompts import parse_prompts, read_prompts
from eaglejax.text.tokenizer import load_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("prompts")
    return load_tokenizer(save_folder(folder, byte_level_bpe(), {"chat_template": TEMPLATE}))


def encode(prompts, tokenizer=None, vocab_size: int = 400, max_len: int = 16):
    return parse_prompts(prompts, tokenizer, vocab_size=vocab_size, max_len=max_len)


def test_one_prompt_or_a_batch(tokenizer):
    the, hi = tokenizer.encode("the"), tokenizer.encode("user:hi")
    for prompts, expected in (
        ("the", [the]),
        (["the", "the"], [the, the]),
        ([5], [[5]]),
        ([[5]], [[5]]),
        ((5, 7), [[5, 7]]),
        ([[5, 7], (5,)], [[5, 7], [5]]),
        (np.array([5, 7], np.int64), [[5, 7]]),
        ([np.int32(5), np.uint8(7)], [[5, 7]]),
        (np.array([[5, 7], [1, 2]]), [[5, 7], [1, 2]]),
        ([np.array([5]), [7]], [[5], [7]]),
        (jnp.array([5, 7]), [[5, 7]]),
        (HI, [hi]),
        ([HI], [hi]),
        ([HI, "the", [5]], [hi, the, [5]]),
    ):
        got = encode(prompts, tokenizer)
        assert got == expected and all(type(i) is int for ids in got for i in ids), prompts


@pytest.mark.parametrize(
    "prompts, message",
    [
        ("", r"prompts\[0\]: the prompt is empty"),
        ([], "no prompt given"),
        ([[]], r"prompts\[0\]: the prompt is empty"),
        ([[1], []], r"prompts\[1\]: the prompt is empty"),
        (["the", ""], r"prompts\[1\]: the prompt is empty"),
        ([1, 400], r"prompts\[0\]\[1\].*found 400.*vocabulary of 400"),
        ([[1], [3, -1]], r"prompts\[1\]\[1\].*found -1"),
        ([[1], list(range(17))], r"prompts\[1\]: the prompt is too long; found 17 tokens; expected at most 16"),
        ([True, 1], r"prompts\[0\]\[0\].*True of type bool"),
        ([[1.0]], r"prompts\[0\]\[0\].*1.0 of type float"),
        (np.array([1.5]), r"prompts\[0\]\[0\].*float64"),
        (np.array([True]), r"prompts\[0\]\[0\].*bool"),
        (np.zeros((1, 1, 1), np.int32), "one or two dimensions"),
        ([1, "a"], r"prompts\[0\]: not a prompt; found 1"),
        (["a", None], r"prompts\[1\]: not a prompt; found None"),
        ([HI[0], "a"], r"prompts\[0\]: not a prompt"),
        ([[HI[0], 5]], r"prompts\[0\]\[1\]: not a message"),
        ([[5, HI[0]]], r"prompts\[0\]\[0\]: not a message"),
        (HI[0], "one message is not a conversation"),
        (b"the", "not a prompt; found bytes"),
        (5, "not a prompt; found int"),
        (None, "not a prompt; found NoneType"),
        (["the", "a\ud800"], r"prompts\[1\].*surrogate"),
        ([[{"role": "user"}]], r"prompts\[0\]\[0\].content"),
    ],
)
def test_refusals(tokenizer, prompts, message):
    with pytest.raises(PromptError, match=message):
        encode(prompts, tokenizer)


def test_without_tokenizer_ids_still_work():
    assert encode([[5, 7]]) == [[5, 7]]
    for prompts in ("the", [[1], "the"], HI):
        with pytest.raises(PromptError, match="has no tokenizer.*tokenizer.json"):
            encode(prompts)


def test_chat_without_template(tmp_path: Path):
    tokenizer = load_tokenizer(save_folder(tmp_path, byte_level_bpe()))
    with pytest.raises(CheckpointError, match="no chat template"):
        encode(HI, tokenizer)


def test_a_prompt_of_exactly_max_len_is_taken():
    assert len(encode(list(range(16)))[0]) == 16


def write(path: Path, *lines: str, end: str = "\n") -> Path:
    path.write_text("\n".join(lines) + end, encoding="utf-8")
    return path


def test_jsonl(tmp_path: Path, tokenizer):
    lines = [
        json.dumps({"id": 1, "prompt": "thé"}, ensure_ascii=False),
        '{"token_ids": [5, 7]}',
        json.dumps({"messages": HI}),
        '{"turns": ["hi", "and then?"], "category": "x"}',
    ]
    for end in ("\n", ""):
        prompts = read_prompts(write(tmp_path / "p.jsonl", *lines, end=end))
        assert prompts == ["thé", [5, 7], HI, HI]
    assert encode(prompts, tokenizer)[3] == tokenizer.encode("user:hi")
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress((tmp_path / "p.jsonl").read_bytes()))
    assert read_prompts(tmp_path / "p.jsonl.gz") == prompts


@pytest.mark.parametrize(
    "line, message",
    [
        ("", "line 2: an empty line"),
        ("  ", "line 2: an empty line"),
        ('{"prompt": ', "line 2: not valid JSON"),
        ('["a"]', "line 2: not a JSON object"),
        ('{"text": "a"}', "line 2: one prompt on each line; found none"),
        ('{"prompt": "a", "turns": ["b"]}', "line 2.*found prompt, turns"),
        ('{"prompt": ""}', "line 2: prompt: not a text"),
        ('{"prompt": 5}', "line 2: prompt: not a text"),
        ('{"token_ids": [1, true]}', r"line 2: token_ids\[1\].*True"),
        ('{"token_ids": "12"}', "line 2: token_ids: not a list"),
        ('{"token_ids": []}', "line 2: token_ids: not a list"),
        ('{"turns": [""]}', r"line 2: turns\[0\]: not a text"),
        ('{"messages": [{"role": "user"}]}', r"line 2: messages\[0\].content"),
    ],
)
def test_jsonl_refusals_name_the_line(tmp_path: Path, line: str, message: str):
    with pytest.raises(PromptError, match=message):
        read_prompts(write(tmp_path / "p.jsonl", '{"prompt": "a"}', line, '{"prompt": "b"}'))


def test_jsonl_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(PromptError, match="absent.jsonl: cannot read"):
        read_prompts(tmp_path / "absent.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(PromptError, match="line 1: not UTF-8"):
        read_prompts(tmp_path / "latin.jsonl")
    (tmp_path / "empty.jsonl").write_bytes(b"")
    with pytest.raises(PromptError, match="is empty"):
        read_prompts(tmp_path / "empty.jsonl")
    for name, content in (("plain.jsonl.gz", b'{"prompt": "a"}'), ("cut.jsonl.gz", gzip.compress(b"x" * 99)[:20])):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(PromptError, match=f"{name}: cannot read"):
            read_prompts(tmp_path / name)

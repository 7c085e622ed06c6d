"""tiktoken.model with Kimi's split, against a slow merge by rank written here."""

from __future__ import annotations

from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_vocabularies import kimi_folder, write_json

from eaglejax.errors import CheckpointError
from eaglejax.text.kimi_tokenizer import PATTERN, RESERVED, cut
from eaglejax.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory):
    folder, ranks = kimi_folder(tmp_path_factory.mktemp("kimi"))
    return load_tokenizer(folder), ranks


def merge_by_rank(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """The lowest rank among neighbours is merged first, the leftmost of equals."""
    parts = [bytes([b]) for b in word]
    while True:
        joined = [(ranks[a + b], n) for n, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in ranks]
        if not joined:
            return [ranks[p] for p in parts]
        n = min(joined)[1]
        parts[n : n + 2] = [parts[n] + parts[n + 1]]


def test_the_split():
    text = "Hello CamelCase's 日本語テキスト 你好world  12345  x\n\n y ALLCAPS don't"
    expected = ["Hello", " Camel", "Case's", " ", "日本語", "テキスト", " ", "你好", "world", " ", " ", "123", "45"]
    expected += [" ", " x", "\n\n", " y", " ALLCAPS", " don't"]
    assert regex.findall(PATTERN, text, flags=regex.V1) == expected


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from(list("theTHE catsé日本語1234 \n\t'.🙂")), max_size=40))
def test_ids_are_those_of_merging_by_rank(kimi, text: str):
    tokenizer, ranks = kimi
    wanted = [i for word in regex.findall(PATTERN, text, flags=regex.V1) for i in merge_by_rank(word.encode(), ranks)]
    assert tokenizer.encode(text) == wanted
    assert tokenizer.decode(wanted) == text


def test_special_ids(kimi):
    tokenizer, ranks = kimi
    base = len(ranks)
    assert tokenizer.vocab_size == base + RESERVED
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (base, base + 1)
    assert tokenizer.token(base + 9) == f"<|reserved_token_{base + 9}|>"
    text = f"[BOS]<|im_user|>the<|tool_call_begin|><|reserved_token_{base + 9}|>cat<|im_end|>"
    ids = tokenizer.encode(text)
    assert [i for i in ids if i >= base] == [base, base + 3, base + 4, base + 9, base + 2]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    # <|im_user|> is special by additional_special_tokens, the tool mark is text by its own entry
    assert tokenizer.decode(ids) == "the<|tool_call_begin|>cat"
    assert tokenizer.decode([base + RESERVED, *ids]) == tokenizer.decode(ids)
    assert tokenizer.token_id("[EOS]") == base + 1 and tokenizer.token_id("Ġthe") == ranks[b" the"]
    assert tokenizer.token(ranks[b" the"]) == "Ġthe" and tokenizer.token(base + RESERVED) is None


def test_long_runs_are_cut():
    assert list(cut("ab cd")) == ["ab cd"] and "".join(cut("")) == ""
    assert list(cut("aaaaaaa bb", max_run=3)) == ["aaa", "aaa", "a bb"]
    assert list(cut("ab      c", max_run=4)) == ["ab    ", "  c"]
    assert list(cut("abcdefgh", max_text=3)) == ["abc", "def", "gh"]


def test_a_long_run_of_one_letter(kimi):
    tokenizer, _ = kimi
    assert tokenizer.decode(tokenizer.encode("a" * 60_000)) == "a" * 60_000


@pytest.mark.parametrize(
    "lines, message",
    [
        ("!!!! 0", "tiktoken.model line 1: not a base64 string"),
        ("YQ== 0\nYg== one", "tiktoken.model line 2"),
        ("YQ== 0\nYg== 2", "without gaps"),
        ("YQ== 0\nYg== 1", "254 bytes missing"),
        ("", "256 bytes missing"),
    ],
)
def test_broken_ranks_are_refused(tmp_path: Path, lines: str, message: str):
    folder, _ = kimi_folder(tmp_path)
    (folder / "tiktoken.model").write_text(lines)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(folder)


def test_other_classes_and_misplaced_specials_are_refused(tmp_path: Path):
    folder, _ = kimi_folder(tmp_path, tokenizer_class="QWenTokenizer")
    with pytest.raises(CheckpointError, match="tokenizer_class.*found QWenTokenizer.*Kimi"):
        load_tokenizer(folder)
    write_json(folder / "tokenizer_config.json", {"added_tokens_decoder": {"5": {"content": "<x>", "special": True}}})
    with pytest.raises(CheckpointError, match="among the ranks.*'<x>' with id 5"):
        load_tokenizer(folder)


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, _ = kimi_folder(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "tiktoken", None)
    with pytest.raises(CheckpointError, match=r"eaglejax\[tiktoken\]"):
        load_tokenizer(folder)


def test_code_beside_the_vocabulary_is_not_run(tmp_path: Path):
    folder, _ = kimi_folder(tmp_path)
    (folder / "tokenization_kimi.py").write_text("raise SystemExit('ran')")
    assert load_tokenizer(folder).encode("the")

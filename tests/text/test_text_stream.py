"""Incremental text and stop strings: the same answer however the ids are cut into blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_vocabularies import byte_level_bpe, save_folder, sentencepiece_bpe, words
from tokenizers import decoders

from eaglejax.errors import ConfigError
from eaglejax.text.stop import StopMatch, TextStream
from eaglejax.text.tokenizer import load_tokenizer

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def letters(data: Path):
    """The tokenizer of the enumerable models: 64 letters, one each."""
    return load_tokenizer(data / "text" / "letters")


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory):
    return load_tokenizer(save_folder(tmp_path_factory.mktemp("bpe"), byte_level_bpe()))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory):
    return load_tokenizer(save_folder(tmp_path_factory.mktemp("sp"), sentencepiece_bpe()))


@pytest.fixture(scope="module")
def syllables(tmp_path_factory: pytest.TempPathFactory):
    """Tokens of several letters, so that several stop strings can be complete at once."""
    tokens = ["a", "b", "ab", "ba", "aab", "bbab", "abcab", "c"]
    return load_tokenizer(save_folder(tmp_path_factory.mktemp("syllables"), words(decoders.Fuse(), tokens)))


def blocks_of(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """`ids` cut into blocks of the given sizes, the rest in one."""
    blocks, place = [], 0
    for size in sizes:
        blocks.append(ids[place : place + size])
        place += size
    return [*blocks, ids[place:]]


def run(tokenizer, stop, blocks) -> tuple[list[str], StopMatch | None]:
    stream = TextStream(tokenizer, stop)
    pieces, match = [], None
    for block in blocks:
        text, match = stream.push(block)
        pieces.append(text)
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text and stream.match is match
    return pieces, match


def by_definition(tokenizer, ids, stop) -> tuple[str, StopMatch | None]:
    """Decodes everything again after each token: the first to complete a stop string ends it, earliest start first."""
    for count in range(1, len(ids) + 1):
        text = tokenizer.detokenizer().push(ids[:count])
        found = [(text.find(s), n) for n, s in enumerate(stop) if s in text]
        if found:
            start, n = min(found)
            return text[:start], StopMatch(count, text[:start], stop[n])
    return tokenizer.decode(ids), None


@pytest.mark.parametrize("block", [1, 2, 4, 8, 26])
@pytest.mark.parametrize(
    "stop, count, text, hit",
    [
        (["b"], 2, "a", "b"),
        (["bc"], 3, "a", "bc"),
        (["hi"], 9, "abcdefg", "hi"),  # over the border of blocks of 8
        (["Z"], None, ALPHABET, None),
        (["xyz", "f", "b"], 2, "a", "b"),  # the later-listed one comes first
        (["cdx", "cde"], 5, "ab", "cde"),
        (["a"], 1, "", "a"),
        (["z"], 26, ALPHABET[:-1], "z"),
        ([], None, ALPHABET, None),
    ],
)
def test_letters_in_blocks(letters, block, stop, count, text, hit):
    ids = letters.encode(ALPHABET)
    assert ids == list(range(26))
    pieces, match = run(letters, stop, [ids[i : i + block] for i in range(0, 26, block)])
    assert "".join(pieces) == text
    assert match == (None if count is None else StopMatch(count, text, hit))


def test_a_character_split_over_tokens_and_blocks(sentencepiece, byte_level):
    euro = [3 + b for b in "€".encode()]
    hi = [sentencepiece.token_id("hi")]
    assert run(sentencepiece, ["€"], [hi + euro[:1], euro[1:2], euro[2:] + hi]) == (
        ["hi", "", "", ""],
        StopMatch(4, "hi", "€"),
    )
    # a stop string whose last byte comes with a later token
    assert run(sentencepiece, ["i€"], [hi, euro[:2], euro[2:], hi])[1] == StopMatch(4, "h", "i€")
    assert run(sentencepiece, [], [hi, euro[:2]])[0] == ["hi", "", "\ufffd"]
    smile = byte_level.encode("a🙃b")
    assert len(smile) > 3  # split for certain
    pieces, _ = run(byte_level, [], [[i] for i in smile])
    assert "".join(pieces) == "a🙃b" and "🙃" in pieces and "\ufffd" not in "".join(pieces)


def test_several_matches_at_one_token(syllables):
    def stopped(token: str, stop: list[str]) -> StopMatch | None:
        return run(syllables, stop, [[syllables.token_id(token)]])[1]

    assert stopped("abcab", ["b", "abc", "ab"]) == StopMatch(1, "", "abc")  # earliest start, then first listed
    assert stopped("abcab", ["ab", "abc"]) == StopMatch(1, "", "ab")
    assert stopped("bbab", ["ab", "ba"]) == StopMatch(1, "b", "ba")
    # token by token the shorter one is complete first, as plain decoding would see it
    ids = [syllables.token_id(t) for t in ("a", "b", "c")]
    assert run(syllables, ["abc", "b"], [ids])[1] == StopMatch(2, "a", "b")


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, 7), max_size=24),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
    sizes=st.lists(st.integers(0, 6), max_size=12),
)
def test_stop_strings_do_not_depend_on_the_cut(syllables, ids, stop, sizes):
    text, match = by_definition(syllables, ids, stop)
    pieces, found = run(syllables, stop, blocks_of(ids, sizes))
    assert "".join(pieces) == text and found == match


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_byte_tokens_with_stop_strings_do_not_depend_on_the_cut(sentencepiece, data):
    byte = st.sampled_from([3 + b for b in "é€🙂".encode()] + [3 + 0x41, 2, 10**6])
    word = st.sampled_from([sentencepiece.token_id(t) for t in ("hi", "▁a", "▁", "é")])
    character = st.sampled_from([[3 + b for b in c.encode()] for c in "é€🙂"])
    ids = [
        i for part in data.draw(st.lists(character | byte.map(lambda i: [i]) | word.map(lambda i: [i]))) for i in part
    ]
    stop = data.draw(st.lists(st.sampled_from(["é", "€", "hi", " a", "🙂é", "i€", "\ufffd"]), max_size=2))
    text, match = by_definition(sentencepiece, ids, stop)
    pieces, found = run(sentencepiece, stop, blocks_of(ids, data.draw(st.lists(st.integers(0, 5), max_size=8))))
    assert found == match and "".join(pieces) == text


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 340), max_size=40), sizes=st.lists(st.integers(0, 9), max_size=9))
def test_pieces_join_to_the_decoded_text(byte_level, ids, sizes):
    for skip in (True, False):
        stream = byte_level.detokenizer(skip_special_tokens=skip)
        pieces = [stream.push(block) for block in blocks_of(ids, sizes)]
        assert "".join(pieces) + stream.flush() == byte_level.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(0, 7), max_size=20),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_what_was_printed_is_never_part_of_a_stop_string(syllables, ids, stop):
    stream = TextStream(syllables, stop)
    printed, whole = "", ""
    for i in ids:
        text, match = stream.push([i])
        printed += text
        if match is not None:
            assert printed == match.text
            return
        whole += syllables.token(i)
        held = whole[len(printed) :]
        assert whole.startswith(printed) and len(held) < max(map(len, stop))
        # held back is exactly what could become a stop string: nothing more
        assert held == max(
            (whole[n:] for n in range(len(whole) + 1) if any(s.startswith(whole[n:]) for s in stop)), key=len
        )


def test_ids_after_a_match_are_ignored(letters):
    stream = TextStream(letters, "b")
    assert stream.push(np.arange(5, dtype=np.int32)) == ("a", StopMatch(2, "a", "b"))
    assert stream.push([7, 8]) == ("", StopMatch(2, "a", "b")) and stream.finish() == "" and stream.text == "a"


def test_bad_stop_strings_and_no_tokenizer(letters):
    for bad in ([""], ["a", ""]):
        with pytest.raises(ConfigError, match="stop: stop strings must be non-empty"):
            TextStream(letters, bad)
    with pytest.raises(ConfigError, match="stop strings need a tokenizer"):
        TextStream(None, ["a"])
    assert TextStream(None).push([1, 2]) == ("", None)


def test_each_token_is_turned_into_text_once(letters):
    class Counting:
        """The letters' vocabulary, counting how often it is asked."""

        size, strip_start, asked = letters.backend.size, 0, 0
        encode, token, token_id = letters.backend.encode, letters.backend.token, letters.backend.token_id

        def piece(self, token_id: int, first: bool) -> bytes | None:
            self.asked += 1
            return letters.backend.piece(token_id, first)

    counting = Counting()
    stream = TextStream(replace(letters, backend=counting), ["abcabd", "Zz"])
    for i in range(5000):
        stream.push([i % 3])
    assert counting.asked == 5000 and len(stream.text + stream.finish()) == 5000

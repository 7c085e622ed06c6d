"""Every kind of tokenizer file: ids, text, special tokens, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from synthetic_vocabularies import byte_level_bpe, gguf_entries, save_folder, sentencepiece_bpe, words, write_json
from tokenizers import decoders

from eaglejax.errors import CheckpointError, PromptError
from eaglejax.text.eos import read_eos_ids
from eaglejax.text.tokenizer import has_tokenizer, load_tokenizer

TEXTS = [
    "",
    "a",
    "\n",
    "the cat's 12345 naïve 🙂",
    "<|im_start|>user\nhi<|im_end|>\n",
    "  two  spaces\n\n",
    "日本語 text",
]


@pytest.fixture
def bpe(tmp_path: Path):
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "pad_token": None}
    return load_tokenizer(save_folder(tmp_path, byte_level_bpe(), config))


def test_ids_and_text_of_a_byte_level_bpe(bpe):
    library = byte_level_bpe()
    for text in TEXTS:
        assert bpe.encode(text) == library.encode(text, add_special_tokens=False).ids
        assert bpe.decode(bpe.encode(text), skip_special_tokens=False) == text
    assert (bpe.bos_token_id, bpe.eos_token_id, bpe.pad_token_id) == (0, 1, None)
    assert bpe.encode("<|im_start|>user")[0] == 0 and bpe.special_ids == {0, 1}
    assert bpe.decode(bpe.encode("<|im_start|>user\nhi<|im_end|>\n")) == "user\nhi\n"
    assert bpe.vocab_size == library.get_vocab_size() and bpe.token(0) == "<|im_start|>" and bpe.token_id("Ġthe")


def test_padded_rows_and_arrays_decode(bpe):
    ids = bpe.encode("the cat")
    padded = [ids[0], bpe.vocab_size, bpe.vocab_size + 7, 2**40, *ids[1:]]
    assert bpe.decode(padded) == "the cat"
    assert bpe.decode([bpe.vocab_size]) == "" == bpe.decode([])
    assert bpe.decode(np.asarray(ids, np.int32)) == bpe.decode([np.int64(i) for i in ids]) == "the cat"


def test_post_processor_and_truncation_of_the_file_add_and_cut_nothing(tmp_path: Path):
    library = byte_level_bpe()
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)]
    )
    library.enable_truncation(2)
    library.enable_padding(length=9)
    tokenizer = load_tokenizer(save_folder(tmp_path, library))
    text = "the cat sat on the mat"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


DECODERS = {
    "byte_level": byte_level_bpe,
    "sentencepiece": sentencepiece_bpe,
    "metaspace": lambda: words(decoders.Metaspace(), ["▁▁a", "b▁", "▁", "c"]),
    "metaspace_never": lambda: words(decoders.Metaspace(prepend_scheme="never"), ["▁▁a", "b▁", "▁", "c"]),
    "fuse": lambda: words(decoders.Fuse(), ["a", "b", " "]),
    "none": lambda: words(None, ["a", "b", "c"]),
}


@pytest.mark.parametrize("kind", DECODERS)
def test_decode_is_the_librarys(kind: str, tmp_path: Path):
    library = DECODERS[kind]()
    tokenizer = load_tokenizer(save_folder(tmp_path, library))
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(12))]
        if kind == "sentencepiece":
            # runs of byte tokens are the one wanted difference: see pieces.py
            ids = [i for i in ids if not 3 + 0x80 <= i < 3 + 256]
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == library.decode(ids, skip_special_tokens=skip), ids


def test_bytes_of_a_sentencepiece_vocabulary(tmp_path: Path):
    tokenizer = load_tokenizer(save_folder(tmp_path, sentencepiece_bpe()))
    for text in ("hi a b", "  hi", "a🙂b é ü", " "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    euro = [3 + b for b in "€".encode()]
    a = tokenizer.token_id("a")
    assert a is not None
    assert tokenizer.decode([*euro[:2], 2, euro[2]]) == "€"  # a skipped special token does not cut a character
    assert tokenizer.decode([*euro, a, euro[0]]) == "€a\ufffd"


def test_a_decoder_that_looks_ahead_is_refused_by_name(tmp_path: Path):
    for decoder, name in (
        (decoders.WordPiece(), "WordPiece"),
        (decoders.CTC(), "CTC"),
        (decoders.BPEDecoder(), "BPEDecoder"),
    ):
        folder = save_folder(tmp_path / name, words(decoder, ["a"]))
        with pytest.raises(CheckpointError, match=f"tokenizer.json.*{name}"):
            load_tokenizer(folder)


def test_tokens_that_only_the_config_declares(tmp_path: Path):
    library = byte_level_bpe()
    size = library.get_vocab_size()
    added = {
        str(size): {"content": "<tool>", "special": False},
        str(size + 1): {"content": "<end>", "special": True},
        "0": {"content": "<|im_start|>", "special": False},
    }
    tokenizer = load_tokenizer(save_folder(tmp_path, library, {"added_tokens_decoder": added}))
    ids = tokenizer.encode("<|im_start|>a<tool>b<end>")
    assert ids[0] == 0 and size in ids and ids[-1] == size + 1
    assert tokenizer.decode(ids) == "<|im_start|>a<tool>b"
    added[str(size + 5)] = added.pop(str(size + 1))
    with pytest.raises(CheckpointError, match=rf"'<end>' has id {size + 1}.*expected id {size + 5}"):
        load_tokenizer(save_folder(tmp_path / "wrong", library, {"added_tokens_decoder": added}))


def test_named_tokens_outside_the_vocabulary_are_noted(tmp_path: Path):
    config = {"eos_token": "<nowhere>", "extra_special_tokens": {"image_token": "the"}}
    tokenizer = load_tokenizer(save_folder(tmp_path, byte_level_bpe(), config))
    assert tokenizer.eos_token_id is None and any("<nowhere>" in note for note in tokenizer.notes)
    the = tokenizer.token_id("the")
    assert the in tokenizer.special_ids and tokenizer.encode("xthe") == [*tokenizer.encode("x"), the]


def test_broken_files_are_named(tmp_path: Path):
    folder = save_folder(tmp_path / "cut", byte_level_bpe())
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(text[:500], encoding="utf-8")
    with pytest.raises(CheckpointError, match="tokenizer.json"):
        load_tokenizer(folder)
    broken = json.loads(text)
    broken["model"]["type"] = "Unheard"
    write_json(folder / "tokenizer.json", broken)
    with pytest.raises(
        CheckpointError, match="tokenizers library cannot read.*tokenizer.json|tokenizer.json: the tokenizers"
    ):
        load_tokenizer(folder)
    shifted = json.loads(text)
    shifted["added_tokens"].append({**shifted["added_tokens"][0], "id": 9999, "content": "<far>"})
    write_json(folder / "tokenizer.json", shifted)
    with pytest.raises(CheckpointError, match="<far>.*id 9999"):
        load_tokenizer(folder)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "tokenizer.model").write_bytes(b"x")
    assert not has_tokenizer(empty) and has_tokenizer(folder)
    with pytest.raises(
        CheckpointError, match="no tokenizer.*found tokenizer.model.*tokenizer.json or tiktoken.model.*save_pretrained"
    ):
        load_tokenizer(empty)
    with pytest.raises(CheckpointError, match="not a checkpoint folder"):
        load_tokenizer(tmp_path / "absent")


def test_lone_surrogates_are_refused(bpe):
    with pytest.raises(PromptError, match="surrogate.*character 2"):
        bpe.encode("ab\ud800")


# GGUF


def test_gguf_digits_stand_alone():
    library = byte_level_bpe()
    tokenizer = load_tokenizer(gguf_entries(library, special=2))
    text = "the 12345 cat\n\n   2. hi<|im_end|>"
    ids = tokenizer.encode(text)
    tokens = [tokenizer.token(i) for i in ids]
    assert tokens[tokens.index("1") :][:5] == list("12345") and tokens[-1] == "<|im_end|>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.special_ids) == (0, 1, {0, 1})
    # planted fault: GPT-2's split alone, which keeps the space before a digit with it or joins digits
    plain = load_tokenizer(gguf_entries(library, special=2, pre="gpt-2"))
    assert plain.encode(text) != ids and plain.encode(text) == library.encode(text).ids


def test_gguf_llama3_split():
    tokenizer = load_tokenizer(gguf_entries(byte_level_bpe(), special=2, pre="llama-bpe"))
    assert tokenizer.decode(tokenizer.encode("HELLO hello's 12345\n")) == "HELLO hello's 12345\n"


def test_gguf_entries_by_their_full_names():
    short = gguf_entries(byte_level_bpe(), special=2)
    full = {("tokenizer." if key == "chat_template" else "tokenizer.ggml.") + key: v for key, v in short.items()}
    assert load_tokenizer(full).encode("the cat 12") == load_tokenizer(short).encode("the cat 12")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"pre": "tekken"}, "tokenizer.ggml.pre.*'tekken'.*smollm"),
        ({"pre": None}, "tokenizer.ggml.pre.*None"),
        ({"model": "llama"}, "tokenizer.ggml.model.*found llama"),
        ({"merges": None}, "tokenizer.ggml.merges.*nothing"),
        ({"merges": ["zz qq"]}, r"merges\[0\].*zz qq"),
        ({"token_type": [1]}, "token_type.*found 1"),
        ({"eos_token_id": 10**6}, "eos_token_id.*1000000"),
    ],
)
def test_gguf_refusals(change: dict, message: str):
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer({**gguf_entries(byte_level_bpe(), special=2), **change})


def test_a_reader_with_a_tokenizer_inside_goes_before_the_folder(tmp_path: Path):
    class Reader:
        path = tmp_path / "model.gguf"
        gguf_tokenizer = gguf_entries(byte_level_bpe(), special=2)

    assert has_tokenizer(tmp_path, Reader()) and not has_tokenizer(tmp_path)
    for tokenizer in (load_tokenizer(tmp_path, Reader()), load_tokenizer(Reader())):
        assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"


# EOS


def test_eos_ids_by_precedence(tmp_path: Path, bpe):
    assert read_eos_ids(tmp_path, {"eos_token_id": 63}) == (63,)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [63, 40, 63]})
    assert read_eos_ids(tmp_path, {"eos_token_id": 63}) == (63, 40)
    write_json(tmp_path / "generation_config.json", {"temperature": 1.0})
    assert read_eos_ids(tmp_path, {"text_config": {"eos_token_id": [5]}}) == (5,)
    assert read_eos_ids(None, {}, bpe) == (1,) and read_eos_ids(None, {}) == ()
    for bad in ("2", True, [-1], [2.0]):
        with pytest.raises(ValueError, match="eos_token_id: not a token id"):
            read_eos_ids(None, {"eos_token_id": bad})

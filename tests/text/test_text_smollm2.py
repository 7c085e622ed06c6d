"""The real SmolLM2 tokenizer out of its GGUF file, against ids and texts of transformers (see the file's `peer`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eaglejax.checkpoint.reader import open_checkpoint
from eaglejax.text.stop import TextStream
from eaglejax.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path):
    return load_tokenizer(open_checkpoint(smollm2_path))


@pytest.fixture(scope="module")
def golden(data: Path) -> dict:
    return json.loads((data / "text" / "smollm2_tokenizer.json").read_text(encoding="utf-8"))


def test_ids(smollm2, golden):
    for case in golden["tokenizer"]:
        assert smollm2.encode(case["text"]) == case["ids"], case["text"]
        assert smollm2.decode(case["ids"], skip_special_tokens=False) == case["text"]


def test_chat_and_text(smollm2, golden):
    assert smollm2.eos_token_id == golden["eos"] and smollm2.bos_token_id == 1 and smollm2.vocab_size == 49152
    for case in golden["chat"]:
        assert smollm2.apply_chat_template([{"role": "user", "content": case["prompt"]}]) == case["prompt_ids"]
        assert smollm2.decode(case["greedy_ids"]) == case["greedy_text"]
        stream = TextStream(smollm2)
        pieces = [stream.push([i])[0] for i in case["greedy_ids"]]
        assert "".join(pieces) + stream.finish() == case["greedy_text"]

"""Small tokenizers of every kind, made on the spot."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from eaglejax.text.pieces import byte_letters

CORPUS = [
    "the cat sat on the mat, and the dog sat on the log. ",
    "naïve café 🙂🙃 日本語 text 你好 world 12345 HELLO Hello hello's don't we'll ",
    "def f(x):\n\treturn x ** 2  # the square\n\n\n",
]


def byte_level_bpe(special: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")) -> tokenizers.Tokenizer:
    """A trained byte-level BPE of about 330 tokens, special tokens first."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    return library


def sentencepiece_bpe() -> tokenizers.Tokenizer:
    """Words with U+2581 for spaces and a token for every byte, as Llama 2 and Mixtral have it."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{b:02X}>": 3 + b for b in range(256)}
    for token in ("▁", "a", "b", "h", "i", "▁a", "▁b", "hi", "▁hi", "é"):
        vocab[token] = len(vocab)
    merges = [("▁", "a"), ("▁", "b"), ("h", "i"), ("▁", "hi")]
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    library.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


def words(decoder: Any, tokens: list[str]) -> tokenizers.Tokenizer:
    """A word-level vocabulary with any decoder."""
    vocab = {token: i for i, token in enumerate(tokens)}
    library = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token=tokens[0]))
    if decoder is not None:
        library.decoder = decoder
    return library


def save_folder(folder: Path, library: tokenizers.Tokenizer, config: dict[str, Any] | None = None) -> Path:
    """A checkpoint folder with tokenizer.json and, where given, tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    if config is not None:
        write_json(folder / "tokenizer_config.json", config)
    return folder


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def gguf_entries(library: tokenizers.Tokenizer, special: int, pre: str = "smollm") -> dict[str, Any]:
    """What a GGUF file holds for a byte-level BPE whose first `special` tokens are control tokens."""
    vocab = library.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = json.loads(library.to_str())["model"]["merges"]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3] * special + [1] * (len(tokens) - special),
        "merges": [" ".join(pair) for pair in merges],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "chat_template": None,
    }


def kimi_folder(folder: Path, **config: Any) -> tuple[Path, dict[bytes, int]]:
    """A folder as Kimi ships it, with the vocabulary of `byte_level_bpe` as ranks. Returns the ranks too."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_of = {letter: byte for byte, letter in byte_letters().items()}
    vocab = byte_level_bpe(special=()).get_vocab()
    spelled = [bytes(byte_of[c] for c in token) for token in sorted(vocab, key=vocab.__getitem__)]
    ranks = {token: rank for rank, token in enumerate(spelled)}
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    base = len(ranks)
    entry = lambda content, special: {"content": content, "special": special, "lstrip": False, "normalized": False}
    settings = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": {
            str(base): entry("[BOS]", True),
            str(base + 1): entry("[EOS]", True),
            str(base + 2): entry("<|im_end|>", True),
            str(base + 3): entry("<|im_user|>", False),
            str(base + 4): entry("<|tool_call_begin|>", False),
        },
        "additional_special_tokens": ["<|im_end|>", "<|im_user|>"],
        "bos_token": "[BOS]",
        "eos_token": {"content": "[EOS]"},
    }
    write_json(folder / "tokenizer_config.json", settings | config)
    return folder, ranks

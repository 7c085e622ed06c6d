"""Prompts as token ids in one small file: made once on a CPU, read where the draft is trained."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np

LARGEST = 24 << 20  # bytes of the file: it is carried to the machine that trains


def prepare(prompts: str, evaluation: list[str], target: str, out: str) -> None:
    """Chat template applied: training prompts, held out (every 150th of each file), and evaluation sets: built-in names or files."""
    from eaglejax.checkpoint.reader import open_checkpoint
    from eaglejax.checkpoint.source import resolve
    from eaglejax.measure.prompt_sets import read_prompts as read_set
    from eaglejax.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(open_checkpoint(resolve(target).path))
    encode = lambda messages: np.asarray(tokenizer.apply_chat_template(messages), np.uint16)
    ask = lambda text: [{"role": "user", "content": text}]
    sets: dict[str, list[np.ndarray]] = {"train": [], "heldout": []}
    for file in sorted(Path(prompts).glob("*.jsonl.gz")):
        for number, line in enumerate(gzip.open(file, "rt", encoding="utf-8")):
            sets["heldout" if number % 150 == 0 else "train"].append(encode(ask(json.loads(line)["prompt"])))
    for name in evaluation:
        sets[Path(name).name.split(".")[0]] = [encode(prompt.content) for prompt in read_set(name)]
    arrays = {}
    for name, encoded in sets.items():
        if not encoded:
            raise SystemExit(f"no prompts for {name}: {prompts} holds no *.jsonl.gz with lines")
        arrays[f"{name}.ids"] = np.concatenate(encoded)
        arrays[f"{name}.lengths"] = np.asarray([len(p) for p in encoded], np.int32)
        print(f"{name}: {len(encoded)} prompts, {len(arrays[f'{name}.ids'])} tokens", flush=True)
    np.savez_compressed(out, **arrays)
    size = Path(out).stat().st_size
    print(f"{out}: {size} bytes")
    if size > LARGEST:
        raise SystemExit(f"{out}: {size} bytes, more than the {LARGEST} that may be carried")


def read_prompts(file: Path, longest: int, limit: int = 0) -> dict[str, list[np.ndarray]]:
    """Set name -> its prompts of at most `longest` tokens, the first `limit` of them (0: all)."""
    sets = {}
    with np.load(file) as stored:
        for name in [key[:-4] for key in stored.files if key.endswith(".ids")]:
            ends = np.cumsum(stored[f"{name}.lengths"])[:-1]
            prompts = np.split(stored[f"{name}.ids"].astype(np.int32), ends)
            fitting = [p for p in prompts if len(p) <= longest]
            sets[name] = fitting[:limit] if limit else fitting
    return sets

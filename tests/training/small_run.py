"""A tiny random target with answers of its own, the settings of a run of seconds, and how to stop one and to read its figures."""

from __future__ import annotations

import csv
import json
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from eaglejax import EagleJaxEngine, Sampling
from eaglejax.training.train_config import TrainConfig

SETTINGS = dict(
    boundaries=(1, 2, 3),
    mlp=64,
    vocab=40,
    row_length=48,
    batch=2,
    steps=30,
    rate=3e-3,
    unroll=3,
    dtype="float32",
    save_every=5,
    evaluate_every=15,
    evaluate_prompts=4,
    evaluate_tokens=12,
    tree=(3, 1, 4),
    slots=4,
)


def target_folder(data: Path) -> str:
    return str(data / "targets" / "llama_tied_linear")


def write_answers(folder: Path, data: Path, count: int = 16) -> tuple[Path, Path]:
    """A file of the target's own sampled answers to random prompts, and one of held-out prompts."""
    rng = np.random.default_rng(11)
    prompts = [rng.integers(3, 60, 5).tolist() for _ in range(count + 4)]
    engine = EagleJaxEngine.from_pretrained(target_folder(data), max_len=48, slots=8)
    asked = [Sampling(max_new_tokens=14, temperature=0.7, seed=n) for n in range(count)]
    answers = engine.generate(prompts[:count], asked)
    rows = [{"prompt_ids": a.prompt_token_ids, "token_ids": a.token_ids} for a in answers]
    files = folder / "answers.jsonl", folder / "held_out.jsonl"
    files[0].write_text("".join(json.dumps(row) + "\n" for row in rows))
    held = [{"prompt_ids": prompt} for prompt in prompts[count:]]
    files[1].write_text("".join(json.dumps(row) + "\n" for row in held))
    return files


def settings(out: Path, data: Path, files: tuple[Path, Path], **changes) -> TrainConfig:
    given = {"out": str(out), "model": target_folder(data), "data": (str(files[0]),), "held_out": str(files[1])}
    return TrainConfig(**{**given, **SETTINGS, **changes})


def rows_of(folder: Path, name: str) -> list[dict[str, str]]:
    with open(folder / name, newline="") as file:
        return list(csv.DictReader(file))


def stop_after(steps: int):
    """A progress bar that interrupts the run once it has taken so many steps, as Ctrl-C would."""

    @contextmanager
    def progress(what, total):
        taken = 0

        def advance(n):
            nonlocal taken
            taken += n
            if taken >= steps:
                raise KeyboardInterrupt

        yield advance

    return progress

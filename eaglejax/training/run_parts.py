"""What a training run is made of before its first step: text and held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eaglejax.engine import EagleJaxEngine
from eaglejax.errors import ConfigError, PromptError
from eaglejax.loading import Pair
from eaglejax.training.answer_file import cut_by_row
from eaglejax.training.conversations import Corpus, Reader
from eaglejax.training.data import Document, pack
from eaglejax.training.identity import digest, target_digest, tokenizer_digest
from eaglejax.training.regenerate import regenerate
from eaglejax.training.run_folder import ANSWERS
from eaglejax.training.starts import Plan
from eaglejax.training.train_config import TrainConfig
from eaglejax.training.ttt import Text

Say = Callable[[str], None]
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class Material:
    """Text to train on and prompts to evaluate with."""

    text: Text
    documents: list[Document]
    held_out: list[list[int]]
    digest: str  # of the packed text


def reader_of(pair: Pair) -> Reader:
    return Reader(pair.tokenizer, pair.target.config.vocab_size, pair.eos_ids)


def read_held_out(config: TrainConfig, pair: Pair, say: Say) -> list[list[int]] | None:
    """All prompts of the held-out file that fit; None where none is named. Raises PromptError."""
    if config.held_out is None:
        return None
    return _prompts(config, pair, [config.held_out], say)


def _prompts(config: TrainConfig, pair: Pair, files: Sequence[str | Path], say: Say) -> list[list[int]]:
    """The prompts that leave room for an answer; how many do not is said."""
    longest = config.row_length - 2
    found = reader_of(pair).prompts(files, longest)
    if found.too_long:
        say(
            f"{found.too_long} of {found.too_long + len(found.fitting)} prompts in {', '.join(map(str, files))} "
            f"left out: longer than {longest} tokens (row_length - 2)"
        )
    return found.fitting


def gather(
    config: TrainConfig, pair: Pair, aside: list[list[int]] | None, out: Path, say: Say, progress: Progress
) -> Material:
    """Read the data, have the target answer where that is asked for, set prompts aside, pack.

    Arguments:
        aside: what `read_held_out` read: documents that answer one of these prompts are not trained on.

    Raises PromptError and ConfigError before the target runs, as far as that can be known.
    """
    files: tuple[str | Path, ...] = config.data
    if config.regenerate:
        files = (_answers(config, pair, aside or [], out, say, progress),)
    corpus = reader_of(pair).corpus(files, config.row_length)
    say(str(corpus))
    documents = corpus.documents
    if aside is None:
        documents, aside = set_aside(corpus, config.evaluate_prompts)
    documents = without_held_out(documents, aside, say)
    aside = aside[: config.evaluate_prompts]
    text = pack(documents, config.row_length)
    filled = float((np.asarray(text.segments) >= 0).mean())
    say(
        f"{text.tokens.shape[0]} rows of {config.row_length} tokens, {filled:.1%} filled; {len(aside)} prompts held out"
    )
    parts = [np.asarray(part) for part in (text.tokens, text.segments, text.loss)]
    return Material(text, documents, aside, digest(*parts))


def without_held_out(documents: list[Document], aside: list[list[int]], say: Say) -> list[Document]:
    """The documents of which no answer is to a held-out prompt; how many are left out is said.

    Raises ConfigError where none is left.
    """
    held = {tuple(prompt) for prompt in aside}
    lengths = {len(prompt) for prompt in aside}

    def shared(document: Document) -> bool:
        return any(
            begin in lengths and tuple(document.tokens[:begin].tolist()) in held for begin, _ in document.answers
        )

    left = [document for document in documents if not shared(document)]
    if not left:
        raise _all_held_out(f"all {len(documents)} documents")
    if len(left) < len(documents):
        say(f"{len(documents) - len(left)} documents left out of the training: their prompts are held out")
    return left


def _all_held_out(found: str) -> ConfigError:
    return ConfigError(
        "every prompt of the data is also a held-out one: nothing is left to train on",
        where="held_out",
        found=found,
        fix="name a file of other prompts, or leave held_out away: some of the data are then set aside",
    )


def _answers(config: TrainConfig, pair: Pair, aside: list[list[int]], out: Path, say: Say, progress: Progress) -> Path:
    prompts = _prompts(config, pair, config.data, say)
    held = {tuple(prompt) for prompt in aside}
    if all(tuple(prompt) in held for prompt in prompts):
        raise _all_held_out(f"all {len(prompts)} prompts")
    engine = EagleJaxEngine(pair, speculation=None, max_len=config.row_length, slots=config.slots)
    file = out / ANSWERS
    lengths = np.asarray([len(prompt) for prompt in prompts])
    facts = {"target": target_digest(pair.target, pair.dtype), "tokenizer": tokenizer_digest(pair)}
    facts |= {"dtype": config.dtype}
    facts["prompts"] = digest(lengths, np.concatenate([np.asarray(prompt) for prompt in prompts]))
    with progress("answers", len(prompts)) as advance:
        before = regenerate(
            engine,
            prompts,
            file,
            temperature=config.temperature,
            new_tokens=config.answer_tokens,
            seed=config.seed,
            facts=facts,
            advance=advance,
        )
    cut = cut_by_row(file, config.answer_tokens)
    say(
        f"{len(prompts)} answers in {file}"
        + (f", {before} of them from before" if before else "")
        + (f"; {cut} cut by row_length {config.row_length} before answer_tokens {config.answer_tokens}" if cut else "")
    )
    return file


def set_aside(corpus: Corpus, most: int) -> tuple[list[Document], list[list[int]]]:
    """Training documents, and the prompts of every tenth or rarer one, `most` at most.

    Raises ConfigError where there are fewer than 20 documents.
    """
    documents = corpus.documents
    count = min(most, len(documents) // 10)
    if count < 2:
        raise ConfigError(
            "too little text to set some of it aside for the evaluation",
            where="data",
            found=f"{len(documents)} documents",
            expected="20 or more",
            fix="name a file of prompts: held_out",
        )
    chosen = {int(i) for i in np.linspace(0, len(documents) - 1, count)}
    prompts = [documents[i].tokens[: documents[i].answers[0][0]].tolist() for i in sorted(chosen)]
    return [d for i, d in enumerate(documents) if i not in chosen], [p for p in prompts if p]


def held_out_digest(prompts: list[list[int]]) -> str:
    return digest(*(np.asarray(prompt) for prompt in prompts))


def early_identity(config: TrainConfig, pair: Pair, plan: Plan, aside: list[list[int]] | None) -> dict[str, Any]:
    """What a checkpoint must share with this run, as far as it is known before there is text."""
    known = {
        **config.binding(),
        "target": target_digest(pair.target, pair.dtype),
        "tokenizer": tokenizer_digest(pair),
        **plan.identity(),
    }
    return known if aside is None else {**known, "held_out_prompts": held_out_digest(aside[: config.evaluate_prompts])}


def refuse_long(config: TrainConfig, pair: Pair) -> None:
    """A row longer than the target's context gives states that it never has when it serves."""
    limit = pair.target.config.max_position
    if 0 < limit < config.row_length:
        raise PromptError(
            "is longer than the target's context",
            where="row_length",
            found=config.row_length,
            expected=f"at most {limit}",
        )

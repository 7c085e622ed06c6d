"""The target's own answers to prompts, written as they come; a run that was stopped goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eaglejax.config import Sampling
from eaglejax.engine import EagleJaxEngine
from eaglejax.training.answer_file import resume
from eaglejax.training.lines import HEADER
from eaglejax.training.run_folder import writing


def regenerate(
    engine: EagleJaxEngine,
    prompts: Sequence[Sequence[int]],
    file: Path,
    *,
    temperature: float,
    new_tokens: int,
    seed: int,
    facts: dict[str, Any],
    advance: Callable[[int], None] = lambda n: None,
) -> int:
    """Answer all prompts, `engine.slots` at a time; returns how many answers the file already held.

    The file's first line says what it was made with; every other line has n, prompt_ids, token_ids, finish_reason and
    seed. Answer n is drawn with seed + n, so that a stopped run and a straight one write the same.

    Arguments:
        facts: what else the answers depend on (target, data); a file made with other facts is refused.

    Raises ConfigError where the file holds the answers of another run, PromptError where it is damaged.
    """
    header = {HEADER: 1, "temperature": temperature, "new_tokens": new_tokens, "seed": seed, **facts}
    header["row_length"] = engine.max_len  # the answers to long prompts are cut there
    with writing(file):
        done = resume(file, header, prompts)
        out = open(file, "ab")
    advance(done)
    with out:
        for first in range(done, len(prompts), engine.slots):
            part = prompts[first : first + engine.slots]
            budgets = [min(new_tokens, engine.max_len - len(prompt)) for prompt in part]
            asked = [
                Sampling(max_new_tokens=budget, temperature=temperature, seed=seed + first + n)
                for n, budget in enumerate(budgets)
            ]
            answers = engine.generate([list(prompt) for prompt in part], asked)
            with writing(file):
                for n, answer in enumerate(answers, first):
                    row = {"n": n, "prompt_ids": answer.prompt_token_ids, "token_ids": answer.token_ids}
                    row |= {"finish_reason": answer.finish_reason, "seed": seed + n}
                    out.write(json.dumps(row).encode() + b"\n")
                out.flush()
                os.fsync(out.fileno())
            advance(len(part))
    return done

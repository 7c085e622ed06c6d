"""What an engine is asked for, checked before anything runs: requests from prompts and samplings, texts from token ids."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from eaglejax.config import Sampling
from eaglejax.errors import ConfigError, PromptError
from eaglejax.loading import Pair
from eaglejax.models.config import TargetConfig
from eaglejax.sharding.processes import from_first
from eaglejax.text.prompts import parse_prompts
from eaglejax.wave import Job


def make_jobs(pair: Pair, prompts: list[list[int]], sampling: Sampling | Sequence[Sampling] | None) -> list[Job]:
    """A request per prompt. Raises ConfigError for samplings that do not fit the prompts, and for stop strings without a tokenizer."""
    given = Sampling() if sampling is None else sampling
    samplings = [given] * len(prompts) if isinstance(given, Sampling) else given
    if not isinstance(samplings, list | tuple) or not all(isinstance(s, Sampling) for s in samplings):
        raise ConfigError(
            "not a Sampling", where="sampling", found=repr(sampling)[:80], expected="one, or a list of them"
        )
    if len(samplings) != len(prompts):
        raise ConfigError(
            "needs as many as there are prompts, or a single one for all",
            where="sampling",
            found=f"{len(samplings)} for {len(prompts)} prompts",
        )
    jobs = []
    for prompt, asked in zip(prompts, samplings, strict=True):
        stops = tuple(asked.stop_token_ids) if asked.ignore_eos else (*pair.eos_ids, *asked.stop_token_ids)
        if asked.stop:
            _ = pair.text_tokenizer  # stop strings need text
        jobs.append(Job(prompt, asked, asked.seed, tuple(dict.fromkeys(stops))))
    return jobs


def seeded(jobs: list[Job]) -> list[Job]:
    """The jobs, a fresh seed for each that has none: process 0's where there are several."""
    return [job if job.seed is not None else replace(job, seed=from_first(secrets.randbits(63))) for job in jobs]


def text_ids(target: TargetConfig, token_ids: Sequence[int], least: int) -> list[int]:
    """A text to look at, as ids. Raises PromptError for ids that are none of the target's, for fewer than `least`, and for more than its
    context."""
    if isinstance(token_ids, str) or not hasattr(token_ids, "__len__"):
        raise PromptError(
            "not token ids", where="token_ids", found=repr(token_ids)[:80], expected="a list of whole numbers"
        )
    limit = target.max_position or 2**31 - 1
    (ids,) = parse_prompts([list(token_ids)], None, vocab_size=target.vocab_size, max_len=limit)
    if len(ids) < least:
        raise PromptError("too few tokens", where="token_ids", found=len(ids), expected=f"{least} or more")
    return ids

"""A wave: up to `slots` requests decoded together, from prompts to answers, with their text watched for stop strings."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.profiler import TraceAnnotation
from jaxtyping import Bool, Int

from eaglejax.config import Sampling, Speculation
from eaglejax.generation import Chunk, Generation, Stats
from eaglejax.sharding.layout import fetch
from eaglejax.speculation.adapt import Policy
from eaglejax.speculation.experience import Experience
from eaglejax.speculation.programs import ALL_CYCLES, Programs, prefill_plan, stop_width
from eaglejax.speculation.state import Request, State
from eaglejax.text.stop import TextStream
from eaglejax.text.tokenizer import Tokenizer

log = logging.getLogger("eaglejax")

# what the host is doing, in a profiler's trace
PREFILL, DECODE, COLLECT = "eaglejax.prefill", "eaglejax.decode", "eaglejax.collect"
CYCLES_BETWEEN_STOP_CHECKS = 8
CYCLES_WITHOUT_ACCEPTANCE, AUTO_CYCLES_WITHOUT_ACCEPTANCE = 64, 8


@dataclass(frozen=True)
class Job:
    """One request of a wave."""

    prompt: list[int]
    sampling: Sampling
    seed: int | None  # None: a fresh one, chosen before the wave runs
    stop_ids: tuple[int, ...]  # EOS ids, unless ignored, and the request's own


class Wave:
    """Runs the jobs; `chunks` yields what is new of each answer, `answers` holds them in the end."""

    def __init__(
        self,
        programs: Programs,
        jobs: Sequence[Job],
        tokenizer: Tokenizer | None,
        slots: int,
        policy: Policy | None = None,
        experience: Experience | None = None,
    ):
        """Arguments: policy: tables of "auto". experience: what it carries from wave to wave; this one begins with it and adds to it."""
        self.programs, self.jobs, self.tokenizer, self.policy = programs, list(jobs), tokenizer, policy
        self.experience = experience
        self.slots = programs.slots_for(len(self.jobs), slots)
        self.answers: list[Generation | None] = [None] * len(self.jobs)
        self._streams = [TextStream(tokenizer, job.sampling.stop) if tokenizer else None for job in self.jobs]
        self._seen = [0] * len(self.jobs)  # answer tokens handed to the text stream
        self._prefill_seconds = self._decode_seconds = 0.0

    def run(self) -> list[Generation]:
        """All answers. The loop stops for the host only where a stop string has to be looked for."""
        watch = any(job.sampling.stop for job in self.jobs)
        for _ in self.chunks(CYCLES_BETWEEN_STOP_CHECKS if watch else ALL_CYCLES):
            pass
        return [answer for answer in self.answers if answer is not None]

    def chunks(self, cycles: int) -> Iterator[tuple[int, Chunk]]:
        """(job, piece) as tokens come, `cycles` cycles of the loop at a time."""
        yield from self._without_budget()
        if all(self.answers):
            return
        begin = time.perf_counter()
        with TraceAnnotation(PREFILL):
            state = self.prefilled()
            jax.block_until_ready(state.length)
        self._prefill_seconds = time.perf_counter() - begin
        ended = np.array([index >= len(self.jobs) or self.answers[index] is not None for index in range(self.slots)])
        whole = True  # an interrupted decode leaves buffers that are gone: such a state is dropped
        try:
            while True:
                with TraceAnnotation(COLLECT):
                    pieces = list(self._collect(state, ended))
                yield from pieces
                if all(self.answers):
                    self._remember(state)
                    return
                begin, whole = time.perf_counter(), False
                with TraceAnnotation(DECODE):
                    state = self.programs.decode(state, cycles, ended, self.policy)
                    jax.block_until_ready(state.length)
                whole = True
                self._decode_seconds += time.perf_counter() - begin
        finally:
            if whole:
                self.programs.keep(state)

    def _remember(self, state: State) -> None:
        if self.experience is None or state.belief is None:
            return
        made = fetch(state.length) - fetch(state.request.prompt_length) - 1
        taken = np.arange(self.slots) < len(self.jobs)
        belief = state.belief
        self.experience.learn(fetch(belief.difficulty), fetch(belief.spent), fetch(belief.credit), made, taken)

    def _without_budget(self) -> Iterator[tuple[int, Chunk]]:
        # nothing was asked of the model: no prefill, no draft step
        for index, job in enumerate(self.jobs):
            if self._limit(job) <= len(job.prompt):
                self.answers[index] = self._answer(index, "", [], "length", None, [], [])
                yield index, Chunk("", [], self.answers[index])

    def _limit(self, job: Job) -> int:
        return min(len(job.prompt) + job.sampling.max_new_tokens, self.programs.max_len)

    def prefilled(self) -> State:
        """The state after the prefill: every slot has its first token."""
        longest = max(len(job.prompt) for job in self.jobs)
        state = self.programs.start(*self._arrays(longest), self.experience)
        for offset, rows in prefill_plan(longest):
            state = self.programs.prefill(state, offset, rows)
        return state

    def _arrays(self, longest: int) -> tuple[Request, Int[np.ndarray, "b n"]]:
        slots = self.slots
        prompts = np.zeros((slots, longest), np.int32)
        columns = {name: np.zeros(slots, np.float32) for name in ("temperature", "top_p", "min_p")}
        columns |= {name: np.zeros(slots, np.int32) for name in ("top_k", "prompt_length", "limit")}
        columns["top_p"] += 1
        seeds = np.zeros((slots, 2), np.uint32)
        stops = np.full((slots, stop_width(max(len(job.stop_ids) for job in self.jobs))), -1, np.int32)
        for index, job in enumerate(self.jobs):
            if self.answers[index] is not None:
                continue
            prompts[index, : len(job.prompt)] = job.prompt
            assert job.seed is not None
            seeds[index] = job.seed & 0xFFFFFFFF, job.seed >> 32
            stops[index, : len(job.stop_ids)] = job.stop_ids
            columns["prompt_length"][index] = len(job.prompt)
            columns["limit"][index] = self._limit(job)
            for name in ("temperature", "top_k", "top_p", "min_p"):
                columns[name][index] = getattr(job.sampling, name)
        put = self.programs.put
        request = Request(
            seed=put(seeds), stop_ids=put(stops), **{name: put(column) for name, column in columns.items()}
        )
        return request, prompts

    def _collect(self, state: State, ended: Bool[np.ndarray, " b"]) -> Iterator[tuple[int, Chunk]]:
        tokens, lengths, done, stopped, cycles, accepted = (
            fetch(x) for x in (state.tokens, state.length, state.done, state.stopped, state.cycles, state.accepted)
        )
        used = fetch(state.belief.used) if state.belief is not None else np.zeros((len(tokens), 0), np.int32)
        for index, job in enumerate(self.jobs):
            if self.answers[index] is not None:
                continue
            made = [int(i) for i in tokens[index, len(job.prompt) : lengths[index]]]
            fresh, text, match = made[self._seen[index] :], "", None
            stream = self._streams[index]
            if stream is not None:
                text, match = stream.push(self._text_ids(job, fresh, bool(stopped[index])))
            self._seen[index] = len(made)
            counts = [int(a) for a in accepted[index, : cycles[index]]]
            choices = [int(n) for n in used[index]]
            self._watch_acceptance(counts, sum(choices[1:]) if choices else len(counts))
            if match is not None:
                fresh = fresh[: match.token_count - (len(made) - len(fresh))]
                made = made[: match.token_count]
                counts = counts[: _cycles_for(counts, len(made))]
                reason, cause = "stop", match.stop
            elif stopped[index]:
                reason, cause = "stop", made[-1]
            elif done[index]:
                reason, cause = "length", None
            else:
                if fresh:
                    yield index, Chunk(text, fresh)
                continue
            if match is None and stream is not None:
                text += stream.finish()
            ended[index] = True
            self.answers[index] = self._answer(
                index, stream.text if stream else "", made, reason, cause, counts, choices
            )
            yield index, Chunk(text, fresh, self.answers[index])

    def _text_ids(self, job: Job, fresh: list[int], stopped: bool) -> list[int]:
        # the id that ended the answer is no part of its text
        return fresh[:-1] if stopped and fresh else fresh

    def _watch_acceptance(self, counts: list[int], drafted: int) -> None:
        """`drafted`: how many of the cycles grew a tree."""
        fixed = isinstance(self.programs.spec, Speculation)
        # "auto" soon stops growing trees that are of no use
        most = CYCLES_WITHOUT_ACCEPTANCE if fixed else AUTO_CYCLES_WITHOUT_ACCEPTANCE
        if not self.programs.spec.num_steps or self.programs.warned or drafted < most:
            return
        if not any(counts[:most] if fixed else counts):
            self.programs.warned = True
            log.warning(
                "no drafted token was accepted in %d cycles: %s the draft is wired wrongly or made for another target; "
                "see engine.load_report for its captures, and let `eaglejax check` measure them",
                most,
                "probably" if fixed else "the text is hard, or",
            )

    def _answer(self, index, text, made, reason, cause, counts, choices) -> Generation:
        job = self.jobs[index]
        assert job.seed is not None
        stats = Stats(
            seed=job.seed,
            prompt_tokens=len(job.prompt),
            new_tokens=len(made),
            accepted_per_cycle=counts,
            cycles_by_choice=choices,
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._decode_seconds,
        )
        return Generation(text, made, reason, cause, list(job.prompt), stats)


def _cycles_for(accepted: list[int], tokens: int) -> int:
    """Cycles that it took to make `tokens` tokens; the first came from the prefill."""
    made = 1
    for cycle, count in enumerate(accepted):
        if made >= tokens:
            return cycle
        made += count + 1
    return len(accepted)

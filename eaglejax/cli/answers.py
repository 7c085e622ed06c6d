"""What the runner says about an answer: the closing line for people, the JSON object for machines.

Compilation is told apart from decoding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from eaglejax.config import Auto, Speculation
from eaglejax.generation import Generation
from eaglejax.measure.acceptance import Acceptance, share

WORTH_SAYING = 0.05  # seconds of compilation


@dataclass(frozen=True)
class Times:
    """Seconds of one call of the engine, from its start to its last token.

    first: until the first token was there, compilation included. decode: after that, compilation left out.
    compile_first, compile_decode: spent on compilation in each of the two parts.
    """

    first: float
    compile_first: float
    decode: float
    compile_decode: float

    @property
    def compile(self) -> float:
        """Seconds of compilation in both parts."""
        return self.compile_first + self.compile_decode

    @property
    def without_compile(self) -> float:
        """Seconds of prefill and decoding."""
        return self.first - self.compile_first + self.decode


def closing_line(answer: Generation, spec: Speculation | Auto, times: Times) -> str:
    """The figures of one answer, for people."""
    line = f"{_counted(answer.stats.new_tokens)}: first after {times.first:.2f} s"
    if times.compile_first > WORTH_SAYING:
        line += f" ({times.compile_first:.2f} s of it compiling)"
    rate = _rate(answer, times)
    if not math.isnan(rate):
        line += f", then {rate:.1f} tokens/s"
        if times.compile_decode > WORTH_SAYING:
            line += f" (after {times.compile_decode:.2f} s more of compiling)"
    return f"{line}\n{_speculation_line([answer], spec)}"


def closing_line_of_many(answers: Sequence[Generation], spec: Speculation | Auto, calls: Sequence[Times]) -> str:
    """The figures of several answers together; compilation does not count into the rate."""
    tokens = sum(answer.stats.new_tokens for answer in answers)
    seconds = math.fsum(call.without_compile for call in calls)
    compiling = math.fsum(call.compile for call in calls)
    line = f"{len(answers)} answers, {tokens} tokens in {seconds:.2f} s"
    if tokens:
        line += f", prefill included: {tokens / seconds:.1f} tokens/s"
    if compiling > WORTH_SAYING:
        line += f"; {compiling:.2f} s more went into compiling"
    return f"{line}\n{_speculation_line(answers, spec)}"


def _counted(tokens: int) -> str:
    return "1 token" if tokens == 1 else f"{tokens} tokens"


def _rate(answer: Generation, times: Times) -> float:
    """Tokens after the first per second of decoding."""
    return share(answer.stats.new_tokens - 1, times.decode) if answer.stats.new_tokens > 1 else math.nan


def _speculation_line(answers: Sequence[Generation], spec: Speculation | Auto) -> str:
    cycles = sum(answer.stats.cycles for answer in answers)
    if spec.num_steps == 0:
        return f"plain decoding, {cycles} steps"
    if cycles == 0:
        return f"{spec.describe()}; no cycle was run"
    counted = Acceptance.of([answer.stats.accepted_per_cycle for answer in answers], spec.num_steps)
    if isinstance(spec, Auto):
        chosen = _choices(answers, spec)
        return f"{chosen}; tau {counted.tau:.2f} tokens per cycle, plain ones among them, over {cycles} cycles"
    levels = ", ".join(map(str, range(1, spec.num_steps + 1)))
    return (
        f"{spec.describe()}; tau {counted.tau:.2f} tokens per cycle, bonus included, over {cycles} cycles; "
        f"accepted at level {levels}: "
        f"{_percents(counted.unconditional)} of all cycles ({_percents(counted.conditional)} of those that reach it)"
    )


def _choices(answers: Sequence[Generation], auto: Auto) -> str:
    """How often each choice of "auto" was taken."""
    counted = [answer.stats.cycles_by_choice for answer in answers if answer.stats.cycles_by_choice]
    counts = [sum(column) for column in zip(*counted, strict=True)]
    names = ["plain", *(f"({tree.num_steps}, {tree.topk}, {tree.nodes})" for tree in auto.trees)]
    return '"auto", cycles by choice: ' + ", ".join(f"{name} {n}" for name, n in zip(names, counts, strict=True))


def _percents(shares: Sequence[float]) -> str:
    return ", ".join("-" if math.isnan(x) else f"{100 * x:.0f}" for x in shares) + " %"


def to_json(answer: Generation, index: int, spec: Speculation | Auto, times: Times) -> str:
    """One answer as a JSON object on one line. `index` is the prompt's number, from 0; `times` are those of the call
    that made it, beside others if it ran with others."""
    stats = answer.stats
    counted = Acceptance.of([stats.accepted_per_cycle], spec.num_steps)
    return json.dumps(
        {
            "index": index,
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "prompt_tokens": stats.prompt_tokens,
            "new_tokens": stats.new_tokens,
            "seed": stats.seed,
            "num_steps": spec.num_steps,
            "topk": spec.topk,
            "num_draft_tokens": spec.nodes,
            "cycles_by_choice": stats.cycles_by_choice,
            "cycles": stats.cycles,
            "tau": _number(stats.tau),
            "accepted_per_cycle": stats.accepted_per_cycle,
            "accepted_by_level_of_all_cycles": [_number(x) for x in counted.unconditional],
            "accepted_by_level_of_cycles_that_reach_it": [_number(x) for x in counted.conditional],
            "first_token_seconds": _number(times.first),
            "first_token_compile_seconds": _number(times.compile_first),
            "decode_seconds": _number(times.decode),
            "decode_compile_seconds": _number(times.compile_decode),
            "tokens_per_second": _number(_rate(answer, times)),
        },
        ensure_ascii=False,
    )


def _number(x: float) -> float | None:
    return None if math.isnan(x) else round(x, 4)

"""The figures under an answer, from counts made by hand: accepted runs of 3, 0, 1 and 5 tokens in trees of 5 levels."""

import json
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from eaglejax import Auto, Generation, Speculation
from eaglejax.cli.answers import Times, closing_line, closing_line_of_many, to_json
from eaglejax.generation import Stats
from eaglejax.measure.compile_clock import CompileClock

CHAIN = Speculation(num_steps=5)


def answer(accepted: list[int], tokens: int, text: str = "words") -> Generation:
    stats = Stats(seed=9, prompt_tokens=4, new_tokens=tokens, accepted_per_cycle=accepted)
    return Generation(text, list(range(tokens)), "length", None, [1, 2, 3, 4], stats)


def test_closing_line_names_every_figure():
    line = closing_line(answer([3, 0, 1, 5], 14), CHAIN, Times(1.5, 1.25, 2.0, 0.5))
    assert "14 tokens: first after 1.50 s (1.25 s of it compiling)" in line
    assert "then 6.5 tokens/s (after 0.50 s more of compiling)" in line
    assert "tau 3.25 tokens per cycle, bonus included, over 4 cycles" in line
    assert "accepted at level 1, 2, 3, 4, 5: 75, 50, 50, 25, 25 % of all cycles" in line
    assert "(75, 67, 100, 50, 100 % of those that reach it)" in line


def test_closing_line_says_nothing_of_compilation_where_there_was_none():
    line = closing_line(answer([0, 0], 3), Speculation(num_steps=0), Times(0.5, 0.0, 1.0, 0.0))
    assert line == "3 tokens: first after 0.50 s, then 2.0 tokens/s\nplain decoding, 2 steps"


def test_closing_line_of_an_answer_without_cycles():
    assert "no cycle was run" in closing_line(answer([], 1), CHAIN, Times(0.5, 0.0, 0.0, 0.0))


def test_several_answers_share_one_rate_without_compilation():
    calls = [Times(2.0, 1.5, 3.0, 4.0), Times(0.5, 0.0, 1.0, 0.0)]
    line = closing_line_of_many([answer([3, 0, 1, 5], 14), answer([0], 1)], CHAIN, calls)
    assert "2 answers, 15 tokens in 5.00 s, prefill included: 3.0 tokens/s; 5.50 s more went into compiling" in line
    assert "tau 2.80" in line


def test_json_is_one_line_of_plain_numbers():
    text = to_json(answer([3, 0, 1, 5], 14, 'two\nlines "é"'), 2, CHAIN, Times(1.5, 1.25, 2.0, 0.5))
    assert "\n" not in text and "é" in text
    said = json.loads(text)
    assert said["index"] == 2 and said["text"] == 'two\nlines "é"' and said["seed"] == 9
    assert (said["prompt_tokens"], said["new_tokens"], said["cycles"], said["tau"]) == (4, 14, 4, 3.25)
    assert said["accepted_per_cycle"] == [3, 0, 1, 5]
    assert said["accepted_by_level_of_all_cycles"] == [0.75, 0.5, 0.5, 0.25, 0.25]
    assert said["tokens_per_second"] == 6.5 and said["first_token_compile_seconds"] == 1.25
    empty = json.loads(to_json(answer([], 0), 0, CHAIN, Times(0.1, 0.0, 0.0, 0.0)))
    assert empty["tau"] is None and empty["tokens_per_second"] is None  # NaN is no JSON


def test_compile_clock_counts_compilation_and_nothing_else():
    clock = CompileClock()
    begin = time.perf_counter()
    compiled = jax.jit(lambda x: jnp.tanh(x @ x) + jnp.sort(x))
    compiled(jnp.ones((8, 8))).block_until_ready()
    middle = time.perf_counter()
    compiled(jnp.ones((8, 8))).block_until_ready()
    time.sleep(0.05)
    end = time.perf_counter()
    spent = clock.between(begin, middle)
    assert 0 < spent <= middle - begin
    assert clock.between(middle, end) == 0
    assert clock.between(begin, end) == pytest.approx(spent)


def test_nested_compile_spans_count_once(monkeypatch):
    clock = CompileClock()
    now = iter([10.0, 11.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock._on_event("/jax/core/compile/jaxpr_trace_duration", 1.0)  # 9 .. 10, inside the next
    clock._on_event("/jax/core/compile/backend_compile_duration", 3.0)  # 8 .. 11
    clock._on_event("/jax/compilation_cache/cache_retrieval_time_sec", 2.0)  # part of the one before
    assert clock.between(0.0, 30.0) == 3.0
    assert clock.between(9.5, 30.0) == 1.5


def test_the_choices_of_auto_are_counted():
    auto = Auto((CHAIN,))
    one = answer([3, 0, 0, 2], 9)
    stats = replace(one.stats, cycles_by_choice=[2, 2])
    line = closing_line(replace(one, stats=stats), auto, Times(0.5, 0.0, 1.0, 0.0))
    assert "cycles by choice: plain 2, (5, 1, 6) 2; tau 2.25" in line
    told = json.loads(to_json(replace(one, stats=stats), 0, auto, Times(0.5, 0.0, 1.0, 0.0)))
    assert told["cycles_by_choice"] == [2, 2] and told["num_draft_tokens"] == 6

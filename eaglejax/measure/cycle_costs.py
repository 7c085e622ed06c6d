"""What a cycle of every choice of "auto" costs, beside a plain one: timed with the program that will decode, each choice forced in turn."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.config import Auto, Sampling
from eaglejax.sharding.layout import fetch
from eaglejax.sharding.processes import from_first
from eaglejax.speculation.adapt import Policy, prior_policy
from eaglejax.speculation.programs import Programs
from eaglejax.speculation.state import State
from eaglejax.wave import Job, Wave

CONTEXT = 64  # tokens of a prompt where nothing is known of the requests
LEAST_CYCLES, CALL_SECONDS = 4, 0.05  # of one timed call: a call's own cost must not show in a cycle's
MOST_ROUNDS, BUDGET_SECONDS = 7, 6.0  # rounds over all choices; time after the first, which compiles
PARTS = 1_000_000  # costs are shared between processes as whole millionths


@dataclass(frozen=True)
class Costs:
    """Of a wave of some width. `trees`: a cycle with each tree; `catch_up`: the draft run over a window; `look`: over what was accepted;
    all in plain steps. `plain_ms`: of one step of plain decoding. `seconds`: how long measuring took."""

    trees: tuple[float, ...]
    catch_up: float
    look: float
    plain_ms: float
    seconds: float


def forced(policy: Policy, choice: int, catch_up: bool = False, look: bool = False) -> Policy:
    """Tables that take one choice in every cycle."""
    always = {"always_catch_up": jnp.bool_(catch_up), "always_look": jnp.bool_(look)}
    return replace(policy, forced=jnp.int32(choice), **always)


def measured_modes(auto: Auto) -> list[Policy]:
    """Plain decoding, the same with the draft's run over the window in every cycle, and over what was accepted; every tree. In this order:
    plain decoding leaves more rows waiting than a tree takes along, and the run over them would be counted as the tree's."""
    tables = prior_policy(auto)
    plain = [forced(tables, 0), forced(tables, 0, catch_up=True), forced(tables, 0, look=True)]
    return plain + [forced(tables, 1 + tree) for tree in range(len(auto.trees))]


class _Run:
    """A wave of random prompts of `context` tokens, or as many as there is room for, that is decoded a few cycles at a time."""

    def __init__(self, programs: Programs, width: int, context: int):
        self.programs, self.width, self.context, self.state = programs, width, context, None
        self.ended = np.zeros(width, bool)

    def seconds_per_cycle(self, policy: Policy, cycles: int) -> float:
        """Time of one call over the cycles it ran."""
        state = self._with_room(cycles)
        before = int(fetch(state.cycles).max())
        begin = time.perf_counter()
        self.state = state = self.programs.decode(state, cycles, self.ended, policy)
        jax.block_until_ready(state.length)
        taken = time.perf_counter() - begin
        return taken / max(1, int(fetch(state.cycles).max()) - before)

    def _with_room(self, cycles: int) -> State:
        longest = self.programs.max_len - cycles * (self.programs.spec.num_steps + 1) - 1
        if self.state is not None and int(fetch(self.state.length).max()) <= longest:
            return self.state
        if self.state is not None:
            self.programs.keep(self.state)
        vocabulary = self.programs.vocab_size
        random = np.random.default_rng(0)
        size = min(self.context, max(1, longest - 1))
        prompts = random.integers(0, vocabulary, (self.width, size)).tolist()
        jobs = [Job(prompt, Sampling(max_new_tokens=self.programs.max_len), 0, ()) for prompt in prompts]
        return Wave(self.programs, jobs, None, self.width).prefilled()

    def close(self) -> None:
        if self.state is not None:
            self.programs.keep(self.state)


def measure_costs(programs: Programs, width: int, context: int = CONTEXT) -> Costs:
    """Costs of the choices of `programs` with `width` slots behind `context` tokens. Compiles what decoding would, then takes some seconds.

    With several processes those of process 0, in all of them.
    """
    auto = programs.spec
    assert isinstance(auto, Auto)
    begin = time.perf_counter()
    placed = [programs.place_policy(mode) for mode in measured_modes(auto)]
    run = _Run(programs, programs.slots_for(width, width), context)
    most = max(1, (programs.max_len // 2) // (auto.num_steps + 1))
    few = min(LEAST_CYCLES, most)
    once = lambda cycles: [run.seconds_per_cycle(policy, cycles) for policy in placed]
    once(few)
    wanted = CALL_SECONDS / max(run.seconds_per_cycle(placed[0], few), 1e-9)
    cycles = from_first(round(min(max(wanted, few), most)))
    rounds, warm = [], time.perf_counter()
    rounds.append(once(cycles))
    more = int(BUDGET_SECONDS / max(time.perf_counter() - warm, 1e-6)) - 1
    rounds += [once(cycles) for _ in range(from_first(max(0, min(more, MOST_ROUNDS - 1))))]
    run.close()
    ratios = [statistics.median(times[mode] / times[0] for times in rounds) for mode in range(len(placed))]
    shared = [from_first(round(ratio * PARTS)) / PARTS for ratio in ratios]
    plain = from_first(round(PARTS * 1e3 * statistics.median(times[0] for times in rounds))) / PARTS
    catch_up, look = (max(0.0, ratio - 1) for ratio in shared[1:3])
    # every call begins with a look, which is no part of a cycle
    trees = tuple(max(1 / PARTS, ratio - look / cycles) for ratio in shared[3:])
    return Costs(trees, catch_up, look, plain, time.perf_counter() - begin)

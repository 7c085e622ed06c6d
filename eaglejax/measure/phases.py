"""What the draft and the verification of a cycle cost: each over and over in a compiled loop of its own, so nothing waits for the host."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from eaglejax.config import Sampling, Speculation
from eaglejax.engine import EagleJaxEngine
from eaglejax.measure.timing import seconds
from eaglejax.speculation.cache import commit, take_rows
from eaglejax.speculation.draft import extend, grow
from eaglejax.speculation.programs import Programs
from eaglejax.speculation.state import Models, State
from eaglejax.speculation.tree import Tree, root_only
from eaglejax.speculation.verify import accept, verify
from eaglejax.wave import Job, Wave

ROUNDS, REPEATS = 16, 3


@dataclass(frozen=True)
class Phases:
    """Milliseconds of one round at the prompts' length, all slots together. `draft`: extend over one token, then grow; 0 in plain
    decoding. `verify`: the target's pass over all nodes, its draws, the walk and the commit of one row."""

    draft: float
    verify: float


def measure_phases(
    engine: EagleJaxEngine, prompts: Sequence[list[int]], sampling: Sampling, spec: Speculation
) -> Phases:
    """The phases of `spec` after the first prompts, as many as the engine has slots. Compiles two programs."""
    programs = engine.programs(spec)
    jobs = [Job(ids, sampling, sampling.seed or 0, ()) for ids in prompts[: engine.slots]]
    state = Wave(programs, jobs, None, engine.slots).prefilled()
    draft = 0.0
    if spec.num_steps:
        draft, state = _timed(programs, state, lambda models, state: _draft_rounds(models, state, spec))
    verifying, _ = _timed(programs, state, lambda models, state: _verify_rounds(models, state, spec))
    return Phases(draft, verifying)


def _timed(programs: Programs, state: State, rounds: Callable[[Models, State], State]) -> tuple[float, State]:
    """Milliseconds of one of the rounds, the median of several runs; and the state, which every run is donated."""
    run = programs.custom(rounds)
    held = [run(state)]  # compiled
    spans = []
    for _ in range(REPEATS):

        def once():
            held[0] = run(held[0])
            return held[0].length

        spans.append(seconds(once))
    return statistics.median(spans) / ROUNDS * 1e3, held[0]


def _roots(state: State) -> tuple[Int[Array, " b"], Int[Array, " b"]]:
    """Last committed tokens and where they stand."""
    positions = state.length - 1
    return jnp.take_along_axis(state.tokens, positions[:, None], axis=-1)[:, 0], positions


def _draft_rounds(models: Models, state: State, spec: Speculation) -> State:
    root, positions = _roots(state)

    def body(_, carry):
        cache, tokens = carry
        cache, tree = _drafted(models, replace(state, draft_cache=cache, pending_tokens=tokens), spec, root, positions)
        return cache, tokens + _nothing(tree.tokens)

    cache, tokens = lax.fori_loop(0, ROUNDS, body, (state.draft_cache, state.pending_tokens))
    return replace(state, draft_cache=cache, pending_tokens=tokens)


def _drafted(models: Models, state: State, spec: Speculation, root, positions) -> tuple[list, Tree]:
    assert models.draft is not None
    rows = positions - state.pending_count
    cache, tip = extend(
        models.draft, state.draft_cache, state.pending_tokens, state.pending_features, rows, state.pending_count
    )
    return cache, grow(models.draft, cache, tip, root, positions, state.request, spec)


def _verify_rounds(models: Models, state: State, spec: Speculation) -> State:
    root, positions = _roots(state)
    draft_cache, tree = state.draft_cache, root_only(root)
    if spec.num_steps:
        draft_cache, tree = _drafted(models, state, spec, root, positions)
    one = jnp.ones_like(positions)

    def body(_, carry):
        cache, tokens = carry
        verdict = verify(models, cache, replace(tree, tokens=tokens), positions, state.request)
        accepted = accept(tree, verdict.draws, spec.num_steps)
        rows = jax.tree.map(lambda part: take_rows(part, accepted.path), verdict.rows)
        cache = commit(cache, rows, positions, one, take_rows(verdict.draws, accepted.path))
        return cache, tokens + _nothing(verdict.draws + accepted.path[:, -1:])

    cache, tokens = lax.fori_loop(0, ROUNDS, body, (state.target_cache, tree.tokens))
    # written back so that no round can be left out
    last = jnp.minimum(state.tokens[:, :1], tokens[:, :1] + state.tokens[:, :1])
    return replace(state, target_cache=cache, draft_cache=draft_cache, tokens=state.tokens.at[:, :1].set(last))


def _nothing(ids: Int[Array, "b n"]) -> Int[Array, "b 1"]:
    """0 that the compiler does not know to be 0, since ids are never negative: it makes the next round wait for this one."""
    return jnp.minimum(jnp.min(ids, axis=-1, keepdims=True), 0)

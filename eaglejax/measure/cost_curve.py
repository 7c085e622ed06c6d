"""What the parts of a cycle cost here: verification by rows, the draft by levels and children; each timed alone, in a compiled loop,
behind as many tokens as answers stand behind.

A cycle is then draft(num_steps, topk) + verify(num_draft_tokens), each with what it writes; a plain one is timed whole. Between measured
numbers of rows the curve is straight in what the target reads: in the rows of a dense target, in the distinct experts that the rows touch
on the busiest device of a mixture (`touched.py`, random routing), where costs rise fast at first and then hardly.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from eaglejax.config import Sampling, Speculation
from eaglejax.measure.touched import busiest_touched
from eaglejax.models.config import MoEConfig, TargetConfig
from eaglejax.sharding.layout import fetch
from eaglejax.sharding.mesh import DATA
from eaglejax.speculation.cache import take_rows
from eaglejax.speculation.draft import extend, grow
from eaglejax.speculation.loop import Outcome, settle
from eaglejax.speculation.programs import Programs
from eaglejax.speculation.state import Models, State
from eaglejax.speculation.tree import Tree, ancestors
from eaglejax.speculation.verify import accept, verify
from eaglejax.wave import Job, Wave

# every number of rows that `replay.settings` asks for: products of few rows go in tiles, so costs go in steps, and not only upwards (on
# one CPU core 5 rows cost 63 ms, 8 rows 54)
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64)
REPEATS, ROUNDS = 4, 3  # rounds of a part in one call; calls in each context of which the median counts
PLAIN_CYCLES = 16  # of one call of plain decoding: an answer's call has more, so the host's part of it must be small
DRAFTED = 3  # levels of the deeper of two drafts whose difference is a level's cost
WHOLE_PLAIN = "plain cycle"


@dataclass(frozen=True)
class CostCurve:
    """Milliseconds with `slots` slots. `verify`: by rows per slot. `draft`: by topk, of draft extend with level 1 and of each level more.
    `plain`: of a plain cycle, whose program captures nothing for a draft."""

    slots: int
    verify: dict[int, float]
    draft: dict[int, tuple[float, float]]
    plain: float
    target: TargetConfig
    devices: int

    def cycle_ms(self, tree: Speculation) -> float:
        """Of a cycle with this tree."""
        if tree.num_steps == 0:
            return self.plain
        first, further = self._draft(tree.topk)
        return first + (tree.num_steps - 1) * further + self.verify_ms(tree.nodes)

    def verify_ms(self, rows: int) -> float:
        """Straight between the measured numbers of rows, and on beyond the last."""
        known = sorted(self.verify)
        upper = next((n for n in known if n >= rows), known[-1])
        if upper == rows or len(known) == 1:
            return self.verify[upper]
        lower = max((n for n in known if n < upper), default=upper)
        reads = lambda n: read_units(self.target, n * self.slots, self.devices)
        share = (reads(rows) - reads(lower)) / max(reads(upper) - reads(lower), 1e-9)
        return self.verify[lower] + share * (self.verify[upper] - self.verify[lower])

    def _draft(self, topk: int) -> tuple[float, float]:
        known = sorted(self.draft)
        middle = [np.interp(topk, known, [self.draft[k][part] for k in known]) for part in (0, 1)]
        return float(middle[0]), float(middle[1])


def read_units(target: TargetConfig, rows: int, devices: int) -> float:
    """What the cost of `rows` rows is straight in: the rows, or the experts of all layers that they touch on the busiest device."""
    mixtures = [layer.mlp for layer in target.layers if isinstance(layer.mlp, MoEConfig)]
    if not mixtures:
        return float(rows)
    return (
        sum(
            busiest_touched(
                m.experts, m.topk, rows, devices if m.experts % devices == 0 else 1, m.groups, m.topk_groups
            )
            for m in mixtures
        )
        + rows * 1e-3
    )


def measure_curves(
    programs: Programs,
    plain: Programs,
    classes: Mapping[str, tuple[Sampling, Sequence[Sequence[int]]]],
    target: TargetConfig,
    devices: int,
    topks: Sequence[int],
    advance: Callable[[int], object],
    rows: Sequence[int] = ROWS,
) -> dict[str, CostCurve]:
    """The curve of a pair for each class of requests: draws cost something too.

    Arguments:
        programs: of any tree of the pair with a few steps; its prefill and state are used.
        plain: of plain decoding.
        classes: name -> what its requests ask for, and contexts: for some waves the tokens that stand in each of the slots. A part costs
            the mean over them, since attention reads them, on a CPU in whole blocks.
        advance: told the parts that are done, for a progress bar.
    """
    steps, vocabulary = programs.spec.num_steps, programs.vocab_size
    parts: dict[object, Callable] = {n: _repeated(programs, _verify_rows(n, steps, vocabulary)) for n in rows}
    for topk in topks:
        for levels in (1, DRAFTED):
            parts[topk, levels] = _repeated(programs, _draft_tree(Speculation(levels, topk, levels + 1)))
    curves, most = {}, max(1, programs.max_len - PLAIN_CYCLES - 1)
    for name, (sampling, wanted) in classes.items():
        contexts = [[min(tokens, most) for tokens in wave] for wave in wanted]  # room for the plain cycles behind them
        middle = _milliseconds(programs, plain, parts, sampling, contexts, advance)
        verified = {n: middle[n] for n in rows}
        drafts = {k: (middle[k, 1], max(0.0, (middle[k, DRAFTED] - middle[k, 1]) / (DRAFTED - 1))) for k in topks}
        curves[name] = CostCurve(len(contexts[0]), verified, drafts, middle[WHOLE_PLAIN], target, devices)
    return curves


def _milliseconds(
    programs: Programs,
    plain: Programs,
    parts: Mapping[object, Callable],
    sampling: Sampling,
    contexts: Sequence[Sequence[int]],
    advance: Callable[[int], object],
) -> dict[object, float]:
    """Of every part and of a plain cycle (`WHOLE_PLAIN`): the mean over the contexts of the medians in each. All take turns."""
    states = [_prefilled(which, sampling, contexts) for which in (programs, plain)]
    ended = np.zeros(states[1].length.shape, bool)
    times: dict[tuple[object, int | None], list[float]] = {}
    places = range(len(contexts))
    for place in (None, *list(places) * ROUNDS):  # a first turn compiles, and does not count
        context = contexts[place or 0]
        for key, part in parts.items():
            state = _behind(programs, states[0], context)
            begin = time.perf_counter()
            states[0] = jax.block_until_ready(part(state))
            times.setdefault((key, place), []).append(1e3 * (time.perf_counter() - begin) / REPEATS)
            advance(place is None)
        state = _behind(plain, states[1], context)
        begin = time.perf_counter()
        states[1] = jax.block_until_ready(plain.decode(state, PLAIN_CYCLES, ended))
        taken = 1e3 * (time.perf_counter() - begin)
        times.setdefault((WHOLE_PLAIN, place), []).append(taken / max(1, int(fetch(states[1].cycles).max())))
    programs.keep(states[0])
    plain.keep(states[1])
    middle = lambda key: statistics.mean(statistics.median(times[key, place]) for place in places)
    return {key: middle(key) for key in (*parts, WHOLE_PLAIN)}


def _prefilled(programs: Programs, sampling: Sampling, contexts: Sequence[Sequence[int]]) -> State:
    """Random prompts as long as each slot's longest context, so that no cached row below it is empty."""
    random = np.random.default_rng(1)
    asked = replace(sampling, max_new_tokens=programs.max_len)
    jobs = [
        Job(random.integers(0, programs.vocab_size, max(each)).tolist(), asked, 0, ())
        for each in zip(*contexts, strict=True)
    ]
    return Wave(programs, jobs, None, len(jobs)).prefilled()


def _behind(programs: Programs, state: State, context: Sequence[int]) -> State:
    """The state with so many tokens in each slot, at the beginning of an answer's cycle; what its caches hold beyond is never read."""
    slots = state.length.shape[0]
    put = lambda counts: programs.put(np.pad(np.asarray(counts, np.int32), (0, slots - len(counts))))
    waiting = [1] * len(context) if programs.spec.num_steps else []
    state = replace(
        state,
        length=put(context),
        pending_count=put(waiting),
        cycles=put([]),
        done=programs.put(np.arange(slots) >= len(context)),
    )
    return jax.block_until_ready(state)


def _repeated(programs: Programs, part: Callable[[Models, State, Array], tuple[State, Array]]) -> Callable:
    """`part`, REPEATS times, each fed what the one before returned. The state is carried, as in decoding: caches are written in place."""

    def run(models, state):
        begin = (state, jnp.zeros_like(state.length))
        state, told = lax.fori_loop(0, REPEATS, lambda _, carry: part(models, *carry), begin)
        return state, [told]  # returned, or no round would have to be run

    program = programs.custom(run, [P(DATA)])
    return lambda state: program(state)[0]


def _verify_rows(rows: int, steps: int, vocabulary: int):
    """Verification of random tokens, every one the child of the one before; then the walk of up to `steps` levels and what a cycle writes:
    a pass that must hand out the rows of all layers costs more than one that is asked for its draws alone."""

    def part(models: Models, state: State, told: Array) -> tuple[State, Array]:
        batch = told.shape[0]
        index = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (batch, rows))
        tokens = (told[:, None] + 7919 * index + 104729 * jnp.arange(batch, dtype=jnp.int32)[:, None]) % vocabulary
        tree = Tree(tokens, index - 1, index, jnp.zeros((batch, rows)), ancestors(index - 1, rows))
        verdict = verify(models, state.target_cache, tree, state.length - 1, state.request)
        accepted = accept(tree, verdict.draws, min(steps, rows - 1))
        along = lambda x: take_rows(x, accepted.path)
        cached = jax.tree.map(along, verdict.rows)
        outcome = Outcome(along(verdict.draws), along(verdict.features), cached, accepted.count)
        # the pending rows begin anew, as after a draft extend
        return settle(replace(state, pending_count=jnp.zeros_like(told)), outcome), verdict.draws[:, -1]

    return part


def _draft_tree(spec: Speculation):
    """Draft extend over the rows of a cycle, of which one is kept, and the growth of a tree."""

    def part(models: Models, state: State, told: Array) -> tuple[State, Array]:
        assert models.draft is not None
        rows, positions = spec.num_steps + 1, state.length - 1
        wide = lambda x: jnp.pad(x[:, :1], ((0, 0), (0, rows - 1), *[(0, 0)] * (x.ndim - 2)), mode="edge")
        tokens, count = wide(state.pending_tokens) * 0 + told[:, None], state.pending_count
        features = wide(state.pending_features)
        cache, tip = extend(models.draft, state.draft_cache, tokens, features, positions - count, count)
        tree = grow(models.draft, cache, tip, told, positions, state.request, spec)
        return replace(state, draft_cache=cache), tree.tokens[:, -1]

    return part

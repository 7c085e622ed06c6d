"""What the parts of a cycle cost here: verification by rows, the draft by levels and children; each timed alone, in a compiled loop.

A cycle is then overhead + draft(num_steps, topk) + verify(num_draft_tokens). Between measured numbers of rows the curve is straight in what
the target reads: in the rows of a dense target, in the distinct experts that the rows touch on the busiest device of a mixture
(`touched.py`, random routing), where costs rise fast at first and then hardly.
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
from eaglejax.models.rows import causal_step
from eaglejax.sharding.mesh import DATA
from eaglejax.speculation.draft import grow, tip_of
from eaglejax.speculation.programs import Programs
from eaglejax.speculation.state import Models, State
from eaglejax.speculation.tree import Tree, ancestors
from eaglejax.speculation.verify import verify
from eaglejax.wave import Job, Wave

# small trees one by one: products of few rows go in tiles, and the cost in steps (on a CPU 5 to 8 rows cost about the same)
ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 32, 48, 64)
REPEATS, ROUNDS, PROMPT = (
    4,
    5,
    16,
)  # rounds of a part in one call; calls of which the median counts; tokens of the prompts
DRAFTED = 3  # levels of the deeper of two drafts whose difference is a level's cost


@dataclass(frozen=True)
class CostCurve:
    """Milliseconds with `slots` slots. `verify`: by rows per slot. `draft`: by topk, of draft extend with level 1 and of each level more.
    `overhead`: of a plain cycle beyond verifying its one row."""

    slots: int
    verify: dict[int, float]
    draft: dict[int, tuple[float, float]]
    overhead: float
    target: TargetConfig
    devices: int

    def cycle_ms(self, tree: Speculation) -> float:
        """Of a cycle with this tree."""
        if tree.num_steps == 0:
            return self.overhead + self.verify_ms(1)
        first, further = self._draft(tree.topk)
        return self.overhead + first + (tree.num_steps - 1) * further + self.verify_ms(tree.nodes)

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
    plain: Callable[[Sampling], float],
    samplings: Mapping[str, Sampling],
    target: TargetConfig,
    devices: int,
    slots: int,
    topks: Sequence[int],
    advance: Callable[[int], object],
    rows: Sequence[int] = ROWS,
) -> dict[str, CostCurve]:
    """The curve of a pair with `slots` slots for each class of requests: draws cost something too.

    Arguments:
        programs: of any tree of the pair; its prefill and state are used.
        plain: milliseconds of a cycle of plain decoding with as many slots, measured now.
        samplings: name of the class -> what its requests ask for.
        advance: told the parts that are done, for a progress bar.
    """
    parts: dict[object, Callable] = {n: _repeated(programs, _verify_rows(n, programs.vocab_size)) for n in rows}
    for topk in topks:
        for steps in (1, DRAFTED):
            parts[topk, steps] = _repeated(programs, _draft_tree(Speculation(steps, topk, steps + 1)))
    return {
        name: _measure_curve(programs, parts, plain, sampling, target, devices, slots, topks, advance, rows)
        for name, sampling in samplings.items()
    }


def _measure_curve(
    programs: Programs,
    parts: Mapping[object, Callable],
    plain: Callable[[Sampling], float],
    sampling: Sampling,
    target: TargetConfig,
    devices: int,
    slots: int,
    topks: Sequence[int],
    advance: Callable[[int], object],
    rows: Sequence[int],
) -> CostCurve:
    random = np.random.default_rng(1)
    prompts = random.integers(0, programs.vocab_size, (slots, PROMPT)).tolist()
    asked = replace(sampling, max_new_tokens=programs.max_len)
    state = Wave(programs, [Job(prompt, asked, 0, ()) for prompt in prompts], None, slots).prefilled()
    slots = state.length.shape[0]
    times: dict[object, list[float]] = {key: [] for key in parts}
    whole: list[float] = []
    for turn in range(ROUNDS + 1):
        for key, part in parts.items():
            begin = time.perf_counter()
            state, _ = part(state)
            jax.block_until_ready(state.length)
            if turn:
                times[key].append(1e3 * (time.perf_counter() - begin) / REPEATS)
            else:
                advance(1)
        whole.append(plain(sampling))
    programs.keep(state)
    middle = {key: statistics.median(found) for key, found in times.items()}
    verified = {n: middle[n] for n in rows}
    for lower, upper in zip(rows, rows[1:], strict=False):  # more rows are never cheaper: noise
        verified[upper] = max(verified[upper], verified[lower])
    drafts = {k: (middle[k, 1], max(0.0, (middle[k, DRAFTED] - middle[k, 1]) / (DRAFTED - 1))) for k in topks}
    overhead = max(0.0, statistics.median(whole[1:]) - verified[rows[0]])
    return CostCurve(slots, verified, drafts, overhead, target, devices)


def _repeated(programs: Programs, part: Callable[[Models, State, Array], Array]) -> Callable:
    """`part`, REPEATS times, each fed what the one before returned; the state comes out as it went in."""

    def run(models, state):
        told = lax.fori_loop(0, REPEATS, lambda _, told: part(models, state, told), jnp.zeros_like(state.length))
        return state, [told]

    return programs.custom(run, [P(DATA)])


def _verify_rows(rows: int, vocabulary: int):
    """Verification of random tokens, every one the child of the one before."""

    def part(models: Models, state: State, told: Array) -> Array:
        batch = told.shape[0]
        index = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (batch, rows))
        tokens = (told[:, None] + 7919 * index + 104729 * jnp.arange(batch, dtype=jnp.int32)[:, None]) % vocabulary
        tree = Tree(tokens, index - 1, index, jnp.zeros((batch, rows)), ancestors(index - 1, rows))
        return verify(models, state.target_cache, tree, state.length - 1, state.request).draws[:, -1]

    return part


def _draft_tree(spec: Speculation):
    """Draft extend over the rows of a cycle, and the growth of a tree."""

    def part(models: Models, state: State, told: Array) -> Array:
        assert models.draft is not None
        rows = spec.num_steps + 1
        wide = lambda x: jnp.pad(x[:, :1], ((0, 0), (0, rows - 1), *[(0, 0)] * (x.ndim - 2)), mode="edge")
        tokens, start = wide(state.pending_tokens) * 0 + told[:, None], state.length - 1 - state.pending_count
        every = jnp.full_like(told, rows)
        hidden = models.draft.fuse(wide(state.pending_features))
        # the rows are not written: in this loop that would copy the cache, which decoding never does
        out = models.draft(tokens, hidden, causal_step(start, rows), state.draft_cache)
        tip, positions = tip_of(out, start, every), state.length - 1
        return grow(models.draft, state.draft_cache, tip, told, positions, state.request, spec).tokens[:, -1]

    return part

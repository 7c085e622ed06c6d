"""The compiled programs of one engine setting: prefill by bucket, decode for any number of cycles. State goes in donated and comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, DTypeLike, Int, Shaped

from eaglejax.config import Auto, Speculation
from eaglejax.models.draft import Draft
from eaglejax.models.target import Target
from eaglejax.sharding.layout import place, shapes_on, weight_specs
from eaglejax.sharding.mesh import DATA, axis_size
from eaglejax.sharding.spmd import on_mesh, state_specs
from eaglejax.speculation import loop
from eaglejax.speculation.adapt import Policy, prior_policy
from eaglejax.speculation.experience import Experience
from eaglejax.speculation.simulated import SimulatedAcceptance
from eaglejax.speculation.state import Models, Request, State, new_state

# One prefill program per bucket: a prompt is cut into the largest that fit, the rest padded up to the smallest that holds it.
PREFILL_BUCKETS = (16, 64, 256)
ALL_CYCLES = 2**30


def prefill_plan(prompt_tokens: int) -> list[tuple[int, int]]:
    """(offset, rows) of each prefill call for the longest prompt of a wave."""
    plan, offset = [], 0
    while offset < prompt_tokens:
        rest = prompt_tokens - offset
        fitting = [size for size in PREFILL_BUCKETS if size <= rest]
        rows = fitting[-1] if fitting else PREFILL_BUCKETS[0]
        plan.append((offset, rows))
        offset += rows
    return plan


def stop_width(stop_ids: int) -> int:
    """Columns of the stop table: 16, or the next power of two, so that the number of stop ids seldom changes a shape."""
    return max(16, 1 << max(stop_ids - 1, 0).bit_length())


class Programs:
    """Prefill and decode for one pair of models and one tree, or the trees of "auto"; on a mesh, every device runs the whole loop on its
    own parts.

    The modules are split once into structure and arrays; the compiled programs take the arrays, so that they are no constants.
    `simulated`: how much to accept in place of what the target draws; for measurements with random weights.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        boundaries: tuple[int, ...],
        spec: Speculation | Auto,
        max_len: int,
        dtype: DTypeLike,
        mesh: Mesh | None = None,
        simulated: SimulatedAcceptance | None = None,
        plain_rows: int = 1,
    ):
        """Arguments: plain_rows: rows that plain decoding runs a step, all but the first for nothing (`measure/lossless.py`)."""
        self.spec, self.max_len, self.dtype, self.mesh = spec, max_len, dtype, mesh
        self.boundaries = boundaries if spec.num_steps else ()
        target_graph, target_arrays = nnx.split(target)
        draft_graph, draft_arrays = nnx.split(draft) if draft is not None and spec.num_steps else (None, None)
        states = (target_arrays, draft_arrays)
        # plain lists: jax flattens a module's state in Python, for every weight and at every call
        self.arrays = tuple(jax.tree.leaves(state) for state in states)
        trees = [jax.tree.structure(state) for state in states]
        self.vocab_size = target.config.vocab_size
        self.warned = False  # about a draft of which nothing is accepted

        def models(arrays) -> Models:
            target_state, draft_state = map(jax.tree.unflatten, trees, arrays)
            merged = nnx.merge(draft_graph, draft_state) if draft_graph is not None else None
            return Models(nnx.merge(target_graph, target_state), merged, self.boundaries)

        drafted = Models(target, draft if draft_graph is not None else None, self.boundaries)
        self._state_specs = state_specs(drafted, adaptive=isinstance(spec, Auto))
        weights = [spec for state in states if state is not None for spec in weight_specs(state)]
        self._weight_specs = weights

        def prefill(arrays, state, offset, rows):
            return loop.prefill(models(arrays), state, offset, rows)

        def decode(arrays, state, policy, max_cycles, ended):
            state = replace(state, done=state.done | ended)
            return loop.decode(models(arrays), state, spec, max_cycles, policy, simulated, plain_rows)

        def fresh(arrays, request):
            return new_state(models(arrays), request, max_len, self._pending, dtype, self._choices)

        self._models = models
        state = self._state_specs
        self._prefill = on_mesh(mesh, prefill, (weights, state, P()), state, static_argnums=3, donate_argnums=1)
        self._decode = on_mesh(mesh, decode, (weights, state, P(), P(), P(DATA)), state, donate_argnums=1)
        self._fresh = on_mesh(mesh, fresh, (weights, P(DATA)), state)
        self._idle: dict[int, State] = {}
        self._unmeasured = self.place_policy(prior_policy(spec)) if isinstance(spec, Auto) else None

    def use_draft(self, draft: Draft) -> None:
        """Serve other weights of a draft of the same shape from now on; nothing is compiled anew."""
        if self.arrays[1]:
            self.arrays = (self.arrays[0], jax.tree.leaves(nnx.split(draft)[1]))

    @property
    def _pending(self) -> int:
        return pending_rows(self.spec)

    @property
    def _choices(self) -> int:
        return len(self.spec.choices) if isinstance(self.spec, Auto) else 0

    def place_policy(self, policy: Policy) -> Policy:
        """The tables of "auto" on the devices."""
        return jax.tree.map(lambda table: place(table, self.mesh), policy)

    def slots_for(self, jobs: int, slots: int) -> int:
        """Slots a wave runs with: the next power of two, so that few widths are compiled, and never more than `slots`; on a mesh the next
        multiple of its data axis."""
        wanted, data = min(1 << max(jobs - 1, 0).bit_length(), slots), axis_size(self.mesh, DATA)
        return -(-wanted // data) * data

    def put(self, value: Shaped[np.ndarray, "b *n"]) -> Shaped[Array, "b *n"]:
        """An array with one entry per slot, on the devices."""
        return place(value, self.mesh, P(DATA))

    def start(
        self, request: Request, prompts: Shaped[np.ndarray, "b n"], experience: Experience | None = None
    ) -> State:
        """A state whose slots hold their prompts. The caches of an earlier wave of the same width are used again as they are:
        rows beyond a slot's length are never read. `experience`: of earlier waves, for "auto"."""
        batch = prompts.shape[0]
        state = self._idle.pop(batch, None)
        if state is None:
            state = self._fresh(self.arrays, request)
        tokens = np.zeros((batch, self.max_len), np.int32)
        tokens[:, : prompts.shape[1]] = prompts
        put = self.put
        # separate buffers: the state is donated whole
        zeros = lambda kind="int32": put(np.zeros(batch, kind))
        belief = (experience or Experience()).begin(batch, self._choices) if self._choices else None
        return replace(
            state,
            request=request,
            tokens=put(tokens),
            length=zeros(),
            done=zeros("bool"),
            stopped=zeros("bool"),
            pending_count=zeros(),
            # masked rows still meet the others in a product with 0, which a NaN of an earlier wave would survive
            pending_features=put(np.zeros(state.pending_features.shape, state.pending_features.dtype)),
            cycles=zeros(),
            accepted=put(np.zeros((batch, self.max_len), np.int32)),
            belief=jax.tree.map(lambda part: put(np.asarray(part)), belief),
        )

    def prefill(self, state: State, offset: int, rows: int) -> State:
        """`rows` prompt tokens from `offset` on, in every slot; `prefill_plan` says which. The state is donated."""
        return self._prefill(self.arrays, state, self._scalar(offset), rows)

    def decode(
        self, state: State, max_cycles: int, ended: Bool[np.ndarray, " b"], policy: Policy | None = None
    ) -> State:
        """Up to `max_cycles` cycles; slots marked in `ended` are done first. `policy`: placed tables; the prior ones where None."""
        ended_there = place(ended, self.mesh, P(DATA))
        return self._decode(self.arrays, state, policy or self._unmeasured, self._scalar(max_cycles), ended_there)

    def _scalar(self, value: int) -> Int[Array, ""]:
        return place(np.int32(value), self.mesh)

    def custom(self, function: Callable, out_specs: Sequence[P] = ()) -> Callable:
        """A program of this pair that is no part of decoding, for instruments: one phase over and over, say.

        Arguments: function: of (models, state), returns the state, or the state and arrays with these specs. The state is donated.
        """

        def run(arrays, state):
            return function(self._models(arrays), state)

        inputs = (self._weight_specs, self._state_specs)
        program = on_mesh(self.mesh, run, inputs, [*self._state_specs, *out_specs], donate_argnums=1)
        return lambda state: program(self.arrays, state)

    def keep(self, state: State) -> None:
        """Hand the buffers of a finished wave back for the next one."""
        self._idle[state.length.shape[0]] = state

    def release(self) -> None:
        """Give the kept buffers up."""
        self._idle.clear()

    def state_shapes(self, batch: int) -> State:
        """The state of `batch` slots as shapes, nothing allocated."""
        shapes = jax.eval_shape(self._fresh, self._weight_shapes(), jax.eval_shape(lambda: empty_request(batch)))
        return shapes_on(self.mesh, shapes, self._state_specs)

    def _weight_shapes(self):
        return shapes_on(self.mesh, self.arrays, self._weight_specs)

    def lower_decode(self, batch: int) -> jax.stages.Lowered:
        """The decode program for `batch` slots, lowered from shapes alone: for memory and HLO questions."""
        ended = shapes_on(self.mesh, jax.ShapeDtypeStruct((batch,), jnp.bool_), P(DATA))
        policy = shapes_on(self.mesh, self._unmeasured, P())
        return self._decode.lower(self._weight_shapes(), self.state_shapes(batch), policy, self._scalar_shape(), ended)

    def lower_prefill(self, batch: int, rows: int) -> jax.stages.Lowered:
        """The prefill program for `batch` slots and `rows` tokens at a time, likewise."""
        return self._prefill.lower(self._weight_shapes(), self.state_shapes(batch), self._scalar_shape(), rows)

    def _scalar_shape(self):
        return shapes_on(self.mesh, jax.ShapeDtypeStruct((), jnp.int32), P())


def pending_rows(spec: Speculation | Auto) -> int:
    """Draft rows that a slot keeps between cycles."""
    if isinstance(spec, Auto):
        return spec.window
    return spec.num_steps + 1 if spec.num_steps else 0


def empty_request(batch: int, stops: int = 0) -> Request:
    """Slots that ask for nothing."""
    whole = lambda: jnp.zeros((batch,), jnp.int32)
    real = lambda: jnp.zeros((batch,), jnp.float32)
    return Request(
        seed=jnp.zeros((batch, 2), jnp.uint32),
        temperature=real(),
        top_k=whole(),
        top_p=real() + 1,
        min_p=real(),
        stop_ids=jnp.full((batch, stop_width(stops)), -1, jnp.int32),
        prompt_length=whole(),
        limit=whole(),
    )


def teacher_bucket(tokens: int) -> int:
    """Rows of a teacher-forced pass over `tokens` tokens: the next power of two, 16 at least."""
    return max(16, 1 << (tokens - 1).bit_length())


def pad_rows(rows: Shaped[Array, "t *c"] | Shaped[np.ndarray, "t *c"], size: int) -> Shaped[np.ndarray, "n *c"]:
    """Rows padded with zeros at the end; attention is causal, so they touch nothing before them."""
    rows = np.asarray(rows)
    return np.pad(rows, [(0, size - rows.shape[0])] + [(0, 0)] * (rows.ndim - 1))


def token_row(token_ids: list[int], size: int) -> Int[Array, "1 n"]:
    """Token ids as one padded row."""
    return jnp.asarray(pad_rows(np.asarray(token_ids, np.int32), size)[None])

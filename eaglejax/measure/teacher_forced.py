"""The first unrolled steps of a draft at every place of a text at once, under any wiring, over one pass of the target.

    step 0 : row i reads token i + 1 beside fc(captures of position i) and foretells token i + 2
    step j : row i reads token i + 1 + j beside its own state of step j - 1, as it would if the tokens before were accepted

Row i of step j stands at position i + j and sees the rows 0..i of step 0, and of the later steps only its own place: a chain of that
length grown at every place, by the modules that the engine serves with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from eaglejax.checkpoint.draft_loader import EMBEDDING, HEAD, load_plan
from eaglejax.load_report import LoadReport
from eaglejax.loading import Pair
from eaglejax.measure.wirings import Wiring
from eaglejax.models.draft import Draft
from eaglejax.models.layers import leaves
from eaglejax.models.rows import KVRows, Step, causal_step
from eaglejax.models.split import Over
from eaglejax.sharding.layout import fetch, place, weight_specs
from eaglejax.sharding.spmd import on_mesh
from eaglejax.speculation.programs import pad_rows

CONTEXT = 8  # tokens before a place that make it a place of its own: a text that goes round in circles is counted once
# bytes of residual streams up to which all of them are kept, whatever is asked for: one program for all checks
ALL_BOUNDARIES = 2**28
FLOOR = -10.0  # log-probability of a token that the draft cannot say, or hardly
Program = Callable[..., Any]


@dataclass(frozen=True)
class Foretold:
    """What a draft says of the target's choices, at every step and place: whether its first choice is that token, and the
    log-probability that it gives it, `FLOOR` at least."""

    hits: Bool[np.ndarray, "steps places"]
    scores: Float[np.ndarray, "steps places"]


@dataclass(frozen=True)
class Text:
    """Token ids of a prompt and what follows it; places count from the first token after the prompt on."""

    token_ids: list[int]
    prompt_tokens: int


class TeacherForced:
    """One pass of the target over some texts, and what the draft says of them under any wiring.

    `places`: which rows of which text count [b, n], in number `count`; the same for all wirings.
    """

    def __init__(self, pair: Pair, texts: Sequence[Text], boundaries: Sequence[int], steps: int):
        """Arguments: boundaries: those that any wiring will read. steps: unrolled steps, 1 or more."""
        assert pair.draft is not None
        self.steps, self.texts = steps, list(texts)
        self._pair, self._mesh = pair, pair.mesh
        size = max(16, -(-max(len(text.token_ids) for text in texts) // 16) * 16)
        rows = np.stack([pad_rows(np.asarray(text.token_ids, np.int32), size) for text in texts])
        self._tokens = place(rows, pair.mesh)
        self.places = _places(self.texts, size, steps)
        self.count = int(self.places.sum())
        self._captured, self.choices = self._run_target(tuple(sorted(set(boundaries))))

    def foretold(self, wiring: Wiring) -> Foretold:
        """What the draft says under a wiring, compiled once for each config of the draft."""
        graph, arrays = nnx.split(self._wired(wiring))
        features = [self._captured[boundary] for boundary in wiring.boundaries]
        wanted = np.stack([np.roll(self.choices, -1 - step, axis=1) for step in range(self.steps)])
        known = np.full(self._pair.target.config.vocab_size, -1, np.int32)  # draft id of every target id
        known[wiring.plan.target_ids] = np.arange(wiring.plan.target_ids.size, dtype=np.int32)
        own = known[wanted]
        run = _draft_program(graph, tuple(weight_specs(arrays)), self.steps, self._mesh)
        ids, scores = run(arrays, self._tokens, features, place(own, self._mesh))
        hits = (fetch(ids) == own) & (own >= 0)
        scores = np.maximum(np.where(own < 0, FLOOR, fetch(scores)), FLOOR)
        return Foretold(hits[:, self.places], scores[:, self.places])

    def covered(self, wiring: Wiring) -> float:
        """Share of the target's choices that the draft's vocabulary holds: no draft can be right more often."""
        wanted = np.roll(self.choices, -1, axis=1)[self.places]
        return float(np.isin(wanted, wiring.plan.target_ids).mean()) if wanted.size else float("nan")

    def _wired(self, wiring: Wiring) -> Draft:
        """The loaded draft's own arrays under another config; what the loaded one lacks is read from the file."""
        pair, plan = self._pair, wiring.plan
        assert pair.draft is not None and pair.origin is not None
        config, split = replace(plan.config, boundaries=()), pair.origin.split
        have = leaves(pair.draft)
        cut = config.draft_vocab_size != config.vocab_size
        if HEAD in plan.borrowed and cut and not np.array_equal(plan.target_ids, pair.origin.plan.target_ids):
            have = {path: value for path, value in have.items() if path != HEAD}  # rows of the target's head, by id
        if plan.tied:
            have[HEAD] = have[EMBEDDING]
        build = lambda: Draft(config, dtype=pair.dtype, split=split)
        loaded = load_plan(
            plan,
            dtype=pair.dtype,
            target=pair.target,
            report=LoadReport(quiet=True),
            mesh=pair.mesh,
            build=build,
            have=have,
        )
        return loaded.draft

    def _run_target(self, boundaries: tuple[int, ...]) -> tuple[dict[int, Array], Int[np.ndarray, "b n"]]:
        target = self._pair.target
        every = tuple(range(target.config.num_layers + 1))
        size = len(every) * self._tokens.size * target.config.hidden_size * target.dtype.itemsize
        kept = every if size <= ALL_BOUNDARIES else boundaries
        graph, arrays = nnx.split(target)
        program = _target_program(graph, tuple(weight_specs(arrays)), kept, self._mesh)
        choices, *captured = program(arrays, self._tokens)
        return dict(zip(kept, captured, strict=True)), fetch(choices)


# Programs are kept by structure, not by pair: weights are arguments, and the wirings of another check are often the same.


@lru_cache(maxsize=8)
def _target_program(graph: Any, specs: tuple[P, ...], boundaries: tuple[int, ...], mesh: Mesh | None) -> Program:
    """(arrays, tokens [b, n]) -> the target's choices [b, n] and its residual streams [b, n, d] at the boundaries."""

    def run(arrays, tokens):
        model = nnx.merge(graph, arrays)
        batch, rows = tokens.shape
        step = causal_step(jnp.zeros((batch,), jnp.int32), rows)
        out = model(tokens, step, model.empty_caches(batch, 0), boundaries)
        # a text at a time: the logits of all of them may be larger than the model
        choose = lambda hidden: _first_choice(model.logits(hidden), model.split.vocab)[0]
        return jax.lax.map(choose, out.hidden), *out.captured

    return on_mesh(mesh, run, (list(specs), P()), P())


@lru_cache(maxsize=32)
def _draft_program(graph: Any, specs: tuple[P, ...], steps: int, mesh: Mesh | None) -> Program:
    """(arrays, tokens, captured streams, wanted ids) -> `unroll` of a draft of this structure."""

    def run(arrays, tokens, features, wanted):
        return unroll(nnx.merge(graph, arrays), tokens, jnp.concatenate(features, axis=-1), wanted, steps)

    return on_mesh(mesh, run, (list(specs), P(), P(), P()), P())


def _first_choice(logits: Float[Array, "n v"], over: Over) -> tuple[Int[Array, " n"], Float[Array, " n"]]:
    """The likeliest id of every row, the lower one of equals, and its logit; the vocabulary may be split."""
    own = logits.max(-1)
    top = over.max(own)
    mine = jnp.argmax(logits, axis=-1).astype(jnp.int32) + over.first(logits.shape[-1])
    return -over.max(-jnp.where(own == top, mine, jnp.iinfo(jnp.int32).max)), top


def unroll(
    draft: Draft,
    tokens: Int[Array, "b n"],
    features: Float[Array, "b n f"],
    wanted: Int[Array, "steps b n"],
    steps: int,
) -> tuple[Int[Array, "steps b n"], Float[Array, "steps b n"]]:
    """Draft ids of the first choices at every place and step, and the log-probabilities of the wanted ones.

    Arguments:
        features: captured states, joined as the draft reads them. wanted: draft ids; negative ones give anything.

    Rows near the end read tokens that are not there: they are not to be counted.
    """
    batch, rows = tokens.shape
    hidden = draft.fuse(features)
    earlier: list[KVRows] | None = None
    caches = draft.empty_caches(batch, 0)
    said = []
    for step in range(steps):
        shifted = jnp.roll(tokens, -1 - step, axis=1)
        out = draft(shifted, hidden, _step(batch, rows, step), caches, earlier)
        earlier = out.rows if earlier is None else jax.tree.map(_joined, earlier, out.rows)
        hidden = out.feedback
        # a text at a time: the logits of all of them may be larger than the draft
        said.append(jax.lax.map(lambda one: _say(draft, *one), (out.hidden, wanted[step])))
    choices, scores = zip(*said, strict=True)
    return jnp.stack(choices), jnp.stack(scores)


def _say(
    draft: Draft, hidden: Float[Array, "n d"], wanted: Int[Array, " n"]
) -> tuple[Int[Array, " n"], Float[Array, " n"]]:
    """First choice and log-probability of the wanted draft id, for the rows of one text; the vocabulary may be split."""
    over, own = draft.split.draft_vocab, draft.logits(hidden)
    width = own.shape[-1]
    choice, top = _first_choice(own, over)
    total = over.sum(jnp.exp(own - top[:, None]).sum(-1))
    places = wanted - over.first(width)
    here = (places >= 0) & (places < width)
    value = jnp.take_along_axis(own, jnp.clip(places, 0, width - 1)[:, None], axis=-1)[:, 0]
    return choice, over.sum(jnp.where(here, value, 0)) - top - jnp.log(total)


def _joined(earlier: Array, new: Array) -> Array:
    return jnp.concatenate([earlier, new], axis=1)


def _step(batch: int, rows: int, step: int) -> Step:
    """Where the rows of an unrolled step stand and what they see: step 0 up to their own place, later steps their own place alone."""
    index = np.arange(rows)
    seen = np.concatenate([np.tril(np.ones((rows, rows), bool)), *[np.eye(rows, dtype=bool)] * step], axis=1)
    positions = np.concatenate([index + each for each in range(step + 1)]).astype(np.int32)
    wide = lambda x: jnp.broadcast_to(jnp.asarray(x), (batch, *x.shape))
    return Step(wide(positions[-rows:]), wide(seen), wide(positions), jnp.zeros((batch,), jnp.int32))


def _places(texts: Sequence[Text], size: int, steps: int) -> Bool[np.ndarray, "b n"]:
    """Rows whose `steps` tokens all lie in the text and after its prompt, each context once."""
    places = np.zeros((len(texts), size), bool)
    seen: set[tuple[int, ...]] = set()
    for number, text in enumerate(texts):
        ids = text.token_ids
        for row in range(max(text.prompt_tokens - 2, 0), len(ids) - steps):
            context = tuple(ids[max(row + 2 - CONTEXT, 0) : row + 2])
            places[number, row] = context not in seen
            seen.add(context)
    return places

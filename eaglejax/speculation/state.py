"""The state of the decoding loop: one fixed-shape record for all slots, every field with its shape and meaning."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int, UInt32

from eaglejax.models.draft import Draft
from eaglejax.models.rows import KVRows
from eaglejax.models.target import Target
from eaglejax.speculation.adapt import Belief, fresh_belief


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Request:
    """What each slot was asked for. Data, not constants: changing any of it compiles nothing."""

    seed: UInt32[Array, "b 2"]  # low and high word of the request's seed
    temperature: Float[Array, " b"]  # 0 is argmax
    top_k: Int[Array, " b"]  # 0 keeps all
    top_p: Float[Array, " b"]  # 1 keeps all
    min_p: Float[Array, " b"]  # 0 keeps all
    stop_ids: Int[Array, "b n"]  # EOS and stop ids, padded with -1
    prompt_length: Int[Array, " b"]  # tokens of the prompt; 0 marks an unused slot
    limit: Int[Array, " b"]  # tokens of prompt and answer at most


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Everything a cycle reads and writes.

    Between cycles a slot holds `length` committed tokens. The last of them, the root of the next tree, has been chosen but not run:
    the target's cache holds `length - 1` rows. The draft's cache holds `length - 1 - pending_count` rows: the pending rows, the last
    accepted tokens with the target's features, are run by the draft at the start of the next cycle (draft extend). While "auto" decodes
    plainly they gather, until it resumes or there are as many as the window holds.
    """

    request: Request
    tokens: Int[Array, "b n"]  # prompt and answer; zeros beyond `length`
    length: Int[Array, " b"]  # committed tokens, the root included
    done: Bool[Array, " b"]  # stopped, out of budget, or unused: the slot no longer changes
    stopped: Bool[Array, " b"]  # ended by EOS or a stop id
    target_cache: list[KVRows]  # per layer, rows 0 .. length - 2 valid
    draft_cache: list[KVRows]  # per draft layer; empty list in plain decoding
    pending_tokens: Int[Array, "b p"]  # tokens of the pending draft rows, p = num_steps + 1; the window with "auto"
    pending_features: Float[Array, "b p f"]  # captured target states of the position before each
    pending_count: Int[Array, " b"]  # valid pending rows, 1 .. p
    cycles: Int[Array, " b"]  # cycles run
    accepted: Int[Array, "b n"]  # accepted draft tokens of every cycle, before any cut
    belief: Belief | None = None  # what "auto" has learned; None with a fixed tree


@dataclass(frozen=True)
class Models:
    """The pair inside a compiled program; `draft` is None in plain decoding."""

    target: Target
    draft: Draft | None
    boundaries: tuple[int, ...]  # captured residual streams, in the order in which the draft's fc reads them


def new_state(
    models: Models, request: Request, max_len: int, pending: int, dtype: DTypeLike, choices: int = 0
) -> State:
    """A state of zeros for the slots of `request`.

    Arguments:
        max_len: tokens of prompt and answer a slot can hold; also the rows of each cache.
        pending: draft rows kept between cycles: num_steps + 1, the window with "auto", 0 in plain decoding.
        dtype: of the captured features.
        choices: of "auto"; 0 with a fixed tree.
    """
    batch = request.seed.shape[0]
    width = models.target.config.hidden_size * len(models.boundaries)
    count = lambda: jnp.zeros((batch,), jnp.int32)
    return State(
        request=request,
        tokens=jnp.zeros((batch, max_len), jnp.int32),
        length=count(),
        done=jnp.zeros((batch,), bool),
        stopped=jnp.zeros((batch,), bool),
        target_cache=models.target.empty_caches(batch, max_len),
        draft_cache=models.draft.empty_caches(batch, max_len) if models.draft is not None else [],
        pending_tokens=jnp.zeros((batch, pending), jnp.int32),
        pending_features=jnp.zeros((batch, pending, width), dtype),
        pending_count=count(),
        cycles=count(),
        accepted=jnp.zeros((batch, max_len), jnp.int32),
        belief=fresh_belief(batch, choices) if choices else None,
    )

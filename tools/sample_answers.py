"""The target's own answers to many prompts at once: plain sampling in large batches, for making training text.

Prompts are padded on the left, so that every sequence writes its keys at the same place: one slice update per layer and no gather. A finished
sequence idles until its batch is done. Serving uses `EagleJaxEngine.generate`; this is the bulk form for a dense target on an accelerator.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from eaglejax.models.attention import GroupedQueryAttention
from eaglejax.models.rope import rotate
from eaglejax.models.target import Target


def _layer(block, x, positions, cache, place, mask):
    """One block over t tokens that stand at `place` of the cache ([b, k, s, c] each); `mask` [b, t, s']: the first s' cached places."""
    attention = block.attention
    assert isinstance(attention, GroupedQueryAttention)
    config, (batch, t, _) = attention.config, x.shape
    normed = block.input_norm(x)
    queries = rotate(attention.q(normed).reshape(batch, t, config.heads, config.head_dim), positions, config.rope)
    both = attention.kv(normed).reshape(batch, t, 2, config.kv_heads, config.head_dim)
    own = (rotate(both[:, :, 0], positions, config.rope).transpose(0, 2, 1, 3), both[:, :, 1].transpose(0, 2, 1, 3))
    cache = tuple(lax.dynamic_update_slice_in_dim(old, new, place, axis=2) for old, new in zip(cache, own, strict=True))
    keys, values = (part[:, :, : mask.shape[-1]] for part in cache)
    grouped = queries.reshape(batch, t, config.kv_heads, -1, config.head_dim)
    scores = jnp.einsum("btkgc,bksc->bkgts", grouped, keys, preferred_element_type=jnp.float32) * config.head_dim**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -1e30), axis=-1).astype(values.dtype)
    mixed = jnp.einsum("bkgts,bksc->btkgc", weights, values).reshape(batch, t, -1)
    x = x + attention.out(mixed)
    return x + block.mlp(block.post_norm(x)), cache


def _forward(target, tokens, positions, caches, place, mask):
    x, new = target.embedding(tokens), []
    for block, cache in zip(target.layers, caches, strict=True):
        x, cache = _layer(block, x, positions, cache, place, mask)
        new.append(cache)
    return x[:, -1:], new


@nnx.jit(static_argnames="new_tokens")
def sample(target: Target, prompts, pads, temperatures, key, budget, *, new_tokens: int):
    """Answers [b, new_tokens] int32 and their lengths [b], the end token counted.

    Arguments:
        prompts: [b, p], left-padded by `pads` [b]. temperatures: [b], 0 for greedy. budget: tokens at most, up to `new_tokens`.
    """
    batch, size = prompts.shape
    config = target.config.layers[0].attention
    end = target.config.eos_token_ids[0]
    whole = size + new_tokens
    shape = (batch, config.kv_heads, whole, config.head_dim)
    caches = [(jnp.zeros(shape, target.dtype), jnp.zeros(shape, target.dtype)) for _ in target.layers]

    def choose(hidden, step):
        logits = target.logits(hidden)[:, 0]
        noise = jax.random.gumbel(jax.random.fold_in(key, step), logits.shape, jnp.float32)
        hot = temperatures[:, None] > 0
        return jnp.argmax(jnp.where(hot, logits / jnp.where(hot, temperatures[:, None], 1) + noise, logits), axis=-1)

    with jax.named_scope("prefill"):
        columns = jnp.arange(size)
        mask = (columns >= pads[:, None])[:, None, :] & jnp.tril(jnp.ones((size, size), bool))
        mask = mask | jnp.eye(size, dtype=bool)  # padding sees itself, so that no row is empty
        hidden, caches = _forward(target, prompts, jnp.maximum(columns - pads[:, None], 0), caches, 0, mask)
        last = choose(hidden, 0).astype(jnp.int32)
    answers = jnp.full((batch, new_tokens), end, jnp.int32).at[:, 0].set(last)
    state = (jnp.int32(1), last, jnp.ones((batch,), jnp.int32), last == end, answers, caches)

    def more(state):
        return (state[0] < budget) & ~jnp.all(state[3])

    def body(state):
        step, last, lengths, done, answers, caches = state
        place = size + step - 1
        columns = jnp.arange(whole)
        mask = ((columns >= pads[:, None]) & (columns <= place))[:, None, :]
        hidden, caches = _forward(target, last[:, None], (place - pads)[:, None], caches, place, mask)
        last = jnp.where(done, end, choose(hidden, step)).astype(jnp.int32)
        answers = lax.dynamic_update_slice_in_dim(answers, last[:, None], step, axis=1)
        return step + 1, last, lengths + ~done, done | (last == end), answers, caches

    _, _, lengths, _, answers, _ = lax.while_loop(more, body, state)
    return answers, lengths


def left_padded(prompts: list[np.ndarray], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts [b, size] and the padding before each [b]."""
    rows, pads = np.zeros((len(prompts), size), np.int32), np.zeros(len(prompts), np.int32)
    for i, prompt in enumerate(prompts):
        pads[i] = size - len(prompt)
        rows[i, pads[i] :] = prompt
    return rows, pads

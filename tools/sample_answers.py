"""The target's own answers to many prompts at once: plain sampling in large batches, for making training text.

Prompts are padded on the left, so that every sequence writes its keys at the same place: one slice update per layer
and no gather. A finished sequence idles until its batch is done. Serving uses `EagleJaxEngine.generate`; this is the
bulk form for a target with grouped-query attention on an accelerator.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from eaglejax.models.attention import GroupedQueryAttention
from eaglejax.models.rope import rotate
from eaglejax.models.target import Target
from eaglejax.training.data import Document

SIZES = (96, 256)  # prompts are padded to one of these lengths; longer ones are left out
NEW_TOKENS = 256


def _layer(block, x, positions, cache, place, mask):
    """One block over t tokens at `place` of the cache ([b, k, s, c] each); `mask` [b, t, s'], its first s' places."""
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
        prompts: [b, p], left-padded by `pads` [b]. temperatures: [b], 0 for greedy. budget: tokens at most, up to
            `new_tokens`.
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


class Sampler:
    """Answers by the batch; every batch of one prompt size has one shape, so two programs serve all."""

    def __init__(self, target, budget_places: int, seed: int):
        self.target, self.places, self.seed, self.count = target, budget_places, seed, 0

    def batch_size(self, size: int) -> int:
        return (
            max(1, self.places // (size + NEW_TOKENS) // 64) * 64 if self.places > 64 * (SIZES[-1] + NEW_TOKENS) else 4
        )

    def answer(self, prompts: list[np.ndarray], size: int, temperatures: np.ndarray) -> list[Document]:
        """Documents of up to one batch of prompts."""
        room = self.batch_size(size)
        rows, pads = left_padded([*prompts, *[prompts[0]] * (room - len(prompts))], size)
        heat = np.zeros(room, np.float32)
        heat[: len(prompts)] = temperatures
        key = jax.random.key(self.seed + self.count, impl="rbg")
        self.count += 1
        answers, lengths = sample(
            self.target,
            jnp.asarray(rows),
            jnp.asarray(pads),
            jnp.asarray(heat),
            key,
            jnp.int32(NEW_TOKENS),
            new_tokens=NEW_TOKENS,
        )
        answers, lengths, end = np.asarray(answers), np.asarray(lengths), self.target.config.eos_token_ids[0]
        documents = []
        for i, prompt in enumerate(prompts):
            answer = answers[i, : lengths[i]]
            documents.append(Document(np.concatenate([prompt, answer]), len(prompt), bool(answer[-1] == end)))
        return documents


def waves(
    prompts: list[np.ndarray], sampler: Sampler, hot: float, rng
) -> list[tuple[int, list[np.ndarray], np.ndarray]]:
    """Batches in random order: every prompt once, half of them greedy, then once more the other way round."""
    order = rng.permutation(len(prompts))
    cold = rng.random(len(prompts)) < 0.5
    jobs = []
    for turn in range(2):
        here = []
        for low, size in zip((0, *SIZES), SIZES, strict=False):
            chosen = [i for i in order if low < len(prompts[i]) <= size]
            room = sampler.batch_size(size)
            for start in range(0, len(chosen), room):
                part = chosen[start : start + room]
                heat = np.where(cold[part] == (turn == 0), 0.0, hot).astype(np.float32)
                here.append((size, [prompts[i] for i in part], heat))
        jobs += [here[i] for i in rng.permutation(len(here))]
    return jobs


def save_documents(file: Path, documents: list[Document]) -> None:
    """Answers in a compact file, for a later run."""
    np.savez_compressed(
        file,
        tokens=np.concatenate([d.tokens for d in documents]).astype(np.uint16),
        lengths=np.asarray([len(d.tokens) for d in documents], np.uint16),
        answers=np.asarray([d.answer for d in documents], np.uint16),
        ended=np.asarray([d.ended for d in documents]),
    )


def load_documents(file: Path) -> list[Document]:
    stored = np.load(file)
    parts = np.split(stored["tokens"].astype(np.int32), np.cumsum(stored["lengths"].astype(np.int64))[:-1])
    return [Document(t, int(a), bool(e)) for t, a, e in zip(parts, stored["answers"], stored["ended"], strict=True)]

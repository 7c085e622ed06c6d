"""Which experts the rows chose, as tables, and how a block of a kernel reads them: scalars only, so every block works them out itself."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

NOBODY = float("-inf")  # in the table of weights: this row did not choose this expert


def chosen_words(ids: Int[Array, "n k"], count: int) -> Int[Array, " w"]:
    """Bit e % 32 of word e // 32 says whether any row chose expert e."""
    flat = ids.reshape(-1, 1)
    word = jnp.arange(-(-count // 32), dtype=ids.dtype)
    bits = lax.shift_left(jnp.ones_like(flat), flat & 31)
    mine = ((flat >> 5) == word) & (flat < count)
    return lax.reduce(jnp.where(mine, bits, 0), ids.dtype.type(0), lax.bitwise_or, (0,))


def weight_table(
    ids: Int[Array, "n k"], weights: Float[Array, "n k"], count: int, columns: int
) -> Float[Array, "e columns"]:
    """With what weight each row takes each expert; NOBODY where it does not."""
    short = ((0, columns - ids.shape[0]), (0, 0))
    ids, weights = jnp.pad(ids, short, constant_values=count), jnp.pad(weights, short)
    expert = jnp.arange(count, dtype=ids.dtype)[:, None]
    table = jnp.full((count, columns), NOBODY, jnp.float32)
    for place in range(ids.shape[1]):
        table = jnp.where(ids[:, place] == expert, weights[:, place], table)
    return table


def _ones(word):
    """How many bits of an int32 are set."""
    shifted = lax.shift_right_logical
    word = word - (shifted(word, jnp.int32(1)) & 0x55555555)
    word = (word & 0x33333333) + (shifted(word, jnp.int32(2)) & 0x33333333)
    word = (word + shifted(word, jnp.int32(4))) & 0x0F0F0F0F
    return shifted(word * 0x01010101, jnp.int32(24))


def how_many(words: list):
    return functools.reduce(lambda a, b: a + b, map(_ones, words))


def expert_of(words: list, slot):
    """The chosen expert that `slot` chosen ones precede: scalars only, so every block works it out for itself."""
    base, word, left = jnp.int32(0), words[0], slot
    passed = jnp.int32(0)
    for index in range(1, len(words)):
        passed = passed + _ones(words[index - 1])
        later = slot >= passed
        base, word = jnp.where(later, 32 * index, base), jnp.where(later, words[index], word)
        left = jnp.where(later, slot - passed, left)
    for half in (16, 8, 4, 2, 1):
        low = _ones(word & ((1 << half) - 1))
        above = left >= low
        base, left = base + jnp.where(above, half, 0), left - jnp.where(above, low, 0)
        word = jnp.where(above, lax.shift_right_logical(word, jnp.int32(half)), word)
    return base

"""Choosing tokens: the shared noise, the filters, the draw.

The token at absolute position p of a request with seed r is argmax_i(filter(logits / T)_i + g(r, p, i)). g is Gumbel noise that depends on
seed, position and target token id alone, so plain decoding and every tree draw the same noise and make the same text.

Where the vocabulary is split over devices each works on its own part; only maxima, sums and one candidate per row cross between them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from eaglejax.models.split import WHOLE, Over
from eaglejax.speculation.state import Request

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_POSITION_TAG = 0x65616731  # keeps the words that key a position apart from those that key a token id


def threefry(
    key: tuple[UInt32[Array, "..."], UInt32[Array, "..."]],
    block: tuple[UInt32[Array, "..."], UInt32[Array, "..."]],
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """Threefry-2x32, 20 rounds (Salmon et al., SC 2011): two random words of a key and a counter.

    Written out so that XLA fuses it and so that the words of single ids can be had without those of a whole vocabulary.
    """
    k0, k1 = key
    keys = (k0, k1, k0 ^ k1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = block[0] + k0, block[1] + k1
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << jnp.uint32(rotation)) | (x1 >> jnp.uint32(32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


def _position_key(seed: UInt32[Array, "b 2"], positions: Int[Array, "b t"]):
    tag = jnp.full(positions.shape, _POSITION_TAG, jnp.uint32)
    k0, k1 = threefry((seed[:, :1], seed[:, 1:]), (positions.astype(jnp.uint32), tag))
    return k0[..., None], k1[..., None]


def _gumbel_of(words: UInt32[Array, "*n"]) -> Float[Array, "*n"]:
    # 1 - u rather than u, and all 32 bits: the upper tail, which decides the argmax, keeps its resolution (up to 22.9)
    uniform = (words.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    uniform = jnp.minimum(uniform, jnp.float32(1 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-uniform))


def gumbel(
    seed: UInt32[Array, "b 2"], positions: Int[Array, "b t"], count: int, first: Int[Array, ""] | int = 0
) -> Float[Array, "b t v"]:
    """Noise g(seed, position, id) for `count` ids from `first` on, a multiple of `count`.

    One block of the generator serves ids 2n and 2n + 1.
    """
    if isinstance(first, Array) and count % 2:
        return gumbel_at(seed, positions, first + jnp.arange(count, dtype=jnp.int32))
    half = jnp.arange((count + 1) // 2, dtype=jnp.uint32) + jnp.asarray(first // 2, jnp.uint32)
    words = threefry(_position_key(seed, positions), (half, jnp.zeros_like(half)))
    both = jnp.stack(words, axis=-1).reshape(*positions.shape, -1)
    return _gumbel_of(both[..., :count])


def gumbel_at(seed: UInt32[Array, "b 2"], positions: Int[Array, "b t"], ids: Int[Array, " w"]) -> Float[Array, "b t w"]:
    """The same noise for some ids only: g(seed, position, ids[j])."""
    block = (ids >> 1).astype(jnp.uint32)
    even, odd = threefry(_position_key(seed, positions), (block, jnp.zeros_like(block)))
    return _gumbel_of(jnp.where(ids & 1 == 0, even, odd))


def _order(x: Float[Array, "*n"]) -> UInt32[Array, "*n"]:
    """Unsigned keys in the order of the floats."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    negative = bits >> jnp.uint32(31) == jnp.uint32(1)
    return jnp.where(negative, ~bits, bits | jnp.uint32(0x80000000))


def _threshold(
    keys: UInt32[Array, "b t v"], weights: Float[Array, "b t v"], goal: Float[Array, "b t"], over: Over
) -> UInt32[Array, "b t"]:
    """The largest key such that the weights at and above it still reach `goal`; found a few bits at a time, without a sort."""
    # a round over devices costs a sum between them, so there it settles four bits; alone, more bits only mean more work
    bits = 1 if over.axis is None else 4

    def body(index, found):
        shift = jnp.uint32(32 - bits) - jnp.uint32(bits) * index.astype(jnp.uint32)
        steps = jnp.arange(1, 1 << bits, dtype=jnp.uint32) << shift
        sums = [jnp.sum(jnp.where(keys >= (found | step)[..., None], weights, 0), axis=-1) for step in steps]
        reached = over.sum(jnp.stack(sums)) >= goal
        # the weights above an edge only shrink as it rises, so the number of edges that reach the goal is the next digit
        return found | (jnp.sum(reached, axis=0, dtype=jnp.uint32) << shift)

    edge = lax.fori_loop(0, 32 // bits, body, jnp.zeros(goal.shape, jnp.uint32))
    # a goal that underflows to 0 is reached by nothing at all: the largest is always kept
    return jnp.minimum(edge, over.max(keys.max(-1)))


def apply_filters(scaled: Float[Array, "b t v"], request: Request, over: Over = WHOLE) -> Float[Array, "b t v"]:
    """Scaled logits with everything outside top-k, then top-p, then min-p at -inf. Tokens that tie with the last one kept stay.

    top-k: the k largest. top-p: the smallest set of largest tokens whose probability (after top-k) reaches p.
    min-p: tokens with at least min_p times the largest probability.
    """

    def top_k(x):
        goal = jnp.broadcast_to(request.top_k.astype(jnp.float32)[:, None], x.shape[:2])
        keys = _order(x)
        edge = _threshold(keys, jnp.ones_like(x), goal, over)
        keep = (keys >= edge[..., None]) | (request.top_k == 0)[:, None, None]
        return jnp.where(keep, x, -jnp.inf)

    def top_p(x):
        mass = jnp.exp(x - over.max(x.max(-1, keepdims=True)))
        keys = _order(x)
        edge = _threshold(keys, mass, request.top_p[:, None] * over.sum(mass.sum(-1)), over)
        keep = (keys >= edge[..., None]) | (request.top_p >= 1)[:, None, None]
        return jnp.where(keep, x, -jnp.inf)

    scaled = lax.cond(jnp.any(request.top_k > 0), top_k, lambda x: x, scaled)
    scaled = lax.cond(jnp.any(request.top_p < 1), top_p, lambda x: x, scaled)
    floor = over.max(scaled.max(-1, keepdims=True)) + jnp.log(request.min_p)[:, None, None]
    return jnp.where(scaled >= floor, scaled, -jnp.inf)


def draw(
    logits: Float[Array, "b t v"], positions: Int[Array, "b t"], request: Request, over: Over = WHOLE
) -> Int[Array, "b t"]:
    """The token of every row by the shared-noise rule; ties go to the lower id.

    Arguments:
        logits: float32, not rounded.
        positions: absolute position at which the drawn token will stand.
        over: how the vocabulary is split; the logits are then those of this device's part.
    """
    first = over.first(logits.shape[-1])

    def greedy(logits):
        return logits

    def sampled(logits):
        hot = (request.temperature > 0)[:, None, None]
        # floored: a temperature so small that logits / T overflows draws the argmax
        scaled = logits / jnp.where(hot, jnp.maximum(request.temperature[:, None, None], 1e-30), 1)
        noise = gumbel(request.seed, positions, logits.shape[-1], first)
        scores = apply_filters(scaled, request, over) + noise
        return jnp.where(hot, scores, logits)

    with jax.named_scope("draw"):
        scores = lax.cond(jnp.any(request.temperature > 0), sampled, greedy, logits)
        best = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        if over.axis is None:
            return best
        return _best_of_parts(scores, best, first, over)


def _best_of_parts(scores: Float[Array, "b t v"], best: Int[Array, "b t"], first, over: Over) -> Int[Array, "b t"]:
    """The best id over all devices; each hands over its best score and id."""
    top = jnp.take_along_axis(scores, best[..., None], axis=-1)[..., 0]
    # one gather for both; as integers, which no device flushes to zero
    offers = over.gather(jnp.stack([lax.bitcast_convert_type(top, jnp.int32), best + first]))
    # parts are in ascending order of id, and argmax takes the first of equals
    winner = jnp.argmax(lax.bitcast_convert_type(offers[:, 0], jnp.float32), axis=0)
    return jnp.take_along_axis(offers[:, 1], winner[None], axis=0)[0]

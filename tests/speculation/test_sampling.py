"""The shared noise, the filters and the draw, against plain numpy and against the distributions they promise."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p
from scipy import stats

from eaglejax.speculation.programs import empty_request
from eaglejax.speculation.sampling import apply_filters, draw, gumbel, gumbel_at, threefry


def request(batch=1, **columns):
    kinds = {"temperature": np.float32, "top_p": np.float32, "min_p": np.float32, "top_k": np.int32, "seed": np.uint32}
    return dataclasses.replace(
        empty_request(batch), **{name: jnp.asarray(np.asarray(value, kinds[name])) for name, value in columns.items()}
    )


def test_threefry_is_the_published_generator():
    a = jnp.arange(64, dtype=jnp.uint32)
    ours = threefry((a * 3 + 5, a * 7), (a, a * 11 + 1))
    theirs = threefry2x32_p.bind(a * 3 + 5, a * 7, a, a * 11 + 1)
    assert all(jnp.array_equal(x, y) for x, y in zip(ours, theirs, strict=True))


def test_noise_depends_on_seed_position_and_id_alone():
    seed = jnp.asarray([[1, 2], [1, 2], [3, 2], [1, 4]], jnp.uint32)
    at = jnp.asarray([[7, 8]] * 4, jnp.int32)
    g = np.asarray(gumbel(seed, at, 101))
    assert np.array_equal(g[0], g[1])  # another slot, the same noise
    assert np.mean(g[0] == g[2]) < 0.05 and np.mean(g[0] == g[3]) < 0.05 and np.mean(g[0, 0] == g[0, 1]) < 0.05
    wider = np.asarray(gumbel(seed[:1], at[:1, 1:], 4096))
    np.testing.assert_allclose(
        wider[0, 0, :101], g[0, 1], rtol=0, atol=1e-6
    )  # padding of the vocabulary changes nothing
    ids = jnp.asarray([100, 3, 64, 0, 7], jnp.int32)
    np.testing.assert_allclose(np.asarray(gumbel_at(seed, at, ids)), g[..., np.asarray(ids)], rtol=0, atol=1e-6)


def test_noise_is_standard_gumbel():
    seed = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (16, 2)), jnp.uint32)
    at = jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32), (16, 16))
    g = np.asarray(gumbel(seed, at, 1000), np.float64).ravel()
    assert np.isfinite(g).all()
    assert stats.kstest(g, "gumbel_r").pvalue > 1e-3
    # neighbours in id, position and seed are independent
    cube = g.reshape(16, 16, 1000)
    for a, b in ((cube[..., 1:], cube[..., :-1]), (cube[:, 1:], cube[:, :-1]), (cube[1:], cube[:-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.01


def kept_by_sorting(x, top_k, top_p, min_p):
    """The filters by their textbook definition, float64."""
    keep = np.ones_like(x, bool)
    if top_k:
        keep &= x >= np.sort(x)[::-1][min(top_k, len(x)) - 1]
    if top_p < 1:
        p = np.where(keep, np.exp(x - x.max()), 0)
        p /= p.sum()
        above = np.array([p[x > value].sum() for value in x])
        keep &= above < top_p
    if min_p:
        p = np.where(keep, np.exp(x - x.max()), 0)
        keep &= p >= min_p * p.max() * (1 - 1e-9)
    return keep


@pytest.mark.parametrize("top_k", [0, 1, 3, 20, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.3, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_filters_keep_what_their_definitions_keep(top_k, top_p, min_p):
    x = np.random.default_rng(top_k).normal(0, 3, (4, 2, 97)).astype(np.float32)
    x[1, 0, 5] = x[1, 0, 6] = x[1, 0].max()  # a tie at the top
    asked = request(4, top_k=[top_k] * 4, top_p=[top_p] * 4, min_p=[min_p] * 4, temperature=[1] * 4)
    got = np.isfinite(np.asarray(apply_filters(jnp.asarray(x), asked)))
    for slot in range(4):
        for row in range(2):
            want = kept_by_sorting(x[slot, row].astype(np.float64), top_k, top_p, min_p)
            assert np.array_equal(got[slot, row], want)


def test_each_slot_has_its_own_filters():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 1, 50)), jnp.float32)
    asked = request(4, top_k=[0, 5, 0, 0], top_p=[1, 1, 0.5, 1], min_p=[0, 0, 0, 0.9], temperature=[1] * 4)
    kept = np.isfinite(np.asarray(apply_filters(x, asked))).sum(-1).ravel()
    assert kept[0] == 50 and kept[1] == 5 and 1 < kept[2] < 50 and 1 <= kept[3] < 50


def test_greedy_rows_ignore_noise_and_ties_go_to_the_lower_id():
    logits = jnp.zeros((2, 3, 40)).at[:, :, 7].set(2.0).at[:, :, 31].set(2.0)
    at = jnp.asarray([[5, 6, 7], [5, 6, 7]], jnp.int32)
    asked = request(2, temperature=[0, 1.5], seed=[[9, 9], [9, 9]])
    drawn = np.asarray(draw(logits, at, asked))
    assert (drawn[0] == 7).all() and not (drawn[1] == 7).all()
    assert (np.asarray(draw(logits, at, request(2))) == 7).all()


@pytest.mark.parametrize(
    "temperature,top_k,top_p,min_p", [(1, 0, 1, 0), (0.7, 0, 1, 0), (1.3, 6, 0.9, 0), (1, 0, 0.8, 0.1)]
)
def test_draws_follow_the_filtered_distribution(temperature, top_k, top_p, min_p):
    logits = np.random.default_rng(3).normal(0, 0.8, 12).astype(np.float32)
    rows, slots = 500, 40
    at = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (slots, rows))
    seeds = np.stack([np.arange(slots), np.full(slots, 17)], -1)
    columns = {
        name: [value] * slots
        for name, value in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("min_p", min_p))
    }
    drawn = np.asarray(
        draw(jnp.broadcast_to(jnp.asarray(logits), (slots, rows, 12)), at, request(slots, seed=seeds, **columns))
    )
    scaled = logits.astype(np.float64) / temperature
    p = np.where(kept_by_sorting(scaled, top_k, top_p, min_p), np.exp(scaled - scaled.max()), 0)
    p /= p.sum()
    counts = np.bincount(drawn.ravel(), minlength=12)
    assert counts[p == 0].sum() == 0
    assert stats.chisquare(counts[p > 0], p[p > 0] * counts.sum()).pvalue > 1e-3


@pytest.mark.parametrize("extreme", [{"top_p": 1e-38}, {"top_p": 1e-45}, {"temperature": 2e-38}, {"min_p": 1}], ids=str)
def test_extreme_settings_draw_the_argmax(extreme):
    logits = jnp.asarray(np.random.default_rng(5).normal(0, 3, (1, 4, 300)), jnp.float32)
    settings = {"temperature": 1.0, **extreme}
    asked = request(1, **{name: [value] for name, value in settings.items()})
    drawn = draw(logits, jnp.arange(4, dtype=jnp.int32)[None], asked)
    assert jnp.array_equal(drawn, jnp.argmax(logits, -1))

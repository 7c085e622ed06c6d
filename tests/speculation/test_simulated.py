"""Simulated acceptance: paths are paths of the tree, as deep as the draw says, at the rates asked for, the same for the same seed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_accept import random_tree

from eaglejax.errors import ConfigError
from eaglejax.speculation.simulated import SimulatedAcceptance
from eaglejax.speculation.tree import Tree, ancestors


def device_tree(trees, levels: int) -> Tree:
    array = lambda i: jnp.asarray([t[i] for t in trees], jnp.int32)
    return Tree(array(0), array(1), array(2), jnp.zeros(array(0).shape), ancestors(array(1), levels))


def seeds(batch: int, low: int = 7) -> jax.Array:
    return jnp.asarray([[low + n, 1] for n in range(batch)], jnp.uint32)


def accept(simulated: SimulatedAcceptance, tree: Tree, positions: jax.Array, seed: jax.Array, steps: int):
    return jax.jit(simulated.accept, static_argnums=3)(tree, positions, seed, steps)


def chain(batch: int, levels: int) -> Tree:
    numbers = list(range(levels + 1))
    return device_tree([([5] * (levels + 1), [n - 1 for n in numbers], numbers)] * batch, levels)


@pytest.mark.parametrize("nodes, levels", [(2, 1), (8, 3), (16, 5), (16, 2)])
def test_paths_go_down_the_tree_as_deep_as_it_allows(nodes, levels):
    rng = np.random.default_rng(nodes)
    trees = [random_tree(rng, nodes, levels, 4) for _ in range(6)]
    tree, positions = device_tree(trees, levels), jnp.arange(6, dtype=jnp.int32)
    for rates in ((1.0,), (0.0,), (0.7,)):
        simulated = SimulatedAcceptance(rates)
        got = accept(simulated, tree, positions, seeds(6), levels)
        wanted = np.asarray(simulated._depths(positions, seeds(6), levels))
        for slot, (_, parents, depths) in enumerate(trees):
            count, path = int(got.count[slot]), np.asarray(got.path[slot]).tolist()
            assert count == min(wanted[slot], max(depths))
            assert path[0] == 0 and len(path) == levels + 1
            assert [parents[node] for node in path[1 : count + 1]] == path[:count]
            assert set(path[count:]) == {path[count]}  # as `verify.accept`: entries after the last node repeat it


def test_rates_are_conditional_and_the_last_holds_for_deeper_levels():
    simulated, batch, levels = SimulatedAcceptance([0.9, 0.5, 0.6]), 20000, 5
    positions = jnp.arange(batch, dtype=jnp.int32)
    seed = jnp.ones((batch, 2), jnp.uint32)
    counts = np.asarray(accept(simulated, chain(batch, levels), positions, seed, levels).count)
    reached = [np.mean(counts >= level) for level in range(levels + 1)]
    conditional = [b / a for a, b in zip(reached, reached[1:], strict=False)]
    assert conditional == pytest.approx([0.9, 0.5, 0.6, 0.6, 0.6], abs=0.02)
    assert counts.mean() + 1 == pytest.approx(simulated.expected_tau(levels), abs=0.03)


def test_the_draw_follows_seed_and_position_alone():
    simulated, positions = SimulatedAcceptance([0.5]), jnp.arange(64, dtype=jnp.int32)
    count = lambda s, p: np.asarray(accept(simulated, chain(64, 8), p, s, 8).count).tolist()
    first = count(seeds(64), positions)
    assert first == count(seeds(64), positions)
    assert first != count(seeds(64, low=8), positions) and first != count(seeds(64), positions + 1)


def test_expected_tau():
    assert SimulatedAcceptance([1.0]).expected_tau(4) == 5
    assert SimulatedAcceptance([0.0]).expected_tau(4) == 1
    assert SimulatedAcceptance([0.5, 0.25]).expected_tau(3) == 1 + 0.5 + 0.125 + 0.03125


@pytest.mark.parametrize("rates", [[], "0.5", [1.5], [-0.1], ["x"], [float("nan")]])
def test_rates_that_are_none_are_refused(rates):
    with pytest.raises(ConfigError, match="simulate_acceptance"):
        SimulatedAcceptance(rates)

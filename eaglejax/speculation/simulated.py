"""Acceptance by a seeded draw in place of the target's choice: for models with random weights, whose drafts are never right.

Everything else of a cycle runs as it always does, so its cost is the real one: the draft grows its tree, the target verifies every node and
draws the token after each, and as many rows are committed as were accepted. What the text says means nothing then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from eaglejax.config import Real, real_number
from eaglejax.errors import ConfigError
from eaglejax.speculation.sampling import threefry
from eaglejax.speculation.tree import Tree
from eaglejax.speculation.verify import Accepted

_TAG = 0x73696D75  # keeps these words apart from the noise that tokens are drawn with


@dataclass(frozen=True)
class SimulatedAcceptance:
    """`rates`: the chance that a cycle which accepted at the level above (or is at level 1) accepts at levels 1, 2, ..; the last one
    holds for all deeper levels."""

    rates: Sequence[Real]

    def __post_init__(self):
        if isinstance(self.rates, str) or not isinstance(self.rates, Sequence) or not self.rates:
            raise ConfigError(
                "not a list of rates",
                where="simulate_acceptance",
                found=repr(self.rates),
                expected="one chance per level, such as 0.8,0.7,0.6",
            )
        rates = tuple(real_number("simulate_acceptance", rate, 0, 1) for rate in self.rates)
        object.__setattr__(self, "rates", rates)

    def rate(self, level: int) -> float:
        """Of a level, 1 being the children of the root."""
        return self.rates[min(level, len(self.rates)) - 1]

    def expected_tau(self, steps: int) -> float:
        """Tokens per cycle, bonus included, of trees that are `steps` levels deep everywhere."""
        reached, total = 1.0, 1.0
        for level in range(1, steps + 1):
            reached *= self.rate(level)
            total += reached
        return total

    def accept(self, tree: Tree, root_positions: Int[Array, " b"], seed: UInt32[Array, "b 2"], steps: int) -> Accepted:
        """The path to a node as deep as the draw says; the first such node, or the deepest above it where the tree is shallower.

        The draw is a function of the request's seed and the root's position alone, so a run can be repeated.
        """
        with jax.named_scope("accept"):
            depth = self._depths(root_positions, seed, steps)
            reachable = jnp.where(tree.depths <= depth[:, None], tree.depths, -1)
            goal = jnp.argmax(reachable, axis=-1).astype(jnp.int32)
            count = jnp.take_along_axis(tree.depths, goal[:, None], axis=-1)[:, 0]
            above = jnp.take_along_axis(tree.mask, goal[:, None, None], axis=1)
            levels = jnp.arange(steps + 1, dtype=jnp.int32)
            here = above & (tree.depths[:, None, :] == levels[:, None])
            path = jnp.where(jnp.any(here, axis=-1), jnp.argmax(here, axis=-1).astype(jnp.int32), goal[:, None])
            return Accepted(path, count)

    def _depths(self, positions: Int[Array, " b"], seed: UInt32[Array, "b 2"], steps: int) -> Int[Array, " b"]:
        """Levels accepted in a row in trees that are `steps` deep."""
        going, depth = jnp.ones(positions.shape, bool), jnp.zeros(positions.shape, jnp.int32)
        for level in range(1, steps + 1):
            tag = jnp.full(positions.shape, _TAG + level, jnp.uint32)
            word, _ = threefry((seed[:, 0], seed[:, 1]), (positions.astype(jnp.uint32), tag))
            # 24 bits are exact in float32: a rate of 1 always accepts, one of 0 never
            uniform = (word >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2.0**-24)
            going &= uniform < jnp.float32(self.rate(level))
            depth += going.astype(jnp.int32)
        return depth

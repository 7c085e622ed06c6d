"""The draft tree: a pool of candidates level by level, and the best N nodes of it (EAGLE-2, arXiv:2406.16858, section 4)."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tree:
    """N nodes per slot, parents before children; node 0 is the root, the last committed token."""

    tokens: Int[Array, "b n"]  # target ids
    parents: Int[Array, "b n"]  # node number, -1 for the root
    depths: Int[Array, "b n"]  # 0 for the root
    scores: Float[Array, "b n"]  # summed log-probabilities along the path, 0 for the root
    mask: Bool[Array, "b n n"]  # ancestors and self


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pool:
    """All candidates in the order in which they were grown, parents before children."""

    tokens: Int[Array, "b m"]  # target ids
    scores: Float[Array, "b m"]  # float32, a child never above its parent
    parents: Int[Array, "b m"]  # index in the pool, -1 for children of the root
    depths: Int[Array, " m"]  # 1 for children of the root

    def extended(self, other: Pool) -> Pool:
        """This pool followed by another one."""
        join = lambda a, b: jnp.concatenate([a, b], axis=-1)
        return jax.tree.map(join, self, other)


def root_only(root: Int[Array, " b"], rows: int = 1) -> Tree:
    """The tree of plain decoding; with more rows than one, dummy children of the root follow it that nobody will accept."""
    batch = root.shape[0]
    level = jnp.broadcast_to(jnp.minimum(jnp.arange(rows, dtype=jnp.int32), 1), (batch, rows))
    parents = jnp.where(level == 0, -1, 0)
    tokens = jnp.broadcast_to(root[:, None], (batch, rows))
    return Tree(tokens, parents, level, jnp.zeros((batch, rows), jnp.float32), ancestors(parents, 1))


def rerank(root: Int[Array, " b"], pool: Pool, nodes: int, depth: int) -> Tree:
    """The root and the nodes - 1 best candidates of a pool of `depth` levels, in ascending order of the pool.

    A child's score is at most its parent's, and equal scores go to the lower index, so the choice is closed under ancestors.
    """
    with jax.named_scope("rerank"):
        batch = root.shape[0]
        chosen = jnp.sort(lax.top_k(pool.scores, nodes - 1)[1], axis=-1)
        take = lambda x: jnp.take_along_axis(x, chosen, axis=-1)
        parent = take(pool.parents)
        # the number of a chosen candidate is 1 + its rank among the chosen
        rank = jnp.sum((chosen[:, None, :] < parent[:, :, None]).astype(jnp.int32), axis=-1) + 1
        zeros = jnp.zeros((batch, 1), jnp.int32)
        parents = jnp.concatenate([zeros - 1, jnp.where(parent < 0, 0, rank)], axis=-1)
        return Tree(
            tokens=jnp.concatenate([root[:, None], take(pool.tokens)], axis=-1),
            parents=parents,
            depths=jnp.concatenate([zeros, pool.depths[chosen]], axis=-1),
            scores=jnp.concatenate([zeros.astype(jnp.float32), take(pool.scores)], axis=-1),
            mask=ancestors(parents, depth),
        )


def ancestors(parents: Int[Array, "b n"], depth: int) -> Bool[Array, "b n n"]:
    """mask[i, j]: node j is node i or an ancestor of it, for trees of at most `depth` levels below the root."""
    nodes = parents.shape[-1]
    index = jnp.arange(nodes, dtype=jnp.int32)
    mask = jnp.broadcast_to(jnp.eye(nodes, dtype=bool), (parents.shape[0], nodes, nodes))
    above = parents
    for _ in range(min(depth, nodes - 1)):
        mask |= above[:, :, None] == index
        above = jnp.where(above < 0, -1, jnp.take_along_axis(parents, jnp.maximum(above, 0), axis=-1))
    return mask

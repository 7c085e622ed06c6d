"""The target's side of a cycle: one forward pass over the tree, then the walk along the tokens it drew."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eaglejax.models.rows import KVRows, Step
from eaglejax.speculation.sampling import draw
from eaglejax.speculation.state import Models, Request
from eaglejax.speculation.tree import Tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Verdict:
    """What the target says about every node of a tree."""

    draws: Int[Array, "b n"]  # the token that follows each node
    features: Float[Array, "b n f"]  # captured states at each node, joined
    rows: list[KVRows]  # cache rows of the nodes, per layer; not yet in any cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Accepted:
    """The accepted path: the root, then `count` drafted nodes."""

    path: Int[Array, "b p"]  # node numbers, p = num_steps + 1; entries after `count` repeat the last node
    count: Int[Array, " b"]  # accepted drafted tokens, 0 .. num_steps


def verify(
    models: Models, cache: list[KVRows], tree: Tree, root_positions: Int[Array, " b"], request: Request
) -> Verdict:
    """Run all nodes at once; each sees the committed prefix (the rows before its root) and its own ancestors."""
    with jax.named_scope("verify"):
        positions = root_positions[:, None] + tree.depths
        step = Step(positions, tree.mask, positions, root_positions)
        out = models.target(tree.tokens, step, cache, models.boundaries)
        logits = models.target.logits(out.hidden, out.normed)
        draws = draw(logits, positions + 1, request, models.target.split.vocab)
        return Verdict(draws, join_features(out.captured, out.hidden), out.rows)


def join_features(captured: tuple[Float[Array, "b t d"], ...], like: Float[Array, "b t d"]) -> Float[Array, "b t f"]:
    """Captured boundaries side by side, as the draft's fc reads them; width 0 where nothing is captured."""
    return jnp.concatenate(captured, axis=-1) if captured else like[..., :0]


def accept(tree: Tree, draws: Int[Array, "b n"], steps: int) -> Accepted:
    """Walk from the root: go to the child whose token is the one drawn, until there is none. Siblings differ, so the walk is unique."""
    with jax.named_scope("accept"):
        batch = draws.shape[0]
        here = jnp.zeros((batch,), jnp.int32)
        going = jnp.ones((batch,), bool)
        count = jnp.zeros((batch,), jnp.int32)
        path = [here]
        for _ in range(steps):
            drawn = jnp.take_along_axis(draws, here[:, None], axis=-1)
            fits = (tree.parents == here[:, None]) & (tree.tokens == drawn)
            going &= jnp.any(fits, axis=-1)
            here = jnp.where(going, jnp.argmax(fits, axis=-1).astype(jnp.int32), here)
            count += going.astype(jnp.int32)
            path.append(here)
        return Accepted(jnp.stack(path, axis=-1), count)

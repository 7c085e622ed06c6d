"""Which tree the next cycle grows, plain decoding included: the policy of "auto". Pure functions of small arrays.

What is not known is how hard the text is for the draft. A calibration gives, for each tree, the share of cycles that accept at least j
tokens; a text of difficulty e has those shares to the power e: 1 is the calibration's own text, near 0 one that the draft always guesses,
large one that it never does. Each slot keeps a log-weight for every difficulty of a fixed grid, multiplied by the likelihood of what its
cycles accepted and fading towards the prior. Expected tokens per cycle over the measured cost of a cycle then say which choice is fastest.

What speculation may lose is accounted for: a slot knows what its cycles have cost, in plain steps, and what it made of them. A tree that
would overdraw the slot's credit if nothing of it were accepted is not chosen, however good it looks. The credit is a small allowance, or
what earlier answers have won (`experience.py`), and grows with every right guess of the draft beside plain decoding: each is a step that a
tree would have saved. The draft's run over a full window is counted too but cannot be refused: without it the draft would fall behind for
good.

Everything a choice depends on is the same on all devices of a model axis: accepted counts are integers they agree on, the tables are
arguments given alike to all, sums are elementwise and over fixed axes. Shards of the data axis choose each for their own slots; no
collective crosses that axis, so they may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from eaglejax.config import Auto, Speculation

# how hard a text may be, and how likely that is before anything of it was seen
DIFFICULTIES = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 12.0)
PRIOR = (0.02, 0.06, 0.15, 0.20, 0.22, 0.15, 0.10, 0.06, 0.04)
KEEP = 0.97  # of a log-weight when the next evidence comes: about 33 cycles are remembered
MARGIN = 1.02  # a tree has to promise so many times plain decoding's rate
SHARE = 0.01  # of the time so far that speculation may have lost
ALLOWANCE = 1.5  # plain steps that it may have lost beyond that, before anything is known
PER_GUESS = 0.2  # plain steps of credit for a right guess
LEAST = 1e-4  # shares stay so far from 0 and 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Policy:
    """Tables of the o choices (0 is plain decoding) on the e difficulties. Arguments of the program: others compile nothing."""

    cost: Float[Array, " o"]  # float32, of a cycle with each choice, in plain steps; 1 for plain decoding
    catch_up: Float[Array, ""]  # float32, of running the draft over a window, in plain steps
    tokens: Float[Array, "o e"]  # float32, expected tokens of a cycle, bonus included
    evidence: Float[Array, "o a e"]  # float32, log-probability that a cycle accepts a tokens
    guess: Float[Array, "2 e"]  # float32, log-probability that the draft's first guess is wrong, right
    forced: Int[Array, ""]  # int32: this choice in every cycle, for measurements; -1: as the tables say
    always_catch_up: Bool[Array, ""]  # bool: run the draft over the window in every cycle, for measurements


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Belief:
    """What each slot has learned; a part of the loop's state."""

    difficulty: Float[Array, "b e"]  # log-weight of every difficulty
    spent: Float[Array, " b"]  # cost of the slot's cycles so far, in plain steps
    credit: Float[Array, " b"]  # plain steps that they may have cost beyond what they made
    used: Int[Array, "b o"]  # cycles with each choice


def make_policy(reach: Sequence[Sequence[float]], cost: Sequence[float], catch_up: float, first_guess: float) -> Policy:
    """The tables, from shares and costs.

    Arguments:
        reach: for each tree the share of cycles that accept at least 1, 2, .. tokens.
        cost: of a cycle with each tree, in plain steps.
        catch_up: of running the draft over a window, likewise.
        first_guess: share of positions at which the draft's first guess is the next token.
    """
    hardness = np.asarray(DIFFICULTIES)
    levels = max(map(len, reach))
    tokens, evidence = [np.ones_like(hardness)], [np.zeros((levels + 1, len(hardness)))]
    for shares in reach:
        known = np.minimum.accumulate(np.clip(np.asarray(shares, float), LEAST, 1 - LEAST))
        at_least = np.concatenate([np.ones((1, len(hardness))), known[:, None] ** hardness])
        exactly = at_least - np.concatenate([at_least[1:], np.zeros((1, len(hardness)))])
        tokens.append(at_least.sum(0))
        rows = np.log(np.maximum(exactly, LEAST))
        evidence.append(np.pad(rows, ((0, levels + 1 - len(rows)), (0, 0))))
    right = np.clip(first_guess, LEAST, 1 - LEAST) ** hardness
    real = lambda x: jnp.asarray(np.asarray(x, np.float32))
    return Policy(
        cost=real([1.0, *cost]),
        catch_up=real(catch_up),
        tokens=real(tokens),
        evidence=real(evidence),
        guess=real(np.log(np.maximum([1 - right, right], LEAST))),
        forced=jnp.int32(-1),
        always_catch_up=jnp.bool_(False),
    )


def fresh_belief(
    slots: int, choices: int, weights: Sequence[float] | Float[np.ndarray, " e"] = PRIOR, credit: float = ALLOWANCE
) -> Belief:
    """What is believed before the first cycle: how likely each difficulty is, and what may be lost."""
    prior = jnp.log(jnp.asarray(np.asarray(weights, np.float32)))
    return Belief(
        difficulty=jnp.broadcast_to(prior, (slots, len(PRIOR))),
        spent=jnp.zeros((slots,), jnp.float32),
        credit=jnp.full((slots,), credit, jnp.float32),
        used=jnp.zeros((slots, choices), jnp.int32),
    )


def choose(
    policy: Policy, belief: Belief, made: Int[Array, " b"], room: Int[Array, " b"], live: Bool[Array, " b"]
) -> Int[Array, ""]:
    """The choice that promises most tokens per time for all live slots together, among those that can be afforded.

    Arguments:
        made: tokens that the slot's cycles have made so far.
        room: tokens that it may still make.
    """
    weights = jax.nn.softmax(belief.difficulty, axis=-1)
    tokens = jnp.sum(weights[:, None, :] * policy.tokens, axis=-1)  # b o
    tokens = jnp.minimum(tokens, room[:, None].astype(jnp.float32))
    of_live = lambda x: jnp.sum(jnp.where(live.reshape(live.shape + (1,) * (x.ndim - 1)), x, 0), axis=0)
    rate = of_live(tokens) / policy.cost
    slots = jnp.sum(live, dtype=jnp.int32).astype(jnp.float32)
    won = of_live(made.astype(jnp.float32) - (1 - SHARE) * belief.spent + belief.credit)
    pays = rate >= MARGIN * rate[0]
    affordable = won >= slots * (policy.cost - 1)
    best = jnp.argmax(jnp.where(pays & affordable, rate, -1)).astype(jnp.int32)
    best = jnp.where(jnp.any((pays & affordable)[1:]), best, 0)
    return jnp.where(policy.forced >= 0, policy.forced, best)


def account(policy: Policy, belief: Belief, choice: Int[Array, ""], live: Bool[Array, " b"]) -> Belief:
    """The time and the count of a cycle, in the slots that took part."""
    one = (jnp.arange(belief.used.shape[1]) == choice) & live[:, None]
    spent = belief.spent + jnp.where(live, policy.cost[choice], 0)
    return replace(belief, spent=spent, used=belief.used + one.astype(belief.used.dtype))


def account_catch_up(policy: Policy, belief: Belief, live: Bool[Array, " b"]) -> Belief:
    """The time of the draft's run over a window."""
    return replace(belief, spent=belief.spent + jnp.where(live, policy.catch_up, 0))


def learn_accepted(
    policy: Policy, belief: Belief, choice: Int[Array, ""], accepted: Int[Array, " b"], live: Bool[Array, " b"]
) -> Belief:
    """What a cycle's accepted tokens say about the difficulty; plain decoding says nothing."""
    table = lax.dynamic_index_in_dim(policy.evidence, choice, keepdims=False)
    return _learned(belief, table[accepted], jnp.float32(KEEP), live & (choice > 0))


def learn_guesses(policy: Policy, belief: Belief, right: Int[Array, " b"], guesses: Int[Array, " b"]) -> Belief:
    """What `right` of `guesses` first guesses of the draft say, made beside tokens that plain decoding drew."""
    count = lambda x: x.astype(jnp.float32)[:, None]
    evidence = count(right) * policy.guess[1] + count(guesses - right) * policy.guess[0]
    belief = replace(belief, credit=belief.credit + PER_GUESS * right.astype(jnp.float32))
    return _learned(belief, evidence, jnp.float32(KEEP) ** count(guesses), guesses > 0)


def _learned(
    belief: Belief, evidence: Float[Array, "b e"], keep: Float[Array, "*n"], told: Bool[Array, " b"]
) -> Belief:
    prior = jnp.log(jnp.asarray(PRIOR, jnp.float32))
    after = jax.nn.log_softmax(keep * belief.difficulty + (1 - keep) * prior + evidence, axis=-1)
    return replace(belief, difficulty=jnp.where(told[:, None], after, belief.difficulty))


# Taken for granted where nothing was measured: round guesses, no measurements. Shares accepted at each level among the cycles that
# reach it, a chain's and those of four children everywhere; then, in plain steps, the cost of one level, of one more row to verify, and
# of a window.
PRIOR_CHAIN, PRIOR_BROAD = (0.60, 0.57, 0.55), (0.75, 0.72, 0.70)
PRIOR_STEP, PRIOR_ROW, PRIOR_CATCH_UP = 0.06, 0.05, 0.3


def prior_policy(auto: Auto) -> Policy:
    """Tables for a pair and a machine of which nothing is known."""
    return make_policy(
        reach=[prior_reach(tree) for tree in auto.trees],
        cost=[1 + PRIOR_STEP * tree.num_steps + PRIOR_ROW * (tree.nodes - 1) for tree in auto.trees],
        catch_up=PRIOR_CATCH_UP,
        first_guess=PRIOR_CHAIN[0],
    )


def prior_reach(tree: Speculation) -> list[float]:
    """Share of cycles that accept at least 1, 2, .. tokens, taken for granted: between a chain's and that of four children everywhere."""
    full = sum(4**level for level in range(1, tree.num_steps + 1))
    breadth = 0.0 if tree.topk == 1 else min(1.0, (tree.nodes - 1 - tree.num_steps) / min(full, 3 * tree.num_steps))
    shares, reached = [], 1.0
    for level in range(tree.num_steps):
        chain, broad = (table[min(level, len(table) - 1)] for table in (PRIOR_CHAIN, PRIOR_BROAD))
        reached *= chain + breadth * (broad - chain)
        shares.append(reached)
    return shares

"""Which tree the next cycle grows, plain decoding included: the policy of "auto". Pure functions of small arrays.

What is not known is how hard the text is for the draft. A calibration gives, for each tree, the share of cycles that accept at least j
tokens; a text of difficulty e has those shares to the power e: 1 is the calibration's own text, near 0 one that the draft always guesses,
large one that it never does. Each slot keeps a log-weight for every difficulty of a fixed grid, multiplied by the likelihood of what its
cycles accepted and fading towards the prior. Expected tokens per cycle over the measured cost of a cycle then say which choice is fastest.

That is said twice. `choose` looks at the text alone: whether to speculate on it at all. Where it says yes, the draft runs over what was
accepted, and `choose_sure` looks at how sure it is of the very next token, for this one cycle: a long chain where it is sure, none where it
is at a loss. Trees cost what they cost whether their tokens are good or not, so one tree for all cycles is too long for some and too
short for others.

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

# How a tree fares beside the draft's probability p of its best first token, by which cycles are sorted: the bounds of the sorts, and a p
# that stands for each. The two lines below were fitted by eye to 4,096 places of greedy answers of smollm2 with its draft (mt_bench,
# gsm8k, humaneval, qa): so often the token is right, and by such a power the shares of further levels, given the first, go.
BOUNDS = (0.15, 0.30, 0.45, 0.60, 0.75, 0.86, 0.94, 0.98)
MIDDLES = (0.09, 0.22, 0.37, 0.52, 0.68, 0.81, 0.90, 0.96, 0.993)
RIGHT_AT_0, RIGHT_AT_1 = 0.12, 1.0
POWER_AT_0, POWER_AT_1 = 1.75, 0.40


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Policy:
    """Tables of the o choices (0 is plain decoding) on the e difficulties, and on the q sorts of cycles by how sure the draft is. Arguments
    of the program: others compile nothing."""

    cost: Float[Array, " o"]  # float32, of a cycle with each choice, in plain steps; 1 for plain decoding
    catch_up: Float[Array, ""]  # float32, of running the draft over a window, in plain steps
    look: Float[
        Array, ""
    ]  # float32, of running the draft over what was accepted last, where no tree is grown then, in plain steps
    tokens: Float[Array, "o e"]  # float32, expected tokens of a cycle, bonus included
    sure_tokens: Float[Array, "q o e"]  # float32, the same by sort
    evidence: Float[Array, "q o a e"]  # float32, log-probability that a cycle accepts a tokens
    guess: Float[Array, "2 e"]  # float32, log-probability that the draft's first guess is wrong, right
    forced: Int[Array, ""]  # int32: this choice in every cycle, for measurements; -1: as the tables say
    always_catch_up: Bool[Array, ""]  # bool: run the draft over the window in every cycle, for measurements
    always_look: Bool[
        Array, ""
    ]  # bool: run the draft over what was accepted before every plain cycle, for measurements


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Belief:
    """What each slot has learned; a part of the loop's state."""

    difficulty: Float[Array, "b e"]  # log-weight of every difficulty
    spent: Float[Array, " b"]  # cost of the slot's cycles so far, in plain steps
    credit: Float[Array, " b"]  # plain steps that they may have cost beyond what they made
    used: Int[Array, "b o"]  # cycles with each choice


def make_policy(
    reach: Sequence[Sequence[float]], cost: Sequence[float], catch_up: float, look: float, first_guess: float
) -> Policy:
    """The tables, from shares and costs.

    Arguments:
        reach: for each tree the share of cycles that accept at least 1, 2, .. tokens.
        cost: of a cycle with each tree, in plain steps.
        catch_up: of running the draft over a window, likewise.
        look: of running it over what a cycle accepted, likewise.
        first_guess: share of positions at which the draft's first guess is the next token.
    """
    hardness = np.asarray(DIFFICULTIES)
    levels = max(map(len, reach))
    plain = np.ones_like(hardness)
    right = np.clip(first_guess, LEAST, 1 - LEAST)
    of_all = [_known(shares)[:, None] ** hardness for shares in reach]
    by_sort = [[_given(_known(shares), right, p)[:, None] ** hardness for shares in reach] for p in MIDDLES]
    none = np.zeros((levels + 1, len(hardness)))
    guesses = right**hardness
    real = lambda x: jnp.asarray(np.asarray(x, np.float32))
    return Policy(
        cost=real([1.0, *cost]),
        catch_up=real(catch_up),
        look=real(look),
        tokens=real([plain, *(1 + shares.sum(0) for shares in of_all)]),
        sure_tokens=real([[plain, *(1 + shares.sum(0) for shares in sort)] for sort in by_sort]),
        evidence=real([[none, *(_evidence(shares, levels) for shares in sort)] for sort in by_sort]),
        guess=real(np.log(np.maximum([1 - guesses, guesses], LEAST))),
        forced=jnp.int32(-1),
        always_catch_up=jnp.bool_(False),
        always_look=jnp.bool_(False),
    )


def _known(shares: Sequence[float]) -> np.ndarray:
    return np.minimum.accumulate(np.clip(np.asarray(shares, float), LEAST, 1 - LEAST))


def _given(shares: np.ndarray, first_guess: float, p: float) -> np.ndarray:
    """Shares of the cycles in which the draft gives its best first token the probability `p`, from those of all cycles."""
    right = RIGHT_AT_0 + (RIGHT_AT_1 - RIGHT_AT_0) * p
    power = POWER_AT_0 + (POWER_AT_1 - POWER_AT_0) * p
    # several children are more often right than the best of them
    first = right ** np.clip(np.log(shares[0]) / np.log(first_guess), 0.1, 1.0)
    return np.clip(first * (shares / shares[0]) ** power, LEAST, 1 - LEAST)


def _evidence(at_least: np.ndarray, levels: int) -> np.ndarray:
    """Log-probabilities that exactly 0, 1, .. tokens are accepted, from those of at least 1, 2, ..; rows of zeros up to `levels`."""
    whole = np.concatenate([np.ones_like(at_least[:1]), at_least])
    exactly = whole - np.concatenate([at_least, np.zeros_like(at_least[:1])])
    rows = np.log(np.maximum(exactly, LEAST))
    return np.pad(rows, ((0, levels + 1 - len(rows)), (0, 0)))


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


@dataclass(frozen=True)
class _Outlook:
    """What the choices promise to all live slots together."""

    tokens: Float[Array, " o"]  # of a cycle
    rate: Float[Array, " o"]  # per plain step of time
    affordable: Bool[Array, " o"]


def choose(
    policy: Policy, belief: Belief, made: Int[Array, " b"], room: Int[Array, " b"], live: Bool[Array, " b"]
) -> Int[Array, ""]:
    """The choice that promises most tokens per time for all live slots together, among those that can be afforded, by the text alone.

    Arguments:
        made: tokens that the slot's cycles have made so far.
        room: tokens that it may still make.
    """
    seen = _outlook(policy, belief, policy.tokens, made, room, live)
    fits = (seen.rate >= MARGIN * seen.rate[0]) & seen.affordable
    best = jnp.argmax(jnp.where(fits, seen.rate, -1)).astype(jnp.int32)
    best = jnp.where(jnp.any(fits[1:]), best, 0)
    return jnp.where(policy.forced >= 0, policy.forced, best)


def choose_sure(
    policy: Policy,
    belief: Belief,
    sure: Float[Array, " b"],
    made: Int[Array, " b"],
    room: Int[Array, " b"],
    live: Bool[Array, " b"],
) -> Int[Array, ""]:
    """The choice for one cycle, once the draft has run: the one that makes most beyond what its time makes at the text's usual rate.

    Arguments:
        sure: the draft's probability of its best token after the root.
        made, room: see `choose`.
    """
    usual = _outlook(policy, belief, policy.tokens, made, room, live)
    rate = jnp.max(jnp.where(usual.affordable, usual.rate, usual.rate[0]))
    here = _outlook(policy, belief, policy.sure_tokens[sort_of(sure)], made, room, live)
    # a tree's cycle ends with the draft's run over what it accepts; beside plain decoding that run comes on top
    cost = policy.cost.at[0].add(policy.look)
    gain = jnp.where(here.affordable, here.tokens - rate * cost, -jnp.inf)
    return jnp.where(policy.forced >= 0, policy.forced, jnp.argmax(gain).astype(jnp.int32))


def sort_of(sure: Float[Array, " b"]) -> Int[Array, " b"]:
    """The sort of a cycle, from the draft's probability of its best first token; that of the least where it is no number."""
    return jnp.sum(sure[:, None] >= jnp.asarray(BOUNDS, jnp.float32), axis=-1, dtype=jnp.int32)


def _outlook(
    policy: Policy,
    belief: Belief,
    tokens: Float[Array, "*b o e"],
    made: Int[Array, " b"],
    room: Int[Array, " b"],
    live: Bool[Array, " b"],
) -> _Outlook:
    weights = jax.nn.softmax(belief.difficulty, axis=-1)
    expected = jnp.sum(weights[:, None, :] * tokens, axis=-1)  # b o
    expected = jnp.minimum(expected, room[:, None].astype(jnp.float32))
    of_live = lambda x: jnp.sum(jnp.where(live.reshape(live.shape + (1,) * (x.ndim - 1)), x, 0), axis=0)
    slots = jnp.sum(live, dtype=jnp.int32).astype(jnp.float32)
    won = of_live(made.astype(jnp.float32) - (1 - SHARE) * belief.spent + belief.credit)
    total = of_live(expected)
    return _Outlook(total, total / policy.cost, won >= slots * (policy.cost - 1))


def account(policy: Policy, belief: Belief, choice: Int[Array, ""], live: Bool[Array, " b"]) -> Belief:
    """The time and the count of a cycle, in the slots that took part."""
    one = (jnp.arange(belief.used.shape[1]) == choice) & live[:, None]
    spent = belief.spent + jnp.where(live, policy.cost[choice], 0)
    return replace(belief, spent=spent, used=belief.used + one.astype(belief.used.dtype))


def account_look(policy: Policy, belief: Belief, live: Bool[Array, " b"]) -> Belief:
    """The time of the draft's run over what was accepted, where it is not a part of a tree's cycle."""
    return replace(belief, spent=belief.spent + jnp.where(live, policy.look, 0))


def account_catch_up(policy: Policy, belief: Belief, live: Bool[Array, " b"]) -> Belief:
    """The time of the draft's run over a window."""
    return replace(belief, spent=belief.spent + jnp.where(live, policy.catch_up, 0))


def learn_accepted(
    policy: Policy,
    belief: Belief,
    choice: Int[Array, ""],
    sure: Float[Array, " b"],
    accepted: Int[Array, " b"],
    live: Bool[Array, " b"],
) -> Belief:
    """What a cycle's accepted tokens say about the difficulty, beside how sure the draft was; plain decoding says nothing."""
    table = lax.dynamic_index_in_dim(policy.evidence, choice, axis=1, keepdims=False)
    return _learned(belief, table[sort_of(sure), accepted], jnp.float32(KEEP), live & (choice > 0))


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
# reach it, a chain's and those of four children everywhere; then, in plain steps, the cost of one level, of one more row to verify, of a
# window, and of the draft's run over a few rows.
PRIOR_CHAIN, PRIOR_BROAD = (0.60, 0.57, 0.55), (0.75, 0.72, 0.70)
PRIOR_STEP, PRIOR_ROW, PRIOR_CATCH_UP, PRIOR_LOOK = 0.06, 0.05, 0.3, 0.1


def prior_policy(auto: Auto) -> Policy:
    """Tables for a pair and a machine of which nothing is known."""
    return make_policy(
        reach=[prior_reach(tree) for tree in auto.trees],
        cost=[1 + PRIOR_STEP * tree.num_steps + PRIOR_ROW * (tree.nodes - 1) for tree in auto.trees],
        catch_up=PRIOR_CATCH_UP,
        look=PRIOR_LOOK,
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

"""Which tree the next cycle grows, plain decoding included: the policy of "auto". Pure functions of small arrays.

What is not known is how hard the text is for the draft. A calibration gives, for each tree, the share of cycles that accept at least j
tokens; a text of difficulty e has those shares to the power e: 1 is the calibration's own text, near 0 one that the draft always guesses,
large one that it never does. Each slot keeps a log-weight for every difficulty of a fixed grid, multiplied by the likelihood of what its
cycles accepted and fading towards the prior.

How sure the draft is of its first token says what to expect of the very next cycle: a long chain where it is sure, none where it is at a
loss. Cycles are sorted by that, and shares are kept for each sort. Trees cost what they cost whether their tokens are good or not, so one
tree for all cycles is too long for some and too short for others. `choose` takes the tree that makes most beyond what its time makes
at the rate of late. To know how sure the draft is it has to be run (a look), so `worth_looking` says first, by the text alone, whether
that pays: by how often the slot's cycles were of each sort.

What speculation may lose is accounted for: a slot knows what its cycles have cost, in plain steps, and what it made of them. A tree that
would overdraw the slot's credit if nothing of it were accepted is not chosen, however good it looks. The credit is a small allowance, or
what earlier answers have won (`experience.py`), and grows with every right guess of the draft beside plain decoding: each is a step that a
tree would have saved. The draft's run over a full window is counted too but cannot be refused: without it the draft would fall behind for
good.

Everything a choice depends on is the same on all devices of a model axis: accepted counts are integers they agree on, the tables are
arguments given alike to all, sums are elementwise and over fixed axes. How sure the draft is rests, like the tokens it drafts, on summed
features that are the same bits on all of them. Shards of the data axis choose each for their own slots; no
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
DIFFICULTIES = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 12.0, 60.0)
PRIOR = (0.02, 0.06, 0.15, 0.20, 0.22, 0.15, 0.10, 0.06, 0.03, 0.01)
KEEP = 0.97  # of a log-weight when the next evidence comes: about 33 cycles are remembered
KEEP_SORT = 0.95  # of how often cycles were of each sort, and of the rate of late, when the next one comes
MARGIN = 1.02  # speculation has to promise so many times plain decoding's rate
SHARE = 0.01  # of the time so far that speculation may have lost
ALLOWANCE = 1.5  # plain steps that it may have lost beyond that, before anything is known
PER_GUESS = 0.2  # plain steps of credit for a right guess
LEAST = 1e-4  # shares stay so far from 0 and 1

# How a tree fares beside the draft's probability p of its best first token, by which cycles are sorted: the bounds of the sorts, and a p
# that stands for each. The two lines below were fitted by eye to 4,096 places of greedy answers of smollm2 with its draft (mt_bench,
# gsm8k, humaneval, qa): so often the token is right, and by such a power the shares of further levels, given the first, go.
BOUNDS = (0.15, 0.30, 0.45, 0.60, 0.75, 0.86, 0.94, 0.98)
MIDDLES = (0.09, 0.22, 0.37, 0.52, 0.68, 0.81, 0.90, 0.96, 0.993)
OFTEN = (0.043, 0.119, 0.131, 0.113, 0.105, 0.082, 0.083, 0.093, 0.231)  # shares of the sorts there
RIGHT_AT_0, RIGHT_AT_1 = 0.12, 0.985
POWER_AT_0, POWER_AT_1 = 1.75, 0.40


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Policy:
    """Tables of the o choices (0 is plain decoding) on the e difficulties, and on the q sorts of cycles by how sure the draft is. Arguments
    of the program: others compile nothing."""

    cost: Float[Array, " o"]  # float32, of a cycle with each choice, in plain steps; 1 for plain decoding
    catch_up: Float[Array, ""]  # float32, of running the draft over a window, in plain steps
    look: Float[Array, ""]  # float32, of the draft's run over what was accepted where no tree is grown, in plain steps
    tokens: Float[Array, "q o e"]  # float32, expected tokens of a cycle, bonus included
    evidence: Float[Array, "q o a e"]  # float32, log-probability that a cycle accepts a tokens
    guess: Float[Array, "2 e"]  # float32, log-probability that the draft's first guess is wrong, right
    forced: Int[Array, ""]  # int32: this choice in every cycle, for measurements; -1: as the tables say
    always_catch_up: Bool[Array, ""]  # bool: run the draft over the window in every cycle, for measurements
    always_look: Bool[Array, ""]  # bool: look before every plain cycle, for measurements


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Belief:
    """What each slot has learned; a part of the loop's state."""

    difficulty: Float[Array, "b e"]  # log-weight of every difficulty
    spent: Float[Array, " b"]  # cost of the slot's cycles so far, in plain steps
    credit: Float[Array, " b"]  # plain steps that they may have cost beyond what they made
    used: Int[Array, "b o"]  # cycles with each choice
    sorts: Float[Array, "b q"]  # how often its cycles were of each sort
    rate: Float[Array, "b 2"]  # of late, of a cycle: tokens, and its cost in plain steps


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
    by_sort = [[_given(_known(shares), right, p)[:, None] ** hardness for shares in reach] for p in MIDDLES]
    none = np.zeros((levels + 1, len(hardness)))
    guesses = right**hardness
    real = lambda x: jnp.asarray(np.asarray(x, np.float32))
    return Policy(
        cost=real([1.0, *cost]),
        catch_up=real(catch_up),
        look=real(look),
        tokens=real([[plain, *(1 + shares.sum(0) for shares in sort)] for sort in by_sort]),
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
        sorts=jnp.broadcast_to(jnp.asarray(OFTEN, jnp.float32), (slots, len(OFTEN))),
        rate=jnp.ones((slots, 2), jnp.float32),
    )


def worth_looking(
    policy: Policy,
    belief: Belief,
    made: Int[Array, " b"],
    room: Int[Array, " b"],
    live: Bool[Array, " b"],
    looked: bool = False,
) -> Bool[Array, ""]:
    """Whether speculation is worth the draft's looking, by the text alone.

    Arguments:
        made: tokens that the slot's cycles have made so far.
        room: tokens that it may still make.
        looked: whether the draft has looked and its time is spent; else a tree has to be affordable after that.
    """
    tokens = _expected(policy.tokens[None], belief, room)  # b q o
    often, slots = belief.sorts[..., None], _count(live)
    # a look that no tree could follow would use up the credit, bit by bit, that windows bring back
    affordable = _affordable(policy, belief, made, live, jnp.float32(0) if looked else policy.look)
    # beyond what their time would make at plain decoding's rate: one choice for all cycles, and the best for each
    gain = lambda tokens: jnp.where(affordable, tokens - MARGIN * _cost(policy), -jnp.inf)
    always = gain(_of_live(jnp.sum(often * tokens, axis=1), live) / slots)
    each = _of_live(jnp.sum(belief.sorts * jnp.max(gain(tokens), axis=-1), axis=-1), live) / slots
    # the sum over many slots is much the same in every cycle
    best = jnp.max(always)
    worth = best + (each - best) / jnp.sqrt(slots)
    pays = (worth > 0) & jnp.any(affordable[1:])
    return jnp.where(policy.forced >= 0, policy.forced > 0, pays)


def choose(
    policy: Policy,
    belief: Belief,
    sure: Float[Array, " b"],
    made: Int[Array, " b"],
    room: Int[Array, " b"],
    live: Bool[Array, " b"],
) -> Int[Array, ""]:
    """The choice for one cycle, once the draft has run: the one that makes most beyond what its time makes at the rate of late.

    Arguments:
        sure: the draft's probability of its best token after the root.
        made, room: see `worth_looking`.
    """
    tokens = _of_live(_expected(policy.tokens[sort_of(sure)], belief, room), live)
    late, cost = _of_live(belief.rate, live)
    rate = jnp.maximum(late / jnp.maximum(cost, LEAST), 1) * _count(live)
    gain = jnp.where(_affordable(policy, belief, made, live, jnp.float32(0)), tokens - rate * _cost(policy), -jnp.inf)
    return jnp.where(policy.forced >= 0, policy.forced, jnp.argmax(gain).astype(jnp.int32))


def sort_of(sure: Float[Array, "*b"]) -> Int[Array, "*b"]:
    """The sort of a cycle, from the draft's probability of its best first token; that of the least where it is no number."""
    return jnp.sum(sure[..., None] >= jnp.asarray(BOUNDS, jnp.float32), axis=-1, dtype=jnp.int32)


def _cost(policy: Policy) -> Float[Array, " o"]:
    # a tree's cycle ends with the draft's run over what it accepts; beside plain decoding that run comes on top
    return policy.cost.at[0].add(policy.look)


def _count(live: Bool[Array, " b"]) -> Float[Array, ""]:
    return jnp.maximum(jnp.sum(live, dtype=jnp.int32), 1).astype(jnp.float32)


def _of_live(x: Float[Array, "b *n"], live: Bool[Array, " b"]) -> Float[Array, "*n"]:
    return jnp.sum(jnp.where(live.reshape(live.shape + (1,) * (x.ndim - 1)), x, 0), axis=0)


def _expected(tokens: Float[Array, "*b o e"], belief: Belief, room: Int[Array, " b"]) -> Float[Array, "b *q o"]:
    weights = jax.nn.softmax(belief.difficulty, axis=-1)
    over = (weights.shape[0],) + (1,) * (tokens.ndim - 2)
    expected = jnp.sum(weights.reshape(*over, -1) * tokens, axis=-1)
    return jnp.minimum(expected, room.reshape(over).astype(jnp.float32))


def _affordable(
    policy: Policy, belief: Belief, made: Int[Array, " b"], live: Bool[Array, " b"], before: Float[Array, ""]
) -> Bool[Array, " o"]:
    """`before`: time that goes by before the cycle, in plain steps."""
    won = _of_live(made.astype(jnp.float32) - (1 - SHARE) * belief.spent + belief.credit, live)
    return (won >= _count(live) * (policy.cost - 1 + before)).at[0].set(True)


def account(
    policy: Policy, belief: Belief, choice: Int[Array, ""], made: Int[Array, " b"], live: Bool[Array, " b"]
) -> Belief:
    """The time, the count and the rate of a cycle that made so many tokens, in the slots that took part."""
    one = (jnp.arange(belief.used.shape[1]) == choice) & live[:, None]
    cost = policy.cost[choice]
    spent = belief.spent + jnp.where(live, cost, 0)
    now = jnp.stack([made.astype(jnp.float32), jnp.broadcast_to(cost, made.shape)], axis=-1)
    rate = jnp.where(live[:, None], KEEP_SORT * belief.rate + (1 - KEEP_SORT) * now, belief.rate)
    return replace(belief, spent=spent, used=belief.used + one.astype(belief.used.dtype), rate=rate)


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


def learn_sure(belief: Belief, sure: Float[Array, "b n"], told: Bool[Array, "b n"]) -> Belief:
    """What the draft's sureness at n places says about how often cycles are of each sort; of those marked in `told`."""
    seen = (sort_of(sure)[..., None] == jnp.arange(len(OFTEN))) & told[..., None]
    count = jnp.sum(told, axis=-1, dtype=jnp.int32)[:, None].astype(jnp.float32)
    shares = jnp.sum(seen, axis=1, dtype=jnp.int32).astype(jnp.float32) / jnp.maximum(count, 1)
    keep = jnp.float32(KEEP_SORT) ** count
    return replace(belief, sorts=keep * belief.sorts + (1 - keep) * shares)


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

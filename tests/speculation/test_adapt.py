"""The policy of "auto" without a model: what it believes, what it chooses, what it may lose."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax.config import Auto, Speculation
from eaglejax.speculation.adapt import (
    ALLOWANCE,
    BOUNDS,
    DIFFICULTIES,
    MIDDLES,
    OFTEN,
    PER_GUESS,
    PRIOR,
    SHARE,
    account,
    account_catch_up,
    account_look,
    choose,
    fresh_belief,
    learn_accepted,
    learn_guesses,
    learn_sure,
    make_policy,
    prior_policy,
    sort_of,
    worth_looking,
)

REACH = [[0.6, 0.35, 0.2], [0.8, 0.55]]
POLICY = make_policy(REACH, [1.3, 1.6], 0.2, 0.1, 0.6)

SURE = jnp.full((1,), 0.99)


def ints(*values):
    return jnp.asarray(values, jnp.int32)


@functools.partial(jax.jit, static_argnames="cycles")
def run(chance, cycles: int):
    """Five simulated waves of one slot; a level is accepted with `chance` given the one above. (choices, tokens made, time spent)."""
    levels, live = jnp.asarray([0, 3, 2]), jnp.ones((1,), bool)

    def cycle(carry, draws):
        belief, made = carry
        worth = worth_looking(POLICY, belief, made, ints(1000), live)
        belief = learn_sure(belief, SURE[:, None], worth[None, None])
        belief = account_look(POLICY, belief, live & worth)  # in every cycle that looks: the worst case
        choice = jnp.where(worth, choose(POLICY, belief, SURE, made, ints(1000), live), 0)
        hits = (draws < chance) & (jnp.arange(3) < levels[choice])
        accepted = jnp.sum(jnp.cumprod(hits.astype(jnp.int32)), dtype=jnp.int32)[None]
        belief = learn_accepted(POLICY, belief, choice, SURE, accepted, live)
        belief = account(POLICY, belief, choice, accepted + 1, live)
        return (belief, made + accepted + 1), choice

    def wave(draws):
        (belief, made), choices = jax.lax.scan(cycle, (fresh_belief(1, 3), ints(0)), draws)
        return choices, made[0], belief.spent[0]

    return jax.vmap(wave)(jax.random.uniform(jax.random.key(0), (5, cycles, 3)))


def test_tables_are_probabilities():
    assert math.isclose(sum(PRIOR), 1) and len(PRIOR) == len(DIFFICULTIES)
    one = DIFFICULTIES.index(1.0)
    # what all sorts together promise is near what the shares of all cycles say
    together = np.einsum("q,qo->o", OFTEN, POLICY.tokens[..., one])
    np.testing.assert_allclose(together, [1, 2.15, 2.35], rtol=0.2)
    assert math.isclose(sum(OFTEN), 1) and together[0] == pytest.approx(1)
    for tree, shares in enumerate(REACH, 1):
        for sort in POLICY.evidence:
            np.testing.assert_allclose(np.exp(np.asarray(sort[tree]))[: len(shares) + 1].sum(0), 1, atol=1e-3)
    np.testing.assert_allclose(np.exp(np.asarray(POLICY.guess)).sum(0), 1, atol=1e-3)
    # harder texts have fewer tokens to expect, cycles in which the draft is surer more
    assert (np.diff(np.asarray(POLICY.tokens[:, 1:]), axis=2) <= 0).all()
    assert (np.diff(np.asarray(POLICY.tokens[:, 1:, one]), axis=0) > 0).all()
    assert len(MIDDLES) == len(BOUNDS) + 1 and (np.diff(MIDDLES) > 0).all()
    assert sort_of(jnp.asarray(MIDDLES)).tolist() == list(range(len(MIDDLES))) and sort_of(jnp.asarray([jnp.nan])) == 0


def test_a_text_that_pays_is_speculated_on_and_wins():
    used, made, spent = map(np.asarray, run(0.8, 200))
    assert ((used == 0).sum(1) < 20).all()
    assert (made > 1.5 * spent).all()


def test_a_text_that_does_not_pay_is_left_alone_within_the_allowance():
    used, made, spent = map(np.asarray, run(0.0, 300))
    assert (spent <= made + ALLOWANCE + SHARE * spent + 1e-3).all()
    tried = (used > 0).sum(1)
    assert ((tried >= 1) & (tried <= 8)).all()


@pytest.mark.parametrize("chance", [0.05, 0.15, 0.3, 0.5])
def test_never_much_slower_than_plain_decoding(chance):
    """By the costs it is told, whatever the text: a wave loses 1 % and the allowance at most."""
    _, made, spent = map(np.asarray, run(chance, 250))
    assert (spent <= made + ALLOWANCE + SHARE * spent + 1e-3).all()


def test_right_guesses_bring_speculation_back():
    live, room = jnp.ones((1,), bool), ints(1000)
    belief = fresh_belief(1, 3)
    for _ in range(6):
        belief = learn_accepted(POLICY, belief, jnp.int32(1), SURE, ints(0), live)
    rich = ints(1000)  # what it may lose is not what decides here
    assert not worth_looking(POLICY, belief, rich, room, live)
    assert not worth_looking(POLICY, learn_guesses(POLICY, belief, ints(0), ints(8)), rich, room, live)
    assert worth_looking(POLICY, learn_guesses(POLICY, belief, ints(7), ints(8)), rich, room, live)
    same = learn_guesses(POLICY, belief, ints(0), ints(0))
    np.testing.assert_array_equal(same.difficulty, belief.difficulty)


def test_right_guesses_lend_credit_to_a_slot_that_has_lost_all_of_it():
    live, room = jnp.ones((1,), bool), ints(1000)
    belief = fresh_belief(1, 3)
    for _ in range(4):  # nothing is accepted: the allowance goes
        belief = learn_accepted(POLICY, belief, jnp.int32(1), SURE, ints(0), live)
        belief = account_catch_up(POLICY, account(POLICY, belief, jnp.int32(1), ints(1), live), live)
    made = ints(4)
    assert 4 - (1 - SHARE) * float(belief.spent[0]) + float(belief.credit[0]) < 0
    promising = lambda right: learn_guesses(POLICY, belief, ints(right), ints(8))
    assert worth_looking(POLICY, promising(8), made, room, live)
    np.testing.assert_allclose(promising(8).credit, ALLOWANCE + 8 * PER_GUESS, rtol=1e-6)
    assert not worth_looking(POLICY, promising(1), made, room, live)
    # good guesses without credit are not enough
    poor = dataclasses.replace(promising(8), credit=belief.credit)
    assert not worth_looking(POLICY, poor, made, room, live)


def test_no_look_where_no_tree_could_follow():
    """Looks that end in nothing would use up what windows bring back: a slot short of credit would look for ever and grow nothing."""
    live, room = jnp.ones((1,), bool), ints(1000)
    cheapest, look = 0.3, float(POLICY.look)
    at = lambda credit, looked: int(
        worth_looking(POLICY, fresh_belief(1, 3, credit=credit), ints(0), room, live, looked)
    )
    assert at(cheapest + look + 0.01, False) > 0
    assert at(cheapest + look / 2, False) == 0 and at(cheapest + look / 2, True) > 0
    assert at(cheapest - 0.01, True) == 0


def test_one_choice_for_the_sum_of_the_live_slots():
    belief = fresh_belief(3, 3)
    bad = ints(0, 0, 3)
    for _ in range(8):
        belief = learn_accepted(POLICY, belief, jnp.int32(1), jnp.full((3,), 0.99), bad, jnp.ones((3,), bool))
    rich, room = ints(500, 500, 500), ints(99, 99, 99)
    pick = lambda *live: int(worth_looking(POLICY, belief, rich, room, jnp.asarray(live)))
    assert pick(True, True, False) == 0 and pick(False, False, True) > 0
    # with one token to go there is nothing to win
    assert not worth_looking(POLICY, belief, rich, ints(1, 1, 1), jnp.asarray([False, False, True]))
    # slots that are done learn nothing and pay nothing
    before = belief.difficulty
    after = learn_accepted(POLICY, belief, jnp.int32(1), jnp.full((3,), 0.99), bad, jnp.zeros((3,), bool))
    np.testing.assert_array_equal(after.difficulty, before)
    nobody = jnp.zeros((3,), bool)
    assert (
        float(
            account_catch_up(POLICY, account(POLICY, belief, jnp.int32(1), ints(1, 1, 1), nobody), nobody).spent.sum()
        )
        == 0
    )


def test_a_cycle_is_as_long_as_the_draft_is_sure():
    chains = make_policy([[0.7, 0.5, 0.35], [0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08]], [1.7, 2.4], 0.3, 0.1, 0.7)
    live, rich, room = jnp.ones((1,), bool), ints(1000), ints(1000)
    pick = lambda sure, room=room, tables=chains: int(
        choose(tables, fresh_belief(1, 3), jnp.asarray([sure]), rich, room, live)
    )
    choices = [pick(sure) for sure in MIDDLES]
    assert choices == sorted(choices) and set(choices) == {0, 1, 2}
    assert pick(0.99, ints(1)) == 0  # one token to go
    assert pick(0.99, tables=dataclasses.replace(chains, forced=jnp.int32(1))) == 1
    # a tree that is not affordable is not grown, however sure the draft
    assert int(choose(chains, fresh_belief(1, 3, credit=0.0), jnp.asarray([0.99]), ints(0), room, live)) == 0
    # of two slots the surer one may decide for both, one that is done does not
    two, belief = jnp.asarray([0.05, 0.99]), fresh_belief(2, 3)
    both = lambda *live: int(choose(chains, belief, two, ints(99, 99), ints(99, 99), jnp.asarray(live)))
    assert both(True, False) == 0 and both(False, True) == 2


def test_plain_decoding_says_nothing_and_its_cycles_count():
    belief = fresh_belief(2, 3)
    live = jnp.ones((2,), bool)
    same = learn_accepted(POLICY, belief, jnp.int32(0), jnp.full((2,), 0.6), ints(0, 0), live)
    np.testing.assert_array_equal(same.difficulty, belief.difficulty)
    paid = account_catch_up(POLICY, account(POLICY, belief, jnp.int32(2), ints(1, 1), live), live)
    np.testing.assert_allclose(paid.spent, 1.8, rtol=1e-6)
    assert paid.used.tolist() == [[0, 0, 1], [0, 0, 1]]


def test_the_prior_for_an_unknown_pair_favours_small_trees():
    trees = (Speculation(3, 1), Speculation(3, 4, 8), Speculation(7, 8, 64))
    policy = prior_policy(Auto(trees))
    one = DIFFICULTIES.index(1.0)
    rate = np.einsum("q,qo->o", OFTEN, policy.tokens[..., one]) / np.asarray(policy.cost)
    assert min(rate[1], rate[2]) > rate[0] > rate[3]

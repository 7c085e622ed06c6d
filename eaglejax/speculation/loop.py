"""EAGLE-3 decoding, top to bottom: prefill, then cycles of extend, grow, verify, accept, commit inside one `lax.while_loop`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from eaglejax.config import PLAIN, Auto, Speculation
from eaglejax.models.rows import KVRows, causal_step
from eaglejax.speculation.adapt import (
    PRIOR_CHAIN,
    Policy,
    account,
    account_catch_up,
    account_look,
    choose,
    learn_accepted,
    learn_guesses,
    learn_sure,
    worth_looking,
)
from eaglejax.speculation.cache import commit, put_rows, take_rows
from eaglejax.speculation.draft import Tip, extend, grow, sureness
from eaglejax.speculation.follow import follow
from eaglejax.speculation.sampling import draw
from eaglejax.speculation.simulated import SimulatedAcceptance
from eaglejax.speculation.state import Models, State
from eaglejax.speculation.tree import root_only
from eaglejax.speculation.verify import accept, join_features, verify

BURST = 8  # plain cycles of "auto" between two choosings
LONE_ROWS = 2  # of a look that ends no tree's cycle, at most: the last one again, and a plain step's


def decode(
    models: Models,
    state: State,
    spec: Speculation | Auto,
    max_cycles: Int[Array, ""],
    policy: Policy | None = None,
    simulated: SimulatedAcceptance | None = None,
    plain_rows: int = 1,
) -> State:
    """Cycles until every slot is done, or `max_cycles` of them.

    Arguments:
        policy: what "auto" chooses by.
        simulated: for measurements of models with random weights, how much to accept in place of what the target drew.
        plain_rows: of plain decoding, for a control of its rounding: all but the first are run for nothing.
    """
    if isinstance(spec, Auto):
        assert policy is not None
        return decode_adaptively(models, state, spec, max_cycles, policy, simulated)

    def running(carry):
        index, state = carry
        return (index < max_cycles) & ~jnp.all(state.done)

    def body(carry):
        index, state = carry
        return index + 1, cycle(models, state, spec, simulated, plain_rows)

    return lax.while_loop(running, body, (jnp.int32(0), state))[1]


def cycle(
    models: Models,
    state: State,
    spec: Speculation,
    simulated: SimulatedAcceptance | None = None,
    plain_rows: int = 1,
) -> State:
    """One round. Plain decoding is the same round with a tree of nothing but the root. `simulated`, `plain_rows`: see `decode`."""
    # 1. draft extend: the tokens accepted last time enter the draft's cache with the target's own features
    tip = None
    if spec.num_steps:
        assert models.draft is not None
        start = state.length - 1 - state.pending_count
        tokens, features = state.pending_tokens, state.pending_features
        draft_cache, tip = extend(models.draft, state.draft_cache, tokens, features, start, state.pending_count)
        state = replace(state, draft_cache=draft_cache, pending_count=jnp.zeros_like(state.pending_count))
    # 2. grow: a tree of candidates below the last committed token
    # 3. verify: the target draws the token after every node
    # 4. accept: follow the drawn tokens down the tree
    outcome = attempt(models, state, tip, spec, simulated, plain_rows)
    # 5. commit: cache rows of the root and the accepted nodes; the tokens drawn at them (accepted ones, then the bonus)
    return settle(state, outcome)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Course:
    """Where the loop of "auto" stands."""

    index: Int[Array, ""]  # cycles so far
    action: Int[Array, ""]  # one of `Auto.choices`, or beyond them: look, then catch up
    burst: Int[Array, ""]  # plain cycles until the next choosing
    looked: Bool[Array, ""]  # the draft has run over all that was accepted, and the action is chosen by that
    tip: Tip  # what a tree grows from then
    sure: Float[Array, " b"]  # how sure the draft is of the token after the root then
    state: State


def decode_adaptively(
    models: Models,
    state: State,
    auto: Auto,
    max_cycles: Int[Array, ""],
    policy: Policy,
    simulated: SimulatedAcceptance | None = None,
) -> State:
    """The same rounds with the tree, or none, that is fastest by the slots' own history and by how sure the draft is: "auto".

    A round begins where the draft has run over what was accepted (it has looked): then the tree is chosen, grown and verified, and the
    draft looks again. While plain decoding is all that the text is worth the draft does not look, and runs over a whole window now and
    then (it catches up).

    Each choice has a loop of its own that goes on while it stays the choice, and all stand in an outer one: a cycle then costs what it
    costs in the loop of a fixed tree, and the choosing. Branches in one loop would cost more: what a branch writes is copied, so it may
    not write caches, and rows of all layers would have to pass its end.
    """
    looking = len(auto.choices)
    running = lambda course: (course.index < max_cycles) & ~jnp.all(course.state.done)

    def caught_up(course: Course) -> Course:
        state = catch_up(models, course.state, auto, policy)
        action, burst = next_action(policy, auto, state, True)
        return replace(course, action=action, burst=burst, state=state)

    def looked(course: Course, rows: int) -> Course:
        state, tip, sure = look(models, course.state, auto, rows)
        if simulated is not None:  # what the draft says means nothing then
            sure = jnp.full_like(sure, PRIOR_CHAIN[0])
        live = ~state.done
        assert state.belief is not None
        state = replace(state, belief=learn_sure(state.belief, sure[:, None], live[:, None]))
        action = next_choice(policy, auto, state, sure)
        return Course(course.index, action, jnp.int32(1), jnp.bool_(True), tip, sure, state)

    def looked_alone(course: Course) -> Course:
        state = course.state
        assert state.belief is not None
        belief = account_look(policy, state.belief, ~state.done)
        return looked(replace(course, state=replace(state, belief=belief)), LONE_ROWS)

    def plain(course: Course) -> Course:
        live = ~course.state.done
        state = settle(course.state, attempt(models, course.state, None, PLAIN, simulated))
        assert state.belief is not None
        state = replace(state, belief=account(policy, state.belief, jnp.int32(0), live.astype(jnp.int32), live))
        return replace(course, index=course.index + 1, burst=course.burst - 1, looked=jnp.bool_(False), state=state)

    def grown(choice: int, course: Course) -> Course:
        live, which = ~course.state.done, jnp.int32(choice)
        outcome = attempt(models, course.state, course.tip, auto.choices[choice], simulated)
        # the row that still waits is the tip's own
        state = replace(course.state, pending_count=jnp.zeros_like(course.state.pending_count))
        state = settle(state, outcome)
        assert state.belief is not None
        belief = learn_accepted(policy, state.belief, which, course.sure, outcome.accepted, live)
        state = replace(state, belief=account(policy, belief, which, outcome.accepted + 1, live))
        return looked(replace(course, index=course.index + 1, state=state), auto.choices[choice].num_steps + 1)

    def outer(course: Course) -> Course:
        by_text = next_action(policy, auto, course.state, False)
        action, burst = jax.tree.map(partial(jnp.where, course.looked), (course.action, course.burst), by_text)
        course = replace(course, action=action, burst=burst)
        # the draft's guesses beside what came may change the choice, so this comes first
        taken = lambda action: lambda course: (course.action == action) & running(course)
        course = lax.while_loop(taken(looking + 1), caught_up, course)
        course = lax.while_loop(taken(looking), looked_alone, course)
        # a plain cycle teaches nothing about the text: some are run for one choosing
        course = lax.while_loop(lambda course: taken(0)(course) & (course.burst > 0), plain, course)
        for choice in range(1, len(auto.choices)):
            course = lax.while_loop(taken(choice), partial(grown, choice), course)
        return course

    shapes = jax.eval_shape(lambda: jax.tree.leaves(look(models, state, auto, 1)[1:]))
    *tip, sure = (jnp.zeros(shape.shape, shape.dtype) for shape in shapes)
    zero = jnp.int32(0)
    return lax.while_loop(running, outer, Course(zero, zero, zero, jnp.bool_(False), Tip(*tip), sure, state)).state


def next_action(policy: Policy, auto: Auto, state: State, caught_up: bool) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """`Course.action` and `Course.burst`, by the text alone. `caught_up`: the draft has just done so, and need not again."""
    belief, live = state.belief, ~state.done
    assert belief is not None
    worth = worth_looking(policy, belief, _made(state), state.request.limit - state.length, live)
    waiting = jnp.max(state.pending_count)
    # a young answer looks up sooner: beginnings are unlike what follows, and half of a short answer would be over by then
    young = jnp.min(jnp.where(live, _made(state), auto.window)) < auto.window
    full = jnp.where(young, max(auto.window // 2, LONE_ROWS + 1), auto.window)
    burst = jnp.where(policy.always_catch_up, 1, jnp.clip(full - waiting, 1, BURST)).astype(jnp.int32)
    looks = worth | policy.always_look
    action = jnp.where(looks, len(auto.choices), 0).astype(jnp.int32)
    if caught_up:
        return action, burst
    behind = (waiting >= full) | (looks & (waiting > LONE_ROWS)) | policy.always_catch_up
    return jnp.where(behind, len(auto.choices) + 1, action).astype(jnp.int32), burst


def next_choice(policy: Policy, auto: Auto, state: State, sure: Float[Array, " b"]) -> Int[Array, ""]:
    """`Course.action` once the draft has looked: a tree for this cycle, or one plain step. A tree is grown only of a text worth it."""
    belief, live = state.belief, ~state.done
    assert belief is not None
    room = state.request.limit - state.length
    worth = worth_looking(policy, belief, _made(state), room, live, looked=True)
    return jnp.where(worth, choose(policy, belief, sure, _made(state), room, live), 0)


def _made(state: State) -> Int[Array, " b"]:
    return state.length - state.request.prompt_length - 1


def look(models: Models, state: State, auto: Auto, rows: int) -> tuple[State, Tip, Float[Array, " b"]]:
    """The draft runs over the rows that wait, `rows` at most: what a tree grows from, and how sure the draft is.

    The last row goes on waiting: running it again changes nothing, and what it says is not kept between calls."""
    assert models.draft is not None
    start, count = state.length - 1 - state.pending_count, state.pending_count
    tokens, features = state.pending_tokens[:, :rows], state.pending_features[:, :rows]
    draft_cache, tip = extend(models.draft, state.draft_cache, tokens, features, start, count)
    sure = sureness(models.draft, tip, state.length - 1, state.request, auto.guess)
    return only_the_last_waits(replace(state, draft_cache=draft_cache)), tip, sure


def only_the_last_waits(state: State) -> State:
    """The pending rows without those that the draft has run, all but the last."""
    count = state.pending_count
    last, zero, one = jnp.maximum(count - 1, 0)[:, None], jnp.zeros_like(count), jnp.minimum(count, 1)
    return replace(
        state,
        pending_tokens=put_rows(state.pending_tokens, take_rows(state.pending_tokens, last), zero, one),
        pending_features=put_rows(state.pending_features, take_rows(state.pending_features, last), zero, one),
        pending_count=one,
    )


def catch_up(models: Models, state: State, auto: Auto, policy: Policy) -> State:
    """The draft runs over the rows that wait since plain decoding began, all but the last, from which a tree may grow; what it guesses
    beside the tokens that came says whether speculation would pay."""
    assert models.draft is not None and state.belief is not None
    start, count = state.length - 1 - state.pending_count, state.pending_count
    ran = follow(models.draft, state, start, auto)
    draft_cache = commit(state.draft_cache, ran.rows, start, jnp.maximum(count - 1, 0), ran.hidden)
    belief = learn_guesses(policy, state.belief, ran.right, ran.guesses)
    belief = learn_sure(belief, ran.sure, ran.counted)
    belief = account_catch_up(policy, belief, ~state.done)
    return only_the_last_waits(replace(state, draft_cache=draft_cache, belief=belief))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outcome:
    """What a round found, not yet written anywhere: p rows, num_steps + 1, those of the root and the accepted nodes first."""

    tokens: Int[Array, "b p"]  # drawn at them: the accepted ones, then the bonus
    features: Float[Array, "b p f"]  # captured states at them
    rows: list[KVRows]  # their rows for the target's cache, per layer
    accepted: Int[Array, " b"]  # accepted drafted tokens


def attempt(
    models: Models,
    state: State,
    tip: Tip | None,
    spec: Speculation,
    simulated: SimulatedAcceptance | None = None,
    plain_rows: int = 1,
) -> Outcome:
    """Grow, verify, accept."""
    root_positions = state.length - 1
    root = jnp.take_along_axis(state.tokens, jnp.maximum(root_positions, 0)[:, None], axis=-1)[:, 0]
    tree = root_only(root, plain_rows)
    if spec.num_steps:
        assert models.draft is not None and tip is not None
        tree = grow(models.draft, state.draft_cache, tip, root, root_positions, state.request, spec)
    verdict = verify(models, state.target_cache, tree, root_positions, state.request)
    if simulated is None:
        accepted = accept(tree, verdict.draws, spec.num_steps)
    else:
        accepted = simulated.accept(tree, root_positions, state.request.seed, spec.num_steps)
    along = lambda rows: take_rows(rows, accepted.path)
    with jax.named_scope("commit"):
        rows = jax.tree.map(along, verdict.rows)
        return Outcome(along(verdict.draws), along(verdict.features), rows, accepted.count)


def settle(state: State, outcome: Outcome) -> State:
    """Commit an outcome: to the target's cache, to the rows that the draft will run, to the answer."""
    live = ~state.done
    kept = jnp.where(live, outcome.accepted + 1, 0)
    target_cache = commit(state.target_cache, outcome.rows, state.length - 1, kept, outcome.tokens)
    if state.pending_tokens.shape[1]:
        # behind the rows that the draft has not run yet; those beyond the accepted ones are finite, and never read
        every = jnp.full_like(kept, outcome.tokens.shape[1])
        state = replace(
            state,
            pending_tokens=put_rows(state.pending_tokens, outcome.tokens, state.pending_count, every),
            pending_features=put_rows(state.pending_features, outcome.features, state.pending_count, every),
            # a slot that is done stays where it is: no pending row of it is run again
            pending_count=jnp.where(live, state.pending_count + outcome.accepted + 1, 0),
        )
    state = replace(
        state,
        target_cache=target_cache,
        accepted=put_rows(state.accepted, outcome.accepted[:, None], state.cycles, live.astype(jnp.int32)),
        cycles=state.cycles + live.astype(jnp.int32),
    )
    return append(state, outcome.tokens, kept)


@jax.named_scope("commit")
def append(state: State, emitted: Int[Array, "b p"], count: Int[Array, " b"]) -> State:
    """Commit the first `count` emitted tokens of each slot, cut at the first EOS or stop id and at the budget."""
    index = jnp.arange(emitted.shape[1], dtype=jnp.int32)
    stops = jnp.any(emitted[:, :, None] == state.request.stop_ids[:, None, :], axis=-1) & (index < count[:, None])
    first_stop = jnp.where(jnp.any(stops, axis=-1), jnp.argmax(stops, axis=-1).astype(jnp.int32), emitted.shape[1])
    room = state.request.limit - state.length
    kept = jnp.minimum(jnp.minimum(count, room), first_stop + 1)
    stopped = state.stopped | (first_stop < kept)
    length = state.length + kept
    return replace(
        state,
        tokens=put_rows(state.tokens, emitted, state.length, kept),
        length=length,
        stopped=stopped,
        done=state.done | stopped | (length >= state.request.limit),
    )


def prefill(models: Models, state: State, offset: Int[Array, ""], rows: int) -> State:
    """Run the prompt tokens at positions `offset` to `offset + rows` of every slot; slots whose prompt ends there draw their first token.

    The draft runs its own prefill on the way: row i is token x_{i+1} beside the target's features of position i. The row of the last
    prompt token waits for the token drawn after it, as the first pending row.
    """
    request = state.request
    batch = request.prompt_length.shape[0]
    tokens = lax.dynamic_slice(_padded(state.tokens, rows + 1), (0, offset), (batch, rows + 1))
    start = jnp.minimum(offset, request.prompt_length)
    count = jnp.clip(request.prompt_length - offset, 0, rows)
    with jax.named_scope("target_prefill"):
        out = models.target(tokens[:, :-1], causal_step(start, rows), state.target_cache, models.boundaries)
        state = replace(state, target_cache=commit(state.target_cache, out.rows, start, count, out.hidden))
    features = join_features(out.captured, out.hidden)
    if models.draft is not None:
        with jax.named_scope("draft_prefill"):
            draft_count = jnp.clip(request.prompt_length - 1 - offset, 0, rows)
            draft_cache, _ = extend(models.draft, state.draft_cache, tokens[:, 1:], features, start, draft_count)
            state = replace(state, draft_cache=draft_cache)

    ends = (count > 0) & (request.prompt_length <= offset + rows)
    last = jnp.maximum(count - 1, 0)[:, None]

    @jax.named_scope("first_token")
    def first_token(hidden):
        logits = models.target.logits(take_rows(hidden, last))
        return draw(logits, request.prompt_length[:, None], request, models.target.split.vocab)

    drawn = lax.cond(jnp.any(ends), first_token, lambda _: jnp.zeros((batch, 1), jnp.int32), out.hidden)
    return _start(state, drawn, take_rows(features, last), ends)


def _padded(tokens: Int[Array, "b n"], extra: int) -> Int[Array, "b m"]:
    # a slice near the end must not be moved back into the prompt
    return jnp.pad(tokens, ((0, 0), (0, extra)))


@jax.named_scope("first_token")
def _start(state: State, drawn: Int[Array, "b 1"], features, ends: Bool[Array, " b"]) -> State:
    """The first token of the slots whose prompt ended, and their first pending draft row."""
    if state.pending_tokens.shape[1]:
        one = ends.astype(jnp.int32)
        zero = jnp.zeros_like(one)
        state = replace(
            state,
            pending_tokens=put_rows(state.pending_tokens, drawn, zero, one),
            pending_features=put_rows(state.pending_features, features, zero, one),
            pending_count=jnp.where(ends, 1, state.pending_count),
        )
    state = replace(state, length=jnp.where(ends, state.request.prompt_length, state.length))
    return append(state, drawn, ends.astype(jnp.int32))

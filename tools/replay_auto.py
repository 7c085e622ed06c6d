"""What "auto" makes of real answers at given costs, beside the fixed chains: its own policy on recorded drafts, free of a machine's noise.

One run grows the longest chain below every token of the answers; with chains a cycle of any length is a part of that. The policy of
`speculation/adapt.py` then decides cycle by cycle as the loop would have it (`loop.decode_adaptively`), and time is counted in plain
steps by the costs it is told. The table has tokens per plain step: how many times plain decoding's rate, were costs exactly these.

    python tools/replay_auto.py --costs 1.75 2.41 --look 0.12 --catch_up 0.3
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax import EagleJaxEngine, Sampling, Speculation
from eaglejax.measure.look_ahead import LookAhead
from eaglejax.measure.prompt_sets import read_prompts
from eaglejax.measure.replay import Text
from eaglejax.speculation import adapt
from eaglejax.speculation.adapt import Belief, Policy
from eaglejax.speculation.experience import Experience
from eaglejax.speculation.follow import GUESSES
from eaglejax.speculation.loop import BURST
from eaglejax.wave import Job

WINDOW = 32
LIVE, ROOM = jnp.ones((1,), bool), jnp.asarray([10_000], jnp.int32)


@dataclass(frozen=True)
class Place:
    """Below one token of an answer: tokens that the longest chain has right, and the draft's probability of its first one."""

    right: int
    sure: float


def places_of(text: Text) -> list[Place]:
    """One for every token that a tree was grown below."""
    found = []
    for place, tree in enumerate(text.trees):
        order = np.argsort(tree.depths, kind="stable")[1:]
        hits = [int(tree.tokens[node]) == token for node, token in zip(order, text.tokens[place + 1 :], strict=False)]
        found.append(Place(int(np.cumprod(hits).sum()), float(np.exp(tree.scores[order[0]]))))
    return found


@dataclass
class Tally:
    """Tokens made, time in plain steps, cycles by choice."""

    used: list[int]
    tokens: int = 0
    time: float = 0.0


@partial(jax.jit, static_argnames="looked")
def _worth(policy: Policy, belief: Belief, made, looked: bool = False):
    return adapt.worth_looking(policy, belief, made, ROOM, LIVE, looked)


@jax.jit
def _chosen(policy: Policy, belief: Belief, made, sure):
    """The choice once the draft has looked, and what is believed then."""
    belief = adapt.learn_sure(belief, sure[:, None], LIVE[:, None])
    choice = adapt.choose(policy, belief, sure, made, ROOM, LIVE)
    return jnp.where(_worth(policy, belief, made, looked=True), choice, 0), belief


@jax.jit
def _after(policy: Policy, belief: Belief, choice, sure, accepted):
    belief = adapt.learn_accepted(policy, belief, choice, sure, accepted, LIVE)
    return adapt.account(policy, belief, choice, accepted + 1, LIVE)


@jax.jit
def _caught_up(policy: Policy, belief: Belief, right, sure, told):
    belief = adapt.learn_guesses(policy, belief, right, jnp.sum(told, axis=-1, dtype=jnp.int32))
    return adapt.account_catch_up(policy, adapt.learn_sure(belief, sure, told), LIVE)


_looked = jax.jit(lambda policy, belief: adapt.account_look(policy, belief, LIVE))


@dataclass
class Replay:
    """One slot that decodes answers one after the other, as the loop of "auto" would."""

    policy: Policy
    depths: list[int]  # of the chains
    tally: Tally
    experience: Experience = field(default_factory=Experience)

    def run(self, places: list[Place]) -> None:
        policy, tally, cost = self.policy, self.tally, [float(x) for x in self.policy.cost]
        belief, at, waiting, looked = self.experience.begin(1, len(cost)), 0, 1, False
        while at < len(places):
            sure, made = jnp.asarray([places[at].sure], jnp.float32), jnp.asarray([at], jnp.int32)
            if not looked and not bool(_worth(policy, belief, made)):
                full = WINDOW // 2 if at < WINDOW else WINDOW
                if waiting >= full:
                    belief, waiting = self._catch_up(belief, places[max(0, at - GUESSES) : at]), 1
                    continue
                for _ in range(min(BURST, full - waiting, len(places) - at)):
                    belief = _after(policy, belief, jnp.int32(0), sure, jnp.asarray([0]))
                    at, waiting = at + 1, waiting + 1
                    tally.tokens, tally.time, tally.used[0] = tally.tokens + 1, tally.time + 1, tally.used[0] + 1
                continue
            if not looked:
                belief, tally.time = _looked(policy, belief), tally.time + float(policy.look)
            choice, belief = _chosen(policy, belief, made, sure)
            which = int(choice)
            accepted = min(places[at].right, self.depths[which - 1]) if which else 0
            belief = _after(policy, belief, jnp.int32(which), sure, jnp.asarray([accepted]))
            tally.tokens, tally.time = tally.tokens + accepted + 1, tally.time + cost[which]
            tally.used[which] += 1
            at, waiting, looked = at + accepted + 1, 1 if which else 2, which > 0
        difficulty, spent, credit = map(np.asarray, (belief.difficulty, belief.spent, belief.credit))
        self.experience.learn(difficulty, spent, credit, np.asarray([len(places)]), np.asarray([True]))

    def _catch_up(self, belief: Belief, seen: list[Place]) -> Belief:
        self.tally.time += float(self.policy.catch_up)
        spare = GUESSES - len(seen)
        sure = jnp.asarray([[place.sure for place in seen] + [0.0] * spare], jnp.float32)
        told = jnp.asarray([[True] * len(seen) + [False] * spare])
        return _caught_up(self.policy, belief, jnp.asarray([sum(place.right > 0 for place in seen)]), sure, told)


def fixed(answers: list[list[Place]], depth: int, cost: float) -> float:
    """Tokens per plain step of one chain in every cycle."""
    tokens = cycles = 0
    for places in answers:
        at = 0
        while at < len(places):
            made = min(places[at].right, depth) + 1
            at, tokens, cycles = at + made, tokens + made, cycles + 1
    return tokens / (cycles * cost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", default="smollm2-eagle3")
    parser.add_argument("--sets", nargs="+", default=["mt_bench", "gsm8k", "humaneval", "qa", "random", "noise"])
    parser.add_argument("--prompts", type=int, default=8, help="of each set")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--depths", type=int, nargs="+", default=[3, 7], help="of the chains")
    parser.add_argument("--costs", type=float, nargs="+", required=True, help="of a cycle with each, in plain steps")
    parser.add_argument("--look", type=float, required=True)
    parser.add_argument("--catch_up", type=float, required=True)
    args = parser.parse_args()
    if len(args.costs) != len(args.depths):
        parser.error("--costs: one for each of --depths")
    chains = [Speculation(depth, 1) for depth in args.depths]
    engine = EagleJaxEngine.from_pretrained(
        args.model, draft=args.draft, max_len=512, slots=args.prompts, tuning="none"
    )
    longest = Speculation(max(args.depths), 1)
    looking = LookAhead(engine._programs_for(longest), [longest])
    reach = [adapt.prior_reach(chain) for chain in chains]
    policy = adapt.make_policy(reach, args.costs, args.catch_up, args.look, adapt.PRIOR_CHAIN[0])
    names = "".join(f"{f'({c.num_steps}, 1, {c.nodes})':>12}" for c in chains)
    print(f"{'set':<12}{names}{'auto':>12}  its cycles: none and each chain")
    replay = Replay(policy, args.depths, Tally([]))
    for name in args.sets:
        # noise: random prompts answered at temperature 2, as in compare_auto
        heat, named = (2.0, "random") if name == "noise" else (0.0, name)
        read = read_prompts(named, args.prompts, chat=named != "random", vocab_size=engine.vocab_size)
        ask = Sampling(max_new_tokens=args.tokens + 1, ignore_eos=True, temperature=heat, seed=0)
        jobs = [Job(prompt, ask, index, ()) for index, prompt in enumerate(engine.encode([p.content for p in read]))]
        answers = [places_of(text) for text in looking.run(jobs, lambda steps: None)[0]]
        replay.tally = Tally([0] * (1 + len(chains)))
        for places in answers:
            replay.run(places)
        rates = [fixed(answers, depth, cost) for depth, cost in zip(args.depths, args.costs, strict=True)]
        told = "".join(f"{rate:>12.3f}" for rate in [*rates, replay.tally.tokens / replay.tally.time])
        print(f"{name:<12}{told}  {replay.tally.used}", flush=True)


if __name__ == "__main__":
    main()

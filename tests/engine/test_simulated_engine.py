"""Simulated acceptance inside the compiled loop: counts as asked, on one device and on a mesh; nothing else changes."""

from __future__ import annotations

import pairs
import pytest

from eaglejax import Sampling, Speculation
from eaglejax.speculation.simulated import SimulatedAcceptance

ASKED = Sampling(max_new_tokens=40, ignore_eos=True, seed=3)
PROMPTS = pairs.prompts([5, 9])


def test_chains_accept_what_was_asked_for(grouped):
    plain = pairs.ids(grouped.generate(PROMPTS, ASKED, speculation=None))
    for rates, each in (((1.0,), 4), ((0.0,), 0), ((1.0, 1.0, 0.0), 2)):
        engine = grouped.variant(simulated=SimulatedAcceptance(rates))
        answers = engine.generate(PROMPTS, ASKED, speculation=Speculation(4, 1, 5))
        assert all(len(a.token_ids) == 40 and set(a.stats.accepted_per_cycle) == {each} for a in answers), rates
    # with nothing accepted every token is the target's own choice
    nothing = grouped.variant(simulated=SimulatedAcceptance((0.0,)))
    assert pairs.ids(nothing.generate(PROMPTS, ASKED, speculation=Speculation(4, 1, 5))) == plain
    assert grouped.simulated is None
    assert pairs.ids(grouped.generate(PROMPTS, ASKED, speculation=Speculation(4, 1, 5))) == plain


@pytest.mark.slow
def test_runs_repeat_and_trees_go_as_deep_as_they_are(latent):
    engine = latent.variant(simulated=SimulatedAcceptance((0.8,)))
    first, again = (pairs.counts(engine.generate(PROMPTS, ASKED, speculation=Speculation(4, 2, 8))) for _ in range(2))
    assert first == again and any(map(any, first)) and max(map(max, first)) <= 4
    assert pairs.ids(engine.generate(PROMPTS, ASKED, speculation=None)) == pairs.ids(
        latent.generate(PROMPTS, ASKED, speculation=None)
    )


def test_a_variant_has_its_own_slots(grouped):
    engine = grouped.variant(slots=1)
    assert (engine.slots, grouped.slots) == (1, 4)
    assert pairs.ids(engine.generate(PROMPTS, ASKED)) == pairs.ids(grouped.generate(PROMPTS, ASKED))


@pytest.mark.slow
def test_on_a_mesh_as_on_one_device(random_pairs, grouped):
    simulated, spec = SimulatedAcceptance((0.8, 0.5)), Speculation(4, 1, 5)
    meshed = pairs.load(*random_pairs["qwen3_moe"], mesh="data=2")
    one, other = (
        pairs.counts(e.variant(simulated=simulated).generate(PROMPTS, ASKED, speculation=spec))
        for e in (grouped, meshed)
    )
    assert one == other

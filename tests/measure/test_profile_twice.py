"""Parts done twice inside the compiled loop: the same results, the work really done again, and its time found."""

import jax
import jax.numpy as jnp
import kit_m
import numpy as np
import pytest
from flax import nnx
from planted import plant
from type_checks import jaxtyping_off

from eaglejax import EagleJaxEngine, Sampling, Speculation
from eaglejax.measure.profile_twice import NAMES, TwiceDraft, TwiceTarget, run_count, time_twice
from eaglejax.measure.timing import Spread
from eaglejax.models.rows import causal_step
from eaglejax.wave import Job

CAPTURE = (1, 2, 3)
SPEC = Speculation(2, 1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder, ring = tmp_path_factory.mktemp("twice"), kit_m.sharp(kit_m.ring())
    target = kit_m.write_target(folder / "target", ring, layers=3)
    draft = kit_m.write_draft(folder / "draft", ring, CAPTURE, eagle_aux_hidden_state_layer_ids=list(CAPTURE))
    return EagleJaxEngine.from_pretrained(str(target), draft=str(draft), speculation=SPEC, max_len=64, slots=1)._pair


def jobs(tokens):
    return [Job(list(range(3, 15)), Sampling(max_new_tokens=tokens), 0, ())]


def passes(model, caches, *inputs):
    """(hidden, logits) of one pass over 4 rows as a model makes them, and the arithmetic of the compiled program."""
    graph, weights = nnx.split(model)

    def run(weights, caches, *inputs):
        merged = nnx.merge(graph, weights)
        hidden = merged(*inputs, causal_step(jnp.zeros(1, jnp.int32), 4), caches).hidden
        return hidden, merged.logits(hidden)

    with jaxtyping_off():
        compiled = jax.jit(run).lower(weights, caches, *inputs).compile()
    return compiled(weights, caches, *inputs), compiled.cost_analysis()["flops"]


def size(module) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(module)) if leaf.ndim >= 2)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["layers", "head"])
def test_twice_gives_the_same_and_works_twice(pair, part):
    target, draft, tokens = pair.target, pair.draft, jnp.asarray([[3, 4, 5, 6]])
    state = jnp.ones((1, 4, draft.config.hidden_size), draft.dtype)
    # the products that XLA must not have joined with the first ones
    again = (
        {"target": target.layers, "draft": draft.first}
        if part == "layers"
        else {"target": target.head, "draft": draft.head}
    )
    for name, plain, doubled, inputs in (
        ("target", target, TwiceTarget(target, part), (tokens,)),
        ("draft", draft, TwiceDraft(draft, part), (tokens, state)),
    ):
        caches = plain.empty_caches(1, 8)
        once, work = passes(plain, caches, *inputs)
        twice, more = passes(doubled, caches, *inputs)
        assert all(map(np.array_equal, once, twice)), name
        assert more - work > 0.95 * 2 * 4 * size(again[name]), name


def test_every_part_of_a_cycle_is_counted():
    assert run_count(SPEC, 3) == 5 * 4 and run_count(Speculation(num_steps=0), 3) == 3 * 4
    assert len(NAMES) == 4


@pytest.mark.slow
def test_the_planted_time_is_found_in_the_draft_without_a_trace(tmp_path_factory):
    folder, ring = tmp_path_factory.mktemp("planted"), kit_m.sharp(kit_m.ring())
    target = kit_m.write_target(folder / "target", ring, layers=3)
    draft = kit_m.write_draft(folder / "draft", ring, CAPTURE, eagle_aux_hidden_state_layer_ids=list(CAPTURE))
    engine = EagleJaxEngine.from_pretrained(str(target), draft=str(draft), speculation=SPEC, max_len=64, slots=1)
    plant(engine)
    twice = time_twice(engine._pair, jobs(25), SPEC, 64, 1, repeats=3)
    assert isinstance(twice.cycle, Spread)
    # nearly all of the cycle is the draft's layers, and doing them again costs that again
    assert 0.5 < twice.parts["draft: extension and steps"] / twice.cycle.median < 1.5
    assert twice.parts["verify: embedding and layers"] < 0.3 * twice.parts["draft: extension and steps"]
    assert "a difference of two runs" in twice.to_text()

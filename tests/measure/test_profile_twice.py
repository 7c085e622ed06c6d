"""Parts done twice inside the compiled loop: the same tokens, the work really done again, and its time found."""

import jax
import kit_m
import pytest
from flax import nnx
from planted import plant
from type_checks import jaxtyping_off

from eaglejax import EagleJaxEngine, Sampling, Speculation
from eaglejax.measure.profile_twice import NAMES, TwiceDraft, TwiceTarget, run_count, time_twice
from eaglejax.measure.timing import Spread
from eaglejax.speculation.programs import Programs
from eaglejax.wave import Job, Wave

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


def programs(pair, target=None, draft=None):
    return Programs(target or pair.target, draft or pair.draft, pair.capture.boundaries, SPEC, 64, pair.dtype)


def test_twice_is_the_same_answer_and_more_work(pair):
    # layers of one and head of the other at a time: two programs in place of four
    plain, doubled = programs(pair), programs(pair, TwiceTarget(pair.target, "layers"), TwiceDraft(pair.draft, "head"))
    (once,), (again,) = Wave(plain, jobs(10), None, 1).run(), Wave(doubled, jobs(10), None, 1).run()
    assert once.token_ids == again.token_ids
    # XLA joined nothing: the compiled loop does the products of all target layers once more
    rows, layers = SPEC.nodes, [leaf.size for leaf in jax.tree.leaves(nnx.state(pair.target.layers)) if leaf.ndim >= 2]
    assert flops(doubled) - flops(plain) > 0.95 * 2 * rows * sum(layers)


def flops(made: Programs) -> float:
    with jaxtyping_off():
        return made.lower_decode(1).compile().cost_analysis()["flops"]


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

"""The work behind the floors of a profile: the parts of a pass add up to the plan's whole pass."""

import kit_m
import pytest

from eaglejax import EagleJaxEngine, Speculation
from eaglejax.measure.profile_floor import cycle_work, placed, prefill_work, verify_work
from eaglejax.measure.work import cycle_phases, layers_phase

CAPTURE = (1, 2, 3)
SPEC = Speculation(3, 2, 7)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder, ring = tmp_path_factory.mktemp("floors"), kit_m.sharp(kit_m.ring())
    target = kit_m.write_target(folder / "target", ring, layers=3)
    draft = kit_m.write_draft(folder / "draft", ring, CAPTURE, eagle_aux_hidden_state_layer_ids=list(CAPTURE))
    return str(target), str(draft)


@pytest.mark.parametrize("mesh", [None, "model=2"])
def test_parts_add_up_to_the_plan(folders, mesh):
    pair = EagleJaxEngine.from_pretrained(folders[0], draft=folders[1], max_len=32, slots=2, mesh=mesh)._pair
    target, draft = placed(pair)
    assert draft is not None and (target.devices, draft.devices) == ((2, 1) if mesh else (1, 1))
    work, whole = cycle_work(target, draft, SPEC, 2, 100), cycle_phases(target, draft, SPEC, 2, 100)
    assert sum(phase.bytes for phase in work.values()) == sum(phase.bytes for phase in whole)
    assert sum(phase.flops for phase in work.values()) == sum(phase.flops for phase in whole)
    counts = [sum(phase.collective_count for phase in phases) for phases in (work.values(), whole)]
    assert counts[0] == counts[1] == (8 if mesh else 0)
    # one device's part: half of what is split
    attention = work["verify: attention"]
    heads, layers = 8 // target.devices, 3
    weights = layers * 128 * 16 * (heads + heads + 2 * 4 // target.devices) * 4
    cache = layers * 2 * 100 * 2 * (4 // target.devices) * 16 * 4
    assert attention.bytes == weights + cache


def test_rows_cost_arithmetic_and_hardly_bytes(folders):
    pair = EagleJaxEngine.from_pretrained(folders[0], max_len=32, slots=1)._pair
    target, draft = placed(pair)
    assert draft is None
    one, six = (verify_work(target, rows, 1, 10)["verify: MLP"] for rows in (1, 6))
    assert six.flops == 6 * one.flops and six.bytes == one.bytes
    assert "verify: experts" not in verify_work(target, 1, 1, 10)
    assert set(cycle_work(target, None, Speculation(num_steps=0), 1, 10)) == set(verify_work(target, 1, 1, 10))


def test_a_prefill_in_two_calls_reads_the_weights_twice(folders):
    pair = EagleJaxEngine.from_pretrained(folders[0], draft=folders[1], max_len=64, slots=1)._pair
    target, draft = placed(pair)
    work = prefill_work(target, draft, [(0, 16), (16, 16)], 1)
    calls = [layers_phase("", target, 16, 1, offset) for offset in (0, 16)]
    assert work["target prefill"].bytes == sum(call.bytes for call in calls)
    assert set(work) == {"target prefill", "draft prefill"}
    assert set(prefill_work(target, None, [(0, 16)], 1)) == {"target prefill"}

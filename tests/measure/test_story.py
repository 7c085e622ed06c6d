"""The plan retells the story: two constants are calibrated on two of its figures, the others have to follow."""

import pytest
from plan_cases import plan_of

from eaglejax.measure import story
from eaglejax.measure.hardware import PRESETS
from eaglejax.measure.roofline import floor


@pytest.fixture(scope="module")
def told():
    plan = plan_of("kimi-k2.5", hardware="rtx-pro-6000-pcie")
    assert plan.draft is not None
    return story.tell(plan.target, plan.draft)


def test_calibrated_on_plain_decoding(told):
    assert 1 / told.plain == pytest.approx(story.PLAIN, rel=0.005)
    assert "calibrated" in PRESETS["rtx-pro-6000-pcie"].sources["allreduce"]


def test_what_follows(told):
    three, six = told.three, told.six
    assert three.verify + three.fixed == pytest.approx(story.VERIFY_3)  # the second calibration
    assert six.verify + six.fixed == pytest.approx(story.VERIFY_6, rel=0.02)
    assert (six.verify + six.fixed) / (three.verify + three.fixed) == pytest.approx(1.12, abs=0.02)
    assert three.draft / three.cycle == pytest.approx(0.03, abs=0.003)
    assert (three.verify + three.fixed) / three.cycle > 0.95
    assert three.tokens(story.RIGHT) == pytest.approx(story.SPECULATIVE, rel=0.05)


def test_what_would_have_fixed_it(told):
    three, better = told.three, told.fixed_three
    assert three.tokens(story.RIGHT) < 1 / told.plain  # the right capture alone does not
    assert three.tokens(told.needed_share) == pytest.approx(1 / told.plain)
    assert better.tokens(story.RIGHT) > 1.4 / told.plain  # a verification as lean as a plain step does
    # the fixed cost is most of what verification cost beyond a plain step, and more than all that its rows read
    assert three.fixed > 3 * (three.verify - told.plain)


def test_the_difference_of_six_and_three_rows_is_expert_bytes(told):
    """Not calibrated: 3.6 more experts of 24.8 MB on the busiest card in 60 layers, at 1.6 TB/s, are the story's 3.1 ms."""
    experts = 9.039 - 5.472
    by_hand = 60 * experts * (3 * 7168 * 2048 * 4.5 / 8) / (1.792e12 * 4.3 / 4.8)
    assert by_hand == pytest.approx(story.VERIFY_6 - story.VERIFY_3, rel=0.1)
    assert told.six.verify - told.three.verify == pytest.approx(by_hand, rel=0.1)


def test_every_figure_of_a_preset_has_a_source():
    for preset in PRESETS.values():
        assert set(preset.sources) == {"bandwidth", "flops", "allreduce", "link", "memory"}
        assert all(preset.sources.values())
        given = preset.having(bandwidth=1e12)
        assert given.bandwidth == 1e12 and given.sources["bandwidth"] == "given" and given.link == preset.link


def test_floor_takes_the_slower_of_memory_and_arithmetic():
    plan = plan_of("kimi-k2.5")
    hardware = PRESETS["h200-nvlink"]
    few, many = plan.plain[0], plan_of("mixtral-8x7b", slots=256, draft=None, tree=(0, 1, 1)).plain[0]
    assert floor(few, hardware, 8).bound == "memory"
    assert floor(few, hardware, 8).device == pytest.approx(few.bytes / 4.3e12)
    slow = hardware.having(flops=1e12)
    assert floor(many, slow, 8).bound == "arithmetic"
    assert floor(many, slow, 8).device == pytest.approx(many.flops / 1e12)

"""The run configs for large models: each fits the GPUs that its name promises, by the plan."""

from pathlib import Path

import pytest

from eaglejax import Speculation
from eaglejax.measure.hardware import GIB, read_hardware
from eaglejax.run_config import RunConfig
from eaglejax.sharding.plan import MeshSize, Question, make_plan
from eaglejax.sharding.plan_models import read_models

CONFIGS = Path(__file__).parents[2] / "configs"
# the built-in config of each, and a mesh that must be refused
PRESETS = {
    "kimi-k2.5-8gpu": ("kimi-k2.5", "model=4"),
    "deepseek-v3-8gpu": ("deepseek-v3", "model=4"),
    "qwen3-235b-8gpu": ("qwen3-235b-a22b", "model=2"),
    "qwen3-30b-1gpu": ("qwen3-30b-a3b", None),
}


def plan_of(name: str, mesh: str | None = None):
    run = RunConfig.load(CONFIGS / f"{name}.toml")
    size = MeshSize.read(mesh or run.mesh or "model=1")
    assert isinstance(run.speculation, Speculation)
    return run, make_plan(
        Question(
            read_models(PRESETS[name][0], "auto"),
            size,
            run.speculation,
            run.slots,
            run.max_len,
            read_hardware("h200-nvlink").having(memory=139 * GIB),
            run.dtype,
            run.draft_placement,
            run.expert_split,
        )
    )


def test_every_preset_is_looked_at():
    assert {path.stem for path in CONFIGS.glob("*gpu.toml")} == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_fits_by_the_plan(name):
    run, plan = plan_of(name)
    assert plan.question.mesh.devices == int(name.rpartition("-")[2].removesuffix("gpu"))
    assert plan.draft is not None and plan.fits and plan.refusal() is None
    assert run.max_len <= plan.question.models.target.max_position
    if (smaller := PRESETS[name][1]) is not None:
        _, refused = plan_of(name, smaller)
        assert "does not fit" in str(refused.refusal())

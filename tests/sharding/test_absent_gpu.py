"""GPUs that are not here: what is refused and why. The figures of real compilations stand in docs/plan.md and test_plan_arithmetic.py."""

import importlib.util

import jax
import pytest

from eaglejax.errors import ConfigError
from eaglejax.kernels.experts import gather_pays
from eaglejax.kernels.select import compiling_for, platform, prefix_block
from eaglejax.sharding.absent_gpu import absent_gpus, known_gpus


def test_known_names_and_unknown_ones():
    assert known_gpus() == ["h200"]
    with pytest.raises(ConfigError, match=r"compile_for: no description of this GPU; found 'b300'; expected h200"):
        absent_gpus("b300", 1)


@pytest.mark.skipif(importlib.util.find_spec("jax_plugins") is not None, reason="jax's GPU plugin is installed")
def test_without_the_plugin():
    with pytest.raises(ConfigError, match=r"cannot compile for a GPU here.*eaglejax\[cuda13\]"):
        absent_gpus("h200", 2)


def test_kernels_are_chosen_for_the_device_that_is_compiled_for():
    assert platform() == jax.default_backend() == "cpu"
    with compiling_for("gpu"):
        assert platform() == "gpu"
        assert prefix_block(8192) is None and gather_pays(4, 8)
    assert platform() == "cpu"
    assert prefix_block(8192) and not gather_pays(4, 8)

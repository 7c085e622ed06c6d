"""The load report's lines on what of a model our kernels do not serve."""

from dataclasses import replace

import jax
import pytest
from flax import nnx

from eaglejax.kernels import select
from eaglejax.kernels.unserved import unserved
from eaglejax.models.config import DenseConfig, GQAConfig, LayerConfig, MoEConfig, RopeConfig, TargetConfig
from eaglejax.models.target import Target

ATTENTION = GQAConfig(8, 4, 64, RopeConfig(1e4, 64))
MIXTURE = MoEConfig(experts=8, topk=2, width=128)


def target(attention=ATTENTION, mlp=MIXTURE, dtype="bfloat16") -> Target:
    layers = (LayerConfig(attention, mlp), LayerConfig(attention, DenseConfig(256)))
    config = TargetConfig("t", 64, 256, layers, 1e-6, tie_embeddings=False, max_position=64)
    return nnx.eval_shape(lambda: Target(config, dtype=dtype))


def test_no_line_where_xla_runs_everything():
    assert unserved(target(dtype="float32"), 1003) == []  # this is a CPU


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our kernels need jax 0.11")
def test_lines_of_a_hopper_gpu():
    with select.compiling_for("gpu"), select.kernels("auto"):
        assert unserved(target(), 2048) == []
        assert unserved(target(), 1003) == ["tree attention by XLA: caches of 1003 rows are not whole eights (max_len)"]
        assert unserved(target(dtype="float32"), 2048) == ["no kernel of ours: they compute in bfloat16, not float32"]
        narrow = replace(ATTENTION, head_dim=80, rope=RopeConfig(1e4, 80))
        assert unserved(target(narrow), 2048) == [
            "tree attention by XLA: head sizes 80 and 80 are not multiples of 64",
            "rotation by XLA: heads of 80: not 16, 32, 64, 128 or 256",
        ]
        lines = unserved(target(mlp=replace(MIXTURE, width=96)), 2048)
        assert lines == ["experts by XLA: 96 of 256 is not made of whole tiles of 64"]
        with select.kernels("xla"):
            assert unserved(target(narrow), 1003) == []


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our kernels need jax 0.11")
def test_lines_of_other_gpus():
    """Where the portable kernel of tree attention was asked for; the load report's first lines say that there is no other."""
    with select.compiling_for("gpu", "12.0"), select.kernels("pallas"):
        for dtype in ("bfloat16", "float32"):
            assert unserved(target(dtype=dtype), 1003) == []
        reason = "our kernel computes in bfloat16 and float32, not float16"
        assert unserved(target(dtype="float16"), 1003) == [f"tree attention by XLA: {reason}"]
        narrow = replace(ATTENTION, head_dim=24, rope=RopeConfig(1e4, 24))
        assert unserved(target(narrow), 1003) == ["tree attention by XLA: head sizes 24 and 24 are not multiples of 16"]
        with select.kernels("auto"):
            assert unserved(target(narrow), 1003) == []

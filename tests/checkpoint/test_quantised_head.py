"""A head that is quantised, with rows beyond the vocabulary: padding is never read, blocks stay where they are."""

import numpy as np
import pytest
from quantised_files import config_of, fp8, int4, random_tensors, write_case

from eaglejax.checkpoint.target_loader import load_target
from eaglejax.models.packed import PackedWeight


@pytest.mark.parametrize("rows", [64, 70])
@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_quantised_head(tmp_path, kind, rows):
    config = config_of("glm4_moe")
    tensors = random_tensors(config)
    head = np.random.default_rng(1).standard_normal((rows, 32)).astype(np.float32)
    if kind == "fp8":
        setting = dict(quant_method="fp8", weight_block_size=[24, 20])
        parts, exact = fp8("lm_head.weight", head, 24, 20)
    else:
        weights = dict(num_bits=4, type="int", strategy="group", group_size=8)
        group = dict(targets=["re:lm_head"], weights=weights)
        setting = dict(quant_method="compressed-tensors", format="pack-quantized", config_groups=dict(g=group))
        parts, exact = int4("lm_head.weight", head, 8)
    del tensors["lm_head.weight"]
    target = load_target(write_case(tmp_path / "m", config | dict(quantization_config=setting), tensors | parts))
    assert isinstance(target.head.weight, PackedWeight)
    np.testing.assert_array_equal(target.head.weight[...], exact[:64])

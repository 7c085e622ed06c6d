"""Makes tests/data/quantised/*.safetensors: small quantised weights with what other people's software makes of them.

    python tools/make_quantised_fixtures.py GOLDEN

Needs torch and transformers 5 (made with 2.13.0+cpu and 5.24.0); nothing of EagleJax is imported. mxfp4: random blocks
and scales of two experts, widened by transformers' convert_moe_packed_tensors, which gpt-oss is loaded with. fp8 and
int4: the smaller layer of GOLDEN/quant_fp8_block and quant_int4_group32, made by DeepSeek's weight_dequant and by
compressed-tensors.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

OUT = Path(__file__).parent.parent / "tests" / "data" / "quantised"


def mxfp4() -> None:
    torch.manual_seed(7)
    blocks = torch.randint(0, 256, (2, 6, 2, 16), dtype=torch.uint8)
    blocks[0, 0, 0] = torch.arange(16, dtype=torch.uint8) * 17  # every code, in both halves of a byte
    scales = torch.randint(100, 140, (2, 6, 2), dtype=torch.uint8)
    wide = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file({"blocks": blocks, "scales": scales, "weight_float32": wide}, OUT / "mxfp4.safetensors")


def golden(folder: Path, kept: tuple[str, ...], name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors |= {k: v for k, v in load_file(folder / "expected.safetensors").items() if k.endswith(kept)}
    save_file({k: v for k, v in tensors.items() if k.startswith("layer_b.")}, OUT / name)


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    mxfp4()
    golden(Path(sys.argv[1]) / "quant_fp8_block", (".input", ".output"), "fp8_block.safetensors")
    kept = (".input", ".output", ".weight_bfloat16", ".int_values")
    golden(Path(sys.argv[1]) / "quant_int4_group32", kept, "int4_group32.safetensors")

"""What our Mosaic kernels have in common."""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
load: Any = plgpu.load  # typed otherwise in jax 0.10
OVER_ROWS, OVER_WEIGHTS = plgpu.Layout.WGMMA.reduce(0), plgpu.Layout.WGMMA.reduce(1)

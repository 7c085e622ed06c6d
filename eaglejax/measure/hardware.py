"""What a device does at best: presets, each figure with where it comes from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from eaglejax.errors import ConfigError

GB, GIB = 10**9, 2**30
REACHED = 4.3 / 4.8  # share of the published bandwidth that a copy reached on an H200


@dataclass(frozen=True)
class Hardware:
    """One device of a mesh and its link to the others.

    `bandwidth`: bytes/s that a kernel reads from memory. `flops`: dense bfloat16 FLOP/s. `allreduce`: seconds of one small all-reduce (or
    gather) inside a compiled loop. `link`: bytes/s a device sends. `memory`: bytes. `sources`: where each figure comes from.
    """

    name: str
    bandwidth: float
    flops: float
    allreduce: float
    link: float
    memory: int
    sources: dict[str, str] = field(default_factory=dict)

    def having(
        self,
        *,
        bandwidth: float | None = None,
        flops: float | None = None,
        allreduce: float | None = None,
        memory: int | None = None,
        source: str = "given",
    ) -> Hardware:
        """With some figures replaced; None keeps the preset's."""
        figures = dict(bandwidth=bandwidth, flops=flops, allreduce=allreduce, memory=memory)
        given: dict[str, Any] = {name: value for name, value in figures.items() if value is not None}
        return replace(self, **given, sources={**self.sources, **dict.fromkeys(given, source)})


MEASURED_COPY = "measured: copy rate on one H200 (docs/design.md, section 5)"
ASSUMED_SHARE = "the share a copy reaches on an H200 (4.3 of 4.8) is assumed"
MEASURED_LATENCY = (
    "measured on 2 H200 inside a compiled loop: 15-25 us whatever the rows (docs/design.md, section 5), later 6-13 us alone and 14 us with "
    "what surrounds it in a step of 12 layers (docs/benchmarks.md): 20 is the cautious reading; more devices assumed alike"
)
SMALL_GB = "published, read as 10^9 bytes, the smaller reading"
CALIBRATED = (
    "calibrated: such that Kimi-K2.5 decodes plainly at the story's 90 tokens/s (docs/plan.md); "
    "launches between collectives included"
)
STORY_ALLREDUCE = 45.0e-6

PRESETS: dict[str, Hardware] = {
    preset.name: preset
    for preset in (
        Hardware(
            "h200-nvlink",
            4.3e12,
            989e12,
            20e-6,
            450e9,
            139 * GIB,
            {
                "bandwidth": MEASURED_COPY,
                "flops": "published, dense bfloat16",
                "allreduce": MEASURED_LATENCY,
                "link": "published, NVLink 4, one direction; assumed reached",
                "memory": "measured: about 139 GiB usable on one H200",
            },
        ),
        Hardware(
            "h100-nvlink",
            3.35e12 * REACHED,
            989e12,
            20e-6,
            450e9,
            80 * GB,
            {
                "bandwidth": f"published 3.35 TB/s; {ASSUMED_SHARE}",
                "flops": "published, dense bfloat16",
                "allreduce": "assumed as on the H200",
                "link": "published, NVLink 4, one direction; assumed reached",
                "memory": SMALL_GB,
            },
        ),
        Hardware(
            "b200",
            8.0e12 * REACHED,
            2250e12,
            20e-6,
            900e9,
            180 * GB,
            {
                "bandwidth": f"published 8 TB/s; {ASSUMED_SHARE}",
                "flops": "published, dense bfloat16",
                "allreduce": "assumed as on the H200",
                "link": "published, NVLink 5, one direction; assumed reached",
                "memory": SMALL_GB,
            },
        ),
        Hardware(
            "rtx-pro-6000-pcie",
            1.792e12 * REACHED,
            500e12,
            STORY_ALLREDUCE,
            50e9,
            96 * GB,
            {
                "bandwidth": f"published 1.792 TB/s; {ASSUMED_SHARE}",
                "flops": "derived: an eighth of the published 4000 sparse FP4 TOPS",
                "allreduce": CALIBRATED,
                "link": "assumed: 80 % of PCIe 5.0 x16, one direction",
                "memory": SMALL_GB,
            },
        ),
    )
}


def read_hardware(name: str) -> Hardware:
    """The preset called `name`. Raises ConfigError."""
    if name not in PRESETS:
        raise ConfigError("no such preset", where="hardware", found=repr(name), expected=f"one of {', '.join(PRESETS)}")
    return PRESETS[name]

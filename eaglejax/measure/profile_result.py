"""A profile as data: the times of every phase beside their floors, and the questions one asks of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eaglejax.config import Speculation
from eaglejax.measure.hardware import Hardware
from eaglejax.measure.profile_phases import group_of, in_order
from eaglejax.measure.profile_sweep import UNNAMED, Times
from eaglejax.measure.profile_twice import Twice
from eaglejax.measure.roofline import Floor, Phase, floor
from eaglejax.measure.timing import Spread

MOST_DISTORTION = 1.3
LEAST_NAMED = 0.95
LEAST_DISTORTION = 0.95  # tracing makes nothing faster


@dataclass(frozen=True)
class Setting:
    """What was profiled. `context`: tokens in the caches, mean over the cycles. `work`: what one device has to do in each phase, of a cycle
    and of the prefill. `model_devices`: devices that a layer is split over. `compile_seconds`: spent before the first run, in no figure."""

    model: str
    spec: Speculation
    slots: int
    prompt_tokens: int
    context: int
    dtype: str
    mesh: str
    device: str
    versions: str
    hardware: Hardware
    work: dict[str, Phase] = field(repr=False)
    model_devices: int = 1
    compile_seconds: float = 0.0


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of one phase in one cycle (or in the prefill) of a device.

    busy: operations of the phase were running. waiting: nothing ran, and the next operation was this phase's. ops: operations run.
    work, floor: bytes, FLOPs and collectives it has to do, and the least time they take; None where a plan counts none.
    """

    name: str
    busy: float
    waiting: float
    ops: float
    work: Phase | None = None
    floor: Floor | None = None

    @property
    def seconds(self) -> float:
        return self.busy + self.waiting


def phase_times(times: Times, setting: Setting) -> tuple[PhaseTime, ...]:
    """`times` in nanoseconds, in the order of a cycle, with their floors."""
    found = []
    for name in in_order(times.phases):
        work = setting.work.get(name)
        least = None if work is None else floor(work, setting.hardware, setting.model_devices)
        busy, waiting = 1e-9 * times.busy.get(name, 0.0), 1e-9 * times.waiting.get(name, 0.0)
        found.append(PhaseTime(name, busy, waiting, times.ops.get(name, 0.0), work, least))
    return tuple(found)


@dataclass(frozen=True)
class Profile:
    """Where a cycle's time goes. Made by `EagleJaxEngine.profile`.

    untraced, traced: tokens/s of all slots, of every run. untraced_cycle: seconds of a cycle, untraced. cycle_seconds: wall time of a
    cycle in the traced run that was read, to which `phases` add up; they are not scaled back to the untraced speed.
    named_by_kernel: share of operations that were told by their kernel's name and place. trace: folder of the raw trace, for Perfetto and
        XProf.
    twice: parts of the cycle timed without a trace (`profile_twice.py`), where that was asked for or the trace could not be mapped.
    """

    setting: Setting
    untraced: Spread
    traced: Spread
    untraced_cycle: Spread
    cycle_seconds: float
    cycles: int
    new_tokens: int
    tau: float
    same_tokens: bool
    phases: tuple[PhaseTime, ...]
    prefill: tuple[PhaseTime, ...]
    prefill_seconds: float
    named_by_kernel: float
    trace: Path | None
    twice: Twice | None = None

    @property
    def distortion(self) -> float:
        """How much slower tracing made it, by the medians."""
        return self.untraced.median / self.traced.median

    @property
    def told_apart(self) -> bool:
        """Whether every untraced run was faster than every traced one, or slower; where not, the distortion is within the machine's
        noise."""
        return self.untraced.low > self.traced.high or self.untraced.high < self.traced.low

    def seconds(self, name: str) -> float:
        """Seconds per cycle of a phase, or of all of a group: "draft", "verify", "host"."""
        return sum(p.seconds for p in self.phases if name in (p.name, group_of(p.name)))

    def share(self, name: str) -> float:
        """`seconds` over the wall time of the traced cycle."""
        return self.seconds(name) / self.cycle_seconds

    @property
    def named(self) -> float:
        """Share of the wall time that operations of named phases, their waiting and the host's annotated work add up to."""
        return sum(p.seconds for p in self.phases if p.name != UNNAMED) / self.cycle_seconds

    @property
    def busy(self) -> float:
        """Share of the wall time in which operations of named phases were running, waiting and host left out."""
        return sum(p.busy for p in self.phases if p.name != UNNAMED and group_of(p.name) != "host") / self.cycle_seconds

    @property
    def groups(self) -> dict[str, float]:
        """Seconds per cycle of draft, verify and the rest, in the order of a cycle."""
        sums: dict[str, float] = {}
        for phase in self.phases:
            sums[group_of(phase.name)] = sums.get(group_of(phase.name), 0.0) + phase.seconds
        return sums

    @property
    def warnings(self) -> list[str]:
        """What makes this profile one to doubt, in words."""
        found = []
        if self.distortion > MOST_DISTORTION:
            found.append(
                f"tracing slowed decoding {self.distortion:.2f} times, more than {MOST_DISTORTION}: phases of many small "
                "operations look larger than they are"
            )
        if self.distortion < LEAST_DISTORTION:
            found.append(
                "traced runs were the faster ones: other work on this machine disturbed them more than tracing did"
            )
        if self.named < LEAST_NAMED:
            found.append(
                f"the trace could not be mapped: named phases add up to {100 * self.named:.1f} % of the wall time only"
            )
        if not self.same_tokens:
            found.append("the runs did not all make the same tokens")
        return found

    def to_text(self) -> str:
        """A table for people."""
        from eaglejax.measure.profile_report import to_text

        return to_text(self)

    def to_json(self) -> dict[str, Any]:
        """Everything, for machines."""
        from eaglejax.measure.profile_report import to_json

        return to_json(self)

    def save_picture(self, file: str | Path) -> None:
        """Bars of the phases beside their floors. Raises ConfigError where matplotlib is missing or the file cannot be written."""
        from eaglejax.measure.profile_picture import save_picture

        save_picture(self, Path(file))

"""Floor times: the least a phase can take on given hardware, from bytes read, FLOPs done and collectives waited for."""

from __future__ import annotations

from dataclasses import dataclass

from eaglejax.measure.hardware import Hardware


@dataclass(frozen=True)
class Collective:
    """`count` collectives of one kind in one run of a phase. `bytes`: size of the result of each on a device."""

    kind: str
    what: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Phase:
    """What one device does in one phase of a cycle, all repeats together."""

    name: str
    bytes: int
    flops: int
    collectives: tuple[Collective, ...] = ()

    @property
    def collective_count(self) -> int:
        return sum(c.count for c in self.collectives)

    @property
    def collective_bytes(self) -> int:
        return sum(c.count * c.bytes for c in self.collectives)


@dataclass(frozen=True)
class Floor:
    """Seconds of a phase: `device` in memory or arithmetic, whichever is more, and `collectives`."""

    device: float
    collectives: float
    bound: str

    @property
    def total(self) -> float:
        return self.device + self.collectives


def floor(phase: Phase, hardware: Hardware, devices: int) -> Floor:
    """The floor of one phase: max(bytes / bandwidth, FLOPs / peak), then its collectives one after another, each the latency of a small
    one and the time its bytes need on the link (twice the result for an all-reduce, once for a gather, but for the own part)."""
    memory, arithmetic = phase.bytes / hardware.bandwidth, phase.flops / hardware.flops
    waiting = 0.0
    for collective in phase.collectives:
        passes = 2 if collective.kind == "all-reduce" else 1
        sent = passes * collective.bytes * (devices - 1) / devices
        waiting += collective.count * (hardware.allreduce + sent / hardware.link)
    return Floor(max(memory, arithmetic), waiting, "memory" if memory >= arithmetic else "arithmetic")


def cycle_seconds(phases: list[Phase], hardware: Hardware, devices: int) -> float:
    return sum(floor(phase, hardware, devices).total for phase in phases)


def chain_tau(steps: int, share: float) -> float:
    """Tokens per cycle, bonus included, where `share` of all drafted tokens of a chain are accepted."""
    return 1 + steps * share

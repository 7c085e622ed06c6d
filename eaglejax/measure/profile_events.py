"""What a profiler's trace says: the operations of every device and the spans of the host.

A CPU's trace holds one event per operation on the line of the thread that ran it (`hlo_op` is the instruction, `device_ordinal` the
device); an operation that ends on another thread has an event "end: NAME" there. A GPU's holds one line per stream of `/device:GPU:i`
with one event per kernel, `hlo_op` among its stats where it was not launched from a command buffer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaglejax.errors import ConfigError
from eaglejax.measure.profile_hlo import Instructions

HOST = "eaglejax."  # what the engine's own annotations begin with


@dataclass(frozen=True)
class Op:
    """One run of an instruction on a device, in nanoseconds of the trace's clock; `phase` None where it is mapped to none."""

    device: int
    name: str
    begin: float
    end: float
    phase: str | None


@dataclass(frozen=True)
class Span:
    """A stretch of the host's time that the engine annotated."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Events:
    """The operations of one program's runs, without loops and branches (their parts are there), and the host's spans."""

    ops: list[Op]
    spans: list[Span]
    by_kernel: int  # operations told by the name of their kernel and its place among the others


@dataclass(frozen=True)
class _Raw:
    device: int
    module: str
    op: str
    kernel: str
    run: int
    begin: float
    end: float


def read_trace(folder: Path, programs: Sequence[Instructions]) -> Events:
    """The events of the newest trace below `folder`.

    Arguments:
        programs: the instructions of each program, in the order in which they ran.

    Raises ConfigError where there is no trace.
    """
    from jax.profiler import ProfileData

    files = sorted(folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise ConfigError("the profiler wrote no trace", where=str(folder))
    raw: list[_Raw] = []
    spans: list[Span] = []
    with warnings.catch_warnings():
        # jax's reader makes its types as it goes, with a DeprecationWarning on Python 3.12; where warnings are errors that one ends the
        # process, since it is raised below Python
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in ProfileData.from_file(str(files[-1])).planes:
            if plane.name.startswith("/device:GPU:"):
                raw += _kernels(plane, int(plane.name.rpartition(":")[2]))
            elif plane.name.startswith("/host:CPU"):
                _read_host(plane, raw, spans)
    ops, by_kernel = _named(raw, programs)
    return Events(ops, sorted(spans, key=lambda span: span.begin), by_kernel)


def _kernels(plane: Any, device: int) -> list[_Raw]:
    found = []
    for line in plane.lines:
        if not line.name.startswith("Stream"):  # the other lines say the same again, by module and step
            continue
        for event in line.events:
            stats = dict(event.stats)
            module, op = str(stats.get("hlo_module", "")), str(stats.get("hlo_op", ""))
            run = int(stats.get("run_id", 0))
            found.append(_Raw(device, module, op, event.name, run, event.start_ns, event.end_ns))
    return found


def _read_host(plane: Any, raw: list[_Raw], spans: list[Span]) -> None:
    started, ends = [], {}
    for line in plane.lines:
        for event in line.events:
            name = event.name
            if name.startswith("end: "):
                ends[dict(event.stats).get("_c")] = event.start_ns
            elif name.startswith(HOST):
                spans.append(Span(name, event.start_ns, event.end_ns))
            elif not name.startswith(("Thread", "Thunk")):  # what the executor and its pool say of themselves
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    started.append((event.start_ns, event.end_ns, stats))
    for begin, end, stats in started:
        end = max(end, ends.get(stats.get("_p"), end))
        raw.append(
            _Raw(
                int(stats.get("device_ordinal", 0)),
                stats["hlo_module"],
                stats["hlo_op"],
                "",
                int(stats.get("run_id", 0)),
                begin,
                end,
            )
        )


def _named(raw: list[_Raw], programs: Sequence[Instructions]) -> tuple[list[Op], int]:
    """Operations with their phases. The k-th run of a module is the k-th program of that name: two programs of one name (prefills of
    several widths) number their instructions alike."""
    raw = sorted(raw, key=lambda event: event.begin)
    runs: dict[str, list[int]] = {}
    for event in raw:
        seen = runs.setdefault(event.module, [])
        if event.run not in seen:
            seen.append(event.run)
    runs_of: dict[tuple[int, str, int], list[_Raw]] = {}
    for event in raw:
        runs_of.setdefault((event.device, event.module, event.run), []).append(event)
    ops, by_kernel = [], 0
    for (device, module, run), events in runs_of.items():
        same = [program for program in programs if module in ("", program.module)]
        if len(runs[module]) == len(same):
            same = [same[runs[module].index(run)]]
        for event, name, program in _instructions(events, same):
            if program is None or name is None:
                if same:
                    ops.append(Op(device, event.op or event.kernel, event.begin, event.end, None))
                continue
            by_kernel += name != event.op
            if name not in program.containers:
                ops.append(Op(device, name, event.begin, event.end, program.phases[name]))
    return sorted(ops, key=lambda op: op.begin), by_kernel


def _instructions(
    events: list[_Raw], programs: Sequence[Instructions]
) -> Iterator[tuple[_Raw, str | None, Instructions | None]]:
    """What each event of one run stands for, and in which of the programs that it may be a run of."""
    told = [(event, *_by_name(event, programs)) for event in events]
    unsure = [event for event, name, _ in told if name is None or name != event.op]
    if unsure and len(programs) == 1:
        # those that name no instruction are told apart by their order; one that fits nowhere goes with a call of a library right before it,
        # which launched more than one kernel
        program, before = programs[0], None
        placed = dict(zip(map(id, unsure), program.lay([event.kernel for event in unsure]), strict=True))
        for place, (event, name, _) in enumerate(told):
            if id(event) in placed:
                name = placed[id(event)] or name or before
                told[place] = (event, name, None if name is None else program)
            before = name if name in program.libraries else None
    yield from told


def _by_name(event: _Raw, programs: Sequence[Instructions]) -> tuple[str | None, Instructions | None]:
    for program in programs:
        if (name := program.name_of(event.op, event.kernel)) is not None:
            return name, program
    return None, None

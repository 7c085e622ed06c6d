"""Collectives of a compiled program, read from its optimised HLO: what crosses between devices, how much, in which phase.

    found = read_collectives(compiled.as_text())
    cycle = [c for c in found if c.loops]            # inside the decode loop
    by_phase(cycle)                                  # {"verify": ..., "draft_extend": ..., ...}

Phases are the named scopes of the source ("verify", "draft_step_1", "head", ...), which XLA keeps as `op_name`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from eaglejax.sharding.hlo_text import Line, parse_program

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all", "collective-broadcast")
ITEM_BITS = {"pred": 8, "token": 0, "opaque": 0}

_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclass(frozen=True)
class Collective:
    """One collective instruction.

    `shapes`: of its results, as (dtype, dims). `bytes`: of them, in the dtype of the program: where XLA widened a 16-bit sum to float32
    (as it does on a CPU), `widened` is set and the bytes are those before. `computation`: where it stands. `scopes`: the named scopes
    around it, outermost first. `loops`: bodies of the loops around it, outermost first. `trips`: product of the known trip counts of all
    loops but the outermost. `conditional`: inside a branch that need not be taken.
    """

    name: str
    kind: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    bytes: int
    widened: bool
    computation: str
    scopes: tuple[str, ...]
    loops: tuple[str, ...]
    trips: int
    conditional: bool

    @property
    def phase(self) -> str:
        """The outermost named scope, "" where there is none."""
        return self.scopes[0] if self.scopes else ""


def read_collectives(hlo: str) -> list[Collective]:
    """All collectives that the program can reach from its entry, in the order of the text of each computation.

    Arguments:
        hlo: `compiled.as_text()`. An asynchronous pair counts once, by its start.

    Raises ValueError for text that is not understood, rather than count too few.
    """
    entry, computations = parse_program(hlo)
    found: list[Collective] = []
    _walk(entry, computations, (), 1, False, found)
    reached = {(one.computation, one.name) for one in found}
    for name, lines in computations.items():
        missed = [line.name for line in lines if _kind(line) and (name, line.name) not in reached]
        if missed:
            raise ValueError(f"collective {missed[0]} in {name} is called in a way that is not understood")
    return found


def by_phase(collectives: Iterable[Collective]) -> dict[str, dict[str, tuple[int, int]]]:
    """Phase -> kind -> (count, bytes), loops within the outermost multiplied out where their trip count is known."""
    sums: dict[str, dict[str, tuple[int, int]]] = {}
    for one in collectives:
        kinds = sums.setdefault(one.phase, {})
        count, size = kinds.get(one.kind, (0, 0))
        kinds[one.kind] = (count + one.trips, size + one.trips * one.bytes)
    return sums


def _walk(
    name: str,
    computations: dict[str, list[Line]],
    loops: tuple[str, ...],
    trips: int,
    conditional: bool,
    found: list[Collective],
) -> None:
    for line in computations.get(name, ()):
        if kind := _kind(line):
            found.append(_collective(line, kind, name, loops, trips, conditional))
            continue
        called = line.calls
        if line.opcode == "while":
            known = _TRIPS.search(line.text)
            inner = trips * (int(known[1]) if known and loops else 1)
            for body in called.get("body", ()):
                _walk(body, computations, (*loops, body), inner, conditional, found)
            for test in called.get("condition", ()):
                _walk(test, computations, loops, trips, conditional, found)
            continue
        for key, callees in called.items():
            branch = key in ("branch_computations", "true_computation", "false_computation")
            for callee in callees:
                _walk(callee, computations, loops, trips, conditional or branch, found)


def _kind(line: Line) -> str | None:
    kind = line.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def _collective(
    line: Line, kind: str, computation: str, loops: tuple[str, ...], trips: int, conditional: bool
) -> Collective:
    shapes = tuple((dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in _SHAPE.findall(line.shape))
    if line.opcode.endswith("-start") and kind != "all-reduce" and len(shapes) > 1:
        # (operands, results, contexts): a gather's or a permute's start carries both ends
        half = [shape for shape in shapes if shape[0] != "u32" or shape[1]]
        shapes = tuple(half[len(half) // 2 :])
    widened = (
        kind in ("all-reduce", "reduce-scatter") and "promoted" in line.text.partition("to_apply=")[2].split(",")[0]
    )
    size = sum(prod(dims) * _bits(dtype) // 8 for dtype, dims in shapes)
    return Collective(
        line.name,
        kind,
        shapes,
        size // 2 if widened else size,
        widened,
        computation,
        line.scopes,
        loops,
        trips,
        conditional,
    )


def _bits(dtype: str) -> int:
    if dtype in ITEM_BITS:
        return ITEM_BITS[dtype]
    match = re.match(r"[a-z]+(\d+)", dtype)
    if match is None:
        raise ValueError(f"unknown element type {dtype!r} in the program's text")
    return int(match[1])

"""Which phase every instruction of a compiled program belongs to."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from eaglejax.measure.profile_order import Order, kernel_name
from eaglejax.measure.profile_phases import LOOP, phase_of
from eaglejax.sharding.collectives import KINDS
from eaglejax.sharding.hlo_text import Line, parse_program

# run other instructions, which have events of their own
CONTAINERS = frozenset(("while", "conditional", "call", "async-start", "async-done"))
_MODULE = re.compile(r"HloModule ([\w.\-]+)")


class Instructions:
    """The phases of one program's instructions, by name.

    XLA keeps the named scopes of the source as `op_name`. An instruction that lost it (a copy XLA put in) gets the phase of the
    instructions fused into it, else of its operands, else of its users, else of the loop or branch it stands in.
    """

    def __init__(self, hlo: str, unscoped: str = LOOP):
        """`hlo`: `compiled.as_text()`. `unscoped`: the phase of what the source gives no scope. Raises ValueError for other text."""
        entry, self._computations = parse_program(hlo)
        found = _MODULE.match(hlo)
        self.module = found[1] if found else ""
        self.phases: dict[str, str] = {}
        self.containers: set[str] = set()
        self.libraries: set[str] = set()  # instructions that may launch several kernels, with names of their own
        self.every_cycle: set[str] = set()
        self._unscoped = unscoped
        self._walk(entry, None, 0)
        self._by_kernel = {kernel_name(name): name for name in self.phases}
        loop = next((line for line in self._computations[entry] if line.opcode == "while"), None)
        self._loop = loop is not None
        self._ordered = entry if loop is None else loop.calls["body"][0]

    def name_of(self, op: str, kernel: str) -> str | None:
        """The instruction that an event stands for: the one it names, or, where the event names a whole command buffer or nothing, the
        one its kernel is called after; None where it is none of this program's.

        XLA may run one kernel for several equal instructions; it is then called after the first of them: `lay` tells them apart.
        """
        if op in self.phases or op in self.containers:
            return op
        return self._by_kernel.get(kernel_name(kernel))

    def lay(self, kernels: Sequence[str]) -> list[str | None]:
        """The instruction of each kernel of one run of the program, told by their order (`profile_order.py`): of the body of its loop over
        and over where it has one, else of the whole program. None for kernels that fit nowhere.

        Arguments:
            kernels: names of all that ran, in the order in which they began.
        """
        return [None if line is None else line.name for line in self._order.lay(kernels, self._loop)]

    @cached_property
    def _order(self) -> Order:
        return Order(self._computations, self._ordered)

    def _walk(self, computation: str, around: str | None, loops: int, branch: bool = False) -> None:
        """`around`: phase of the loop or branch that runs this computation. `loops`: loops around it."""
        lines = self._computations.get(computation, [])
        phases = self._resolved(lines, around)
        for line in lines:
            phase = phases.get(line.name, around)
            if line.opcode in CONTAINERS:
                self.containers.add(line.name)
                for part, callees in line.calls.items():
                    inside = loops + (part == "body")
                    for callee in callees:
                        self._walk(callee, phase, inside, branch or line.opcode == "conditional" or inside > 1)
            elif loops == 1 and not branch:
                self.every_cycle.add(line.name)
            if line.opcode == "custom-call":
                self.libraries.add(line.name)
            self.phases[line.name] = phase or self._unscoped

    def _resolved(self, lines: list[Line], around: str | None) -> dict[str, str]:
        phases = {line.name: phase for line in lines if (phase := self._own(line, around)) is not None}
        operands = {line.name: _operands(line) for line in lines}
        users: dict[str, list[str]] = {}
        for name, sources in operands.items():
            for source in sources:
                users.setdefault(source, []).append(name)
        for neighbours in (operands, users):
            for line in lines:
                near = [phases[other] for other in neighbours.get(line.name, ()) if other in phases]
                if line.name not in phases and near:
                    phases[line.name] = near[0]
        return phases

    def _own(self, line: Line, around: str | None) -> str | None:
        collective = line.opcode.removesuffix("-start").removesuffix("-done") in KINDS
        if (phase := phase_of(line.scopes, collective)) is not None:
            return phase
        if 'op_name="jit(' in line.text and around is None and line.opcode not in CONTAINERS:
            return self._unscoped  # the source has no scope there
        inner = [
            phase_of(inside.scopes, collective)
            for callee in line.calls.get("calls", ())
            for inside in self._computations.get(callee, ())
        ]
        counts = Counter(phase for phase in inner if phase is not None)
        return counts.most_common(1)[0][0] if counts else None


def _operands(line: Line) -> list[str]:
    inside = line.text.partition(f" {line.opcode}(")[2].partition(")")[0]
    return re.findall(r"%([\w.\-]+)", inside) or re.findall(r"[\w.\-]+", inside)

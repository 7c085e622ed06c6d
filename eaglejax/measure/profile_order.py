"""Kernels of a command buffer told apart by their order.

A replayed command buffer tells the name of each kernel and no instruction. XLA compiles equal instructions once and calls the kernel after
the first of them, so the name alone would give a kernel of the verification to the draft's extension, or layer 7's to layer 0. What it does
keep is the order: a compiled program lists its instructions as they are scheduled, and a stream runs them one after the other. So the
kernels of one cycle are laid along the instructions of the loop's body, each on one that may run it, as many as possible in order.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

from eaglejax.sharding.collectives import KINDS
from eaglejax.sharding.hlo_text import Line

# no kernel: a name for what is there already
FREE = frozenset(
    "parameter constant bitcast tuple get-tuple-element after-all partition-id replica-id opt-barrier add-dependency".split()
)
INLINE = frozenset(("call", "conditional", "while", "async-start"))
OWN, ALIKE, LIBRARY = 4, 3, 1  # how good a match is: its own kernel, that of an equal instruction, one of a library
_NAME = re.compile(r"%[\w.\-]+")
_ASIDE = re.compile(
    r"(metadata|frontend_attributes|control-predecessors|backend_config)=\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
)
_KERNEL = re.compile(r"[^A-Za-z0-9_]")


def kernel_name(instruction: str) -> str:
    """What XLA calls the kernel of an instruction."""
    return _KERNEL.sub("_", instruction)


def scheduled(computations: Mapping[str, Sequence[Line]], name: str) -> list[Line]:
    """The instructions of a computation that run something, in order, those of the computations it runs among them."""
    found: list[Line] = []
    for line in computations.get(name, ()):
        if line.opcode in INLINE:
            for callees in line.calls.values():
                for callee in callees:
                    found += scheduled(computations, callee)
        elif line.opcode not in FREE:
            found.append(line)
    return found


def likeness(computations: Mapping[str, Sequence[Line]], line: Line) -> str:
    """A text that is the same for instructions that XLA may run with one kernel: what is computed from what shapes, without any name."""
    inside = [text.text for callee in line.calls.get("calls", ()) for text in computations.get(callee, ())]
    names: dict[str, str] = {}
    anonymous = lambda match: names.setdefault(match[0], f"%{len(names)}")
    head = f"{line.shape} {line.opcode}" if inside else line.text.partition(" = ")[2]
    text = _ASIDE.sub("", "\n".join((head, *inside)))
    return _NAME.sub(anonymous, text)


class Order:
    """Lays kernels along the scheduled instructions of one computation."""

    def __init__(self, computations: Mapping[str, Sequence[Line]], body: str):
        self.lines = scheduled(computations, body)
        looks = [likeness(computations, line) for line in self.lines]
        self._number = {look: number for number, look in enumerate(dict.fromkeys(looks))}
        self._looks = [self._number[look] for look in looks]
        self._first = {kernel_name(line.name): place for place, line in enumerate(self.lines)}
        self._once = {number for number, count in Counter(self._looks).items() if count == 1}
        self._align = cache(self._aligned)

    def lay(self, kernels: Sequence[str], loop: bool) -> list[Line | None]:
        """The instruction of each kernel, None for those that fit nowhere.

        Arguments:
            kernels: names in the order in which they began.
            loop: whether the computation ran many times, one after the other.
        """
        if not loop:
            return self._placed(self._align(tuple(kernels), 0))
        cuts, anchor = self._cuts(kernels)
        found: list[Line | None] = []
        for begin, end in zip([0, *cuts], [*cuts, len(kernels)], strict=True):
            # before the first anchor: the end of a rotated cycle
            found += self._placed(self._align(tuple(kernels[begin:end]), anchor))
        return found

    def _cuts(self, kernels: Sequence[str]) -> tuple[list[int], int]:
        """Where each cycle's anchor stands among the kernels, and where among the instructions: one whose kernel is like no other."""
        counts = Counter(kernels)
        sure = {
            name: place for name, place in self._first.items() if name in counts and self._looks[place] in self._once
        }
        if not sure:
            return [], 0
        usual = Counter(counts[name] for name in sure).most_common(1)[0][0]
        name, anchor = min(((n, p) for n, p in sure.items() if counts[n] == usual), key=lambda pair: pair[1])
        return [place for place, kernel in enumerate(kernels) if kernel == name], anchor

    def _placed(self, places: Sequence[int]) -> list[Line | None]:
        return [None if place < 0 else self.lines[place] for place in places]

    def _aligned(self, kernels: tuple[str, ...], anchor: int) -> list[int]:
        """The longest run of matches in order, of the kernels with the instructions from the anchor on and around to it."""
        count = len(self.lines)
        order = [(anchor + step) % count for step in range(count)]
        looks = np.asarray([self._looks[place] for place in order], np.int64)
        place_of = {place: step for step, place in enumerate(order)}
        kinds = [_kind(self.lines[place].opcode) for place in order]
        # best[i, j]: of the first i kernels along the first j instructions
        best = np.zeros((len(kernels) + 1, count + 1), np.int32)
        values = []
        for row, kernel in enumerate(kernels):
            value = np.zeros(count, np.int32)
            first = self._first.get(kernel)
            if first is None:
                value[[kind == _kernel_kind(kernel) for kind in kinds]] = LIBRARY
            else:
                value[looks == self._looks[first]] = ALIKE
                value[place_of[first]] = OWN
            values.append(value)
            taken = np.where(value > 0, best[row, :-1] + value, 0)
            best[row + 1, 1:] = np.maximum.accumulate(np.maximum(best[row, 1:], taken))
        found, step = [-1] * len(kernels), count
        for row in range(len(kernels), 0, -1):
            while step and best[row, step] == best[row, step - 1]:
                step -= 1
            if not step or best[row, step] == best[row - 1, step]:
                continue  # this kernel fits nowhere
            found[row - 1] = order[step - 1]
            step -= 1
        return found


def _kind(opcode: str) -> str:
    """Of the kernels with names of their own that an instruction may launch: "" for one that launches none."""
    opcode = opcode.removesuffix("-start")
    return "collective" if opcode in KINDS else {"copy": "copy", "custom-call": "library"}.get(opcode, "")


def _kernel_kind(kernel: str) -> str:
    if kernel.startswith(("Memcpy", "Memset")):
        return "copy"
    return "collective" if kernel.startswith("nccl") else "library"

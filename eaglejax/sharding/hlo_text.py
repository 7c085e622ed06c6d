"""The text of a compiled program (optimised HLO), cut into instructions with the named scopes of the source that made them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
# a tuple's shape holds comments such as /*index=5*/
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(")
_CALLS = re.compile(
    r"\b(body|condition|to_apply|calls|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')
# what jax and XLA add to the path of scopes
_PLUMBING = re.compile(
    r"^(jit\(.*\)|pjit|shard_map|while|body|cond|closed_call|checkpoint|branch_\d+_fun|body_jaxpr|cond_jaxpr|main)$"
)


@dataclass(frozen=True)
class Line:
    """One instruction: its name, which no other of the program has, the text of its shape, its opcode, and its whole line."""

    name: str
    shape: str
    opcode: str
    text: str

    @property
    def calls(self) -> dict[str, list[str]]:
        """Computations that it runs, by the part they play: "body", "condition", "calls", "branch_computations", .."""
        return {key: re.findall(r"[\w.\-]+", value) for key, value in _CALLS.findall(self.text)}

    @cached_property
    def scopes(self) -> tuple[str, ...]:
        """Named scopes of the source around it, outermost first; of the first source where XLA joined several."""
        name = _OP_NAME.search(self.text)
        parts = name[1].partition(";")[0].split("/") if name else []
        return tuple(part for part in parts[:-1] if not _PLUMBING.match(part))


def parse_program(hlo: str) -> tuple[str, dict[str, list[Line]]]:
    """(name of the entry computation, computation -> its instructions) of `compiled.as_text()`.

    Raises ValueError for what is no such text.
    """
    entry, here = "", None
    computations: dict[str, list[Line]] = {}
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            here = match[2]
            computations[here] = []
            entry = here if match[1] else entry
        elif here is not None and (match := _INSTRUCTION.match(line)):
            computations[here].append(Line(match[1], match[2], match[3], line))
    if not entry:
        raise ValueError("no ENTRY computation: not the text of a compiled program")
    return entry, computations

"""What a load did, in plain words: what was read, captured, borrowed, converted, assumed."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

log = logging.getLogger("eaglejax")


@dataclass
class LoadReport:
    """Notes by section, in the order in which they were made, and warnings apart; `quiet` ones are not logged."""

    notes: dict[str, list[str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    quiet: bool = False

    def note(self, section: str, line: str) -> None:
        """A line of a section: "target", "draft", "text", "kernels", "speculation"."""
        self.notes.setdefault(section, []).append(line)

    def warn(self, line: str) -> None:
        """Something a user should look at; logged at once too."""
        self.warnings.append(line)
        if not self.quiet:
            log.warning("%s", line)

    def __str__(self) -> str:
        lines = [f"! {line}" for line in self.warnings]
        for section, notes in self.notes.items():
            lines.append(f"{section}:")
            lines += [f"  {note}" for note in notes]
        return "\n".join(lines)

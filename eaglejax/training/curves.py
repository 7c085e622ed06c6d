"""Figures of a run as two CSV files, and a picture of them (SVG, no plotting library)."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path

from eaglejax.checkpoint.durable import replace_file
from eaglejax.training.run_folder import writing

TRAINING, EVALUATION, PICTURE = "training.csv", "evaluation.csv", "curves.svg"
WIDTH, HEIGHT, MARGIN = 640, 240, 48


class Curves:
    """training.csv (a line per optimiser step) and evaluation.csv (a line per evaluation) of a run's folder."""

    def __init__(self, folder: Path, unroll: int, levels: int):
        steps, deep = range(unroll), range(1, levels + 1)
        losses, accuracies = [f"loss_{j}" for j in steps], [f"accuracy_{j}" for j in steps]
        self._folder = folder
        self._columns = {
            TRAINING: ["step", "epoch", "rate", "loss", "gradient_norm", *losses, *accuracies],
            EVALUATION: ["step", "tau", *[f"accepted_{j}" for j in deep], *[f"conditional_{j}" for j in deep]],
        }

    def begin(self, step: int) -> None:
        """Drop what was written after `step` by a run that was killed; a fresh run begins empty."""
        for name, columns in self._columns.items():
            rows = [row for row in self._rows(name) if float(row[0]) <= step]
            made = io.StringIO(newline="")
            csv.writer(made).writerows([columns, *rows])
            with writing(self._folder / name):
                replace_file(self._folder / name, made.getvalue().encode())  # a kill here must not cost the figures

    def add(self, name: str, values: Sequence[float | int]) -> None:
        """One line; whole numbers stay whole, other figures keep every digit."""
        place = self._folder / name
        with writing(place), open(place, "a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow([repr(value) for value in values])

    def draw(self) -> None:
        """curves.svg: loss by step above, tau below."""
        panels = []
        for number, (name, column, title) in enumerate(((TRAINING, 3, "loss"), (EVALUATION, 1, "tau (held out)"))):
            points = [(float(row[0]), float(row[column])) for row in self._rows(name)]
            points = [point for point in points if math.isfinite(point[1])]
            panels.append(_panel(points, title, number * HEIGHT))
        size = f'width="{WIDTH}" height="{2 * HEIGHT}"'
        text = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
        with writing(self._folder / PICTURE):
            (self._folder / PICTURE).write_text("\n".join([text, *panels, "</svg>"]) + "\n", encoding="utf-8")

    def _rows(self, name: str) -> list[list[str]]:
        file = self._folder / name
        if not file.exists():
            return []
        with open(file, newline="", encoding="utf-8") as lines:
            rows = list(csv.reader(lines))[1:]
        width = len(self._columns[name])
        return [row for row in rows if len(row) == width]  # a kill may have cut the last


def _panel(points: list[tuple[float, float]], title: str, top: int) -> str:
    """One curve with its ranges written at the axes."""
    label = f'<text x="{MARGIN}" y="{top + 20}">{title}</text>'
    if not points:
        return label
    xs, ys = [x for x, _ in points], [y for _, y in points]
    wide, high = (max(xs) - min(xs)) or 1, (max(ys) - min(ys)) or 1
    place = lambda x, y: (
        MARGIN + (x - min(xs)) / wide * (WIDTH - 2 * MARGIN),
        top + HEIGHT - MARGIN - (y - min(ys)) / high * (HEIGHT - 2 * MARGIN),
    )
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
    bottom = top + HEIGHT - MARGIN
    parts = [
        label,
        f'<path d="M{MARGIN},{top + MARGIN}V{bottom}H{WIDTH - MARGIN}" fill="none" stroke="#888"/>',
        f'<polyline points="{line}" fill="none" stroke="#06c" stroke-width="1.5"/>',
        f'<text x="4" y="{top + MARGIN + 4}">{max(ys):.3g}</text><text x="4" y="{bottom}">{min(ys):.3g}</text>',
        f'<text x="{MARGIN}" y="{bottom + 16}">step {min(xs):.0f}</text>',
        f'<text x="{WIDTH - MARGIN}" y="{bottom + 16}" text-anchor="end">{max(xs):.0f}</text>',
    ]
    return "\n".join(parts)

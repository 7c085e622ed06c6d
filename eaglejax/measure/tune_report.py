"""A tuning in words."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from eaglejax.measure.tuning import Row, Tuning

SHOWN = 8  # rows of a class


def tune_report(tuning: Tuning, path: Path | None = None) -> str:
    """The table of every class, the trees of "auto" and what they cost, and where all that is kept, if it is."""
    holds = tuning.holds_for
    lines = [
        f"{holds.target} with draft {holds.draft}: {holds.device}, {holds.dtype}, {holds.mesh}, {holds.slots} slots",
        "tokens/s are those of all slots together; predicted = slots x tau / cycle; tau = tokens per cycle, bonus included, replayed on",
        "the calibration's answers; measured = by running it, in turns with the others, what an answer's last cycle made beyond its limit",
        "counted. Plain decoding is 0, 1, 1.",
    ]
    for name, rows in tuning.rows.items():
        lines += ["", f"{name}: num_steps, topk, num_draft_tokens"]
        lines.append(f"  {'':12} {'tau':>6} {'ms/cycle':>9} {'predicted':>10} {'measured':>9} {'ms/cycle':>9}")
        run = [row for row in rows if row.measured is not None]
        plain = [row for row in rows[max(SHOWN, len(run)) :] if row.num_steps == 0]
        lines += [_line(row) for row in (*rows[: max(SHOWN, len(run))], *plain)]
        if run:
            off = statistics.median(abs(row.predicted / (row.measured or 1) - 1) for row in run)
            lines.append(
                f"  predicted tokens/s differ from the measured ones by {100 * off:.1f} % (median of {len(run)} settings"
                f"{_beside_plain(run)})"
            )
        if rows[0].num_steps == 0:
            lines.append("  no draft is faster here")
    lines += [
        "",
        f'"auto" chooses among plain decoding ({tuning.costs.plain_ms:.2f} ms a step) and, in plain steps a cycle:',
    ]
    for tree, cost in zip(tuning.trees, tuning.costs.trees, strict=True):
        lines.append(f"  ({tree.num_steps}, {tree.topk}, {tree.nodes}): {cost:.2f}")
    lines.append(f"  the draft over {tuning.window} waiting rows: {tuning.costs.catch_up:.2f}")
    return "\n".join(lines if path is None else [*lines, "", f"stored in {path}"])


def _beside_plain(run: Sequence[Row]) -> str:
    """The same with every row beside plain decoding, which a machine that is slower by now than when costs were measured leaves alone."""
    plain = next((row for row in run if row.num_steps == 0), None)
    trees = [row.predicted / row.measured for row in run if row.num_steps and row.measured]
    if plain is None or not plain.measured or not trees:
        return ""
    off = statistics.median(abs(ratio * plain.measured / plain.predicted - 1) for ratio in trees)
    return f"; beside plain decoding {100 * off:.1f} %"


def _line(row: Row) -> str:
    shape = f"{row.num_steps}, {row.topk}, {row.num_draft_tokens}"
    measured = "" if row.measured is None else f"{row.measured:9.1f}"
    cycle = "" if row.measured_ms is None else f"{row.measured_ms:9.2f}"
    return f"  {shape:12} {row.tau:6.2f} {row.cycle_ms:9.2f} {row.predicted:10.1f} {measured:>9} {cycle:>9}".rstrip()

"""`eaglejax convert SOURCE TARGET --to=FORM`: a checkpoint in another form, bit for bit."""

from __future__ import annotations

import json
import math
import os
import sys
from typing import TYPE_CHECKING

from absl.flags import FlagValues

from eaglejax.cli.flags import UsageError, given

if TYPE_CHECKING:
    from eaglejax.checkpoint.convert import Conversion

GROUPS = ("convert", "result", "refusal")
PLACES = ("SOURCE", "TARGET")
NAMES = 3  # of many, shown
FORMS, KINDS = ("orbax", "safetensors"), ("int8", "int4")


def main(flags: FlagValues, *places: str) -> int:
    if len(places) < len(PLACES):
        raise UsageError(f"give {' and '.join(PLACES)}: a checkpoint, and the folder to make")
    to = given(flags, "to")
    if to not in FORMS:
        raise UsageError(f"--to: the form to convert to; found {to!r}; expected {' or '.join(FORMS)}")
    max_bytes = _bytes(given(flags, "max_shard_gb"))
    quantize = given(flags, "quantize")
    if quantize not in (None, *KINDS):
        raise UsageError(f"--quantize: unknown; found {quantize!r}; expected {' or '.join(KINDS)}")
    if "jax" not in sys.modules:
        # orbax asks jax for its devices: nothing here needs one, or the memory that jax would take on it
        os.environ["JAX_PLATFORMS"] = "cpu"

    from eaglejax.checkpoint.convert import convert
    from eaglejax.cli.byte_progress import byte_progress

    try:
        made = convert(
            places[0],
            places[1],
            to=to,
            max_bytes=max_bytes,
            quantize=quantize,
            progress=lambda total: byte_progress("convert", total),
        )
    except KeyboardInterrupt:
        print("\nthe same command continues where this one stopped", file=sys.stderr)
        raise
    _say(made, as_json=bool(flags["json"].value))
    return 0


def _bytes(value: str | None) -> int | None:
    if value is None:
        return None
    try:
        size = float(value) * 1e9
    except ValueError:
        raise UsageError(f"--max_shard_gb: not a number; found {value!r}") from None
    if not (math.isfinite(size) and size >= 1):
        raise UsageError(f"--max_shard_gb: out of range; found {value}; expected above 0")
    return int(size)


def _say(made: Conversion, *, as_json: bool) -> None:
    part = "groups" if made.to == "orbax" else "files"
    if as_json:
        values = {
            "source": str(made.source),
            "target": str(made.target),
            "to": made.to,
            "tensors": made.tensors,
            "bytes": made.nbytes,
            part: made.parts,
            "kept": made.kept,
            "written_bytes": made.written,
            "seconds": round(made.seconds, 3),
            "already_done": made.already_done,
            "left_out": list(made.left_out),
            "left_plain": {"count": len(made.left_plain), "names": list(made.left_plain[:NAMES])},
        }
        print(json.dumps(values))
        return
    whole = f"{made.tensors} tensors, {made.nbytes / 1e9:.3f} GB in {made.parts} {part}"
    if made.already_done:
        print(f"{made.target}: already there, {whole}")
        _say_plain(made)
        return
    rate = f"{made.written / 1e9:.3f} GB written in {made.seconds:.1f} s, {made.written / 1e6 / made.seconds:.0f} MB/s"
    kept = f"; {made.kept} {part} were there from an earlier run" if made.kept else ""
    print(f"{made.target}: {whole} ({rate}{kept})")
    _say_plain(made)
    if made.left_out:
        print(f"not taken along: {', '.join(made.left_out)}", file=sys.stderr)


def _say_plain(made: Conversion) -> None:
    if count := len(made.left_plain):
        names = ", ".join(made.left_plain[:NAMES]) + (" ..." if count > NAMES else "")
        print(
            f"not quantised: {count} projection{'s' if count > 1 else ''} (experts fused into one tensor, or rows that groups of 32 "
            f"do not divide): {names}"
        )

"""`eaglejax export SOURCE TARGET --to=FORM`: a draft in the layout that another engine reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from absl.flags import FlagValues

from eaglejax.cli.flags import UsageError, given

GROUPS = ("export", "result", "refusal")
PLACES = ("SOURCE", "TARGET")
FORMS = ("safeailab", "speculators")


def main(flags: FlagValues, *places: str) -> int:
    if len(places) < len(PLACES):
        raise UsageError(f"give {' and '.join(PLACES)}: a draft or a training run, and the folder to make")
    form = given(flags, "to")
    if form not in FORMS:
        raise UsageError(f"--to: the layout to write; found {form!r}; expected {' or '.join(FORMS)}")

    from eaglejax.training.convert_draft import convert_draft

    size = convert_draft(
        places[0],
        Path(places[1]),
        model=given(flags, "model"),
        form=form,
        int8=bool(flags["int8"].value),
        whole=bool(flags["whole"].value),
        capture=_capture(given(flags, "capture")),
    )
    done = {"source": places[0], "target": places[1], "to": form, "bytes": size}
    print(json.dumps(done) if flags["json"].value else f"{places[1]}: {form} layout, {size / 1e6:.3f} MB of tensors")
    return 0


def _capture(value: str | None) -> Any:
    if value is None or value in ("auto", "input", "output"):
        return value or "auto"
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise UsageError(
            f"--capture: found {value!r}; expected auto, input, output or numbers such as 3,31,59"
        ) from None

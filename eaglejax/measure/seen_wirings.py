"""Pairs whose wiring was found right at an earlier load, so that only a pair's first load on a machine pays for the look.

A file per pair in the user's cache folder, named by what decides: both models' fingerprints (the draft's config is part of its own), the
captured boundaries, the compute dtype. Only "right" is remembered: a warning is measured, and given, at every load.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from eaglejax.checkpoint.builtin import cache_folder
from eaglejax.loading import Pair
from eaglejax.measure.tuning import fingerprint
from eaglejax.sharding.processes import from_first

VERSION = 1  # of the look itself: another one measures again


def seen_path(pair: Pair) -> Path:
    """Where this pair's mark is kept."""
    assert pair.draft is not None and pair.capture is not None
    key = (VERSION, fingerprint(pair.target), fingerprint(pair.draft), pair.capture.boundaries, str(pair.dtype))
    return cache_folder() / "wirings" / hashlib.sha256(repr(key).encode()).hexdigest()[:20]


def was_right(path: Path) -> bool:
    """Whether the mark is there; process 0's answer where there are several, since all have to run the same programs."""
    return bool(from_first(int(path.is_file())))


def remember(path: Path) -> None:
    """Leave the mark. Where the folder cannot be written, the next load looks again: that costs time and nothing else."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

"""From names to a checked pair of models: resolve, read, compare, report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp

from eaglejax.checkpoint.draft_loader import read_draft
from eaglejax.checkpoint.source import resolve
from eaglejax.checkpoint.target_loader import load_target
from eaglejax.kernels import select
from eaglejax.load_report import LoadReport
from eaglejax.models.capture import CaptureReading
from eaglejax.models.draft import Draft
from eaglejax.models.target import Target
from eaglejax.text.tokenizer import Tokenizer, load_tokenizer


@dataclass
class Pair:
    """A target with its tokenizer, and the draft where there is one."""

    name: str
    target: Target
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    dtype: jnp.dtype
    draft: Draft | None = None
    capture: CaptureReading | None = None
    report: LoadReport = field(default_factory=LoadReport)

"""The tiles and splits of our GPU kernels: stored choices of this device where there are any, else each kernel's own rule.

A kernel asks `chosen` as it is traced, by its name and shape; None means its rule. What is legal stands in `tile_candidates.py`, the file
in `tile_store.py`; `eaglejax tune_kernels` measures and writes it (docs/kernels.md).

What a row gets may not depend on how many rows run beside it, and splits set the order of a sum. So no key holds a number of rows: one
choice holds for all of them, and a kernel may only take fewer buffers than chosen where more rows leave less room. `slots` is in the key of
attention because it is a length of the caches, by which its rule goes too.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

import jax

# of each kernel: what its shape is, and what is chosen
SHAPES = {
    "attention": ("slots", "heads", "kv_heads", "width", "value_width", "latent", "cached"),
    "gateup": ("experts", "topk", "d", "f"),
    "down": ("experts", "topk", "d", "f"),
    "route": ("experts", "topk", "d"),
    "project": ("d", "out1", "out2", "out3", "out4"),  # as many as there are weights
}
CHOICES = {
    "attention": ("tile", "splits", "block_rows"),
    "gateup": ("step", "stages", "parts"),
    "down": ("step", "stages", "parts"),
    "route": ("step", "stages", "parts"),
    "project": ("step", "stages", "parts"),
}
Choice = tuple[int, ...]


class Key(NamedTuple):
    """A kernel and the shape it is traced for, in the order of SHAPES. `cached` is rounded up to a power of two."""

    kernel: str
    shape: tuple[int, ...]

    def named(self) -> dict[str, int]:
        """The shape by name."""
        return dict(zip(SHAPES[self.kernel], self.shape, strict=False))

    def __str__(self) -> str:
        return f"{self.kernel} " + ", ".join(f"{name} {value}" for name, value in self.named().items())


# None: as stored. A context that jax's caches of traces know of: a trace made with one choice is not taken for another
_only = jax.make_user_context(None)


def using(choices: Mapping[Key, Choice]) -> AbstractContextManager[object]:
    """Kernels traced inside take these choices and no stored ones; their rules for every other shape."""
    return _only(tuple(sorted(choices.items())))


def chosen(key: Key) -> Choice | None:
    """What the kernel being traced shall take for this shape; None: what its rule says."""
    only = _only.value
    if only is not None:
        return dict(only).get(key)
    # imported here, for what is legal is asked of the kernels' own files, and those import this one
    from eaglejax.kernels.tile_store import stored

    return stored().choices.get(key)


def power_of_two(rows: int) -> int:
    """The least one that is not less: the class of a cache's length."""
    return 1 << max(rows - 1, 0).bit_length()


def choice_text(kernel: str, choice: Choice | None) -> str:
    """For people."""
    return "rule" if choice is None else ", ".join(f"{n} {v}" for n, v in zip(CHOICES[kernel], choice, strict=True))

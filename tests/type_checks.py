"""The runtime type checks of the tests, switched off where records hold shapes in place of arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jaxtyping


@contextlib.contextmanager
def jaxtyping_off() -> Iterator[None]:
    """A state of shapes holds no arrays, which the type checks of the tests would refuse."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)

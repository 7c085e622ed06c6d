"""The programs of a profile: compiled ahead of their first run, so that their text is that of what runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool

from eaglejax.measure.profile_hlo import Instructions
from eaglejax.measure.profile_phases import FIRST_TOKEN, LOOP
from eaglejax.sharding.layout import place
from eaglejax.sharding.mesh import DATA
from eaglejax.speculation.adapt import Policy
from eaglejax.speculation.programs import Programs
from eaglejax.speculation.state import State


def compiler_options(platform: str) -> dict[str, bool]:
    """On a GPU command buffers stay on under a profiler, which XLA would otherwise switch off: without them the loop is another one."""
    return {"xla_enable_command_buffers_during_profiling": True} if platform == "gpu" else {}


@contextmanager
def _own_scopes() -> Iterator[None]:
    """jax's compilation cache may hold the same program with the named scopes of an older source: here they are part of the key."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


class ProfiledPrograms(Programs):
    """`Programs` that keep the instructions of what they ran, in the order of the runs (`ran`), and the seconds spent on compiling."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.ran: list[Instructions] = []
        self.compile_seconds = 0.0
        self._compiled: dict[tuple[Any, ...], tuple[jax.stages.Compiled, Instructions]] = {}

    def prefill(self, state: State, offset: int, rows: int) -> State:
        return self._run(("prefill", rows), self._prefill, (self.arrays, state, self._scalar(offset)), rows)

    def decode(
        self, state: State, max_cycles: int, ended: Bool[np.ndarray, " b"], policy: Policy | None = None
    ) -> State:
        put = place(ended, self.mesh, P(DATA))
        return self._run(("decode",), self._decode, (self.arrays, state, policy, self._scalar(max_cycles), put))

    def _run(self, name: tuple[Any, ...], jitted: Any, arguments: tuple[Any, ...], *fixed: Any) -> State:
        key = (*name, arguments[1].length.shape)
        if key not in self._compiled:
            begin = time.perf_counter()
            lowered = jitted.lower(*arguments, *fixed)
            with _own_scopes():
                compiled = lowered.compile(compiler_options(jax.default_backend()) or None)
            unscoped = FIRST_TOKEN if name[0] == "prefill" else LOOP
            self._compiled[key] = compiled, Instructions(compiled.as_text(), unscoped)
            self.compile_seconds += time.perf_counter() - begin
        compiled, instructions = self._compiled[key]
        self.ran.append(instructions)
        return compiled(*arguments)

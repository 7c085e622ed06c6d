"""Which cells fit: the memory beside the weights, and the length that a slot holds."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from eaglejax.config import Speculation
from eaglejax.engine import EagleJaxEngine
from eaglejax.loading import Pair
from eaglejax.measure.prompt_sets import Prompt
from eaglejax.sharding.fit import local_devices, pools_of
from eaglejax.sharding.local_shapes import local_config
from eaglejax.sharding.memory import Sizes, program_rows, state_bytes, temporary_bytes, total
from eaglejax.sharding.mesh import DATA, axis_size


def too_long(prompts: Sequence[Prompt], ids: Sequence[Sequence[int]], new_tokens: int, max_len: int) -> str | None:
    """Why a set's answers could not be as long as asked for; None where they can."""
    for prompt, tokens in zip(prompts, ids, strict=True):
        if len(tokens) + new_tokens > max_len:
            return f"{prompt.name} has {len(tokens)} tokens, which with {new_tokens} new ones are more than max_len {max_len}"
    return None


def without_room(engine: EagleJaxEngine, specs: Sequence[Speculation]) -> dict[Speculation, str]:
    """The trees whose state and temporaries do not fit beside the weights and the states of those before them, and why.

    States of all trees that take turns are held at once: a fresh one each turn would be measured too. On an accelerator a program may
    still ask for more than is estimated here; that is told when it is first run.
    """
    gc.collect()  # the programs of an earlier number of slots
    free = free_bytes(engine.pair)
    if free is None:
        return {}
    found: dict[Speculation, str] = {}
    held = 0
    for spec in specs:
        state, temporaries = cell_bytes(engine, spec)
        if held + state + temporaries > free:
            beside = f", {held:,} of the cells before it" if held else ""
            found[spec] = (
                f"does not fit the memory: {state:,} bytes of caches and state and about {temporaries:,} of temporaries{beside}; "
                f"{free:,} free"
            )
        else:
            held += state
    return found


def free_bytes(pair: Pair) -> int | None:
    """Of the device with the least; None where nothing tells."""
    pools = pools_of(local_devices(pair.mesh))
    return min((pool.free // pool.devices for pool in pools if pool.free is not None), default=None)


def cell_bytes(engine: EagleJaxEngine, spec: Speculation) -> tuple[int, int]:
    """(state, temporaries) on one device; the latter are an estimate."""
    pair = engine.pair
    draft = pair.draft if spec.num_steps else None
    sizes = Sizes(
        local_config(pair.target.config, pair.target.split),
        None if draft is None else local_config(draft.config, draft.split),
        spec,
        -(-engine.slots // axis_size(pair.mesh, DATA)),
        engine.max_len,
        pair.dtype.itemsize,
        local_devices(pair.mesh)[0].platform,
    )
    programs = program_rows(sizes).values()
    return total(state_bytes(sizes)), max(total(temporary_bytes(sizes, rows, 0)) for rows in programs)

"""Loads a folder of big random tensors onto eight devices in a process of its own, and says what it cost.

    python streaming_tool.py FOLDER [whole]

Prints JSON. "whole" plants the fault that streaming avoids: every tensor is read before the first is placed.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType

from eaglejax.checkpoint import streaming
from eaglejax.checkpoint.reader import open_checkpoint
from eaglejax.checkpoint.weight_plan import Part, seen
from eaglejax.models.layers import leaves


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Peak(threading.Thread):
    """The largest resident set, looked at every millisecond."""

    def __init__(self):
        super().__init__(daemon=True)
        self.peak, self.on = resident(), True

    def run(self):
        while self.on:
            self.peak = max(self.peak, resident())
            time.sleep(0.001)


def main(folder: str, fault: str = "") -> None:
    reader = open_checkpoint(Path(folder))
    mesh = jax.make_mesh((1, 8), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    chosen = {}

    class Model(nnx.Module):
        def __init__(self):
            for name, info in reader.tensors.items():
                axis = {"rows": 0, "columns": 1, "experts": 0, "heads": 0}[name.split("_")[0]]
                shape, view = list(info.shape), None
                if name.startswith("heads"):  # half of every head, as latent attention takes it
                    shape = [8, info.shape[0] // 16, info.shape[1]]
                    view = seen(8, info.shape[0] // 8, info.shape[1], start=(0, shape[1], 0))
                axes = tuple("model" if a == axis else None for a in range(len(shape)))
                shape[axis] //= 8
                setattr(self, name, nnx.Param(jnp.zeros(shape, jnp.bfloat16), mesh_axes=axes))
                chosen[name] = (Part(name, info.shape, view=view),)

    model = nnx.eval_shape(Model)
    for device in jax.devices():
        jax.device_put(np.zeros(8, jnp.bfloat16), device).block_until_ready()
    largest = max(int(np.prod(v.shape)) * 2 for v in leaves(model).values())
    before, watch = resident(), Peak()
    watch.start()
    kept = [reader.read(name) for name in reader.tensors] if fault == "whole" else []
    stats = streaming.fill(model, chosen, reader, mesh)
    del kept
    watch.on = False
    arrays = sum(s.data.nbytes for v in leaves(model).values() for s in v.get_value().addressable_shards)
    for name, variable in leaves(model).items():
        whole = reader.read(name)
        view = chosen[name][0].view
        want = whole if view is None else whole.reshape(view.shape)[:, view.start[1] :]
        assert np.array_equal(np.asarray(variable[...]).view(np.uint16), want.view(np.uint16)), name
    print(
        json.dumps(
            dict(
                read=stats.bytes_read,
                needed=stats.bytes_needed,
                beside=watch.peak - before - arrays,
                largest=largest,
                arrays=arrays,
                seconds=stats.seconds,
            )
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

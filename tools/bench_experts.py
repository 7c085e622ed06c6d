"""A mixture's layer, from its router to the sum over its experts, on this GPU: our kernels beside XLA's own.

Random weights and rows, so random routing. Every layer has weights of its own (no cache serves them); all run in one compiled loop.
"fused" has the router in our kernels too, up to 16 rows. "route" is XLA's router without experts: what is left of the other layers is what
their experts take. The floor is the bytes of the experts that are touched, and of the router, at --bandwidth.

python tools/bench_experts.py --shape qwen3-30b-a3b --rows 1 2 4 8 16 32 64
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.kernels import select
from eaglejax.kernels.experts import experts, routed_experts
from eaglejax.kernels.experts_gpu_shape import summed
from eaglejax.models.config import MoEConfig
from eaglejax.models.layers import project
from eaglejax.models.moe import route

# hidden size and mixture; of Kimi-K2 the experts that one of eight devices holds (routing among those alone)
SHAPES = {
    "qwen3-30b-a3b": (2048, MoEConfig(128, 8, 768)),
    "gpt-oss-20b": (2880, MoEConfig(32, 4, 2880, "softmax_topk", expert_bias=True, expert_activation="gpt_oss")),
    "kimi-k2-eighth": (7168, MoEConfig(48, 8, 2048, "sigmoid", scaling=2.5)),
    "tiny": (128, MoEConfig(8, 2, 128)),
}
WAYS = ("fused", "pallas", "xla", "route")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["qwen3-30b-a3b"], choices=SHAPES)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--loops", type=int, default=40, help="times through all layers in one measurement")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s of the floor")
    parser.add_argument("--json", help="append a line per measurement to this file")
    args = parser.parse_args(arguments)
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, {args.layers} layers")
    for name in args.shape:
        records = bench(name, args)
        print(to_text(name, records))
        for record in records:
            line = json.dumps({"device": device.device_kind, "shape": name, **record})
            print(line)
            if args.json:
                with Path(args.json).open("a") as file:
                    file.write(line + "\n")


def bench(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A record for every way and number of rows."""
    d, config = SHAPES[name]
    most = max(args.rows)
    weights = [make_layer(jax.random.key(layer), d, config) for layer in range(args.layers)]
    rows = jax.random.normal(jax.random.key(99), (args.layers, most, d), jnp.bfloat16)
    ids = [
        np.asarray(jax.jit(choose, static_argnums=2)(rows[layer], weights[layer], config)[0])
        for layer in range(args.layers)
    ]
    want = np.asarray(reference(rows[0], weights[0], config))
    begin = time.perf_counter()
    cases = [(way, n) for n in args.rows for way in args.ways]
    # the way is chosen while a program is traced, one after the other; compilers then run side by side
    lowered = [lower(way, weights, rows[:, :n], config) for way, n in cases]
    with ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(lambda one: one.compile(), lowered))
    print(f"{name}: {len(cases)} programs compiled in {time.perf_counter() - begin:.0f} s")
    records = []
    for (way, n), program in zip(cases, programs, strict=True):
        given = (weights, rows[:, :n], jnp.bfloat16(0))
        run = lambda loops, program=program, given=given: jax.block_until_ready(program(*given, jnp.int32(loops)))
        first = np.asarray(run(1)[1]).astype(np.float32)
        spans = []
        for _ in range(args.repeats):
            begin = time.perf_counter()
            run(args.loops)
            spans.append((time.perf_counter() - begin) / args.loops / args.layers * 1e6)
        touched = statistics.mean(len(np.unique(layer[:n])) for layer in ids)
        size = touched * 3 * config.width * d * 2 + config.experts * d * 4
        floor = size / args.bandwidth / 1e6
        error = np.linalg.norm(first - want[:n]) / np.linalg.norm(want[:n])
        record = {
            "way": way,
            "rows": n,
            "us": round(statistics.median(spans), 2),
            "us_min": round(min(spans), 2),
            "touched": round(touched, 1),
            "floor_us": round(floor, 2),
        }
        if way != "route":
            record |= {"ratio": round(record["us"] / floor, 2), "error": round(float(error), 5)}
        records.append(record)
    return records


def to_text(name: str, records: list[dict[str, Any]]) -> str:
    by = {(record["way"], record["rows"]): record for record in records}
    lines = [
        f"{name}: us a layer",
        "rows  touched  floor  fused (x floor, error)      pallas (x floor, error)     xla (x floor, error)        route",
    ]
    for n in sorted({record["rows"] for record in records}):
        some = next(record for record in records if record["rows"] == n)
        cells = [f"{n:4d}  {some['touched']:7.1f}  {some['floor_us']:5.1f}"]
        for way in ("fused", "pallas", "xla"):
            r = by.get((way, n))
            cells.append(f"{r['us']:8.1f} ({r['ratio']:5.2f}, {r['error']:.4f})  " if r else " " * 26)
        cells.append(f"{by['route', n]['us']:8.1f}" if ("route", n) in by else "")
        lines.append("  ".join(cells))
    return "\n".join(lines)


@partial(jax.jit, static_argnums=(1, 2))
def make_layer(key: jax.Array, d: int, config: MoEConfig) -> dict[str, jax.Array]:
    """Weights of a layer that keep the scale of rows of scale 1."""
    e, f = config.experts, config.width
    keys = iter(jax.random.split(key, 5))
    draw = lambda scale, dtype, *shape: (jax.random.normal(next(keys), shape, dtype) * scale).astype(dtype)
    layer = {
        "router": draw(d**-0.5, jnp.float32, e, d),
        "gate_up": draw(d**-0.5, jnp.bfloat16, e, 2, f, d),
        "down": draw(f**-0.5, jnp.bfloat16, e, d, f),
    }
    if config.expert_bias:
        layer |= {
            "gate_up_bias": draw(1.0, jnp.bfloat16, e, 2, f),
            "down_bias": draw(1.0, jnp.bfloat16, e, d),
        }
    return layer


def choose(x: jax.Array, layer: dict[str, jax.Array], config: MoEConfig) -> tuple[jax.Array, jax.Array]:
    return route(project(x.astype(jnp.float32), layer["router"]), config)


def expert_arrays(layer: dict[str, jax.Array], dtype: Any = None) -> list[jax.Array]:
    names = ("gate_up", "down", "gate_up_bias", "down_bias")
    return [layer[name] if dtype is None else layer[name].astype(dtype) for name in names if name in layer]


@partial(jax.jit, static_argnums=2)
def reference(x: jax.Array, layer: dict[str, jax.Array], config: MoEConfig) -> jax.Array:
    """Everything in float32."""
    ids, weights = choose(x, layer, config)
    wide = expert_arrays(layer, jnp.float32)
    return experts(x.astype(jnp.float32), ids, weights, *wide, activation=config.expert_activation, gather=False)


def lower(way: str, weights: list[dict[str, jax.Array]], rows: jax.Array, config: MoEConfig) -> Any:
    """The program of one way, for rows of this number."""
    before = os.environ.get(select.VARIABLE)
    os.environ[select.VARIABLE] = {"route": "xla", "fused": "pallas"}.get(way, way)

    def layer_of(x: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
        if way == "fused":
            parts = routed_experts(x, layer["router"], None, None, *expert_arrays(layer), config=config)
            if parts is not None:  # else as "pallas"
                return summed(parts, x)
        ids, shares = choose(x, layer, config)
        if way == "route":
            return x * (shares.sum(axis=1, keepdims=True) + ids.sum(axis=1, keepdims=True)).astype(x.dtype)
        return summed(experts(x, ids, shares, *expert_arrays(layer), activation=config.expert_activation), x)

    def program(weights, rows, scale, loops):
        def once(_, carry):
            y, first = carry
            for index, layer in enumerate(weights):
                # scale is 0, which the compiler does not know: every layer waits for the one before it, and its rows are known
                y = layer_of(rows[index] + y * scale, layer)
                first = y if index == 0 else first
            return y, first

        zeros = jnp.zeros_like(rows[0])
        return jax.lax.fori_loop(0, loops, once, (zeros, zeros))

    try:
        return jax.jit(program).lower(weights, rows, jnp.bfloat16(0), jnp.int32(1))
    finally:
        os.environ.pop(select.VARIABLE)
        if before is not None:
            os.environ[select.VARIABLE] = before


if __name__ == "__main__":
    main()

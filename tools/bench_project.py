"""Projections of few rows, on this GPU: our kernel beside XLA's own products.

Every layer has weights of its own (no cache serves them); all run in one compiled loop, each waiting for the one before. "chain" is q and
kv, then out, then the next layer's, with nothing in between. In the other cases a tiny addition lies between layers; "between" is what it
takes alone, and the ratio is of the rest to the floor: the bytes of the weights at --bandwidth. Into that addition XLA fuses the last step
of its own products, for the one column that is used: "chain" is the comparison that counts. --parts forces a split of the sums.

python tools/bench_project.py --rows 1 4 8 16 64
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.models.layers import project


class Case(NamedTuple):
    d: int
    outs: tuple[int, ...]
    layers: int
    loops: int
    accumulate: Any = None


# of Qwen3-30B-A3B
CASES = {
    "qkv": Case(2048, (4096, 1024), 8, 100),
    "out": Case(4096, (2048,), 8, 100),
    "chain": Case(2048, (4096, 1024, 2048), 8, 100),
    "head": Case(2048, (151936,), 2, 20, jnp.float32),
    "tiny": Case(192, (128, 64), 2, 1),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["qkv", "out", "chain", "head"], choices=CASES)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 16, 64])
    parser.add_argument("--ways", nargs="+", default=["pallas", "xla"], choices=["pallas", "xla"])
    parser.add_argument("--parts", type=int, choices=[1, 2, 4], help="of a sum (by default what the kernel chooses)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s of the floor")
    parser.add_argument("--json", help="append a line per measurement to this file")
    args = parser.parse_args(arguments)
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, us a layer (of the head: a call)")
    print("case   rows  way       us  between   floor  ratio  error")
    records = []
    for name in args.cases:
        for r in bench(name, args):
            records.append(r)
            print(
                f"{name:6s} {r['rows']:4d}  {r['way']:6s} {r['us']:7.2f} {r['between_us']:7.2f} {r['floor_us']:8.2f}"
                f" {r['ratio']:6.2f}  {r['error']:.5f}"
            )
    for record in records:
        line = json.dumps({"device": device.device_kind, "parts": args.parts, **record})
        print(line)
        if args.json:
            with Path(args.json).open("a") as file:
                file.write(line + "\n")


def bench(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A record for every way and number of rows."""
    case = CASES[name]
    weights = [make_layer(jax.random.key(layer), name) for layer in range(case.layers)]
    rows = jax.random.normal(jax.random.key(99), (case.layers, max(args.rows), case.d), jnp.bfloat16)
    ways = [*args.ways, *(["between"] if name != "chain" else [])]
    cases = [(way, n) for n in args.rows for way in ways]
    lowered = [lower(name, way, args.parts, weights, rows[:, :n]) for way, n in cases]
    with ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(lambda one: one.compile(), lowered))
    spans, errors = {}, {}
    for key, program in zip(cases, programs, strict=True):
        way, n = key
        given = (weights, rows[:, :n], jnp.bfloat16(0))
        jax.block_until_ready(program(*given, jnp.int32(1)))
        if way != "between":
            first = jax.jit(partial(products, name, way, args.parts))(rows[0, :n], *weights[0])
            errors[key] = error(name, rows[0, :n], weights[0], first)
        measured = []
        for _ in range(args.repeats):
            begin = time.perf_counter()
            jax.block_until_ready(program(*given, jnp.int32(case.loops)))
            measured.append((time.perf_counter() - begin) / case.loops / case.layers * 1e6)
        spans[key] = statistics.median(measured)
    floor = sum(weight.size for weight in weights[0]) * 2 / args.bandwidth / 1e6
    return [
        {
            "case": name,
            "rows": n,
            "way": way,
            "us": round(spans[way, n], 2),
            "between_us": round(spans.get(("between", n), 0.0), 2),
            "floor_us": round(floor, 2),
            "ratio": round((spans[way, n] - spans.get(("between", n), 0.0)) / floor, 2),
            "error": round(errors[way, n], 6),
        }
        for way, n in cases
        if way != "between"
    ]


def products(name: str, way: str, parts: int | None, x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
    """Of one layer."""
    case = CASES[name]
    if way == "between":
        return (x,)
    if name == "chain" and len(weights) == 3:
        q, kv = products(name, way, parts, x, *weights[:2])
        return q, kv, *products(name, way, parts, q, weights[2])
    if way == "pallas":
        from eaglejax.kernels.project_gpu import project_gpu

        return project_gpu(x, *weights, accumulate=case.accumulate, parts=parts)
    return tuple(project(x, weight, case.accumulate) for weight in weights)


def lower(name: str, way: str, parts: int | None, weights: Any, rows: jax.Array) -> Any:
    def program(weights: Any, rows: jax.Array, scale: jax.Array, loops: jax.Array) -> Any:
        def once(_, last):
            # scale is 0, which the compiler does not know: every layer waits for the one before it, and its rows are known
            x, used = rows[0] + last * scale, []
            for index, layer in enumerate(weights):
                if index and name != "chain":
                    x = rows[index] + last * scale
                outs = products(name, way, parts, x, *layer)
                used = [*(used if name == "chain" else []), *(out[:, :1].astype(x.dtype) for out in outs)]
                if name == "chain":
                    x = outs[-1]
                else:
                    last = sum(used[1:], used[0])
            return sum(used[1:], used[0])

        return jax.lax.fori_loop(0, loops, once, jnp.zeros_like(rows[0, :, :1]))

    return jax.jit(program).lower(weights, rows, jnp.bfloat16(0), jnp.int32(1))


@partial(jax.jit, static_argnums=1)
def make_layer(key: jax.Array, name: str) -> list[jax.Array]:
    """Weights of a layer that keep the scale of rows of scale 1."""
    case = CASES[name]
    widths = [case.d] * len(case.outs)
    if name == "chain":
        widths[2] = case.outs[0]
    keys = jax.random.split(key, len(widths))
    return [
        jax.random.normal(one, (out, d), jnp.bfloat16) * jnp.bfloat16(d**-0.5)
        for one, out, d in zip(keys, case.outs, widths, strict=True)
    ]


def error(name: str, x: jax.Array, weights: list[jax.Array], outs: tuple[jax.Array, ...]) -> float:
    """Of the first layer's products, relative to float32 (of a chain's last one, to what it was given)."""
    worst = 0.0
    for index, (weight, out) in enumerate(zip(weights, outs, strict=True)):
        given = outs[0] if name == "chain" and index == 2 else x
        want = np.asarray(project(given.astype(jnp.float32), weight.astype(jnp.float32)))
        worst = max(worst, float(np.linalg.norm(np.asarray(out, np.float32) - want) / np.linalg.norm(want)))
    return worst


if __name__ == "__main__":
    main()

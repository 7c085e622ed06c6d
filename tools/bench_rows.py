"""What lies between the large products of a decode step, on this GPU: our fused kernels beside XLA's own.

A layer is one residual addition with its norm, and one norm of heads with rotation; of "parts" the addition alone, of sums in four parts as
the experts leave them. All layers run in one compiled loop, each on what the one before it left; the key/value product is the norm's result
itself (2 * 8 heads * 128 = 2048), so that nothing else lies in between.

python tools/bench_rows.py --rows 1 4 8 16
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eaglejax.kernels import select
from eaglejax.kernels.experts_gpu_shape import Parts, padded_rows
from eaglejax.kernels.row_kernels import add_norm, norm_rotate
from eaglejax.models.config import GQAConfig, RopeConfig
from eaglejax.models.layers import RMSNorm

D = 2048
ATTENTION = GQAConfig(32, 8, 128, RopeConfig(theta=1e6, rotary_dim=128), qk_norm=True)
PARTS = ("both", "add_norm", "parts")  # the rotation alone would have nothing to wait for


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 16])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--loops", type=int, default=200, help="times through all layers in one measurement")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", help="append a line per measurement to this file")
    args = parser.parse_args(arguments)
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, {args.layers} layers, us a layer")
    records = [bench(part, rows, args) for part in args.parts for rows in args.rows]
    print("part         rows    fused      xla   differ (share of stream, norm, queries, keys, values)")
    for r in records:
        print(f"{r['part']:12s} {r['rows']:4d} {r['fused_us']:8.2f} {r['xla_us']:8.2f}   {r['differ']}")
    for record in records:
        line = json.dumps({"device": device.device_kind, **record})
        print(line)
        if args.json:
            with Path(args.json).open("a") as file:
                file.write(line + "\n")


def bench(part: str, rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """Both ways of one number of rows."""
    record: dict[str, Any] = {"part": part, "rows": rows}
    arrays, firsts = make(args.layers, rows, part == "parts"), []
    for way, form in (("fused", "pallas"), ("xla", "xla")):
        begin = time.perf_counter()
        with select.kernels(form):
            program = jax.jit(lambda *given: loop(part == "both", *given)).lower(*arrays, jnp.int32(1)).compile()
            one = jax.jit(lambda *given: layer(True, *given))
            x, update, queries, scale, norms, positions = arrays
            firsts.append(one(x, queries, update[0], scale[0], norms[0], positions))
        record[f"{way}_compile_s"] = round(time.perf_counter() - begin, 1)
        jax.block_until_ready(program(*arrays, jnp.int32(2)))
        spans = []
        for _ in range(args.repeats):
            begin = time.perf_counter()
            jax.block_until_ready(program(*arrays, jnp.int32(args.loops)))
            spans.append((time.perf_counter() - begin) / args.loops / args.layers * 1e6)
        record[f"{way}_us"] = round(statistics.median(spans), 2)
    differ = [
        float((np.asarray(a, np.float32) != np.asarray(b, np.float32)).mean()) for a, b in zip(*firsts, strict=True)
    ]
    record["differ"] = [f"{share:.5f}" for share in differ]
    return record


def make(layers: int, rows: int, in_parts: bool) -> tuple[Any, ...]:
    keys = iter(jax.random.split(jax.random.key(0), 5))
    draw = lambda *shape: jax.random.normal(next(keys), shape, jnp.bfloat16)
    scales = 1 + draw(layers, D) / 8
    norms = 1 + draw(layers, 2, ATTENTION.head_dim) / 8
    updates: list[Any] = list(draw(layers, 1, rows, D))
    if in_parts:
        updates = [Parts(sums / 2) for sums in jax.random.normal(jax.random.key(1), (layers, 4, padded_rows(rows), D))]
    positions = 1000 + jnp.arange(rows, dtype=jnp.int32)[None]
    queries = draw(1, rows, ATTENTION.heads * ATTENTION.head_dim)
    return draw(1, rows, D), updates, queries, list(scales), list(norms), positions


def norm(scale: jax.Array) -> RMSNorm:
    made = RMSNorm(scale.shape[0], 1e-6, dtype=scale.dtype)
    made.scale = nnx.Param(scale)
    return made


def layer(rotates: bool, x, queries, update, scale, norms, positions) -> tuple[jax.Array, ...]:
    """The stream, its norm, queries, keys and values."""
    x, normed = add_norm(x, update, scale, 1e-6)
    if not rotates:
        return x, normed, queries, queries, queries
    batch, rows, _ = x.shape
    both = normed.reshape(batch, rows, 2, -1)
    q, k, v = norm_rotate(queries, both, (norm(norms[0]), norm(norms[1])), positions, ATTENTION)
    # in the order that attention reads
    q = q.reshape(batch, rows, ATTENTION.kv_heads, -1, ATTENTION.head_dim).transpose(0, 2, 1, 3, 4)
    return x, normed, q.reshape(queries.shape), k, v


def loop(rotates: bool, x, updates, queries, scales, norms, positions, loops) -> Any:
    def once(_, carry):
        x, queries, positions, _ = carry
        kept = []
        for update, scale, pair in zip(updates, scales, norms, strict=True):
            _, x, queries, keys, values = layer(rotates, x, queries, update, scale, pair, positions)
            kept.append((keys, values) if rotates else ())
        return x, queries, positions + 1, kept

    rows = x.shape[1]
    empty = jnp.zeros((1, rows, ATTENTION.kv_heads, ATTENTION.head_dim), x.dtype)
    kept = [(empty, empty) if rotates else () for _ in updates]
    return jax.lax.fori_loop(0, loops, once, (x, queries, positions, kept))


if __name__ == "__main__":
    main()

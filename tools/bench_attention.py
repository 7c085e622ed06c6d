"""Microseconds per layer of tree attention in one compiled loop over the caches of several layers: the Pallas kernel beside XLA.

The loop goes over distinct caches, as a model's layers do, so that a cache is read from memory where all of them together do not fit into
the second-level cache (at the shortest contexts they may). Each layer's queries depend on the output of the layer before. Bytes over
`--bandwidth` are the floor. Errors are against float32 on the same inputs; unused rows of the caches hold NaN.

python tools/bench_attention.py --contexts 1024 8192 32768 --rows 1 4 8 16
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eaglejax.kernels import select
from eaglejax.kernels.tree_attention import tree_attention
from eaglejax.models.rows import KVRows, Step

# query heads, key/value heads, width of keys, of values (None: the first columns of the keys), value_dim
MODELS = {
    "gqa": (32, 4, 128, 128, 128),
    "gqa64": (32, 8, 64, 64, 64),
    "mla": (8, 1, 576, None, 512),
    "mla16": (16, 1, 576, None, 512),
}


class Case(NamedTuple):
    """One line of the table."""

    model: str
    context: int
    rows: int
    batch: int
    form: str


class Inputs(NamedTuple):
    queries: jax.Array
    rows: list[KVRows]
    caches: list[KVRows]
    step: Step


def make_inputs(case: Case, layers: int, seed: int) -> Inputs:
    """Random values on the device; slots full but for a few rows; a random tree in each."""
    heads, kv_heads, width, values, _ = MODELS[case.model]
    rng, batch = np.random.default_rng(seed), case.batch
    lengths = jnp.asarray(case.context - rng.integers(1, 8, batch), jnp.int32)
    mask = np.zeros((batch, case.rows, case.rows), bool)
    for slot, row in np.ndindex(batch, case.rows):
        if row:
            mask[slot, row] = mask[slot, rng.integers(0, row)]
        mask[slot, row, row] = True
    positions = lengths[:, None] + jnp.asarray(mask.sum(-1) - 1, jnp.int32)
    keys = iter(jax.random.split(jax.random.key(seed), 4 * layers + 1))
    draw = jax.jit(lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1)
    spoil = jax.jit(lambda x: jnp.where((jnp.arange(x.shape[1]) < lengths[:, None])[..., None, None], x, jnp.nan))

    def pair(n: int) -> KVRows:
        own = draw(next(keys), (batch, n, kv_heads, width))
        return KVRows(own, None if values is None else draw(next(keys), (batch, n, kv_heads, values)))

    queries = draw(next(keys), (batch, case.rows, heads, width))
    rows = [pair(case.rows) for _ in range(layers)]
    caches = [jax.tree.map(spoil, pair(case.context)) for _ in range(layers)]
    return Inputs(queries, rows, caches, Step(positions, jnp.asarray(mask), positions, lengths))


def attention(case: Case, options: dict[str, int]) -> Callable[..., jax.Array]:
    """The form that the case names; `options` are the kernel's own."""
    *_, width, _, value_dim = MODELS[case.model]
    fixed: dict[str, Any] = dict(scale=width**-0.5, value_dim=value_dim)

    def run(*given: Any) -> jax.Array:
        if case.form == "pallas":
            from eaglejax.kernels.tree_attention_gpu import tree_attention_gpu

            return tree_attention_gpu(*given, **fixed, **options)
        with select.kernels("xla"):
            return tree_attention(*given, **fixed)

    return run


def looped(case: Case, options: dict[str, int], trips: int) -> Callable[..., jax.Array]:
    """All layers, `trips` times over: a number the compiler knows, for else the host would be asked before every trip."""
    one = jax.jit(attention(case, options))

    def run(inputs: Inputs) -> jax.Array:
        def body(_: Any, queries: jax.Array) -> jax.Array:
            for rows, cache in zip(inputs.rows, inputs.caches, strict=True):
                out = one(queries, rows, cache, inputs.step)
                spare = [(0, 0)] * 3 + [(0, queries.shape[-1] - out.shape[-1])]
                queries = inputs.queries + jnp.pad(out, spare)
            return queries

        return lax.fori_loop(0, trips, body, inputs.queries)

    return run


def error_of(case: Case, inputs: Inputs, options: dict[str, int]) -> float:
    """Norm of the difference to float32, relative."""
    given = (inputs.queries, inputs.rows[0], inputs.caches[0], inputs.step)
    got = jax.jit(attention(case, options))(*given).astype(jnp.float32)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, given)
    want = jax.jit(attention(case._replace(form="xla"), {}))(*wide)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def bytes_of(case: Case) -> int:
    """Of a layer: the cache, the step rows, the queries and the output, once each."""
    heads, kv_heads, width, values, value_dim = MODELS[case.model]
    kept = kv_heads * (width + (values or 0))
    return 2 * case.batch * (kept * (case.context + case.rows) + case.rows * heads * (width + value_dim))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gqa", choices=MODELS)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16], help="tree rows of a slot")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--forms", nargs="+", default=["pallas", "xla"], choices=["pallas", "xla"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tile", type=int, help="keys of a tile of the kernel; default: its own choice")
    parser.add_argument(
        "--splits", type=int, help="blocks per slot and key/value head; default: as many as fill the card"
    )
    parser.add_argument("--block_rows", type=int, help="most query rows of a block; default: its own choice")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes a second of the floor")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--trips", type=int, default=25, help="of the compiled loop over the layers")
    parser.add_argument("--repeats", type=int, default=15, help="runs of the loop, of which the median counts")
    args = parser.parse_args()
    options = {name: value for name in ("tile", "splits", "block_rows") if (value := getattr(args, name)) is not None}
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.model}, batch {args.batch}, seed {args.seed}")
    lines = []
    for context in args.contexts:
        cases = [Case(args.model, context, rows, args.batch, form) for rows in args.rows for form in args.forms]
        lines += measure(cases, args, options)
    for line in lines:
        print(json.dumps(line))


def measure(cases: list[Case], args: argparse.Namespace, options: dict[str, int]) -> list[dict[str, Any]]:
    """Compiles the cases side by side, then runs them one after the other."""
    inputs = {
        case: make_inputs(case, args.layers, args.seed + case.rows) for case in cases if case.form == cases[0].form
    }
    of = lambda case: inputs[case._replace(form=cases[0].form)]
    kept = [case for case in cases if case.form == "xla" or served(case, of(case), args.tile)]
    lowered = [jax.jit(looped(case, options, args.trips)).lower(of(case)) for case in kept]
    with ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(lambda program: program.compile(), lowered))
    lines = []
    for case, program in zip(kept, programs, strict=True):
        seconds = []
        for _ in range(args.repeats + 1):
            begin = time.perf_counter()
            program(of(case)).block_until_ready()
            seconds.append(time.perf_counter() - begin)
        each = 1e6 * statistics.median(seconds[1:]) / args.trips / args.layers
        floor = 1e6 * bytes_of(case) / args.bandwidth
        error = error_of(case, of(case), options)
        print(
            f"context {case.context:6} rows {case.rows:3} {case.form:6}: {each:8.2f} us a layer, floor {floor:6.2f},"
            f" ratio {each / floor:6.2f}, error {error:.4f}"
        )
        lines.append(
            case._asdict() | dict(us=round(each, 2), floor_us=round(floor, 2), error=round(error, 5), **options)
        )
    return lines


def served(case: Case, inputs: Inputs, tile: int | None) -> bool:
    """Whether the kernel takes the case; says why where it does not."""
    from eaglejax.kernels.tree_attention_gpu import serves

    reason = serves(inputs.queries, inputs.rows[0], inputs.caches[0], MODELS[case.model][-1], tile)
    if reason is not None:
        print(f"context {case.context:6} rows {case.rows:3} pallas: not served: {reason}")
    return reason is None


if __name__ == "__main__":
    main()

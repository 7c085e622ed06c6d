"""What a mesh gives and costs: the same tokens as one device, the time of collectives, a draft replicated against sharded.

    python tools/bench_mesh.py --model=2 --layers=12

Three parts, each printed as it is done and as one JSON object last:
1. A small Mixtral pair (tests/data/e2e_mixtral, float32): tokens and accepted counts on every mesh of the devices against one device.
2. Dependent all-reduces inside one compiled loop, by rows and width: microseconds each, and what the 2 per layer of a model cost.
3. A target of the Qwen3-30B-A3B shape (random bfloat16 weights, `--layers` of its 48) and a draft of its shape: ms per plain step and per
   cycle of a chain of 3, on one device and on the mesh, draft replicated and sharded. Random drafts are never accepted: tokens/s would
   mean nothing, so only times are given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from eaglejax import EagleJaxEngine, Sampling, Speculation
from eaglejax.loading import Pair
from eaglejax.measure.random_pair import fill_randomly
from eaglejax.models.capture import CaptureReading
from eaglejax.models.config import DenseConfig, DraftConfig, GQAConfig, LayerConfig, RopeConfig
from eaglejax.models.draft import Draft
from eaglejax.models.target import Target
from eaglejax.models.target_config import read_target_config
from eaglejax.sharding.layout import place
from eaglejax.sharding.mesh import MODEL, axis_size, build_mesh
from eaglejax.sharding.rules import Placement, split_draft, split_target

ROOT = Path(__file__).parents[1]
CHAIN = Speculation(3, 1, 4)


def same_tokens(devices: int) -> dict[str, bool]:
    """Whether every mesh of `devices` devices gives the tokens and accepted counts of one device, greedy and sampled."""
    folder = ROOT / "tests" / "data" / "e2e_mixtral"
    prompts = [[5, 9, 100, 3], [7], [40, 41, 90, 12, 8]]
    samplings = [
        Sampling(max_new_tokens=24, ignore_eos=True),
        Sampling(max_new_tokens=24, temperature=0.9, seed=3, ignore_eos=True),
        Sampling(max_new_tokens=24, temperature=1.0, top_p=0.9, top_k=30, seed=4, ignore_eos=True),
    ]

    def run(mesh: str | None, draft_placement: str = "replicated"):
        engine = EagleJaxEngine.from_pretrained(
            str(folder / "target"), draft=str(folder / "draft"), speculation=Speculation(3, 2, 6), mesh=mesh,
            draft_placement=draft_placement, max_len=64, slots=4,
        )  # fmt: skip
        answers = engine.generate(prompts, samplings)
        plain = engine.generate(prompts, samplings, speculation=None)
        return [(a.token_ids, a.stats.accepted_per_cycle) for a in answers], [a.token_ids for a in plain]

    one, sizes = run(None), [n for n in (1, 2, 4, 8) if n <= devices and devices % n == 0]
    meshes = [f"data={devices // n},model={n}" for n in sizes]
    return {f"{mesh} {kind}": run(mesh, kind) == one for mesh in meshes for kind in ("replicated", "sharded")}


def all_reduce_times(mesh: Mesh, rounds: int = 2000) -> dict[str, float]:
    """Microseconds of one all-reduce that waits for the one before, bfloat16, by rows x width."""
    times = {}
    for rows in (1, 4, 16, 64):
        for width in (2048, 7168):

            def loop(x):
                half = jnp.asarray(1 / axis_size(mesh, MODEL), x.dtype)
                return lax.fori_loop(0, rounds, lambda _, y: lax.psum(y * half, MODEL), x)

            def empty(x):
                half = jnp.asarray(1 / axis_size(mesh, MODEL), x.dtype)
                return lax.fori_loop(0, rounds, lambda _, y: y * half, x)

            x = place(np.ones((rows, width), jnp.bfloat16), mesh)
            both = []
            for body in (loop, empty):
                run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
                run(x).block_until_ready()
                spans = []
                for _ in range(5):
                    begin = time.perf_counter()
                    run(x).block_until_ready()
                    spans.append(time.perf_counter() - begin)
                both.append(min(spans))
            times[f"{rows} x {width}"] = round((both[0] - both[1]) / rounds * 1e6, 2)
    return times


def shape_pair(changes: dict, mesh: Mesh | None, placement: Placement, dtype: str = "bfloat16") -> Pair:
    """Qwen3-30B-A3B's shape with some values changed, and an EAGLE-3 draft of its shape with a vocabulary of 32,000."""
    values = json.loads((ROOT / "configs" / "models" / "qwen3-30b-a3b" / "config.json").read_text())
    reading = read_target_config(values | changes, where="qwen3-30b-a3b", generation={})
    config, size, notes = reading.config, axis_size(mesh, MODEL), []
    layers = config.num_layers
    attention = GQAConfig(32, 4, 128, RopeConfig(1e6, 128))
    drafted = DraftConfig(
        config.vocab_size, 32000, config.hidden_size, config.hidden_size, (2, layers // 2, layers - 3),
        (LayerConfig(attention, DenseConfig(12288)),), 1e-6,
    )  # fmt: skip
    split = split_target(config, size, placement, notes)
    own = split_draft(drafted, size, placement, notes)
    target = nnx.eval_shape(lambda: Target(config, dtype=dtype, split=split))
    draft = nnx.eval_shape(lambda: Draft(drafted, dtype=dtype, split=own))
    fill_randomly(target, mesh, 0)
    fill_randomly(draft, mesh, 1)
    draft.target_ids.set_value(place(np.arange(32000, dtype=np.int32), mesh))
    capture = CaptureReading(drafted.boundaries)
    return Pair("random", target, None, (), jnp.dtype(dtype), draft, capture, mesh=mesh)


def step_times(pair: Pair, prompt: int = 1000, steps: int = 96, repeats: int = 3) -> dict[str, float]:
    """Milliseconds per plain step and per cycle of the chain, greedy and sampled, one slot, after a prompt; the median of the repeats."""
    engine = EagleJaxEngine(pair, speculation=CHAIN, max_len=prompt + 4 * steps, slots=1)
    ids = [int(i) for i in np.random.default_rng(0).integers(0, 32000, prompt)]
    out = {}
    greedy = Sampling(max_new_tokens=steps, ignore_eos=True)
    sampled = Sampling(max_new_tokens=steps, ignore_eos=True, temperature=0.7, top_p=0.95, top_k=20, seed=1)
    for name, setting in (("plain", None), ("chain", CHAIN)):
        for kind, asked in (("", greedy), (", sampled", sampled)):
            engine.generate([ids], asked, speculation=setting)
            spans = []
            for _ in range(repeats):
                stats = engine.generate([ids], asked, speculation=setting)[0].stats
                spans.append(stats.decode_seconds / max(len(stats.accepted_per_cycle), 1) * 1e3)
            out[name + kind] = round(statistics.median(spans), 3)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=int, default=len(jax.devices()), help="devices of the model axis")
    parser.add_argument("--layers", type=int, default=12, help="layers of the 48, at least 7")
    parser.add_argument("--parts", default="tokens,reduce,steps")
    args = parser.parse_args()
    kind, result = jax.devices()[0].device_kind, {"device": f"{args.model} x {jax.devices()[0].device_kind}"}
    print(f"{args.model} of {len(jax.devices())} devices ({kind}), jax {jax.__version__}", flush=True)
    mesh = build_mesh(f"model={args.model}")
    assert mesh is not None
    if "tokens" in args.parts:
        result["same_tokens"] = same_tokens(args.model)
        print("same tokens as one device:", result["same_tokens"], flush=True)
    if "reduce" in args.parts:
        result["all_reduce_us"] = all_reduce_times(mesh)
        print("microseconds per all-reduce (rows x width, bfloat16):", result["all_reduce_us"], flush=True)
    if "steps" in args.parts:
        settings = [("one device", None, Placement())]
        kinds = ("replicated", "sharded") if args.model > 1 else ()
        settings += [(f"model={args.model}, draft {kind}", mesh, Placement(draft=kind)) for kind in kinds]
        for name, where, placement in settings:
            result[name] = step_times(shape_pair({"num_hidden_layers": args.layers}, where, placement))
            print(f"{args.layers} layers, {name}: ms per step {result[name]}", flush=True)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()

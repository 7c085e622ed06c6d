"""Tau of a draft by the engine itself: answers to prompts, tokens per cycle as `Generation.stats.tau` counts them.

python tools/measure_tau.py --prompts mt_bench.jsonl gsm8k.jsonl --trees 3,1,4 5,1,6
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path

import numpy as np

from eaglejax import EagleJaxEngine, Sampling, Speculation


def read(file: Path, every: int, count: int) -> list[list[dict[str, str]]]:
    """First user turns of a JSONL file (`turns` or `prompt`): every `every`-th line, `count` at most."""
    opened = gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8")
    with opened as lines:
        rows = [json.loads(line) for number, line in enumerate(lines) if number % every == 0]
    texts = [row["turns"][0] if "turns" in row else row["prompt"] for row in rows]
    return [[{"role": "user", "content": text}] for text in texts[:count]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default="smollm2-eagle3")
    parser.add_argument("--prompts", nargs="+", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--trees", nargs="+", default=["3,1,4", "5,1,6"], help="num_steps,topk,num_draft_tokens")
    args = parser.parse_args()
    trees = [Speculation(*(int(n) for n in text.split(","))) for text in args.trees]
    engine = EagleJaxEngine.from_pretrained(
        args.target, draft=args.draft, speculation=trees[0], dtype="float32", max_len=1024, slots=args.slots
    )
    sampling = Sampling(max_new_tokens=args.new_tokens, temperature=args.temperature, seed=0)
    for file in args.prompts:
        prompts = read(file, args.every, args.count)
        for text, tree in zip(args.trees, trees, strict=True):
            began = time.time()
            stats = [answer.stats for answer in engine.generate(prompts, sampling, speculation=tree)]
            taus = [s.tau for s in stats if s.cycles]
            levels = np.mean([s.accepted_at_level(tree.num_steps) for s in stats if s.cycles], axis=0)
            print(
                f"{file.name} ({text}): tau {np.mean(taus):.3f} over {len(taus)} prompts, "
                f"{sum(s.new_tokens for s in stats)} tokens, accepted at level {np.round(levels, 3).tolist()}, "
                f"{time.time() - began:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()

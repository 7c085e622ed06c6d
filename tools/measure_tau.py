"""Tau of a draft by the engine itself: answers to prompts of several sets, chat template, the target's end token honoured.

    python tools/measure_tau.py --prompts mt_bench gsm8k --count 10 --trees 3,1,4 5,1,6 7,8,60@0.8

A tree is num_steps,topk,num_draft_tokens, with @score_temperature where that is not 1. For each set two means are told: of the prompts'
own taus, and of all cycles pooled (what `bench` and `stats` mean by tau); then both again without the answers that mostly repeat one
n-gram. --out keeps tokens and cycles of every prompt.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from eaglejax import EagleJaxEngine, Sampling, Speculation
from eaglejax.measure.acceptance import Acceptance
from eaglejax.measure.prompt_sets import check_set, read_prompts
from eaglejax.measure.repetition import mostly_repeated


def tree_of(text: str) -> Speculation:
    numbers, _, score_temperature = text.partition("@")
    return Speculation(*(int(n) for n in numbers.split(",")), score_temperature=float(score_temperature or 1))


def means(rows: list[dict], levels: int) -> dict[str, float | int | list[float]]:
    """Tau of the rows as the mean of their own and pooled, and the acceptance by level."""
    counts = [row["accepted"] for row in rows if row["accepted"]]
    found = Acceptance.of(counts, levels)
    each = [1 + float(np.mean(count)) for count in counts]
    figures = {"prompts": len(counts), "mean": float(np.mean(each)) if each else float("nan")}
    return {**figures, "pooled": found.tau, "levels": [round(share, 3) for share in found.unconditional]}


def told(found: dict) -> str:
    return f"{found['mean']:.3f} ({found['pooled']:.3f} pooled, {found['prompts']} prompts)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default="smollm2-eagle3")
    parser.add_argument("--prompts", nargs="+", required=True, help="built-in prompt sets or JSONL files")
    parser.add_argument("--count", type=int, default=10, help="prompts of each set, spread evenly over it")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0])
    parser.add_argument("--trees", nargs="+", default=["3,1,4", "5,1,6"])
    parser.add_argument("--out", help="JSON file of the figures and of every prompt's")
    args = parser.parse_args()
    for name in args.prompts:
        check_set(name)
    if len({Path(name).stem for name in args.prompts}) < len(args.prompts):
        raise SystemExit(f"--prompts {' '.join(args.prompts)}: two sets of one name")
    trees = {text: tree_of(text) for text in args.trees}
    engine = EagleJaxEngine.from_pretrained(
        args.target,
        draft=args.draft,
        speculation=next(iter(trees.values())),
        dtype=args.dtype,
        max_len=1024,
        slots=args.slots,
    )
    asked = {
        Path(name).stem: [one.content for one in read_prompts(name, args.count, vocab_size=engine.vocab_size)]
        for name in args.prompts
    }
    everything = [prompt for prompts in asked.values() for prompt in prompts]
    results = []
    for text, tree in trees.items():
        for temperature in args.temperatures:
            began = time.time()
            # a seed of its own for each prompt: noise is a function of seed, position and id
            asking = [
                Sampling(max_new_tokens=args.new_tokens, temperature=temperature, seed=n)
                for n in range(len(everything))
            ]
            answers = iter(engine.generate(everything, asking, speculation=tree))
            sets = {}
            for name, prompts in asked.items():
                mine = [next(answers) for _ in prompts]
                sets[name] = [
                    {
                        "accepted": list(a.stats.accepted_per_cycle),
                        "repeats": mostly_repeated(a.token_ids),
                        "token_ids": a.token_ids,
                    }
                    for a in mine
                ]
            print(f"({text}), temperature {temperature:g}, {time.time() - began:.0f} s", flush=True)
            figures: dict[str, dict] = {}
            for kept, which in (("all", lambda row: True), ("without repeats", lambda row: not row["repeats"])):
                each = {name: means([r for r in rows if which(r)], tree.num_steps) for name, rows in sets.items()}
                average = float(np.mean([found["mean"] for found in each.values()]))
                figures[kept] = {"sets": each, "mean of sets": average}
                line = "; ".join(f"{name} {told(found)}" for name, found in each.items())
                print(f"  {kept}: mean of the sets {average:.3f}: {line}", flush=True)
            results.append({"tree": text, "temperature": temperature, "figures": figures, "prompts": sets})
    if args.out:
        facts = {"target": args.target, "draft": args.draft, "new_tokens": args.new_tokens, "dtype": args.dtype}
        Path(args.out).write_text(json.dumps({**facts, "results": results}), encoding="utf-8")


if __name__ == "__main__":
    main()

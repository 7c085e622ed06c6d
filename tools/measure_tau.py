"""Tau of a draft by the engine itself: answers to prompts, tokens per cycle, the cycles of all answers pooled.

python tools/measure_tau.py --prompts mt_bench gsm8k --count 10 --trees 3,1,4 5,1,6
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from eaglejax import EagleJaxEngine, Sampling, Speculation
from eaglejax.measure.acceptance import Acceptance
from eaglejax.measure.prompt_sets import check_set, read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default="smollm2-eagle3")
    parser.add_argument("--prompts", nargs="+", required=True, help="built-in prompt sets or JSONL files")
    parser.add_argument("--count", type=int, default=10, help="prompts of each set, spread evenly over it")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--trees", nargs="+", default=["3,1,4", "5,1,6"], help="num_steps,topk,num_draft_tokens")
    args = parser.parse_args()
    for name in args.prompts:
        check_set(name)
    trees = [Speculation(*(int(n) for n in text.split(","))) for text in args.trees]
    engine = EagleJaxEngine.from_pretrained(
        args.target, draft=args.draft, speculation=trees[0], dtype="float32", max_len=1024, slots=args.slots
    )
    sampling = Sampling(max_new_tokens=args.new_tokens, temperature=args.temperature, seed=0)
    for name in args.prompts:
        prompts = [prompt.content for prompt in read_prompts(name, args.count, vocab_size=engine.vocab_size)]
        for text, tree in zip(args.trees, trees, strict=True):
            began = time.time()
            stats = [answer.stats for answer in engine.generate(prompts, sampling, speculation=tree)]
            found = Acceptance.of([s.accepted_per_cycle for s in stats], tree.num_steps)
            print(
                f"{name} ({text}): tau {found.tau:.3f} over {found.cycles} cycles of {len(stats)} prompts, "
                f"{sum(s.new_tokens for s in stats)} tokens, "
                f"accepted at level, of all cycles {np.round(found.unconditional, 3).tolist()}, "
                f"{time.time() - began:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()

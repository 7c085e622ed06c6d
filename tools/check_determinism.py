"""Whether decoding repeats itself: tokens and accepted counts of the same prompts, over repeats in one process and over fresh processes.

    python tools/check_determinism.py --dtype bfloat16 --repeats 10 --processes 3

Each process answers the prompts in turn and all at once, plain and with a chain and a tree, greedy and sampled. Exit status 1 where any two
runs differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys

from eaglejax import EagleJaxEngine, Sampling, Speculation
from eaglejax.measure.prompt_sets import read_prompts

SETTINGS = {"plain": None, "(3, 1, 4)": Speculation(3, 1, 4), "(4, 4, 16)": Speculation(4, 4, 16)}
HEATS = (0.0, 0.8)


def digests(args) -> dict[str, list[str]]:
    """Setting -> a digest of everything that was answered, for every repeat."""
    engine = EagleJaxEngine.from_pretrained(
        args.model, draft=args.draft, dtype=args.dtype, slots=args.slots, max_len=args.max_len, tuning="none"
    )
    prompts = [prompt.content for prompt in read_prompts("mt_bench", args.slots)]
    found: dict[str, list[str]] = {}
    for _ in range(args.repeats):
        for name, spec in SETTINGS.items():
            for heat in HEATS:
                ask = Sampling(max_new_tokens=args.tokens, temperature=heat, seed=7, ignore_eos=True)
                answers = engine.generate(prompts, ask, speculation=spec)
                told = [(answer.token_ids, answer.stats.accepted_per_cycle) for answer in answers]
                digest = hashlib.sha256(json.dumps(told).encode()).hexdigest()
                found.setdefault(f"{name}, temperature {heat:g}", []).append(digest)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", default="smollm2-eagle3")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--max_len", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--one", action="store_true", help="be one of the processes: print digests as JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(digests(args)))
        return
    runs = []
    for _ in range(args.processes):
        done = subprocess.run([sys.executable, *sys.argv, "--one"], stdout=subprocess.PIPE, text=True, check=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    worst = 0
    for name in runs[0]:
        different = {digest for run in runs for digest in run[name]}
        worst = max(worst, len(different))
        print(f"{name}: {len(different)} different in {args.processes} processes x {args.repeats} repeats")
    sys.exit(worst != 1)


if __name__ == "__main__":
    main()

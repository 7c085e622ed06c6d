"""Speculative decoding of SmolLM2 beside plain decoding in one process: are the token ids the same?

    python tools/check_lossless.py                            # 50 prompts x 64 tokens, every setting
    python tools/check_lossless.py --part 1/25 --slots 4      # the part that runs in CI
    python tools/check_lossless.py --draft my/draft --json out.json

The audit of `eaglejax check` (`eaglejax/measure/lossless.py`) on a matrix of settings: SmolLM2 in float32; prompts of
tests/data/prompts through the chat template; temperature 0, 0.8, and 0.8 with top-p 0.95 and top-k 20, each prompt with a seed
of its own; a chain and a tree; 1 and 4 requests decoded together. The three samplings of a prompt share the waves of 4. Plain
decoding of one request at a time is the reference; with --plain, plain decoding of 4 together is compared with it too.

Exit code 1 when a first divergence is not rounding (docs/losslessness.md), when there is more than one per 10,000 tokens, or when
a setting's tau stays below --least_tau (then nothing was speculated).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path

from eaglejax import EagleJaxEngine, Speculation
from eaglejax.generation import Generation
from eaglejax.measure.judge import Judge
from eaglejax.measure.lossless import SAMPLINGS, Job, Row, answer, compare, failures, make_jobs, table

PROMPTS = Path(__file__).parents[1] / "tests" / "data" / "prompts" / "prompts.jsonl"
SHAPES = {"plain": None, "chain": Speculation(3, 1, 4), "tree": Speculation(4, 4, 16)}


def answers(engine: EagleJaxEngine, jobs: list[Job], shape: str, slots: int) -> list[Generation]:
    """Answers of one shape, with a line on standard error."""
    begin = time.perf_counter()
    generate = lambda prompts, samplings: engine.generate(prompts, samplings, speculation=SHAPES[shape])
    made = answer(generate, jobs, slots)
    print(f"{shape}, {slots} slot(s): {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    return made


def run(engine: EagleJaxEngine, prompts: list[list[int]], tokens: int, settings: list[tuple[str, int]]) -> list[Row]:
    """Rows of the table for `settings` of (shape, slots)."""
    names = list(SAMPLINGS)
    jobs, judge = make_jobs(prompts, tokens, names), Judge(engine._pair)
    reference = answers(engine, jobs, "plain", 1)
    rows = []
    for shape, slots in settings:
        rows += compare(shape, slots, names, jobs, reference, answers(engine, jobs, shape, slots), judge)
        print(table(rows[-len(names) :]), file=sys.stderr, flush=True)
    return rows


def read_prompts(engine: EagleJaxEngine, count: int, part: str) -> list[list[int]]:
    """Token ids of the first `count` stored prompts, or of one part of them ("1/10"), through the chat template."""
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()][:count]
    which, parts = (int(word) for word in part.split("/"))
    size = math.ceil(len(texts) / parts)
    chosen = texts[(which - 1) * size : which * size]
    if not chosen:
        raise SystemExit(f"--part {part} of {len(texts)} prompts is empty")
    return [engine.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in chosen]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", default="smollm2-eagle3", help="built-in name or folder of a draft for SmolLM2")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt; EOS is run past")
    parser.add_argument("--part", default="1/1", help="which part of the prompts, such as 1/10")
    parser.add_argument("--shapes", default="chain,tree")
    parser.add_argument("--slots", default="1,4")
    parser.add_argument("--plain", action="store_true", help="compare plain decoding of 4 together as well")
    parser.add_argument("--least_tau", type=float, default=1.05, help="a setting below this speculated nothing: fail")
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args()

    import jax

    from eaglejax.cli.compile_cache import use_compile_cache

    use_compile_cache()
    slots = [int(word) for word in args.slots.split(",")]
    settings = [(shape, count) for shape in args.shapes.split(",") for count in slots]
    settings += [("plain", 4)] if args.plain else []
    engine = EagleJaxEngine.from_pretrained(
        "smollm2", draft=args.draft, max_len=512, slots=max(4, *slots), check_wiring=False
    )
    prompts = read_prompts(engine, args.prompts, args.part)
    begin = time.perf_counter()
    rows = run(engine, prompts, args.tokens, settings)
    wrong = failures(rows, "float32", args.least_tau)
    title = (
        f"SmolLM2-135M, draft {args.draft}, float32, {jax.devices()[0].device_kind}, {platform.machine()}, "
        f"jax {jax.__version__}: "
        f"{len(prompts)} prompts x {args.tokens} tokens, {sum(row.tokens for row in rows)} tokens compared, "
        f"{time.perf_counter() - begin:.0f} s"
    )
    print(title, table(rows), sep="\n")
    print("\n".join(f"FAILED: {line}" for line in wrong) or "lossless")
    if args.json:
        figures = {
            "title": title,
            "prompts": len(prompts),
            "failures": wrong,
            "rows": [asdict(row) | {"tau": row.tau} for row in rows],
        }
        Path(args.json).write_text(json.dumps(figures, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

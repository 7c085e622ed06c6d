"""speculation="auto" beside plain decoding and fixed trees, in turns, per prompt set; every answer's tokens compared with plain decoding's.

The last set, "noise", is random prompts answered at temperature 2: text that no draft foresees (greedy answers to random prompts soon go
round in circles, which drafts do foresee).

python tools/compare_auto.py --prompts 2 --rounds 2 --tokens 48
python tools/compare_auto.py --fixed 3,1,4 7,1,8 --choices 3,1,4 7,1,8   # other trees
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from eaglejax import Auto, EagleJaxEngine, Sampling, Speculation
from eaglejax.measure.compile_clock import CompileClock
from eaglejax.measure.prompt_sets import read_prompts

SETS = ("mt_bench", "gsm8k", "humaneval", "random", "noise")


def tree(text: str) -> Speculation:
    """The tree that 'num_steps,topk,num_draft_tokens' names."""
    steps, topk, rows = map(int, text.split(","))
    return Speculation(steps, topk, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", default="smollm2-eagle3")
    parser.add_argument("--prompts", type=int, default=2, help="of each set")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tuning", default="measure")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max_len", type=int, default=512)
    parser.add_argument("--fixed", type=tree, nargs="*", default=[Speculation(3, 1, 4), Speculation(3, 4, 8)])
    parser.add_argument("--choices", type=tree, nargs="*", help='what "auto" chooses among; default: its own')
    args = parser.parse_args()
    engine = EagleJaxEngine.from_pretrained(
        args.model, draft=args.draft, max_len=args.max_len, slots=1, tuning=args.tuning, dtype=args.dtype
    )
    auto = Auto(args.choices) if args.choices else engine.speculation
    assert isinstance(auto, Auto)
    settings = {"plain": None} | {f"({t.num_steps}, {t.topk}, {t.nodes})": t for t in args.fixed} | {"auto": auto}
    clock = CompileClock()
    for name, spec in settings.items():
        begin = time.perf_counter()
        engine.generate([[1, 2, 3]], Sampling(max_new_tokens=8, ignore_eos=True), speculation=spec)
        now = time.perf_counter()
        print(f"{name}: first call {now - begin:.1f} s, {clock.between(begin, now):.1f} s of it compiling", flush=True)
    print(engine.load_report.notes["speculation"][-1], flush=True)
    told = lambda answers: [answer.token_ids for answer in answers]
    for source in SETS:
        heat = 2.0 if source == "noise" else args.temperature
        ask = Sampling(max_new_tokens=args.tokens, ignore_eos=True, temperature=heat, seed=0)
        named = "random" if source == "noise" else source
        prompts = [p.content for p in read_prompts(named, args.prompts, vocab_size=engine.vocab_size)]
        rates: dict[str, list[float]] = {name: [] for name in settings}
        wrong, used = 0, [0] * len(auto.choices)
        for _ in range(args.rounds):
            for prompt in prompts:
                plain = None
                for name, spec in settings.items():
                    answers = engine.generate([prompt], ask, speculation=spec)
                    plain = plain or told(answers)
                    wrong += told(answers) != plain
                    rates[name].append(answers[0].stats.tokens_per_second)
                    for choice, count in enumerate(answers[0].stats.cycles_by_choice):
                        used[choice] += count
        ratio = {
            name: statistics.median(a / b for a, b in zip(values, rates["plain"], strict=True))
            for name, values in rates.items()
        }
        line = {"set": source, "tokens_per_second": {n: round(statistics.median(v), 2) for n, v in rates.items()}}
        line |= {"beside_plain": {n: round(r, 3) for n, r in ratio.items()}, "auto_cycles": used, "differing": wrong}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

"""Plain and speculative decoding beside transformers' cached generate: same model, same prompts, same process, alternating.

    pip install torch transformers accelerate gguf
    python tools/bench_against_transformers.py --tokens 64 --rounds 3

Prints tokens per second of decoding (new tokens after the first over the time after the first) per engine: median and range over rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

PROMPTS = (
    "What is the capital of France, and what can I see there?",
    "Write a short story about a lighthouse keeper.",
    "Explain how a bicycle stays upright.",
)


def transformers_speed(model, ids: list[int], tokens: int) -> float:
    """Tokens per second after the first token, by the difference of a long and a one-token run."""
    import torch

    prompt = torch.tensor([ids])

    def run(count: int) -> float:
        begin = time.perf_counter()
        with torch.no_grad():
            model.generate(
                prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, use_cache=True, pad_token_id=2
            )
        return time.perf_counter() - begin

    return (tokens - 1) / (run(tokens) - run(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft", default="smollm2-eagle3", help="a draft to measure speculation with, or 'none'")
    args = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    from eaglejax import EagleJaxEngine, Sampling
    from eaglejax.checkpoint.builtin import builtin_path

    path = builtin_path("smollm2")
    peer = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    engine = EagleJaxEngine.from_pretrained("smollm2", draft=None if args.draft == "none" else args.draft, slots=1)
    asked = Sampling(max_new_tokens=args.tokens, ignore_eos=True)
    chats = [engine.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in PROMPTS]
    settings = {"eaglejax plain": None} | (
        {} if args.draft == "none" else {f"eaglejax {engine.speculation.describe()}": "auto"}
    )
    speeds: dict[str, list[float]] = {"transformers": [], **{name: [] for name in settings}}
    taus: list[float] = []
    for setting in settings.values():
        engine.generate(chats[0], asked, speculation=setting)  # compile
    transformers_speed(peer, chats[0], 8)
    for _ in range(args.rounds):
        for ids in chats:
            speeds["transformers"].append(transformers_speed(peer, ids, args.tokens))
            for name, setting in settings.items():
                answer = engine.generate(ids, asked, speculation=setting)[0]
                speeds[name].append(answer.stats.tokens_per_second)
                if setting:
                    taus.append(answer.stats.tau)
    base = statistics.median(speeds["transformers"])
    print(
        f"SmolLM2-135M, float32, {os.cpu_count()} cores, {args.tokens} new tokens, {len(PROMPTS)} prompts x {args.rounds} rounds"
    )
    for name, values in speeds.items():
        middle = statistics.median(values)
        print(f"{name:60s} {middle:6.1f} tok/s ({min(values):.1f}-{max(values):.1f})  {middle / base:.2f}x")
    if taus:
        print(f"tau {statistics.mean(taus):.2f}")


if __name__ == "__main__":
    main()

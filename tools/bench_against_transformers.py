"""Plain and speculative decoding beside transformers' cached generate: same model, same prompts, same process, alternating.

    pip install torch transformers accelerate gguf
    python tools/bench_against_transformers.py --tokens 64 --rounds 3
    python tools/bench_against_transformers.py --dtype bfloat16 --device cuda --compiled --trees 3,1,4 7,1,8   (beside a GPU)

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

    prompt = torch.tensor([ids], device=model.device)
    asked = {"do_sample": False, "use_cache": True, "pad_token_id": 2}

    def run(count: int) -> float:
        begin = time.perf_counter()
        with torch.no_grad():
            # .tolist waits for the device
            model.generate(prompt, max_new_tokens=count, min_new_tokens=count, **asked)[0].tolist()
        return time.perf_counter() - begin

    return (tokens - 1) / (run(tokens) - run(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft", default="smollm2-eagle3", help="a draft to measure speculation with, or 'none'")
    parser.add_argument("--dtype", default="float32", help="of both: float32 or bfloat16")
    parser.add_argument("--device", default="cpu", help="torch's: cpu or cuda")
    parser.add_argument(
        "--compiled", action="store_true", help="transformers with a static cache, which it compiles for"
    )
    parser.add_argument("--trees", nargs="*", default=[], help="num_steps,topk,num_draft_tokens, beside the default")
    args = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    from eaglejax import EagleJaxEngine, Sampling, Speculation
    from eaglejax.checkpoint.builtin import builtin_path

    path = builtin_path("smollm2")
    peer = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=getattr(torch, args.dtype)
    ).eval()
    peer = peer.to(args.device)
    if args.compiled:
        peer.generation_config.cache_implementation = "static"
    draft = None if args.draft == "none" else args.draft
    engine = EagleJaxEngine.from_pretrained("smollm2", draft=draft, slots=1, dtype=args.dtype)
    asked = Sampling(max_new_tokens=args.tokens, ignore_eos=True)
    chats = [engine.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in PROMPTS]
    settings = {"eaglejax plain": None} | (
        {} if args.draft == "none" else {f"eaglejax {engine.speculation.describe()}": "auto"}
    )
    for tree in args.trees:
        spec = Speculation(*(int(n) for n in tree.split(",")))
        settings[f"eaglejax {spec.describe()}"] = spec
    speeds: dict[str, list[float]] = {"transformers": [], **{name: [] for name in settings}}
    taus: dict[str, list[float]] = {name: [] for name in settings}
    for setting in settings.values():
        engine.generate(chats[0], asked, speculation=setting)  # compile
    for _ in range(2):  # what it compiles, it compiles at the second call
        transformers_speed(peer, chats[0], args.tokens)
    for _ in range(args.rounds):
        for ids in chats:
            speeds["transformers"].append(transformers_speed(peer, ids, args.tokens))
            for name, setting in settings.items():
                answer = engine.generate(ids, asked, speculation=setting)[0]
                speeds[name].append(answer.stats.tokens_per_second)
                if setting:
                    taus[name].append(answer.stats.tau)
    base = statistics.median(speeds["transformers"])
    where = f"{os.cpu_count()} cores" if args.device == "cpu" else torch.cuda.get_device_name()
    print(
        f"SmolLM2-135M, {args.dtype}, {where}, {args.tokens} new tokens, {len(PROMPTS)} prompts x {args.rounds} rounds"
    )
    for name, values in speeds.items():
        middle = statistics.median(values)
        print(
            f"{name:60s} {middle:6.1f} tok/s ({min(values):.1f}-{max(values):.1f})  {middle / base:.2f}x"
            + (f"  tau {statistics.mean(taus[name]):.2f}" if taus.get(name) else "")
        )


if __name__ == "__main__":
    main()

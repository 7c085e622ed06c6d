"""Whether the experts of a mixture earn their place, on given texts.

Losses in nats per token: of the model, with routed experts that give nothing, with every expert at the place of the next one, and of
another model (the dense one it was made from). Then the share of each expert in its layer's choices, and how many different experts
consecutive rows choose, which is what a tree's rows read.

python tools/measure_experts.py --model smollm2-moe --against smollm2 --text mt_bench gsm8k --limit 20
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from eaglejax.checkpoint.source import resolve
from eaglejax.checkpoint.target_loader import load_target, open_target
from eaglejax.errors import EagleJaxError, PromptError
from eaglejax.measure.expert_use import ExpertUse, cut_windows, mean_loss, measure_experts
from eaglejax.measure.prompt_sets import known_sets, read_prompts
from eaglejax.text.interface import Tokenizer
from eaglejax.text.prompts import parse_prompts
from eaglejax.text.tokenizer import has_tokenizer, load_tokenizer

LONGEST = 1 << 30  # texts are cut into windows, so no text is too long


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-moe")
    parser.add_argument("--against", help="a model with the same tokens, for its loss on the same texts")
    parser.add_argument(
        "--text",
        nargs="+",
        default=[name for name in known_sets() if name != "random"],
        help="built-in prompt sets, .jsonl of prompts or messages (by the model's chat template), or .txt as it stands",
    )
    parser.add_argument("--limit", type=int, default=0, help="texts of each set or .jsonl, spread over it; 0: all")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window; each begins without a past")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--json", help="write the figures to this file too")
    args = parser.parse_args(arguments)
    try:
        figures = measure(args)
    except EagleJaxError as error:
        raise SystemExit(f"error: {error}") from None
    print(to_text(figures))
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1) + "\n")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every figure, in the types of JSON."""
    source = resolve(args.model)
    reading, reader = open_target(source.path)
    tokenizer = load_tokenizer(source.folder, reader) if has_tokenizer(source.folder, reader) else None
    vocabulary = reading.config.vocab_size
    texts = [ids for name in args.text for ids in read_text(name, args.limit, tokenizer, vocabulary)]
    windows = cut_windows(texts, args.window)
    figures = as_json(measure_experts(load_target(source.path, dtype=args.dtype), windows))
    figures |= {"model": args.model, "texts": len(texts), "windows": len(windows), "dtype": args.dtype}
    if args.against:
        other = load_target(resolve(args.against).path, dtype=args.dtype)
        if other.config.vocab_size != vocabulary:
            raise PromptError(
                "has other tokens",
                where="--against",
                found=other.config.vocab_size,
                expected=f"a vocabulary of {vocabulary}",
            )
        figures |= {"against": args.against, "loss_against": mean_loss(other, windows)}
    return figures


def read_text(name: str, limit: int, tokenizer: Tokenizer | None, vocab_size: int) -> list[list[int]]:
    """Token ids of each text: a .txt is one text, anything else as `prompt_sets.read_prompts` reads it."""
    if name.endswith(".txt"):
        try:
            contents = [Path(name).read_text(encoding="utf-8")]
        except (OSError, UnicodeDecodeError) as error:
            raise PromptError("cannot be read", where=name, found=error) from None
    else:
        contents = [prompt.content for prompt in read_prompts(name, limit, vocab_size=vocab_size)]
    return [encode(content, tokenizer, vocab_size) for content in contents]


def encode(content: Any, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """Ids of a text, of messages, or of ids. After an answer no other is begun."""
    answered = isinstance(content, list) and isinstance(content[-1], dict) and content[-1]["role"] == "assistant"
    if answered and tokenizer is not None:
        return tokenizer.apply_chat_template(content, add_generation_prompt=False)
    return parse_prompts([content], tokenizer, vocab_size=vocab_size, max_len=LONGEST)[0]


def as_json(use: ExpertUse) -> dict[str, Any]:
    """`ExpertUse` in the types of JSON."""
    return {
        "predicted_tokens": use.predicted,
        "loss": use.loss,
        "loss_without": use.loss_without,
        "loss_shifted": use.loss_shifted,
        "shares": {str(layer): share.tolist() for layer, share in use.shares.items()},
        "dead": {str(layer): experts for layer, experts in use.dead.items()},
        "touched": {str(rows): count for rows, count in use.touched.items()},
    }


def to_text(figures: dict[str, Any]) -> str:
    """The figures for people."""
    loss = figures["loss"]
    others = [("routed experts that give nothing", "loss_without"), ("experts shifted by one", "loss_shifted")]
    others += [(figures.get("against"), "loss_against")] * ("against" in figures)
    lines = [
        f"{figures['model']}, {figures['dtype']}: {figures['predicted_tokens']:,} predicted tokens of {figures['texts']} texts "
        f"in {figures['windows']} windows",
        f"loss {loss:.4f} nats/token",
        *(f"  {what}: {figures[key]:.4f} ({figures[key] - loss:+.4f})" for what, key in others),
        "shares of the choices, by layer: least used, most used",
    ]
    for layer, shares in figures["shares"].items():
        dead = figures["dead"].get(layer)
        least, most = min(shares), max(shares)
        lines.append(
            f"  {layer:>3}: {least:7.2%} (expert {shares.index(least)}), {most:7.2%} (expert {shares.index(most)})"
            + (f", dead: {', '.join(map(str, dead))}" if dead else "")
        )
    dead = sum(map(len, figures["dead"].values()))
    lines.append(f"dead experts (share below 0.1 %): {dead} of {sum(map(len, figures['shares'].values()))}")
    lines.append("different experts of a layer that consecutive rows choose, on the mean:")
    lines += [f"  {rows:>3} rows: {count:.2f}" for rows, count in figures["touched"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Speculative decoding beside plain decoding in one process: are the token ids the same?

    python tools/check_lossless.py                            # 50 prompts x 64 tokens, every setting
    python tools/check_lossless.py --part 1/10                # the tenth that runs in CI
    python tools/check_lossless.py --draft my/draft --json out.json

SmolLM2 in float32; prompts of tests/data/prompts through the chat template; temperature 0, 0.8, and 0.8 with top-p
0.95 and top-k 20, each prompt with a seed of its own; a chain and a tree; 1 and 4 requests decoded together. The
three samplings of a prompt share the waves of 4. Plain decoding of one request at a time is the reference; with
--plain, plain decoding of 4 together is compared with it too.

Every first divergence is looked at again by teacher forcing (docs/losslessness.md). Exit code 1 when one is not
rounding, when there is more than one per 10,000 tokens, or when a setting's tau stays below --least_tau (then
nothing was speculated).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from eaglejax import EagleJaxEngine, Sampling, Speculation
from eaglejax.generation import Generation

PROMPTS = Path(__file__).parents[1] / "tests" / "data" / "prompts" / "prompts.jsonl"
LIMIT = 1e-4  # of a perturbed score, of a scaled logit, of a probability
TOKENS_PER_ROUNDING = 10_000
SHAPES = {"plain": None, "chain": Speculation(3, 1, 4), "tree": Speculation(4, 4, 16)}
SAMPLINGS = {
    "T=0": {"temperature": 0.0},
    "T=0.8": {"temperature": 0.8},
    "T=0.8 top_p=0.95 top_k=20": {"temperature": 0.8, "top_p": 0.95, "top_k": 20},
}


@dataclass(frozen=True)
class Divergence:
    """The first token in which an answer leaves plain decoding, and what teacher forcing says of the two candidates."""

    request: int
    index: int  # of the answer's token
    plain: int | None  # None: the answer ended there
    found: int | None
    gap: float  # of the lower of the two to the best sure candidate; inf where one was filtered out
    cause: str  # "score", "filter" or "" when it is no rounding

    @property
    def rounding(self) -> bool:
        return bool(self.cause)


@dataclass
class Row:
    """One line of the table: a tree, a number of slots, a sampling."""

    shape: str
    slots: int
    sampling: str
    tokens: int = 0  # compared: up to the first divergence of every answer, that token included
    accepted: int = 0
    cycles: int = 0
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def tau(self) -> float:
        return self.accepted / self.cycles + 1 if self.cycles else math.nan


def candidates(scaled: np.ndarray, sampling: Sampling, limit: float = LIMIT) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [v] that the filters surely keep, and that they may keep, when all figures are only known to `limit`.

    Written apart from the engine's filters: a sort instead of a search, float64.
    """
    scaled = scaled.astype(np.float64)
    sure = may = kept = np.ones(scaled.shape, bool)

    def cut(keep, also):
        nonlocal sure, may, kept
        out = scaled[kept & ~keep]
        above = scaled > out.max() + limit if out.size else np.ones_like(keep)
        sure, may, kept = sure & keep & above, may & (keep | also), kept & keep

    order = np.argsort(-scaled, kind="stable")
    if 0 < sampling.top_k < scaled.size:
        edge = scaled[order[sampling.top_k - 1]]
        cut(scaled >= edge, scaled >= edge - limit)
    if sampling.top_p < 1:
        mass = np.where(kept, np.exp(scaled - scaled.max()), 0)
        before = np.empty_like(mass)
        before[order] = (np.cumsum(mass[order]) - mass[order]) / mass.sum()
        keep = before < sampling.top_p
        edge = scaled[kept & keep].min()
        cut(keep, (before < sampling.top_p + limit) | (scaled >= edge - limit))
        sure = sure & (before < sampling.top_p - limit)
    if sampling.min_p > 0:
        floor = scaled.max() + math.log(sampling.min_p)
        cut(scaled >= floor, scaled >= floor - limit)
        sure = sure & (scaled >= floor + limit)
    return sure, may


def examine(logits: np.ndarray, noise: np.ndarray, sampling: Sampling, pair: tuple[int, int]) -> tuple[float, str]:
    """Whether both tokens of `pair` could have been the draw, given teacher-forced logits [v] known to `LIMIT`.

    Returns: how far the lower of the two lies below the best token that the filters surely keep, and the cause:
    "score" where both were candidates, "filter" where the edge of a filter decides over one of them, "" where rounding
    does not explain the pair.
    """
    ids = list(pair)
    if sampling.temperature == 0:
        gap = float(logits.max() - logits[ids].min())
        return gap, "score" if gap < LIMIT else ""
    scaled = logits / np.float32(sampling.temperature)
    sure, may = candidates(scaled, sampling)
    if not may[ids].all():
        return math.inf, ""
    scores = scaled + noise
    best = scores[sure].max() if sure.any() else -math.inf
    gap = float(max(best - scores[ids].min(), 0))
    if sure[ids].all():
        return gap, "score" if gap < LIMIT else ""
    return gap, "filter" if gap < LIMIT else ""


def first_difference(plain: list[int], found: list[int]) -> int | None:
    """Index of the first token that is not the same, or that only one of the two has."""
    for index, (a, b) in enumerate(zip(plain, found, strict=False)):
        if a != b:
            return index
    return None if len(plain) == len(found) else min(len(plain), len(found))


def judge(
    engine: EagleJaxEngine, request: int, plain: Generation, found: Generation, sampling: Sampling
) -> Divergence | None:
    """The first divergence of an answer from plain decoding's, examined; None where the ids are the same."""
    import jax.numpy as jnp

    from eaglejax.speculation.sampling import gumbel

    index = first_difference(plain.token_ids, found.token_ids)
    if index is None:
        return None
    pair = [tokens[index] if index < len(tokens) else None for tokens in (plain.token_ids, found.token_ids)]
    if pair[0] is None or pair[1] is None:
        return Divergence(request, index, pair[0], pair[1], math.inf, "")
    context = plain.prompt_token_ids + plain.token_ids[:index]
    logits = engine.score(context).logits[-1]
    seed = sampling.seed or 0
    words = jnp.asarray(np.array([[seed & 0xFFFFFFFF, seed >> 32]], np.uint32))
    noise = np.asarray(gumbel(words, jnp.asarray([[len(context)]], jnp.int32), logits.size))[0, 0]
    gap, cause = examine(logits, noise, sampling, (pair[0], pair[1]))
    return Divergence(request, index, pair[0], pair[1], gap, cause)


def answer(engine: EagleJaxEngine, jobs: list, speculation: Speculation | None, slots: int) -> list[Generation]:
    """Answers to (prompt, sampling) jobs, `slots` of them together; the last wave is filled up with the first jobs."""
    filled = jobs + jobs[: -len(jobs) % slots]
    answers: list[Generation] = []
    for first in range(0, len(filled), slots):
        wave = filled[first : first + slots]
        answers += engine.generate([ids for ids, _ in wave], [asked for _, asked in wave], speculation=speculation)
        print(f"\r{min(first + slots, len(jobs))} of {len(jobs)} answers", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return answers[: len(jobs)]


def compare(
    engine: EagleJaxEngine, prompts: list[list[int]], tokens: int, runs: list[tuple[str, int]], least_slots: int = 1
) -> list[Row]:
    """Rows of the table for `runs` of (shape, slots)."""
    samplings = [
        Sampling(max_new_tokens=tokens, seed=1000 + index, ignore_eos=True, **SAMPLINGS[name])
        for index in range(len(prompts))
        for name in SAMPLINGS
    ]
    jobs = [(prompts[index // len(SAMPLINGS)], asked) for index, asked in enumerate(samplings)]
    begin = time.perf_counter()
    reference = answer(engine, jobs, None, least_slots)
    print(f"plain decoding, {least_slots} slot(s): {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    rows = []
    for shape, slots in runs:
        begin = time.perf_counter()
        answers = answer(engine, jobs, SHAPES[shape], slots)
        print(f"{shape}, {slots} slot(s): {time.perf_counter() - begin:.0f} s", file=sys.stderr)
        for offset, name in enumerate(SAMPLINGS):
            row = Row(shape, slots, name)
            for index in range(offset, len(jobs), len(SAMPLINGS)):
                row.cycles += answers[index].stats.cycles
                row.accepted += sum(answers[index].stats.accepted_per_cycle)
                found = judge(engine, index, reference[index], answers[index], samplings[index])
                row.tokens += len(reference[index].token_ids) if found is None else found.index + 1
                row.divergences += [found] if found else []
            rows.append(row)
        print(table(rows[-len(SAMPLINGS) :]), file=sys.stderr, flush=True)
    return rows


def failures(rows: list[Row], least_tau: float) -> list[str]:
    """What is wrong with the table, in words; empty when all is well."""
    told = []
    everything = [(row, d) for row in rows for d in row.divergences]
    for row, found in everything:
        if not found.rounding:
            told.append(f"not rounding: {row.shape}, {row.slots} slot(s), {row.sampling}: {found}")
    tokens = sum(row.tokens for row in rows)
    allowed = math.ceil(tokens / TOKENS_PER_ROUNDING)
    if len(everything) > allowed:
        told.append(f"{len(everything)} divergences in {tokens} tokens; at most {allowed} may be rounding")
    for row in rows:
        if row.shape != "plain" and not row.tau >= least_tau:
            told.append(f"tau {row.tau:.2f} of {row.shape}, {row.slots} slot(s), {row.sampling} is below {least_tau}")
    return told


def read_prompts(engine: EagleJaxEngine, count: int, part: str) -> list[list[int]]:
    """Token ids of the first `count` stored prompts, or of one part of them ("1/10"), through the chat template."""
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()][:count]
    which, parts = (int(word) for word in part.split("/"))
    size = math.ceil(len(texts) / parts)
    chosen = texts[(which - 1) * size : which * size]
    if not chosen:
        raise SystemExit(f"--part {part} of {len(texts)} prompts is empty")
    return [engine.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in chosen]


def table(rows: list[Row]) -> str:
    lines = [f"{'shape':6} {'slots':>5}  {'sampling':26} {'tokens':>7} {'diverged':>8} {'rounding':>8} {'tau':>5}"]
    for row in rows:
        rounding = sum(d.rounding for d in row.divergences)
        counts = f"{row.tokens:7} {len(row.divergences):8} {rounding:8} {row.tau:5.2f}"
        lines.append(f"{row.shape:6} {row.slots:5}  {row.sampling:26} {counts}")
    lines += [f"  {row.shape}, {row.slots} slot(s), {row.sampling}: {d}" for row in rows for d in row.divergences]
    return "\n".join(lines)


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
    runs = [(shape, count) for shape in args.shapes.split(",") for count in slots]
    runs += [("plain", 4)] if args.plain else []
    engine = EagleJaxEngine.from_pretrained("smollm2", draft=args.draft, max_len=512, slots=max(4, *slots))
    prompts = read_prompts(engine, args.prompts, args.part)
    begin = time.perf_counter()
    rows = compare(engine, prompts, args.tokens, runs)
    wrong = failures(rows, args.least_tau)
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

"""Train a draft for a built-in target: the target answers the prompts, the draft learns from the answers.

    prepare   prompts (JSONL, gzip) -> one file of token ids, chat template applied         (a CPU, a minute)
    train     answers sampled from the target, draft trained on them, the best kept         (an accelerator, minutes)
    export    kept weights -> the shipped folder: int8 weights, config.json                 (a CPU, seconds)

`train` works by the clock: it samples for --sample-seconds, trains for --train-seconds, and the learning rate
follows the share of the time that is gone, or of --max-steps where that is ahead. --total-seconds ends the training
early where all before took longer.
It leaves in --out: weights-N.npz (bfloat16, the best by held-out tau), draft/ (the same in int8, to be loaded),
curve.csv (lines `train`: step, epoch, seconds, loss, gradient norm, accuracy of each unrolled step; lines `tau`: step,
set, tau of the chains of 3 and 7) and answers.json. --start goes on from such a folder, with fresh answers of another
--seed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from eaglejax.training.losses import OBJECTIVES
from eaglejax.training.trainer import OPTIMISERS


def export(args) -> None:
    """The shipped folder from kept weights."""
    from draft_run import say_size
    from weight_parts import load_parts

    from eaglejax.checkpoint.source import resolve
    from eaglejax.checkpoint.target_loader import load_target
    from eaglejax.load_report import LoadReport
    from eaglejax.training.export import write_draft
    from eaglejax.training.shape import draft_shape

    weights, facts = load_parts(Path(args.weights))
    target = load_target(resolve(args.target).path, dtype="float32", report=LoadReport())
    own, ids = str(facts["head"]) == "own", facts["target_ids"]
    if args.vocab is not None:
        if own:
            raise SystemExit("--vocab: an own head has rows for the ids it was trained with alone")
        if "counts" not in facts:
            raise SystemExit(f"--vocab: the weights in {args.weights} were kept without the counts of their answers")
        if not 0 < args.vocab <= len(facts["counts"]):
            raise SystemExit(f"--vocab {args.vocab}: found {len(facts['counts'])} ids in the target's vocabulary")
        ids = np.sort(np.argsort(-facts["counts"], kind="stable")[: args.vocab]).astype(np.int32)
    captures = tuple(facts["boundaries"].tolist()) if "boundaries" in facts else None
    config = draft_shape(target.config, len(ids), int(facts["mlp"]), own_head=own, boundaries=captures)
    write_draft(Path(args.out), config, weights, ids, int8=not args.float32)
    if not args.float32:
        say_size(Path(args.out))


def train(args) -> None:
    from draft_run import Run

    Run(args).train()


def prepare(args) -> None:
    from prompt_sets import prepare as make

    make(args.prompts, args.evaluation, args.target, args.out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prepare")
    one.add_argument("--prompts", required=True, help="folder of *.jsonl.gz")
    one.add_argument(
        "--evaluation", nargs="*", default=[], help="built-in prompt sets or JSONL files, for evaluation only"
    )
    one.add_argument("--target", default="smollm2")
    one.add_argument("--out", required=True)
    two = commands.add_parser("train")
    two.add_argument("--target", default="smollm2")
    two.add_argument("--prompts", required=True, help="file made by `prepare`")
    two.add_argument("--out", required=True)
    two.add_argument(
        "--start", default="", help="--out folder of an earlier run, or a draft, to go on from its weights"
    )
    two.add_argument("--head", choices=("own", "target"), help="own: trained and exported (default); target: borrowed")
    two.add_argument("--mlp", type=int, help="width of the draft's MLP (default 768)")
    two.add_argument("--vocab", type=int, help="draft vocabulary (default 5248)")
    two.add_argument("--boundaries", help="captures of a fresh draft, such as 3,16,28 (default 2, L // 2, L - 3)")
    two.add_argument("--objective", choices=OBJECTIVES, default="entropy")
    two.add_argument("--optimiser", choices=OPTIMISERS, default="adamw", help="not with a trial of it")
    two.add_argument("--int8", action="store_true", help="train towards the rounding of the export")
    two.add_argument("--trial-seconds", type=float, default=0, help="try each so long, go on with the better")
    two.add_argument(
        "--trial-of",
        choices=("optimiser", "objective"),
        default="optimiser",
        help="what is tried: adamw and muon, or every objective, all with --decay",
    )
    two.add_argument("--dtype", default="bfloat16")
    two.add_argument("--seed", type=int, default=1)
    two.add_argument("--places", type=int, default=1_080_000, help="cache places of one sampling batch")
    two.add_argument("--temperature", type=float, default=0.8)
    two.add_argument("--sample-seconds", type=float, default=120)
    two.add_argument("--answers", nargs="*", default=[], help="files of --keep-answers to train on as well")
    two.add_argument("--most-answers", type=int, default=0, help="take so many of --answers (0: all)")
    two.add_argument("--keep-answers", default="", help="file for the fresh answers")
    two.add_argument("--train-seconds", type=float, default=300)
    two.add_argument("--total-seconds", type=float, default=0, help="training ends by then, counted from the start")
    two.add_argument("--every", type=float, default=60, help="seconds between evaluations")
    two.add_argument("--batch", type=int, default=64, help="rows of a training batch")
    two.add_argument("--rate", type=float, default=1e-3)
    two.add_argument("--unroll", type=int, default=7)
    two.add_argument("--decay", type=float, default=0.8, help="weight of step j is decay^j")
    two.add_argument("--keep-gb", type=float, default=80, help="device memory for kept target features")
    two.add_argument("--limit", type=int, default=0, help="prompts of each set at most (a trial)")
    two.add_argument("--max-steps", type=int, default=0)
    three = commands.add_parser("export")
    three.add_argument("--weights", required=True, help="--out folder of a run")
    three.add_argument("--target", default="smollm2")
    three.add_argument("--out", required=True)
    three.add_argument(
        "--vocab", type=int, help="another vocabulary for a borrowed head: the most frequent answer tokens"
    )
    three.add_argument("--float32", action="store_true", help="leave out the rounding to int8")
    return parser.parse_args()


def main() -> None:
    args = parse()
    {"prepare": prepare, "train": train, "export": export}[args.command](args)


if __name__ == "__main__":
    main()

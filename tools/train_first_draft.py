"""Train the built-in draft `smollm2-eagle3`: the target answers the prompts, the draft learns from the answers.

    prepare   prompts (JSONL, gzip) -> one file of token ids, chat template applied         (a CPU, seconds)
    train     answers sampled from the target, draft trained on them, checkpoints written   (an accelerator, minutes)
    export    a checkpoint -> the shipped folder: int8 weights, config.json                 (a CPU, seconds)

`train` works by the clock: it samples for --sample-seconds, trains for --train-seconds, and the learning rate
follows the share of the time that is gone. It can go on from its own checkpoint and answers (--resume).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from sample_answers import NEW_TOKENS, SIZES, Sampler, load_documents, save_documents, waves

from eaglejax.checkpoint.draft_loader import read_draft
from eaglejax.checkpoint.target_loader import load_target
from eaglejax.load_report import LoadReport
from eaglejax.models.config import DenseConfig, DraftConfig, GQAConfig, LayerConfig
from eaglejax.training import trainer
from eaglejax.training.data import Document, draft_vocabulary, pack
from eaglejax.training.export import write_draft
from eaglejax.training.ttt import Text
from eaglejax.training.weights import first_weights, trained_weights

ROW = SIZES[-1] + NEW_TOKENS


def prepare(args) -> None:
    """Token ids of all prompts: train, held out (every 150th), and evaluation sets by name."""
    from eaglejax.checkpoint.reader import open_checkpoint
    from eaglejax.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(open_checkpoint(args.target))
    encode = lambda text: np.asarray(tokenizer.apply_chat_template([{"role": "user", "content": text}]), np.uint16)
    sets: dict[str, list[np.ndarray]] = {"train": [], "heldout": []}
    for file in sorted(Path(args.prompts).glob("*.jsonl.gz")):
        for number, line in enumerate(gzip.open(file, "rt", encoding="utf-8")):
            sets["heldout" if number % 150 == 0 else "train"].append(encode(json.loads(line)["prompt"]))
    for name in args.evaluation:
        lines = Path(name).read_text(encoding="utf-8").splitlines()
        sets[Path(name).stem] = [encode(json.loads(line)["turns"][0]) for line in lines]
    arrays = {}
    for name, prompts in sets.items():
        arrays[f"{name}.ids"] = np.concatenate(prompts)
        arrays[f"{name}.lengths"] = np.asarray([len(p) for p in prompts], np.int32)
        print(f"{name}: {len(prompts)} prompts, {len(arrays[f'{name}.ids'])} tokens", flush=True)
    np.savez_compressed(args.out, **arrays)


def read_prompts(file: Path) -> dict[str, list[np.ndarray]]:
    """Set name -> prompts that fit."""
    stored = np.load(file)
    sets = {}
    for name in [key[:-4] for key in stored.files if key.endswith(".ids")]:
        lengths = stored[f"{name}.lengths"]
        prompts = np.split(stored[f"{name}.ids"].astype(np.int32), np.cumsum(lengths)[:-1])
        sets[name] = [p for p in prompts if len(p) <= SIZES[-1]]
    return sets


def first_tokens(document: Document, count: int) -> Document:
    """The document cut to its answer's first tokens: a greedy answer's beginning is the answer of a smaller budget."""
    end = document.answer + count
    return Document(document.tokens[:end], document.answer, document.ended and len(document.tokens) <= end)


def boundaries(target_config) -> tuple[int, ...]:
    """EAGLE-3's usual captures."""
    layers = target_config.num_layers
    return (2, layers // 2, layers - 3)


def draft_config(target_config, vocabulary: int, width: int) -> DraftConfig:
    """The shape of the built-in draft: one layer as wide as the target, its attention shape, a cut vocabulary."""
    attention = target_config.layers[0].attention
    assert isinstance(attention, GQAConfig)
    return DraftConfig(
        vocab_size=target_config.vocab_size,
        draft_vocab_size=vocabulary,
        hidden_size=target_config.hidden_size,
        target_hidden_size=target_config.hidden_size,
        boundaries=boundaries(target_config),
        layers=(LayerConfig(attention, DenseConfig(width)),),
        norm_eps=target_config.norm_eps,
        max_position=target_config.max_position,
    )


class Run:
    """One training run: data on the device, state, log."""

    def __init__(self, args):
        self.args, self.began = args, time.time()
        self.out, self.work = Path(args.out), Path(args.work)
        self.out.mkdir(parents=True, exist_ok=True)
        self.work.mkdir(parents=True, exist_ok=True)
        report = LoadReport()
        self.target = load_target(args.target, dtype=args.dtype, report=report)
        self.log(str(report))
        self.prompts = read_prompts(Path(args.prompts))
        if args.limit:
            self.prompts = {name: prompts[: args.limit] for name, prompts in self.prompts.items()}
        self.sampler = Sampler(self.target, args.places, args.seed)
        self.features: dict[int, trainer.TargetFeatures] = {}

    def log(self, line: str) -> None:
        print(f"[{time.time() - self.began:7.1f}] {line}", flush=True)

    def sample(self) -> list[Document]:
        """Training answers for --sample-seconds, or those of an earlier run."""
        stored = self.work / "answers.npz"
        if self.args.resume and stored.exists():
            return load_documents(stored)
        rng = np.random.default_rng(self.args.seed)
        documents: list[Document] = []
        began = time.time()
        for size, prompts, heat in waves(self.prompts["train"], self.sampler, self.args.temperature, rng):
            if time.time() - began > self.args.sample_seconds:
                break
            at = time.time()
            documents += self.sampler.answer(prompts, size, heat)
            new = sum(len(d.tokens) - d.answer for d in documents)
            self.log(
                f"sampled {len(prompts)} x {size}: {time.time() - at:.1f} s; {len(documents)} answers, {new} tokens, "
                f"{new / (time.time() - began):.0f} tokens/s"
            )
        save_documents(stored, documents)
        return documents

    def evaluation(self) -> dict[str, Text]:
        """Greedy answers of the target to the held-out prompts and the evaluation sets, packed."""
        names = [name for name in self.prompts if name != "train"]
        everything = [(name, prompt) for name in names for prompt in self.prompts[name]]
        answers: dict[str, list[Document]] = {name: [] for name in names}
        for low, size in zip((0, *SIZES), SIZES, strict=False):
            chosen = [pair for pair in everything if low < len(pair[1]) <= size]
            room = self.sampler.batch_size(size)
            for start in range(0, len(chosen), room):
                part = chosen[start : start + room]
                documents = self.sampler.answer([prompt for _, prompt in part], size, np.zeros(len(part), np.float32))
                for (name, _), document in zip(part, documents, strict=True):
                    answers[name].append(document)
        return {name: pack([first_tokens(d, 128) for d in documents], ROW) for name, documents in answers.items()}

    def batch(self, text: Text, rows: np.ndarray) -> Text:
        """Rows of a text, on the device; short of a full batch the first row is repeated without loss."""
        missing = self.args.batch - len(rows)
        parts = {}
        for name in ("tokens", "positions", "segments", "loss"):
            part = np.asarray(getattr(text, name))[np.concatenate([rows, np.zeros(missing, int)])]
            if name == "loss" and missing:
                part[len(rows) :] = False
            parts[name] = jnp.asarray(part)
        return Text(**parts)

    def target_features(self, key: int, text: Text) -> trainer.TargetFeatures:
        """Features of a batch: kept on the device while they fit, computed anew otherwise."""
        if key in self.features:
            return self.features[key]
        found = trainer.target_features(self.target, text, boundaries(self.target.config))
        used = (len(self.features) + 1) * (found.captured.nbytes + found.last.nbytes)
        if key >= 0 and used < self.args.keep_gb * 1e9:
            self.features[key] = found
        return found

    def evaluate(self, state, frozen, config, settings, texts: dict[str, Text]) -> dict[str, tuple[float, float]]:
        """Set -> tau of the chains of 3 and of 7, mean over documents."""
        found = {}
        for name, text in texts.items():
            drafted = []
            rows = np.arange(text.tokens.shape[0])
            for start in range(0, len(rows), self.args.batch):
                part = self.batch(text, rows[start : start + self.args.batch])
                features = self.target_features(-1, part)
                got = trainer.drafted_tokens(state.weights, frozen, part, features, config=config, settings=settings)
                drafted.append(np.asarray(got)[:, : len(rows) - start])
            whole = np.concatenate(drafted, axis=1)
            found[name] = tuple(float(trainer.chain_acceptance(text, whole, s)[0].mean()) for s in (3, 7))
        return found

    def save(self, state, config, target_ids) -> None:
        """The weights for the way back (bfloat16, and whole in the work folder) with all that export needs."""
        facts = {"target_ids": np.asarray(target_ids), "width": np.asarray(config.layers[0].mlp.width)}
        exact = {path: np.asarray(value) for path, value in state.weights.items()}
        np.savez(self.work / "weights.npz", **exact, **facts)
        small = {path: value.astype(ml_dtypes.bfloat16).view(np.uint16) for path, value in exact.items()}
        partial = self.out / "weights_bf16.npz.part.npz"
        np.savez(partial, **small, **facts)
        partial.rename(self.out / "weights_bf16.npz")

    def train(self) -> None:
        args = self.args
        texts = self.evaluation()
        rows = ", ".join(f"{name} {text.tokens.shape[0]} rows" for name, text in texts.items())
        self.log(f"evaluation sets: {rows}")
        documents = self.sample()
        stored = self.work / "weights.npz"
        again = args.resume and stored.exists()
        before = self.earlier_draft() if args.start else None
        if again:
            target_ids = np.load(stored)["target_ids"]
        elif before is not None:
            target_ids = np.asarray(before.target_ids[...])
        else:
            target_ids, covered = draft_vocabulary(documents, args.vocabulary, self.target.config.vocab_size)
            self.statistics(documents, covered)
        config = draft_config(self.target.config, len(target_ids), args.width)
        text = pack(documents, ROW)
        filled = float((np.asarray(text.segments) >= 0).mean())
        self.log(f"{len(documents)} documents in {text.tokens.shape[0]} rows of {ROW}, {filled:.1%} filled")
        head = trainer.target_head(self.target)
        frozen = trainer.Frozen(self.target.embedding.weight[...], head, jnp.asarray(target_ids))
        settings = trainer.TrainSettings(rate=args.rate, unroll=args.unroll, compute_dtype=args.dtype)
        rng = np.random.default_rng(args.seed + 1)
        rows = rng.permutation(text.tokens.shape[0])
        batches = [rows[i : i + args.batch] for i in range(0, len(rows) - args.batch + 1, args.batch)] or [rows]
        if again:
            state = trainer.start(read_weights(stored), settings)
        elif before is not None:
            state = trainer.start({path: np.asarray(x) for path, x in trained_weights(before).items()}, settings)
        else:
            state = trainer.start(self.initial(config, head, target_ids, self.batch(text, batches[0])), settings)
        self.loop(state, frozen, config, settings, text, batches, texts, rng, target_ids)

    def earlier_draft(self):
        """The draft of an exported folder, to go on from."""
        return read_draft(
            self.args.start,
            dtype="float32",
            target=None,
            target_embedding=np.asarray(self.target.embedding.weight[...].astype(jnp.float32)),
            capture="auto",
            report=LoadReport(),
        ).draft

    def initial(self, config, head, target_ids, text: Text) -> dict[str, np.ndarray]:
        captured = np.asarray(
            trainer.target_features(self.target, text, boundaries(self.target.config)).captured.astype(jnp.float32)
        )
        real = captured[np.asarray(text.segments) >= 0].reshape(-1, config.captures, config.target_hidden_size)
        scales = [float(s) for s in np.median(np.sqrt((real**2).mean(-1)), axis=0)]
        self.log(f"root mean square of the captures: {scales}")
        rows = np.asarray(head.astype(jnp.float32))[target_ids]
        return first_weights(
            config, rows, np.asarray(self.target.norm.scale[...].astype(jnp.float32)), scales, self.args.seed
        )

    def loop(self, state, frozen, config, settings, text, batches, texts, rng, target_ids) -> None:
        """Optimiser steps until the time is over; evaluation and a checkpoint every --every seconds, and at the end."""
        args, began, told, step, epoch = self.args, time.time(), time.time(), 0, 0
        curve = (self.out / "curve.csv").open("a", newline="", encoding="utf-8")
        writer = csv.writer(curve)
        order: list[int] = []
        while True:
            gone = (time.time() - began) / args.train_seconds
            if not order:
                order, epoch = list(rng.permutation(len(batches))), epoch + 1
            key = int(order.pop())
            part = self.batch(text, batches[key])
            features = self.target_features(key, part)
            state, figures = trainer.train_step(
                state, frozen, part, features, jnp.float32(settings.rate_at(gone)), config=config, settings=settings
            )
            step += 1
            if step == 1:
                jax.block_until_ready(state.weights)
                self.log("first step done")
                began = time.time()
            if step % 20 == 0:
                acc = [round(float(a), 4) for a in figures.accuracies]
                row = [
                    step,
                    epoch,
                    round(time.time() - began, 1),
                    round(float(figures.loss), 4),
                    round(float(figures.gradient_norm), 3),
                    *acc,
                ]
                writer.writerow([*row, "", "", ""])
                if step % 200 == 0:
                    self.log(
                        f"step {step} epoch {epoch} loss {row[3]} norm {row[4]} acc {acc} "
                        f"kept {len(self.features)}/{len(batches)}"
                    )
            over = gone >= 1 or (args.max_steps and step >= args.max_steps)
            if over or time.time() - told > args.every:
                self.save(state, config, target_ids)
                taus = self.evaluate(state, frozen, config, settings, texts)
                for name, (three, seven) in taus.items():
                    writer.writerow(
                        [
                            step,
                            epoch,
                            round(time.time() - began, 1),
                            "",
                            "",
                            *[""] * settings.unroll,
                            name,
                            three,
                            seven,
                        ]
                    )
                curve.flush()
                self.log(
                    f"step {step} epoch {epoch} tau(3,1,4)/(7,1,8): "
                    + ", ".join(f"{n} {a:.3f}/{b:.3f}" for n, (a, b) in taus.items())
                )
                told = time.time()
            if over:
                return

    def statistics(self, documents: list[Document], covered: float) -> None:
        answers = np.asarray([len(d.tokens) - d.answer for d in documents])
        counts = np.zeros(self.target.config.vocab_size, np.int64)
        for d in documents:
            counts += np.bincount(d.tokens[d.answer :], minlength=len(counts))
        share = np.sort(counts)[::-1].cumsum() / counts.sum()
        facts = {
            "answers": len(documents),
            "answer_tokens": int(answers.sum()),
            "mean_length": float(answers.mean()),
            "ended": float(np.mean([d.ended for d in documents])),
            "covered": covered,
            "coverage": {
                str(w): float(share[min(w, len(share)) - 1]) for w in (2048, 3072, 4096, 5248, 6144, 8192, 12288, 16384)
            },
        }
        (self.out / "answers.json").write_text(json.dumps(facts, indent=1))
        self.log(json.dumps(facts))


def read_weights(file: Path) -> dict[str, np.ndarray]:
    """Parameter path -> float32 values of a checkpoint, whether whole or in bfloat16."""
    stored = np.load(file)
    widen = lambda x: x.view(ml_dtypes.bfloat16).astype(np.float32) if x.dtype == np.uint16 else x
    return {name: widen(stored[name]) for name in stored.files if "." in name}


def export(args) -> None:
    """The shipped folder from a checkpoint."""
    stored, weights = np.load(args.weights), read_weights(args.weights)
    target = load_target(args.target, dtype="float32", report=LoadReport())
    config = draft_config(target.config, len(stored["target_ids"]), int(stored["width"]))
    write_draft(Path(args.out), config, weights, stored["target_ids"], int8=not args.float32)
    for file in sorted(Path(args.out).iterdir()):
        print(f"{file.name}: {file.stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prepare")
    one.add_argument("--prompts", required=True, help="folder of *.jsonl.gz")
    one.add_argument("--evaluation", nargs="*", default=[], help="JSONL files with `turns`, for evaluation only")
    one.add_argument("--target", required=True)
    one.add_argument("--out", required=True)
    two = commands.add_parser("train")
    for name, default in (("target", None), ("prompts", None), ("out", None), ("work", None)):
        two.add_argument(f"--{name}", required=True, default=default)
    two.add_argument("--dtype", default="bfloat16")
    two.add_argument("--seed", type=int, default=1)
    two.add_argument("--places", type=int, default=1_080_000, help="cache places of one sampling batch")
    two.add_argument("--temperature", type=float, default=0.8)
    two.add_argument("--sample-seconds", type=float, default=120)
    two.add_argument("--train-seconds", type=float, default=300)
    two.add_argument("--every", type=float, default=60)
    two.add_argument("--batch", type=int, default=64, help="rows of a training batch")
    two.add_argument("--rate", type=float, default=1e-3)
    two.add_argument("--unroll", type=int, default=7)
    two.add_argument("--vocabulary", type=int, default=5248)
    two.add_argument("--width", type=int, default=768, help="width of the draft's MLP")
    two.add_argument("--keep-gb", type=float, default=90, help="device memory for kept target features")
    two.add_argument("--limit", type=int, default=0, help="prompts of each set at most (a trial)")
    two.add_argument("--max-steps", type=int, default=0)
    two.add_argument("--start", default="", help="folder of an exported draft to go on from")
    two.add_argument("--resume", action="store_true")
    three = commands.add_parser("export")
    three.add_argument("--weights", required=True)
    three.add_argument("--target", required=True)
    three.add_argument("--out", required=True)
    three.add_argument("--float32", action="store_true", help="leave out the rounding to int8")
    args = parser.parse_args()
    if args.command == "train":
        Run(args).train()
    else:
        {"prepare": prepare, "export": export}[args.command](args)


if __name__ == "__main__":
    main()

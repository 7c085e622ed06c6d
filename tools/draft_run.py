"""One training run by the clock: answers sampled, a draft trained on them, the best by held-out tau kept."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from prompt_sets import read_prompts
from sample_answers import NEW_TOKENS, SIZES, Sampler, load_documents, save_documents, waves
from weight_parts import load_parts, save_parts

from eaglejax.checkpoint.draft_loader import read_draft
from eaglejax.checkpoint.source import resolve
from eaglejax.checkpoint.target_loader import load_target
from eaglejax.load_report import LoadReport
from eaglejax.models.config import DenseConfig, DraftConfig
from eaglejax.training import trainer
from eaglejax.training.data import Document, batch_of, draft_vocabulary, pack
from eaglejax.training.export import file_bytes, write_draft
from eaglejax.training.losses import OBJECTIVES
from eaglejax.training.shape import draft_shape, usual_boundaries
from eaglejax.training.ttt import Text
from eaglejax.training.weights import first_weights, trained_weights

ROW = SIZES[-1] + NEW_TOKENS
LARGEST_EXPORT = 7_000_000  # bytes, of the whole folder; a kilobyte or two is config.json
HELD_OUT = "heldout"
FIRST = {"head": "own", "mlp": 768, "vocab": 5248}  # the shape of the first draft


def first_tokens(document: Document, count: int) -> Document:
    """The document cut to its answer's first tokens: a greedy answer's beginning is the answer of a smaller budget."""
    end = document.answer + count
    return Document(document.tokens[:end], document.answer, document.ended and len(document.tokens) <= end)


class Run:
    """Data on the device, state, log."""

    def __init__(self, args):
        self.args, self.began = args, time.time()
        self.out = Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        report = LoadReport()
        self.target = load_target(resolve(args.target).path, dtype=args.dtype, report=report)
        self.log(str(report))
        self.before = self.earlier(Path(args.start)) if args.start else None
        self.captures = self.wanted_captures()
        self.shape = self.wanted_shape()
        self.check_size()
        self.prompts = read_prompts(Path(args.prompts), SIZES[-1], args.limit)
        self.sampler = Sampler(self.target, args.places, args.seed)
        self.features: dict[int, trainer.TargetFeatures] = {}
        self.counts = np.zeros(self.target.config.vocab_size, np.int32)  # of every id in the training answers

    def log(self, line: str) -> None:
        print(f"[{time.time() - self.began:7.1f}] {line}", flush=True)

    def earlier(self, folder: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Weights and facts that the run goes on from: an earlier run's folder, or a draft's."""
        if not (folder / "config.json").exists():
            return load_parts(folder)
        draft = read_draft(folder, dtype="float32", target=self.target, report=LoadReport()).draft
        config = draft.config
        mlp = config.layers[0].mlp
        assert isinstance(mlp, DenseConfig)
        facts = {"target_ids": np.asarray(draft.target_ids[...]), "mlp": np.asarray(mlp.width)}
        facts |= {
            "boundaries": np.asarray(config.boundaries),
            "head": np.asarray("own" if config.own_head else "target"),
        }
        return {path: np.asarray(value) for path, value in trained_weights(draft).items()}, facts

    def wanted_shape(self) -> dict:
        """Head, MLP width and vocabulary: those of the flags, or of the weights that the run goes on from."""
        given = {name: getattr(self.args, name) for name in FIRST}
        if self.before is None:
            return {name: FIRST[name] if value is None else value for name, value in given.items()}
        facts = self.before[1]
        shape = {"head": str(facts["head"]), "mlp": int(facts["mlp"]), "vocab": len(facts["target_ids"])}
        if given["vocab"] is not None and shape["head"] == "target":
            shape["vocab"] = given["vocab"]  # a borrowed head has rows for any id
        for name, value in given.items():
            if value is not None and value != shape[name]:
                raise SystemExit(f"--{name}={value}, but the weights in {self.args.start} have {shape[name]}")
        return shape

    def wanted_captures(self) -> tuple[int, ...]:
        """Boundaries of the flag or of the weights that the run goes on from, else the usual ones."""
        given = tuple(int(b) for b in self.args.boundaries.split(",")) if self.args.boundaries else None
        usual = usual_boundaries(self.target.config)
        if self.before is None:
            return given or usual
        facts = self.before[1]
        stored = tuple(facts["boundaries"].tolist()) if "boundaries" in facts else usual
        if given not in (None, stored):
            raise SystemExit(f"--boundaries {given}, but the weights in {self.args.start} have {stored}")
        return stored

    def config(self) -> DraftConfig:
        shape, own = self.shape, self.shape["head"] == "own"
        return draft_shape(self.target.config, shape["vocab"], shape["mlp"], own_head=own, boundaries=self.captures)

    def check_size(self) -> None:
        size = file_bytes(self.config(), int8=True)
        self.log(f"draft: {self.shape}; export in int8: {size / 1e6:.3f} MB of tensors")
        if size > LARGEST_EXPORT:
            raise SystemExit(f"the export would take {size} bytes, more than {LARGEST_EXPORT}: choose a smaller shape")

    def sample(self) -> list[Document]:
        """Training answers: those of --answers, and fresh ones for --sample-seconds."""
        rng = np.random.default_rng(self.args.seed)
        stored = [document for file in self.args.answers for document in load_documents(Path(file))]
        stored = stored[: self.args.most_answers or None]
        if stored:
            self.log(f"{len(stored)} answers of earlier runs")
        fresh = self.sample_fresh(rng) if self.args.sample_seconds > 0 else []
        if self.args.keep_answers:
            save_documents(Path(self.args.keep_answers), fresh)
        return stored + fresh

    def sample_fresh(self, rng) -> list[Document]:
        documents: list[Document] = []
        began = time.time()
        for size, prompts, heat in waves(self.prompts["train"], self.sampler, self.args.temperature, rng):
            if documents and time.time() - began > self.args.sample_seconds:
                break
            at = time.time()
            documents += self.sampler.answer(prompts, size, heat)
            new = sum(len(d.tokens) - d.answer for d in documents)
            self.log(
                f"sampled {len(prompts)} x {size}: {time.time() - at:.1f} s; {len(documents)} answers, {new} tokens, "
                f"{new / (time.time() - began):.0f} tokens/s"
            )
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

    def target_features(self, key: int, text: Text) -> trainer.TargetFeatures:
        """Features of a batch: kept on the device while they fit, computed anew otherwise."""
        if key in self.features:
            return self.features[key]
        found = trainer.target_features(self.target, text, self.captures)
        used = (len(self.features) + 1) * (found.captured.nbytes + found.last.nbytes)
        if key >= 0 and used < self.args.keep_gb * 1e9:
            self.features[key] = found
        return found

    def evaluate(self, weights, frozen, config, settings, texts: dict[str, Text]) -> dict[str, tuple[float, float]]:
        """Set -> tau of the chains of 3 and of 7, mean over documents; whatever the unroll of the training."""
        settings, found = replace(settings, unroll=7), {}
        for name, text in texts.items():
            drafted = []
            rows = np.arange(text.tokens.shape[0])
            for start in range(0, len(rows), self.args.batch):
                part = batch_of(text, rows[start : start + self.args.batch], self.args.batch)
                features = self.target_features(-1, part)
                got = trainer.drafted_tokens(weights, frozen, part, features, config=config, settings=settings)
                drafted.append(np.asarray(got)[:, : len(rows) - start])
            whole = np.concatenate(drafted, axis=1)
            found[name] = tuple(float(trainer.chain_acceptance(text, whole, s)[0].mean()) for s in (3, 7))
        return found

    def train(self) -> None:
        args, config = self.args, self.config()
        texts = self.evaluation()
        rows = ", ".join(f"{name} {text.tokens.shape[0]} rows" for name, text in texts.items())
        self.log(f"evaluation sets: {rows}")
        documents = self.sample()
        if self.before is None or self.shape["vocab"] != len(self.before[1]["target_ids"]):
            target_ids, _ = draft_vocabulary(documents, self.shape["vocab"], self.target.config.vocab_size)
        else:
            target_ids = self.before[1]["target_ids"]
        self.statistics(documents, target_ids)
        text = pack(documents, ROW)
        filled = float((np.asarray(text.segments) >= 0).mean())
        self.log(f"{len(documents)} documents in {text.tokens.shape[0]} rows of {ROW}, {filled:.1%} filled")
        head = trainer.target_head(self.target)
        frozen = trainer.Frozen(self.target.embedding.weight[...], head, jnp.asarray(target_ids))
        settings = trainer.TrainSettings(
            rate=args.rate,
            unroll=args.unroll,
            decay=args.decay,
            compute_dtype=args.dtype,
            objective=args.objective,
            optimiser=args.optimiser,
            int8=args.int8,
        )
        rng = np.random.default_rng(args.seed + 1)
        rows = rng.permutation(text.tokens.shape[0])
        batches = [rows[i : i + args.batch] for i in range(0, len(rows) - args.batch + 1, args.batch)] or [rows]
        first = self.first(config, head, target_ids, batch_of(text, batches[0], args.batch))
        go = lambda first, settings, seconds: self.loop(
            trainer.start(first, settings), frozen, config, settings, text, batches, texts, rng, seconds
        )
        if args.trial_seconds:
            trials, what = {}, args.trial_of
            for name in {"optimiser": trainer.OPTIMISERS, "objective": OBJECTIVES}[what]:
                self.log(f"trial of {name}")
                self.features.clear()  # each computes its own
                trials[name] = go(first, replace(settings, **{what: name}), lambda: args.trial_seconds)
            name = max(trials, key=lambda one: trials[one][0])
            self.log(
                f"trials: {', '.join(f'{one} {tau:.3f}' for one, (tau, _) in trials.items())}; goes on with {name}"
            )
            settings, first = replace(settings, **{what: name}), trials[name][1]
        _, best = go(first, settings, self.seconds)
        self.export(best, config, frozen, settings, texts)

    def first(self, config, head, target_ids, text: Text) -> dict[str, np.ndarray]:
        """Weights to begin with: an earlier run's, or fresh ones made from the target's head and captures."""
        if self.before is not None:
            return self.before[0]
        captured = np.asarray(trainer.target_features(self.target, text, self.captures).captured.astype(jnp.float32))
        real = captured[np.asarray(text.segments) >= 0].reshape(-1, config.captures, config.target_hidden_size)
        scales = [float(s) for s in np.median(np.sqrt((real**2).mean(-1)), axis=0)]
        self.log(f"root mean square of the captures: {scales}")
        rows = np.asarray(head.astype(jnp.float32))[target_ids]
        norm = np.asarray(self.target.norm.scale[...].astype(jnp.float32))
        return first_weights(config, rows, norm, scales, self.args.seed)

    def seconds(self) -> float:
        """Training time: --train-seconds, or less where --total-seconds ends the run before."""
        left = self.args.total_seconds - (time.time() - self.began) if self.args.total_seconds else np.inf
        return max(1.0, min(self.args.train_seconds, left))

    def loop(
        self, state, frozen, config, settings, text, batches, texts, rng, allowed: Callable[[], float]
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Steps until the `allowed` seconds are over, evaluated every --every seconds and at the end. Returns the best
        held-out tau and its weights."""
        args, step, epoch, best = self.args, 0, 0, (-1.0, {})
        began, told, seconds = time.time(), time.time(), allowed()
        curve = (self.out / "curve.csv").open("a", newline="", encoding="utf-8")
        writer = csv.writer(curve)
        order: list[int] = []
        while True:
            gone = max((time.time() - began) / seconds, step / args.max_steps if args.max_steps else 0)
            if not order:
                order, epoch = list(rng.permutation(len(batches))), epoch + 1
            key = int(order.pop())
            part = batch_of(text, batches[key], args.batch)
            features = self.target_features(key, part)
            state, figures = trainer.train_step(
                state, frozen, part, features, jnp.float32(settings.rate_at(gone)), config=config, settings=settings
            )
            step += 1
            if step == 1:
                jax.block_until_ready(state.weights)
                began, told, seconds = time.time(), time.time(), allowed()
                self.log(f"first step done; training for {seconds:.0f} s")
            if step % 20 == 0:
                seen = [step, epoch, round(time.time() - began, 1), round(float(figures.loss), 4)]
                seen += [round(float(figures.gradient_norm), 3), *(round(float(a), 4) for a in figures.accuracies)]
                writer.writerow(["train", *seen])
                if step % 200 == 0:
                    self.log(f"step {step} epoch {epoch} loss {seen[3]} norm {seen[4]} acc {seen[5:]}")
            over = gone >= 1 or bool(args.max_steps and step >= args.max_steps)
            if over or time.time() - told > args.every:
                taus = self.evaluate(state.weights, frozen, config, settings, texts)
                writer.writerows(["tau", step, name, *pair] for name, pair in taus.items())
                curve.flush()
                better = taus[HELD_OUT][1] > best[0]
                if better:
                    best = (taus[HELD_OUT][1], {path: np.asarray(value) for path, value in state.weights.items()})
                    self.save(best[1], frozen.target_ids, step)
                self.log(f"step {step} epoch {epoch} {said(taus)}{' (best so far, kept)' if better else ''}")
                told = time.time()
            if over:
                curve.close()
                return best

    def save(self, weights, target_ids, step: int) -> None:
        facts = {"target_ids": np.asarray(target_ids), "mlp": np.asarray(self.shape["mlp"])}
        facts |= {"boundaries": np.asarray(self.captures), "counts": self.counts}
        facts |= {"head": np.asarray(self.shape["head"]), "step": np.asarray(step)}
        save_parts(self.out, weights, facts)

    def export(self, weights, config, frozen, settings, texts) -> None:
        """The int8 folder of the best weights, and its tau as it is read back."""
        folder = self.out / "draft"
        write_draft(folder, config, weights, np.asarray(frozen.target_ids), int8=True)
        say_size(folder)
        draft = read_draft(folder, dtype="float32", target=self.target, report=LoadReport()).draft
        self.log(f"int8: {said(self.evaluate(trained_weights(draft), frozen, config, settings, texts))}")

    def statistics(self, documents: list[Document], target_ids: np.ndarray) -> None:
        """answers.json: how many answers and tokens, and what share of them a vocabulary of some sizes covers."""
        answers = np.asarray([len(d.tokens) - d.answer for d in documents])
        counts = np.zeros(self.target.config.vocab_size, np.int64)
        for d in documents:
            counts += np.bincount(d.tokens[d.answer :], minlength=len(counts))
        self.counts = counts.astype(np.int32)
        share = np.sort(counts)[::-1].cumsum() / counts.sum()
        sizes = (2048, 4096, 5248, 8192, 12288, 16384, 24576)
        facts = {
            "answers": len(documents),
            "answer_tokens": int(answers.sum()),
            "mean_length": float(answers.mean()),
            "ended": float(np.mean([d.ended for d in documents])),
            "covered": float(counts[target_ids].sum() / counts.sum()),
            "coverage": {str(w): float(share[min(w, len(share)) - 1]) for w in sizes},
        }
        (self.out / "answers.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
        self.log(json.dumps(facts))


def said(taus: dict[str, tuple[float, float]]) -> str:
    """Taus in a line."""
    return "tau (3,1,4)/(7,1,8): " + ", ".join(f"{name} {a:.3f}/{b:.3f}" for name, (a, b) in taus.items())


def say_size(folder: Path) -> None:
    """Prints what an exported folder weighs; stops where it is more than may be shipped."""
    files = sorted(folder.iterdir())
    total = sum(file.stat().st_size for file in files)
    print(", ".join(f"{file.name} {file.stat().st_size}" for file in files) + f": {total} bytes of {LARGEST_EXPORT}")
    if total > LARGEST_EXPORT:
        raise SystemExit(f"{folder}: {total} bytes, more than the {LARGEST_EXPORT} that may be shipped")

"""A training run in a folder: steps, figures, evaluations by the serving engine, checkpoints; exact to resume."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from eaglejax.checkpoint.durable import swap_folder
from eaglejax.engine import EagleJaxEngine
from eaglejax.errors import ConfigError
from eaglejax.loading import Pair, load_pair
from eaglejax.models.capture import CaptureReading
from eaglejax.models.draft import Draft
from eaglejax.sharding.mesh import DATA, build_mesh
from eaglejax.training import trainer
from eaglejax.training.checkpoints import BEST, LAST, Checkpoints
from eaglejax.training.curves import EVALUATION, PICTURE, TRAINING, Curves
from eaglejax.training.data import batch_of, batch_rows
from eaglejax.training.evaluate import Acceptance, Evaluator
from eaglejax.training.export import write_draft
from eaglejax.training.identity import check_same_run
from eaglejax.training.int8 import as_exported
from eaglejax.training.programs import TargetPass, TrainStep, mesh_line, put_text, whole
from eaglejax.training.run_folder import ANSWERS, EXPORT, run_facts, run_folder, writing
from eaglejax.training.run_parts import (
    Material,
    Progress,
    Say,
    early_identity,
    gather,
    held_out_digest,
    read_held_out,
    refuse_long,
)
from eaglejax.training.starts import Start, begin, described, plan_draft, vocabulary_digest
from eaglejax.training.train_config import TrainConfig
from eaglejax.training.weights import rebuild


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `reason` "steps" (all taken) or "patience" (acceptance no longer rose)."""

    step: int
    reason: str
    best_step: int
    best_tau: float
    draft: Path


@dataclass
class _Memory:
    """What a checkpoint remembers beside the arrays."""

    best_step: int = -1
    best_tau: float = -math.inf
    stale: int = 0  # evaluations since the best

    def facts(self) -> dict[str, Any]:
        return {"best_step": self.best_step, "best_tau": self.best_tau if self.best_step >= 0 else None} | {
            "stale": self.stale
        }


@contextmanager
def _silent(what: str, total: int) -> Iterator[Any]:
    yield lambda n: None


def train(config: TrainConfig, say: Say = lambda line: None, progress: Progress = _silent) -> Outcome:
    """Run, or go on with, a training run.

    Arguments:
        config: with the folder of the run, `out`; one that holds checkpoints of the same run is gone on with.
        say: gets a line now and then. progress: makes a bar for what takes long.

    Raises ConfigError, PromptError and CheckpointError for what is wrong with text, draft, folder, mesh or settings
    before the first step; CheckpointError where a checkpoint cannot be written; ConfigError where the loss is no number.
    """
    refuse_processes()
    mesh = build_mesh(config.mesh)
    out = Path(config.out)
    with run_folder(out, (TRAINING, EVALUATION, PICTURE, ANSWERS), (LAST, BEST, EXPORT)):
        pair = load_pair(config.model, None, capture="auto", dtype=config.dtype, mesh=mesh)
        refuse_long(config, pair)
        plan = plan_draft(config, pair)
        aside = read_held_out(config, pair, say)
        identity = early_identity(config, pair, plan, aside)
        begun = run_facts(out, (LAST, BEST))
        if begun is not None:  # before the answers, which may take hours
            check_same_run(begun[0].get("run", {}), identity, begun[1], identity)
        material = gather(config, pair, aside, out, say, progress)
        start = begin(config, pair, plan, material.documents, material.text)
        identity |= {
            "text": material.digest,
            "held_out_prompts": held_out_digest(material.held_out),
            "vocabulary": vocabulary_digest(start.frozen.target_ids),
        }
        if begun is not None:  # before anything is compiled
            check_same_run(begun[0].get("run", {}), identity, begun[1])
        run = _Run(config, pair, material, start, identity, out, say)
        try:
            return run.steps(progress)
        finally:
            run.checkpoints.close()


def refuse_processes() -> None:
    """Raises ConfigError where several processes run together: text, answers and checkpoints would be each one's own."""
    if jax.process_count() > 1:
        raise ConfigError(
            "training runs in one process",
            where="mesh",
            found=f"{jax.process_count()} processes",
            expected="one process that has all devices of the mesh",
            fix="train on the devices of one machine; the engine serves the draft in several processes",
        )


class _Run:
    """One run: `steps` takes it to its end."""

    def __init__(
        self,
        config: TrainConfig,
        pair: Pair,
        material: Material,
        start: Start,
        identity: dict[str, Any],
        out: Path,
        say: Say,
    ):
        self.config, self.pair, self.material, self.start, self.out, self.say = config, pair, material, start, out, say
        self.identity = identity
        say(described(start, len(material.documents)))
        if pair.mesh is not None:
            say(mesh_line(config.batch, pair.mesh))
        self.settings = trainer.TrainSettings(
            unroll=config.unroll,
            decay=config.decay,
            rate=config.rate,
            warmup=config.warmup,
            clip=config.clip,
            compute_dtype=config.dtype,
            accumulate=config.accumulate,
            objective=config.objective,  # pyright: ignore[reportArgumentType]
            optimiser=config.optimiser,  # pyright: ignore[reportArgumentType]
            int8=config.int8,
        )
        self.checkpoints = Checkpoints(out, config.keep)
        self.curves = Curves(out, config.unroll, config.tree[0])
        self.memory = _Memory()
        self.evaluator: Evaluator | None = None
        self.features = TargetPass(pair.target, start.config.boundaries, pair.mesh, P(DATA))
        self.program = TrainStep(start.config, self.settings, config.batch, pair.mesh, say)

    def steps(self, progress: Progress) -> Outcome:
        config, state = self.config, whole(trainer.start(self.start.weights, self.settings), self.pair.mesh)
        state, step = self.restored(state)
        self.curves.begin(step)
        if step == 0 and config.start is not None:
            self.evaluate(state, 0)
        reason = "steps"
        with progress("steps", config.steps) as advance:
            advance(step)
            while step < config.steps and reason == "steps":
                state = self.step(state, step)
                step += 1
                advance(1)
                last = step == config.steps
                if last or step % config.evaluate_every == 0 or step % config.save_every == 0:
                    self.refuse_infinite(state, step)
                if last or step % config.evaluate_every == 0:
                    self.evaluate(state, step)
                    if 0 < config.patience <= self.memory.stale:
                        reason = "patience"
                if last or reason == "patience" or step % config.save_every == 0:
                    self.checkpoints.save(LAST, step, self.tree(state), self.facts())
        if not (self.out / EXPORT / "config.json").exists():
            self.export(self.restored_best(state))
        self.curves.draw()
        best = self.memory
        return Outcome(step, reason, best.best_step, best.best_tau, self.out / EXPORT)

    def step(self, state: trainer.TrainState, step: int) -> trainer.TrainState:
        """One optimiser step: `accumulate` batches."""
        config, text = self.config, self.material.text
        rate = self.settings.rate_at((step + 1) / config.steps)
        seen, epoch = [], 0
        for part in range(config.accumulate):
            number = step * config.accumulate + part
            rows, epoch = batch_rows(number, text.tokens.shape[0], config.batch, config.seed)
            batch = put_text(batch_of(text, rows, config.batch), self.pair.mesh, P(DATA))
            state, figures = self.program(state, self.start.frozen, batch, self.features(batch), rate)
            seen.append(figures)
        mean = lambda pick: np.mean([np.asarray(pick(one), np.float32) for one in seen], axis=0)
        loss, norm = float(mean(lambda f: f.loss)), float(mean(lambda f: f.gradient_norm))
        for what, figure in (("loss", loss), ("gradient's norm", norm)):
            if not math.isfinite(figure):
                raise self.diverged(f"the {what} is no longer a number", step + 1, figure)
        parts = [*mean(lambda f: f.losses).tolist(), *mean(lambda f: f.accuracies).tolist()]
        self.curves.add(TRAINING, [step + 1, epoch, rate, loss, norm, *parts])
        return state

    def diverged(self, what: str, step: int, found: object) -> ConfigError:
        fix = "train anew in another folder (out) with a lower rate"
        fix += f"; the best so far, of step {self.memory.best_step}, stays here" if self.memory.best_step >= 0 else ""
        return ConfigError(what, where=f"step {step}", found=found, fix=fix)

    def refuse_infinite(self, state: trainer.TrainState, step: int) -> None:
        """Weights that no run could go on from are neither evaluated nor kept."""
        if not all(bool(jnp.isfinite(value).all()) for value in state.weights.values()):
            raise self.diverged("the weights are no longer numbers", step, "infinite ones, or NaN")

    def draft(self, weights) -> Draft:
        """The module that serves these weights."""
        frozen = self.start.frozen
        parameters = frozen.parameters(self.start.config)
        if self.config.int8:
            weights = as_exported(weights)
        return rebuild(self.start.config, weights, parameters, frozen.target_ids, self.pair.dtype)

    def evaluate(self, state: trainer.TrainState, step: int) -> Acceptance:
        """Acceptance on the held-out prompts; where it is the best so far, the weights are kept and exported."""
        config, draft = self.config, self.draft(state.weights)
        if self.evaluator is None:
            captures = CaptureReading(self.start.config.boundaries, source="the run's own")
            pair = replace(self.pair, draft=draft, capture=captures)
            longest = max(map(len, self.material.held_out)) + config.evaluate_tokens
            limit = self.pair.target.config.max_position or longest
            engine = EagleJaxEngine(
                pair, speculation=config.speculation, max_len=min(longest, limit), slots=config.slots
            )
            self.evaluator = Evaluator(engine, self.material.held_out, config.speculation, config.evaluate_tokens)
        found = self.evaluator(draft)
        self.curves.add(EVALUATION, [step, found.tau, *found.unconditional, *found.conditional])
        self.curves.draw()
        better = found.tau > self.memory.best_tau
        if better:
            self.memory = _Memory(step, found.tau)
            self.checkpoints.save_best(step, self.tree(state), self.facts())
            self.export(state.weights)
        else:
            self.memory.stale += 1
        if not found.cycles:
            self.say(
                f"step {step}: no acceptance on {found.prompts} held-out prompts: each answer ended with its first token"
            )
            return found
        levels = " ".join(f"{share:.3f}" for share in found.conditional)
        self.say(
            f"step {step}: tau {found.tau:.3f} on {found.prompts} held-out prompts, accepted by level {levels}"
            + (" (best so far)" if better else "")
        )
        return found

    def export(self, weights) -> None:
        exact = {path: np.asarray(value) for path, value in weights.items()}
        frozen, config, ids = self.start.frozen, self.start.config, np.asarray(self.start.frozen.target_ids)
        own = np.asarray(frozen.embedding.astype(jnp.float32)) if config.own_embedding else None
        with writing(self.out / EXPORT), swap_folder(self.out / EXPORT) as folder:
            write_draft(folder, config, exact, ids, int8=self.config.int8, embedding=own)

    def tree(self, state: trainer.TrainState) -> dict[str, Any]:
        ids = self.start.frozen.target_ids
        return {"weights": state.weights, "moments": state.moments, "step": state.step, "target_ids": ids}

    def facts(self) -> dict[str, Any]:
        return {"run": self.identity, "settings": _plain(asdict(self.config)), **self.memory.facts()}

    def restored(self, state: trainer.TrainState) -> tuple[trainer.TrainState, int]:
        """The state of the newest checkpoint and its step, or the fresh one and 0."""
        step = self.checkpoints.latest()
        if step is None:
            return state, 0
        facts = self.checkpoints.facts(step)
        tree = self.checkpoints.state(step, self.tree(state))
        # older checkpoints say nothing of the vocabulary but this
        if not np.array_equal(tree["target_ids"], self.start.frozen.target_ids):
            raise ConfigError(
                "belongs to another run: its draft vocabulary holds other ids",
                where=self.out / LAST / str(step),
                found=f"ids of digest {vocabulary_digest(tree['target_ids'])}",
                expected=f"{vocabulary_digest(self.start.frozen.target_ids)}, as the draft to go on from has them",
                fix="give the draft that it was begun with (start), or another output folder",
            )
        best = facts["best_tau"]
        self.memory = _Memory(facts["best_step"], -math.inf if best is None else best, facts["stale"])
        self.say(f"goes on from step {step}")
        return trainer.TrainState(tree["weights"], tree["moments"], tree["step"]), step

    def restored_best(self, state: trainer.TrainState):
        """The weights of the best checkpoint, or these where none was ever better than nothing."""
        steps = self.checkpoints.steps(BEST)
        if not steps:
            return state.weights
        step = self.memory.best_step if self.memory.best_step in steps else steps[-1]
        return self.checkpoints.state(step, self.tree(state), BEST)["weights"]


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

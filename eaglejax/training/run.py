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

from eaglejax.checkpoint.durable import locked, swap_folder
from eaglejax.engine import EagleJaxEngine
from eaglejax.errors import ConfigError
from eaglejax.loading import Pair, load_pair
from eaglejax.models.capture import CaptureReading
from eaglejax.models.draft import Draft
from eaglejax.sharding.mesh import DATA, build_mesh
from eaglejax.training import trainer
from eaglejax.training.checkpoints import BEST, LAST, Checkpoints, check_same_run
from eaglejax.training.curves import EVALUATION, TRAINING, Curves
from eaglejax.training.data import batch_of, batch_rows
from eaglejax.training.evaluate import Acceptance, Evaluator
from eaglejax.training.export import write_draft
from eaglejax.training.int8 import as_exported
from eaglejax.training.programs import TargetPass, TrainStep, mesh_line, put_text, whole
from eaglejax.training.run_parts import (
    Material,
    Progress,
    Say,
    Start,
    begin,
    described,
    digest,
    gather,
    refuse_long,
    target_digest,
    tokenizer_digest,
)
from eaglejax.training.train_config import TrainConfig
from eaglejax.training.weights import rebuild

EXPORT = "draft"


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
    out.mkdir(parents=True, exist_ok=True)
    with locked(out, "training run"):
        pair = load_pair(config.model, None, capture="auto", dtype=config.dtype, mesh=mesh)
        refuse_long(config, pair)
        material = gather(config, pair, out, say, progress)
        run = _Run(config, pair, material, begin(config, pair, material), out, say)
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

    def __init__(self, config: TrainConfig, pair: Pair, material: Material, start: Start, out: Path, say: Say):
        self.config, self.pair, self.material, self.start, self.out, self.say = config, pair, material, start, out, say
        say(described(start, material))
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
        self.identity = {
            **config.binding(),
            "text": material.digest,
            "held_out_prompts": digest(*(np.asarray(prompt) for prompt in material.held_out)),
            "target": target_digest(pair),
            "tokenizer": tokenizer_digest(pair),
            "draft": repr(start.config),
        }
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
        if not math.isfinite(loss):
            raise ConfigError(
                "the loss is no longer a number",
                where=f"step {step + 1}",
                found=loss,
                fix="lower the rate; the run goes on from its last checkpoint with the settings it was begun with",
            )
        parts = [*mean(lambda f: f.losses).tolist(), *mean(lambda f: f.accuracies).tolist()]
        self.curves.add(TRAINING, [step + 1, epoch, rate, loss, norm, *parts])
        return state

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
        with swap_folder(self.out / EXPORT) as folder:
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
            if self.checkpoints.latest(BEST) is not None:
                check_same_run(
                    self.checkpoints.facts(self.checkpoints.latest(BEST) or 0, BEST)["run"], self.identity, self.out
                )
            return state, 0
        facts = self.checkpoints.facts(step)
        check_same_run(facts["run"], self.identity, self.out / LAST / str(step))
        tree = self.checkpoints.state(step, self.tree(state))
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

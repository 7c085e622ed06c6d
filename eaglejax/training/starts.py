"""The draft that a run begins with: planned before the target answers a prompt, made once the text is there."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from eaglejax.checkpoint.draft_loader import LoadedDraft, read_draft
from eaglejax.errors import ConfigError
from eaglejax.load_report import LoadReport
from eaglejax.loading import Pair
from eaglejax.models.config import DenseConfig, DraftConfig
from eaglejax.training import trainer
from eaglejax.training.data import Document, batch_of, draft_vocabulary
from eaglejax.training.gradients import check_trainable
from eaglejax.training.identity import digest
from eaglejax.training.programs import TargetPass, put_text, whole
from eaglejax.training.run_folder import trained
from eaglejax.training.shape import draft_shape
from eaglejax.training.train_config import TrainConfig
from eaglejax.training.ttt import Text
from eaglejax.training.weights import first_weights, trained_weights

USUAL_VOCABULARY = 32_000


@dataclass(frozen=True)
class Plan:
    """What is known of a draft before there is text. `earlier`: what it goes on from; None: it is a fresh one."""

    config: DraftConfig
    earlier: LoadedDraft | None = None

    @property
    def ids(self) -> Int[np.ndarray, " w"] | None:
        """The vocabulary, where an earlier draft decides it."""
        return None if self.earlier is None else np.asarray(self.earlier.draft.target_ids[...])

    def identity(self) -> dict[str, str]:
        """Of shape and earlier draft: its vocabulary, and all its own weights, an embedding of its own with them."""
        facts = {"draft": repr(self.config)}
        if self.earlier is None:
            return facts
        draft = self.earlier.draft
        arrays = [np.asarray(value, np.float32) for _, value in sorted(trained_weights(draft).items())]
        if self.config.own_embedding:
            arrays.append(np.asarray(draft.embedding.weight[...], np.float32))
        return {**facts, "vocabulary": vocabulary_digest(draft.target_ids[...]), "start_draft": digest(*arrays)}


@dataclass(frozen=True)
class Start:
    """A draft to begin with: weights float32 by parameter path, and what stays as it is."""

    config: DraftConfig
    weights: dict[str, Float[np.ndarray, "..."]]
    frozen: trainer.Frozen
    covered: float  # share of the answer tokens that the draft vocabulary holds


def vocabulary_digest(ids: Int[Array, " w"] | Int[np.ndarray, " w"]) -> str:
    return digest(np.asarray(ids, np.int32))


def plan_draft(config: TrainConfig, pair: Pair) -> Plan:
    """Everything about the draft that needs no text. Raises ConfigError and CheckpointError for what cannot be trained."""
    if config.start is not None:
        return _plan_earlier(config, pair)
    facts = pair.target.config
    vocab = min(USUAL_VOCABULARY, facts.vocab_size) if config.vocab is None else config.vocab
    if vocab > facts.vocab_size:
        raise ConfigError(
            "must lie within the target's vocabulary", where="vocab", found=vocab, expected=f"1..{facts.vocab_size}"
        )
    mlp = 4 * facts.hidden_size if config.mlp is None else config.mlp
    shape = draft_shape(facts, vocab, mlp, own_head=config.head != "target", boundaries=config.boundaries)
    wrong = [b for b in shape.boundaries if not 0 <= b <= facts.num_layers]
    if wrong or len(set(shape.boundaries)) != len(shape.boundaries):
        raise ConfigError(
            "not boundaries of the target",
            where="boundaries",
            found=list(shape.boundaries),
            expected=f"different numbers of 0..{facts.num_layers}",
        )
    return Plan(replace(shape, captures=len(shape.boundaries)))


def _plan_earlier(config: TrainConfig, pair: Pair) -> Plan:
    """An earlier draft, whose shape and vocabulary stay its own."""
    for name in ("mlp", "vocab", "boundaries"):
        if getattr(config, name) is not None:
            raise ConfigError(
                "is that of the draft to go on from", where=name, found=getattr(config, name), fix=f"leave {name} out"
            )
    assert config.start is not None
    folder = trained(config.start)
    loaded = read_draft(folder, dtype=pair.dtype, target=pair.target, report=LoadReport(), mesh=pair.mesh)
    check_trainable(loaded.config)
    if loaded.capture.ambiguous:
        raise ConfigError(
            "the draft's capture layers can be read in two ways",
            where=folder,
            found=loaded.capture.source,
            fix="write the boundaries into its config.json: eaglejax.boundaries",
        )
    theirs = "own" if loaded.config.own_head else "target"
    if config.head is not None and config.head != theirs:
        raise ConfigError(
            "is that of the draft to go on from",
            where="head",
            found=config.head,
            expected=f"{theirs}, as in {folder}",
            fix="leave head out",
        )
    return Plan(loaded.config, loaded)


def begin(config: TrainConfig, pair: Pair, plan: Plan, documents: list[Document], text: Text) -> Start:
    """The draft of the run's first step. Raises ConfigError where its vocabulary holds no token of the answers."""
    if plan.earlier is not None:
        return _go_on(pair, plan, plan.earlier, documents)
    shape, facts = plan.config, pair.target.config
    ids, covered = draft_vocabulary(documents, shape.draft_vocab_size, facts.vocab_size)
    frozen = _frozen(pair, whole(pair.target.embedding.weight[...], pair.mesh), ids, borrowed=True)
    rows = np.asarray(frozen.head[frozen.target_ids].astype(jnp.float32))
    norm = np.asarray(pair.target.norm.scale[...].astype(jnp.float32))
    scales = capture_scales(pair, batch_of(text, np.arange(1), 1), shape)
    return Start(shape, first_weights(shape, rows, norm, scales, config.seed), frozen, covered)


def _go_on(pair: Pair, plan: Plan, loaded: LoadedDraft, documents: list[Document]) -> Start:
    draft = loaded.draft
    weights = {path: np.asarray(value.astype(jnp.float32)) for path, value in trained_weights(draft).items()}
    ids: Int[np.ndarray, " w"] = np.asarray(draft.target_ids[...])
    frozen = _frozen(pair, draft.embedding.weight[...], ids, borrowed=not loaded.config.own_embedding)
    counts = np.zeros(pair.target.config.vocab_size, np.int64)
    for document in documents:
        for first, end in document.answers:
            counts += np.bincount(document.tokens[first:end], minlength=len(counts))
    if not counts[ids].any():
        raise ConfigError(
            "the draft's vocabulary holds no token of the answers: nothing can be learned",
            where="start",
            found=f"0 of {counts.sum()} answer tokens in its {len(ids)} ids",
            fix="check that draft and text belong to this target, or begin with a fresh draft",
        )
    return Start(loaded.config, weights, frozen, float(counts[ids].sum() / max(1, counts.sum())))


def _frozen(
    pair: Pair, embedding: Float[Array, "v d"], ids: Int[np.ndarray, " w"], *, borrowed: bool
) -> trainer.Frozen:
    """What a run reads and never changes, whole on every device; `borrowed`: the embedding is the target's."""
    tied = borrowed and pair.target.head is None
    head = embedding if tied else whole(trainer.target_head(pair.target), pair.mesh)
    return trainer.Frozen(embedding, head, whole(ids, pair.mesh))


def capture_scales(pair: Pair, text: Text, config: DraftConfig) -> list[float]:
    """Typical root mean square of each capture."""
    one_pass = TargetPass(pair.target, config.boundaries, pair.mesh)
    captured = one_pass(put_text(text, pair.mesh)).captured
    real = np.asarray(captured.astype(jnp.float32))[np.asarray(text.segments) >= 0]
    real = real.reshape(-1, config.captures, config.target_hidden_size)
    return [float(s) for s in np.median(np.sqrt((real**2).mean(-1)), axis=0)]


def described(start: Start, documents: int) -> str:
    """The draft in one line."""
    config, mlp = start.config, start.config.layers[0].mlp
    width = mlp.width if isinstance(mlp, DenseConfig) else 0
    size = sum(value.size for value in start.weights.values())
    return (
        f"draft: {size:,} trained weights, MLP {width}, vocabulary {config.draft_vocab_size} of {config.vocab_size} "
        f"({start.covered:.1%} of {documents} documents' answer tokens), boundaries "
        f"{list(config.boundaries)}, head {'own' if config.own_head else 'borrowed'}"
    )

"""What a training run is made of before its first step: text, held-out prompts, and the draft to begin with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from eaglejax.checkpoint.draft_loader import read_draft
from eaglejax.engine import EagleJaxEngine
from eaglejax.errors import ConfigError, PromptError
from eaglejax.load_report import LoadReport
from eaglejax.loading import Pair
from eaglejax.models.config import DenseConfig, DraftConfig
from eaglejax.training import trainer
from eaglejax.training.conversations import Corpus, Reader
from eaglejax.training.data import Document, batch_of, draft_vocabulary, pack
from eaglejax.training.gradients import check_trainable
from eaglejax.training.programs import TargetPass, put_text, whole
from eaglejax.training.regenerate import regenerate
from eaglejax.training.shape import draft_shape
from eaglejax.training.train_config import TrainConfig
from eaglejax.training.ttt import Text
from eaglejax.training.weights import first_weights, trained_weights

ANSWERS = "answers.jsonl"
USUAL_VOCABULARY = 32_000
PROBE = "The quick brown fox: 1,234 + 5 = x; def f(x):\n    return 'ü' # 你好"

Say = Callable[[str], None]
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class Material:
    """Text to train on and prompts to evaluate with."""

    text: Text
    documents: list[Document]
    held_out: list[list[int]]
    digest: str  # of the packed text


@dataclass(frozen=True)
class Start:
    """A draft to begin with: weights float32 by parameter path, and what stays as it is."""

    config: DraftConfig
    weights: dict[str, Float[np.ndarray, "..."]]
    frozen: trainer.Frozen
    covered: float  # share of the answer tokens that the draft vocabulary holds


def tokenizer_digest(pair: Pair) -> str:
    """Tells tokenizers apart: what a fixed line of text becomes. Empty where there is none."""
    if pair.tokenizer is None:
        return ""
    return hashlib.sha256(repr((pair.tokenizer.vocab_size, pair.tokenizer.encode(PROBE))).encode()).hexdigest()[:16]


def target_digest(pair: Pair) -> str:
    """Tells targets apart: their config, and some of their weights."""
    some = [np.asarray(part.astype(jnp.float32)) for part in (pair.target.norm.scale[...], _rows(pair))]
    return digest(np.frombuffer(repr(pair.target.config).encode(), np.uint8), *some)


def _rows(pair: Pair):
    return pair.target.embedding.weight[...][:64]


def digest(*arrays: Shaped[np.ndarray, "..."]) -> str:
    """A short name for the contents of arrays."""
    made = hashlib.sha256()
    for array in arrays:
        made.update(np.ascontiguousarray(array).tobytes())
    return made.hexdigest()[:16]


def gather(config: TrainConfig, pair: Pair, out: Path, say: Say, progress: Progress) -> Material:
    """Read the data, have the target answer where that is asked for, set prompts aside, pack.

    Raises PromptError and ConfigError before the target runs, as far as that can be known.
    """
    reader = Reader(pair.tokenizer, pair.target.config.vocab_size, pair.eos_ids)
    longest = config.row_length - 2
    aside = reader.prompts([config.held_out], longest)[: config.evaluate_prompts] if config.held_out else None
    files: tuple[str | Path, ...] = config.data
    if config.regenerate:
        files = (_answers(config, pair, reader, out, say, progress),)
    corpus = reader.corpus(files, config.row_length)
    say(str(corpus))
    documents = corpus.documents
    if aside is None:
        documents, aside = set_aside(corpus, config.evaluate_prompts)
    text = pack(documents, config.row_length)
    filled = float((np.asarray(text.segments) >= 0).mean())
    say(
        f"{text.tokens.shape[0]} rows of {config.row_length} tokens, {filled:.1%} filled; {len(aside)} prompts held out"
    )
    parts = [np.asarray(part) for part in (text.tokens, text.segments, text.loss)]
    return Material(text, documents, aside, digest(*parts))


def _answers(config: TrainConfig, pair: Pair, reader: Reader, out: Path, say: Say, progress: Progress) -> Path:
    prompts = reader.prompts(config.data, config.row_length - 2)
    engine = EagleJaxEngine(pair, speculation=None, max_len=config.row_length, slots=config.slots)
    file = out / ANSWERS
    lengths = np.asarray([len(prompt) for prompt in prompts])
    facts = {"target": target_digest(pair), "tokenizer": tokenizer_digest(pair)}
    facts["prompts"] = digest(lengths, np.concatenate([np.asarray(prompt) for prompt in prompts]))
    with progress("answers", len(prompts)) as advance:
        before = regenerate(
            engine,
            prompts,
            file,
            temperature=config.temperature,
            new_tokens=config.answer_tokens,
            seed=config.seed,
            facts=facts,
            advance=advance,
        )
    say(f"{len(prompts)} answers in {file}" + (f", {before} of them from before" if before else ""))
    return file


def set_aside(corpus: Corpus, most: int) -> tuple[list[Document], list[list[int]]]:
    """Training documents, and the prompts of every tenth or rarer one, `most` at most.

    Raises ConfigError where there are fewer than 20 documents.
    """
    documents = corpus.documents
    count = min(most, len(documents) // 10)
    if count < 2:
        raise ConfigError(
            "too little text to set some of it aside for the evaluation",
            where="data",
            found=f"{len(documents)} documents",
            expected="20 or more",
            fix="name a file of prompts: held_out",
        )
    chosen = {int(i) for i in np.linspace(0, len(documents) - 1, count)}
    prompts = [documents[i].tokens[: documents[i].answers[0][0]].tolist() for i in sorted(chosen)]
    return [d for i, d in enumerate(documents) if i not in chosen], [p for p in prompts if p]


def begin(config: TrainConfig, pair: Pair, material: Material) -> Start:
    """The draft of the run's first step. Raises ConfigError and CheckpointError for a draft that cannot be trained."""
    if config.start is not None:
        return _go_on(config, pair, material)
    facts = pair.target.config
    vocab = min(USUAL_VOCABULARY, facts.vocab_size) if config.vocab is None else config.vocab
    mlp = 4 * facts.hidden_size if config.mlp is None else config.mlp
    shape = draft_shape(facts, vocab, mlp, own_head=config.head == "own", boundaries=config.boundaries)
    wrong = [b for b in shape.boundaries if not 0 <= b <= facts.num_layers]
    if wrong or len(set(shape.boundaries)) != len(shape.boundaries):
        raise ConfigError(
            "not boundaries of the target",
            where="boundaries",
            found=list(shape.boundaries),
            expected=f"different numbers of 0..{facts.num_layers}",
        )
    shape = DraftConfig(**{**vars(shape), "captures": len(shape.boundaries)})
    ids, covered = draft_vocabulary(material.documents, vocab, facts.vocab_size)
    frozen = _frozen(pair, whole(pair.target.embedding.weight[...], pair.mesh), ids, borrowed=True)
    rows = np.asarray(frozen.head[frozen.target_ids].astype(jnp.float32))
    norm = np.asarray(pair.target.norm.scale[...].astype(jnp.float32))
    scales = capture_scales(pair, batch_of(material.text, np.arange(1), 1), shape)
    return Start(shape, first_weights(shape, rows, norm, scales, config.seed), frozen, covered)


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


def _go_on(config: TrainConfig, pair: Pair, material: Material) -> Start:
    """From an earlier draft, whose vocabulary stays its own."""
    for name in ("mlp", "vocab", "boundaries"):
        if getattr(config, name) is not None:
            raise ConfigError("is that of the draft to go on from", where=name, found=getattr(config, name))
    assert config.start is not None
    loaded = read_draft(config.start, dtype=pair.dtype, target=pair.target, report=LoadReport(), mesh=pair.mesh)
    check_trainable(loaded.config)
    if loaded.capture.ambiguous:
        raise ConfigError(
            "the draft's capture layers can be read in two ways",
            where=config.start,
            found=loaded.capture.source,
            fix="write the boundaries into its config.json: eaglejax.boundaries",
        )
    draft = loaded.draft
    weights = {path: np.asarray(value.astype(jnp.float32)) for path, value in trained_weights(draft).items()}
    ids: Int[np.ndarray, " w"] = np.asarray(draft.target_ids[...])
    frozen = _frozen(pair, draft.embedding.weight[...], ids, borrowed=not loaded.config.own_embedding)
    counts = np.zeros(pair.target.config.vocab_size, np.int64)
    for document in material.documents:
        for first, end in document.answers:
            counts += np.bincount(document.tokens[first:end], minlength=len(counts))
    return Start(loaded.config, weights, frozen, float(counts[ids].sum() / max(1, counts.sum())))


def described(start: Start, material: Material) -> str:
    """The draft in one line."""
    config, mlp = start.config, start.config.layers[0].mlp
    width = mlp.width if isinstance(mlp, DenseConfig) else 0
    size = sum(value.size for value in start.weights.values())
    return (
        f"draft: {size:,} trained weights, MLP {width}, vocabulary {config.draft_vocab_size} of {config.vocab_size} "
        f"({start.covered:.1%} of {len(material.documents)} documents' answer tokens), boundaries "
        f"{list(config.boundaries)}, head {'own' if config.own_head else 'borrowed'}"
    )


def refuse_long(config: TrainConfig, pair: Pair) -> None:
    """A row longer than the target's context gives states that it never has when it serves."""
    limit = pair.target.config.max_position
    if 0 < limit < config.row_length:
        raise PromptError(
            "is longer than the target's context",
            where="row_length",
            found=config.row_length,
            expected=f"at most {limit}",
        )

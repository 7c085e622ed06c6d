"""A draft by itself, teacher-forced or proposing trees: for tests, notebooks and training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from eaglejax.checkpoint.draft_loader import read_draft
from eaglejax.config import Speculation
from eaglejax.errors import ConfigError, PromptError
from eaglejax.generation import DraftScore, Tree
from eaglejax.load_report import LoadReport
from eaglejax.models.draft import Draft
from eaglejax.models.rows import causal_step
from eaglejax.sharding.layout import fetch
from eaglejax.speculation import draft as drafting
from eaglejax.speculation.programs import empty_request, pad_rows, teacher_bucket, token_row
from eaglejax.speculation.tree import Tree as DeviceTree
from eaglejax.text.prompts import parse_prompts

DTYPES = ("float32", "bfloat16")


class StandaloneDraft:
    """A loaded draft with the target states given by hand.

    Arguments to the methods: `aux_hidden` [n, f], the captured target states of positions 0..n-1 side by side, and `token_ids` [n + 1]:
    row i pairs token i + 1 with the state of position i, at position i.
    """

    def __init__(self, draft: Draft, load_report: LoadReport, dtype: str = "float32"):
        self.draft, self.load_report, self._dtype = draft, load_report, jnp.dtype(dtype)
        graph, self._arrays = nnx.split(draft)

        def score(arrays, tokens, features):
            draft = nnx.merge(graph, arrays)
            rows = tokens.shape[1]
            out = draft(
                tokens, draft.fuse(features), causal_step(jnp.zeros((1,), jnp.int32), rows), draft.empty_caches(1, 0)
            )
            return out.hidden, draft.logits(out.hidden)

        def propose(arrays, tokens, features, count, spec):
            draft = nnx.merge(graph, arrays)
            zero = jnp.zeros((1,), jnp.int32)
            caches, tip = drafting.extend(draft, draft.empty_caches(1, tokens.shape[1]), tokens, features, zero, count)
            root = jnp.take_along_axis(tokens, count[:, None] - 1, axis=1)[:, 0]
            return drafting.grow(draft, caches, tip, root, count, empty_request(1), spec)

        self._score = jax.jit(score)
        self._propose = jax.jit(propose, static_argnames="spec")

    def score(self, aux_hidden: Float[Array, "n f"] | Float[np.ndarray, "n f"], token_ids: Sequence[int]) -> DraftScore:
        """Hidden states [n, d] before the final norm and logits [n, w] over the draft vocabulary.

        Raises PromptError for shapes that do not fit each other and for ids outside the embedding's rows.
        """
        rows, tokens, features = self._inputs(aux_hidden, token_ids)
        hidden, logits = self._score(self._arrays, tokens, features)
        return DraftScore(np.asarray(logits[0, :rows]), np.asarray(hidden[0, :rows]))

    def propose(
        self,
        aux_hidden: Float[Array, "n f"] | Float[np.ndarray, "n f"],
        token_ids: Sequence[int],
        speculation: Speculation,
    ) -> Tree:
        """The tree below the last token, at temperature 0, in the words of `eaglejax.Tree`.

        Raises ConfigError for a tree that this draft cannot fill, PromptError as `score` does.
        """
        check_tree(speculation, self.draft.config.draft_vocab_size)
        rows, tokens, features = self._inputs(aux_hidden, token_ids)
        return view(self._propose(self._arrays, tokens, features, jnp.asarray([rows], jnp.int32), speculation))

    def _inputs(self, aux_hidden: Any, token_ids: Sequence[int]) -> tuple[int, Int[Array, "1 t"], Array]:
        features = np.asarray(aux_hidden)
        rows = len(token_ids) - 1
        width = self.draft.config.target_hidden_size * self.draft.config.captures
        if features.shape != (rows, width) or rows < 1:
            raise PromptError(
                "needs one captured state per token but the last",
                where="aux_hidden",
                found=f"{features.shape} with {rows + 1} token ids",
                expected=f"({rows}, {width})",
            )
        (ids,) = parse_prompts([list(token_ids)], None, vocab_size=self.draft.config.vocab_size, max_len=len(token_ids))
        size = teacher_bucket(rows)
        return rows, token_row(ids[1:], size), jnp.asarray(pad_rows(features, size)[None], self._dtype)


def check_tree(spec: Speculation, draft_vocab_size: int) -> None:
    """Refuse trees that this draft cannot fill."""
    if not isinstance(spec, Speculation):
        raise ConfigError("not a tree", where="speculation", found=repr(spec)[:80], expected="a Speculation")
    if spec.num_steps < 1:
        raise ConfigError(
            "a tree has at least one level", where="num_steps", found=spec.num_steps, expected="1 or more"
        )
    if spec.topk > draft_vocab_size:
        raise ConfigError(
            "more children than the draft has tokens",
            where="topk",
            found=spec.topk,
            expected=f"at most {draft_vocab_size}",
        )


def check_draft_config(draft_config: Any) -> None:
    """Refuse anything but None or a table of config keys."""
    if draft_config is None or (isinstance(draft_config, Mapping) and all(isinstance(k, str) for k in draft_config)):
        return
    raise ConfigError(
        "not a table of config keys", where="draft_config", found=repr(draft_config)[:80], expected="a dict"
    )


def view(tree: DeviceTree) -> Tree:
    """The first slot's tree as numpy arrays."""
    return Tree(**{name: fetch(getattr(tree, name))[0] for name in Tree.__dataclass_fields__})


def load_draft(
    folder: str,
    *,
    target_embedding: Float[np.ndarray, "v d"] | Float[Array, "v d"] | None = None,
    dtype: str = "float32",
    capture: str | Sequence[int] = "auto",
    draft_config: Mapping[str, Any] | None = None,
) -> StandaloneDraft:
    """Load a draft without its target.

    Arguments:
        folder: a folder in Hugging Face format, a built-in name, or a hub id.
        target_embedding: [v, d], where the folder holds no embedding of its own.
        dtype: "float32" or "bfloat16"; weights are converted to it.
        capture, draft_config: as in `EagleJaxEngine.from_pretrained`.

    Raises CheckpointError or ConfigError; the message says what, where, found, expected and what to do.
    """
    check_draft_config(draft_config)
    if dtype not in DTYPES:
        raise ConfigError("not a compute dtype", where="dtype", found=repr(dtype), expected=" or ".join(DTYPES))
    report = LoadReport()
    loaded = read_draft(
        folder,
        dtype=dtype,
        target=None,
        target_embedding=target_embedding,
        capture=capture,
        overrides=draft_config,
        report=report,
    )
    return StandaloneDraft(loaded.draft, report, dtype)

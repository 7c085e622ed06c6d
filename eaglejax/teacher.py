"""Teacher-forced passes of target and draft: what each says about a given text, and the tree that would grow below it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from eaglejax.config import Speculation
from eaglejax.generation import DraftScore, Score
from eaglejax.models.config import MoEConfig
from eaglejax.models.draft import Draft
from eaglejax.models.moe import watching_routers
from eaglejax.models.rows import causal_step
from eaglejax.models.target import Target
from eaglejax.sharding.layout import fetch, place, weight_specs
from eaglejax.sharding.spmd import on_mesh
from eaglejax.speculation.draft import extend, grow
from eaglejax.speculation.programs import empty_request, pad_rows, teacher_bucket
from eaglejax.speculation.tree import Tree
from eaglejax.speculation.verify import join_features

Program = Callable[..., Any]


class Teacher:
    """The passes of one pair of models; compiled once per length bucket, choice of boundaries and tree."""

    def __init__(self, target: Target, draft: Draft | None, mesh: Mesh | None = None):
        self._target, self._draft, self._mesh = target, draft, mesh
        self._graphs, arrays = zip(*(nnx.split(model) for model in (target, draft) if model is not None), strict=True)
        self._arrays = arrays
        layers = enumerate(target.config.layers)
        self._moe_layers = [index for index, layer in layers if isinstance(layer.mlp, MoEConfig)]
        self._score_program = cache(self._make_score)
        self._draft_program = cache(self._make_draft_score)
        self._tree_program = cache(self._make_propose)

    def score(self, token_ids: list[int]) -> Score:
        """Logits [t, v], all boundaries [t, d] and the experts [t, k] of every MoE layer of the target over the tokens."""
        count = len(token_ids)
        logits, boundaries, experts = self._score_program()(self._arrays, self._row(token_ids, teacher_bucket(count)))
        return Score(
            fetch(logits)[0, :count],
            {b: fetch(x)[0, :count].astype(np.float32) for b, x in enumerate(boundaries)},
            {layer: fetch(ids)[:count] for layer, ids in zip(self._moe_layers, experts, strict=True)},
        )

    def draft_score(self, boundaries: tuple[int, ...], token_ids: list[int]) -> DraftScore:
        """Logits [t - 1, w] and hidden states [t - 1, d] of the draft: row i has token i + 1 and the features of position i."""
        count = len(token_ids) - 1
        hidden, logits = self._draft_program(boundaries)(self._arrays, self._row(token_ids, teacher_bucket(count) + 1))
        return DraftScore(fetch(logits)[0, :count], fetch(hidden)[0, :count].astype(np.float32))

    def propose(self, boundaries: tuple[int, ...], token_ids: list[int], spec: Speculation) -> Tree:
        """The tree below the last token, at temperature 0."""
        count = len(token_ids) - 1
        tokens = self._row(token_ids, teacher_bucket(count) + 1)
        return self._tree_program(boundaries, spec)(
            self._arrays, tokens, place(np.asarray([count], np.int32), self._mesh)
        )

    def _row(self, token_ids: list[int], size: int) -> Int[Array, "1 n"]:
        return place(pad_rows(np.asarray(token_ids, np.int32), size)[None], self._mesh)

    def _models(self, arrays) -> tuple[Target, Draft | None]:
        models = [nnx.merge(graph, own) for graph, own in zip(self._graphs, arrays, strict=True)]
        return models[0], models[1] if len(models) == 2 else None

    def _compiled(self, function: Callable, inputs: int, out_specs: list[P] | P) -> Program:
        weights = [spec for arrays in self._arrays for spec in weight_specs(arrays)]
        return on_mesh(self._mesh, function, (weights, *[P()] * inputs), out_specs)

    def _make_score(self) -> Program:
        everything = tuple(range(self._target.config.num_layers + 1))

        def run(arrays, tokens):
            target, _ = self._models(arrays)
            with watching_routers() as watched:
                out = _full_pass(target, tokens, everything)
            return target.logits(out.hidden), list(out.captured), watched.experts

        logits = P(None, None, self._target.split.vocab.axis)
        return self._compiled(run, 1, [logits, *[P()] * (len(everything) + len(self._moe_layers))])

    def _make_draft_score(self, boundaries: tuple[int, ...]) -> Program:
        def run(arrays, tokens):
            target, draft = self._models(arrays)
            assert draft is not None
            out = _full_pass(target, tokens, boundaries)
            features = join_features(out.captured, out.hidden)
            rows = tokens.shape[1] - 1
            step = causal_step(jnp.zeros((tokens.shape[0],), jnp.int32), rows)
            drafted = draft(tokens[:, 1:], draft.fuse(features[:, :-1]), step, draft.empty_caches(tokens.shape[0], 0))
            return drafted.hidden, draft.logits(drafted.hidden)

        assert self._draft is not None
        return self._compiled(run, 1, [P(), P(None, None, self._draft.split.draft_vocab.axis)])

    def _make_propose(self, boundaries: tuple[int, ...], spec: Speculation) -> Program:
        def run(arrays, tokens, count):
            target, draft = self._models(arrays)
            assert draft is not None
            out = _full_pass(target, tokens[:, :-1], boundaries)
            features: Float[Array, "b t f"] = join_features(out.captured, out.hidden)
            cache = draft.empty_caches(tokens.shape[0], tokens.shape[1])
            cache, tip = extend(draft, cache, tokens[:, 1:], features, jnp.zeros_like(count), count)
            root = jnp.take_along_axis(tokens, count[:, None], axis=1)[:, 0]
            return grow(draft, cache, tip, root, count, empty_request(tokens.shape[0]), spec)

        return self._compiled(run, 2, P())


def _full_pass(target: Target, tokens: Int[Array, "b t"], boundaries: tuple[int, ...]):
    step = causal_step(jnp.zeros((tokens.shape[0],), jnp.int32), tokens.shape[1])
    return target(tokens, step, target.empty_caches(tokens.shape[0], 0), boundaries)

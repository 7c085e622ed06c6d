"""Kit M drafts in every shape in which drafts are found, and short ways to check, load and run them."""

import json

import jax
import jax.numpy as jnp
import kit_m
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from eaglejax.checkpoint.draft_loader import inspect_draft, read_draft
from eaglejax.errors import EagleJaxError
from eaglejax.load_report import LoadReport
from eaglejax.models.draft_config import TargetFacts
from eaglejax.models.rows import causal_step

RNG = np.random.default_rng(11)
Q = RNG.dirichlet(np.ones(64), 64)
FACTS = TargetFacts(64, 128, 8, 1e-6)
TABLE = np.zeros((64, 128), np.float32)
TABLE[:, :64] = np.eye(64)
TOKENS = np.asarray([5, 17, 3, 60, 2, 5, 40], np.int32)
CUT = list(range(3, 64, 4))  # 16 ids: 3, 7, 11, ...
KIT = kit_m.draft_tensors(Q, (2, 4, 5))


def features(boundaries=(2, 4, 5)):
    """What a Kit M target captures at `boundaries` before each token of TOKENS."""
    before = np.roll(TOKENS, 1)
    tags = [np.concatenate([np.ones(b), np.zeros(64 - b)]) for b in boundaries]
    parts = [np.concatenate([np.eye(64)[before], np.tile(tag, (len(before), 1))], axis=-1) for tag in tags]
    return np.concatenate(parts, axis=-1)[None].astype(np.float32)


def inspect(folder, facts=FACTS, **kw):
    report = LoadReport()
    return inspect_draft(folder, target=facts, report=report, **kw), str(report)


def refused(folder, message, *, facts=FACTS, kind=EagleJaxError, **kw):
    """Refused from headers and small tables: no weight is read."""
    with pytest.raises(kind, match=f"(?s){message}"):
        inspect_draft(folder, target=facts, report=LoadReport(), **kw)


def loaded(folder, embedding=TABLE, dtype="float32", **kw):
    report = LoadReport()
    out = read_draft(folder, dtype=dtype, target_embedding=embedding, report=report, **kw)
    return out.draft, str(report)


def probabilities(draft, captured=None, tokens=TOKENS):
    """Softmax over the draft vocabulary after each token."""
    graph, arrays = nnx.split(draft)

    @jax.jit
    def run(arrays, captured):
        module = nnx.merge(graph, arrays)
        step = causal_step(jnp.zeros((1,), jnp.int32), len(tokens))
        out = module(jnp.asarray(tokens)[None], module.fuse(captured), step, module.empty_caches(1, 0))
        return jax.nn.softmax(module.logits(out.hidden)[0])

    return np.asarray(run(arrays, jnp.asarray(features() if captured is None else captured)))


def proposes(folder, expected=None, atol=5e-5, **kw):
    """The draft gives Q's rows (restricted to what it knows and renormalised)."""
    draft, report = loaded(folder, **kw)
    ids = np.asarray(draft.target_ids[...])
    if expected is None:
        expected = Q[TOKENS][:, ids] / Q[TOKENS][:, ids].sum(-1, keepdims=True)
    np.testing.assert_allclose(probabilities(draft), expected, atol=atol, rtol=0)
    return draft, report


def draft(tmp_path, tensors=None, drop=(), name="draft", keys=None, **config):
    """Kit M's draft with tensors added or replaced, dropped, or renamed by `keys`."""
    ids = config.pop("ids", None)
    weights = kit_m.draft_tensors(Q, (2, 4, 5), ids=ids) if ids else dict(KIT)
    weights = {k: v for k, v in (weights | (tensors or {})).items() if k not in drop}
    weights = {(keys or (lambda k: k))(k): v for k, v in weights.items()}
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    save_file({k: np.ascontiguousarray(v) for k, v in weights.items()}, folder / "model.safetensors")
    settings = kit_m.draft_config(16 if ids else 64) | config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if v != "ABSENT"}))
    return folder

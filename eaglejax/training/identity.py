"""What a run is made of, in few words, and the refusal of what was made of something else."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import DTypeLike, Shaped

from eaglejax.errors import ConfigError
from eaglejax.loading import Pair
from eaglejax.models.target import Target
from eaglejax.training.train_config import PATHS

PROBE = "The quick brown fox: 1,234 + 5 = x; def f(x):\n    return 'ü' # 你好"
FLAGS = {"new_tokens": "answer_tokens", "start_draft": "start"}  # what a key of a file is called in settings


def tokenizer_digest(pair: Pair) -> str:
    """Tells tokenizers apart: what a fixed line of text becomes. Empty where there is none."""
    if pair.tokenizer is None:
        return ""
    return hashlib.sha256(repr((pair.tokenizer.vocab_size, pair.tokenizer.encode(PROBE))).encode()).hexdigest()[:16]


def target_digest(target: Target, dtype: DTypeLike) -> str:
    """Tells targets apart: their config, and some of their weights as a run in `dtype` has them."""
    some = (target.norm.scale[...], target.embedding.weight[...][:64])
    parts = [np.asarray(part.astype(dtype).astype(jnp.float32)) for part in some]
    return digest(np.frombuffer(repr(target.config).encode(), np.uint8), *parts)


def digest(*arrays: Shaped[np.ndarray, "..."]) -> str:
    """A short name for the contents of arrays."""
    made = hashlib.sha256()
    for array in arrays:
        made.update(np.ascontiguousarray(array).tobytes())
    return made.hexdigest()[:16]


def check_same_run(
    found: dict[str, Any], expected: dict[str, Any], where: object, only: Collection[str] | None = None
) -> None:
    """Refuse to go on with what another run made.

    Arguments:
        only: the keys that are known yet; None: all of both sides.

    Raises ConfigError naming every key that differs, with both values.
    """
    if "start" in found:  # an older checkpoint has the path alone, and says nothing of vocabularies
        found = {**found, "start_draft": found["start"] and expected.get("start_draft", found["start"])}
    names = {name for name in found.keys() | expected.keys() if name not in PATHS and (only is None or name in only)}
    names -= {name for name in ("vocabulary", "dtype") if name not in found}  # that of older ones
    keys = sorted(name for name in names if found.get(name) != expected.get(name))
    if "dtype" in keys and "target" in keys:
        keys.remove("target")  # its digest is of rounded weights
    if "draft" in keys and {"mlp", "vocab", "boundaries", "head"} & set(keys):
        keys.remove("draft")  # its shape says the same again
    if not keys:
        return
    fix = "give the settings it was begun with, or another output folder"
    if "steps" in keys:
        fix += "; a run cannot be lengthened, since its rate follows from its steps: begin another with start"
    raise ConfigError(
        "belongs to another run",
        where=where,
        found="; ".join(_difference(key, found.get(key), expected.get(key)) for key in keys),
        fix=fix,
    )


def _difference(key: str, before: Any, now: Any) -> str:
    """`key` begun with one value, now another; of two shapes only what differs."""
    if key == "draft" and isinstance(before, str) and isinstance(now, str):
        ours, theirs = _leaves(before), _leaves(now)
        if [name for name, _ in ours] == [name for name, _ in theirs]:
            pairs = [(name, a, b) for (name, a), (_, b) in zip(ours, theirs, strict=True) if a != b]
            before, now = (", ".join(f"{pair[0]} {pair[side]}" for pair in pairs) for side in (1, 2))
            return f"draft begun with {before}, now {now}"
    return f"{FLAGS.get(key, key)} begun with {before!r}, now {now!r}"


def _leaves(shape: str) -> list[tuple[str, str]]:
    """(name, value) of everything in a repr of nested dataclasses that holds no dataclass itself."""
    return re.findall(r"(\w+)=(\([^()=]*\)|[^,()=]+)", shape)

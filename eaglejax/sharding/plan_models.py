"""The models of a plan, from configs alone: a built-in name, a folder, or a config.json."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaglejax.checkpoint.builtin import builtin_names, shipped_config
from eaglejax.errors import ConfigError
from eaglejax.load_report import LoadReport
from eaglejax.models.config import DraftConfig, TargetConfig
from eaglejax.models.draft_config import TargetFacts, read_draft_config
from eaglejax.models.draft_formats import flatten
from eaglejax.models.target_config import read_target_config
from eaglejax.run_config import built_in_draft
from eaglejax.sharding.model_names import PLACES, known_models
from eaglejax.sharding.storage import Storage, read_storage


@dataclass(frozen=True)
class PlanModels:
    """A target and its draft as configs. `name`, `draft_name`: what to call them. `storage`: how packed weights lie."""

    name: str
    target: TargetConfig
    storage: Storage | None
    draft_name: str | None
    draft: DraftConfig | None


def read_models(model: str, draft: str | None) -> PlanModels:
    """Reads both configs.

    Arguments:
        model: a built-in name (a config of `configs/models`, or a model in the package), a folder with a config.json, or
            such a file.
        draft: likewise; "auto" is the built-in target's own, where there is one; None for plain decoding.

    Raises ConfigError or CheckpointError naming file, key, found and expected.
    """
    path = _find(model, "model")
    values = _read_json(path)
    reading = read_target_config(values, where=path)
    target, storage = reading.config, read_storage(reading)
    if draft == "auto":
        own = path.parent / "draft" / "config.json"
        draft = str(own) if path.parent.parent in PLACES and own.is_file() else None
        shown = f"the head of {path.parent.name}" if draft else None
        if path == shipped_config(model):
            draft = shown = built_in_draft(model)
    else:
        shown = draft
    read = None if draft is None else read_draft(_draft_of(draft, model, target), target)
    name = path.parent.name if path.name == "config.json" else path.stem
    return PlanModels(name, target, storage, shown, read)


def read_draft(path: Path, target: TargetConfig) -> DraftConfig:
    """A draft's config without its tensors: one layer, fc, own head, borrowed embedding, as heads are released."""
    values = _read_json(path)
    tensors = ReleasedTensors(values, target, path)
    flat = flatten(values, tensors.names, path)
    facts = TargetFacts(target.vocab_size, target.hidden_size, target.num_layers, target.norm_eps)
    return read_draft_config(flat, tensors, facts, capture="auto", where=path, report=LoadReport()).config


def _draft_of(draft: str, model: str, target: TargetConfig) -> Path:
    """The draft's config; ConfigError for a built-in one that belongs to a target of another shape."""
    path = _find(draft, "draft")
    owner = path.parent.parent
    if path.parent.name != "draft" or owner.parent not in PLACES:
        return path
    own = read_target_config(_read_json(owner / "config.json"), where=owner / "config.json").config
    shape = lambda config: (config.num_layers, config.hidden_size, config.vocab_size)
    if shape(own) != shape(target):
        say = "{} layers, {} wide, {} tokens".format
        raise ConfigError(
            f"the draft of {owner.name} is none of {model}",
            where="draft",
            found=f"{draft!r}, made for {say(*shape(own))}",
            expected=f"one made for {say(*shape(target))}, as {model} has, or none",
        )
    return path


def _find(text: str, what: str) -> Path:
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return path
    wanted = Path(text.lower()) / "draft" if what == "draft" else Path(text.lower())
    for place in PLACES:
        if (found := place / wanted / "config.json").is_file():
            return found
    if (shipped := shipped_config(text)) is not None:
        return shipped
    names = known_models()
    names += [name for name in builtin_names() if what == "model" and shipped_config(name) is not None]
    if what == "draft" and text.lower() in names:
        drafted = [
            name for name in names if any((place / name / "draft" / "config.json").is_file() for place in PLACES)
        ]
        raise ConfigError(
            f"there is no built-in draft of {text.lower()}",
            where=what,
            found=repr(text),
            expected=f"a folder with a draft's config.json, such a file, one of {', '.join(drafted)}, or none",
        )
    near = difflib.get_close_matches(text.lower(), names, n=1, cutoff=0.5)
    raise ConfigError(
        "no such config",
        where=what,
        found=repr(text),
        expected=f"a folder with a config.json, such a file, or one of {', '.join(names)}",
        fix=f"did you mean {near[0]}?" if near else None,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("cannot be read", where=path, found=error.strerror) from None
    except (ValueError, RecursionError):
        raise ConfigError("is not valid JSON", where=path) from None
    if not isinstance(values, dict):
        raise ConfigError("holds no object", where=path, found=type(values).__name__, expected="{...}")
    return values


class ReleasedTensors:
    """The tensors that a draft with this config is released with (`models/draft_formats.py`: Shapes), by our names."""

    def __init__(self, values: Mapping[str, Any], target: TargetConfig, where: object):
        inner = values.get("transformer_layer_config")
        layer = {**values, **inner} if isinstance(inner, Mapping) else dict(values)
        need = lambda key, default=None: _whole(layer, key, default, where)
        width, heads = need("hidden_size"), need("num_attention_heads")
        head = need("head_dim", width // heads)
        kv, middle = need("num_key_value_heads", heads), need("intermediate_size")
        words = need("draft_vocab_size", target.vocab_size)
        seen = need("target_hidden_size", target.hidden_size)
        self._shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (width, 3 * seen),
            "norm.weight": (width,),
            "lm_head.weight": (words, width),
            "layers.0.input_layernorm.weight": (width,),
            "layers.0.hidden_norm.weight": (width,),
            "layers.0.post_attention_layernorm.weight": (width,),
            "layers.0.mlp.gate_proj.weight": (middle, width),
            "layers.0.mlp.up_proj.weight": (middle, width),
            "layers.0.mlp.down_proj.weight": (width, middle),
        }
        if words != target.vocab_size:
            self._shapes["d2t"] = (words,)
        if width != target.hidden_size:
            self._shapes["embed_tokens.weight"] = (target.vocab_size, width)
        if layer.get("fc_norm"):
            self._shapes |= {f"fc_norm.{i}.weight": (seen,) for i in range(3)}
        if layer.get("norm_before_fc"):
            self._shapes["input_norm.weight"] = (3 * seen,)
        attention = self._latent(need, width, heads) if layer.get("kv_lora_rank") else None
        attention = attention or {
            "q_proj": (heads * head, 2 * width),
            "k_proj": (kv * head, 2 * width),
            "v_proj": (kv * head, 2 * width),
            "o_proj": (width, heads * head),
        }
        self._shapes |= {f"layers.0.self_attn.{name}.weight": shape for name, shape in attention.items()}

    @staticmethod
    def _latent(need: Any, width: int, heads: int) -> dict[str, tuple[int, ...]]:
        latent, query = need("kv_lora_rank"), need("q_lora_rank")
        nope, rope, value = need("qk_nope_head_dim"), need("qk_rope_head_dim"), need("v_head_dim")
        return {
            "q_a_proj": (query, 2 * width),
            "q_a_layernorm": (query,),
            "q_b_proj": (heads * (nope + rope), query),
            "kv_a_proj_with_mqa": (latent + rope, 2 * width),
            "kv_a_layernorm": (latent,),
            "kv_b_proj": (heads * (nope + value), latent),
            "o_proj": (width, heads * value),
        }

    @property
    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

    def layer_count(self) -> int:
        return 1


def _whole(values: Mapping[str, Any], key: str, default: int | None, where: object) -> int:
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError("must be a whole number above 0", where=f"{where}: {key}", found=repr(value))
    return value

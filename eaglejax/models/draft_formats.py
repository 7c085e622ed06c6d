"""Which of the released draft formats a config.json is, and its keys brought into one flat form.

Formats: SafeAILab's (a plain LlamaForCausalLM config), SpecForge's (ids and flags beside a Llama config), vLLM
speculators' (the layer's config nested) and NVIDIA ModelOpt's (flags under `eagle_config`). Everything that is not an
EAGLE-3 draft is refused by what it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from eaglejax.errors import ConfigError
from eaglejax.models.capture import IDS_KEY, MANIFEST_KEY

MODELOPT_FLAGS = ("use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm")
# Flags of the forward pass. `fc_norm` had an older name.
FLAGS = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "use_aux_hidden_state",
    "fc",
    *MODELOPT_FLAGS,
)
ALIASES = {"use_aux_norm": "fc_norm"}
OTHER_DRAFTS = (
    # what marks it: (words in the architecture, keys of the config, words in tensor names), what it is, what to do
    (
        (r"peagle|pard", ("ptd_token_id", "pard_token", "mask_token_id", "parallel_drafting"), r"(^|\.)mask_hidden$"),
        "a P-EAGLE draft, which proposes several tokens in one pass with a mask token",
        "use an EAGLE-3 draft for this target",
    ),
    (
        (r"eagle-?4", ("efficient_lm_head_config",), r"^$"),
        "an EAGLE-4 draft, with a low-rank candidate head",
        "use an EAGLE-3 draft for this target",
    ),
    (
        (r"mtp|nextn", ("mtp_config",), r"(^|\.)(eh_proj|enorm|hnorm|mtp)(\.|$)"),
        "a multi-token-prediction layer, not an EAGLE-3 draft",
        "use an EAGLE-3 draft for this target",
    ),
    (
        (r"dflash|dspark|domino", ("dflash_config", "target_layer_ids"), r"^$"),
        "a block-diffusion draft (DFlash family), not an EAGLE-3 draft",
        "use an EAGLE-3 draft for this target",
    ),
    (
        (r"medusa|mlpspeculator|hydra", ("medusa_num_heads",), r"medusa_head"),
        "a set of Medusa heads, not an EAGLE-3 draft",
        "use an EAGLE-3 draft for this target",
    ),
)


@runtime_checkable
class Shapes(Protocol):
    """The tensors of a draft as far as their headers tell (`checkpoint.draft_names.DraftTensors`)."""

    def shape(self, name: str) -> tuple[int, ...] | None: ...

    def layer_count(self) -> int: ...


@dataclass(frozen=True)
class FlatConfig:
    """A draft's config in one flat form.

    `name`: the format, for reports. `layer`: the keys of the decoder layer (as in a Llama config). `flags`: the flags
    that the config sets. `top`: the whole config, where capture ids and the quantisation are looked up. `notes`: lines
    for the load report.
    """

    name: str
    layer: dict[str, Any]
    flags: dict[str, bool]
    top: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def flatten(config: Mapping[str, Any], tensors: Collection[str], where: object) -> FlatConfig:
    """The flat form of a draft's config.json.

    Arguments:
        config: config.json as read.
        tensors: the names of the checkpoint's tensors, which tell other kinds of draft.
        where: the file, for messages.
    Raises ConfigError for everything that is not an EAGLE-3 draft, and for flags that are not true or false or
    contradict each other.
    """
    _refuse_other_drafts(config, tensors, where)
    top = dict(config)
    nested = _mapping(config, "eagle_config", where)
    inner = _mapping(config, "transformer_layer_config", where)
    name = _format_name(config, nested, inner)
    layer = {key: value for key, value in top.items() if key not in ("eagle_config", "transformer_layer_config")}
    layer |= inner
    flags: dict[str, bool] = {}
    for place, values in (("eagle_config.", nested), ("", top)):
        for key in (*FLAGS, *ALIASES):
            value = values.get(key)
            if value is None:
                continue
            if not isinstance(value, bool):
                raise ConfigError("a flag must be true or false", where=f"{where}: {place}{key}", found=repr(value))
            flag = ALIASES.get(key, key)
            if flags.get(flag, value) != value:
                raise ConfigError(
                    "a flag is set twice, to different values", where=f"{where}: {place}{key}", found=value
                )
            flags[flag] = value
    notes = []
    if name == "speculators" and "norm_before_residual" not in flags:
        flags["norm_before_residual"] = True
        notes.append("norm_before_residual is absent: true, as this format's trainer and its main consumer have it")
    return FlatConfig(name, layer, flags, top, notes)


def replace_keys(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A draft's config.json with keys replaced wherever they stand: at the top level, or in the nested configs that win over it."""
    replaced = {**config, **overrides}
    for place in ("transformer_layer_config", "eagle_config"):
        inner = config.get(place)
        if isinstance(inner, dict) and place not in overrides:
            replaced[place] = {**inner, **{key: value for key, value in overrides.items() if key in inner}}
    return replaced


def _mapping(config: Mapping[str, Any], key: str, where: object) -> dict[str, Any]:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError("must be an object", where=f"{where}: {key}", found=repr(value))
    return value


def _format_name(config: Mapping[str, Any], nested: Mapping[str, Any], inner: Mapping[str, Any]) -> str:
    names = " ".join(_architectures(config))
    if inner or "speculators_model_type" in config or re.search(r"Eagle3(Speculator|DraftModel)", names):
        return "speculators"
    if any(flag in nested for flag in (*MODELOPT_FLAGS, "norm_before_fc")):
        return "ModelOpt"
    if re.search(r"eagle-?3", names, re.IGNORECASE) or nested or IDS_KEY in config:
        return "SpecForge"
    return "eaglejax" if MANIFEST_KEY in config else "SafeAILab"


def _architectures(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures") or []
    return [str(name) for name in names] if isinstance(names, list) else [str(names)]


def _active(value: Any) -> bool:
    return value is not None and value is not False and value != -1


def _refuse_other_drafts(config: Mapping[str, Any], tensors: Collection[str], where: object) -> None:
    """Refuses other kinds of draft, whole models and unrelated architectures, by what they are."""
    names = _architectures(config)
    said = " ".join([*names, str(config.get("speculators_model_type") or "")]).lower()
    for (words, keys, tensor_words), what, fix in OTHER_DRAFTS:
        signs = [f"architecture {name}" for name in [said] if re.search(words, name)]
        signs += [f"config key {key}" for key in keys if _active(config.get(key))]
        signs += [f"tensor {tensor}" for tensor in tensors if re.search(tensor_words, tensor)]
        if signs:
            raise ConfigError(f"this is {what}", where=where, found=signs[0], expected="an EAGLE-3 draft", fix=fix)
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise ConfigError(
            "this is not an EAGLE-3 draft",
            where=f"{where}: speculators_model_type",
            found=repr(kind),
            expected="'eagle3'",
        )
    nested = config.get("eagle_config")
    off = isinstance(nested, dict) and nested.get("use_input_layernorm_in_first_layer") is False
    if not off and not any("hidden_norm" in tensor for tensor in tensors):
        _refuse_without_hidden_norm(names, tensors, where)
    known = [n for n in names if n == "LlamaForCausalLM" or re.search(r"eagle-?3", n, re.IGNORECASE)]
    if names and not known:
        raise ConfigError(
            "this architecture is no EAGLE-3 draft",
            where=f"{where}: architectures",
            found=", ".join(names),
            expected="LlamaForCausalLM, or a name with Eagle3 in it",
        )


def _refuse_without_hidden_norm(names: list[str], tensors: Collection[str], where: object) -> None:
    """No hidden_norm: whatever it is, it is no EAGLE-3 draft. Says what it looks like."""
    has_fc = any(re.search(r"(^|\.)fc\.weight$", tensor) for tensor in tensors)
    layers = {m.group(1) for t in tensors if (m := re.search(r"(?:^|\.)layers\.(\d+)\.", t))}
    if has_fc:
        what = (
            "this is an EAGLE-1/2 draft: its fc joins a token embedding and a hidden state, and it has no hidden_norm"
        )
        fix = "use an EAGLE-3 draft for this target"
    elif layers:
        what = (
            f"this is a complete language model of {len(layers)} layers, not a draft: it has no fc and no hidden_norm"
        )
        fix = "give the folder of the EAGLE-3 draft, or no draft for plain decoding"
    else:
        what, fix = "this is not an EAGLE-3 draft: it has no hidden_norm", "give the folder of an EAGLE-3 draft"
    raise ConfigError(
        what, where=where, found=f"architecture {', '.join(names) or 'unknown'}", expected="an EAGLE-3 draft", fix=fix
    )

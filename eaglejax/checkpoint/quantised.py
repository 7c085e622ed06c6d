"""What a config's quantization_config says: how which weights are stored. Anything we would not run as it was meant is
refused here.

Read: DeepSeek's fp8, gpt-oss' mxfp4, and of compressed-tensors pack-quantized (4 bits, symmetric), float-quantized
(e4m3) and int-quantized (8 bits, symmetric). Weights only: activations are never quantised, which the notes say where
the release would.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from eaglejax.errors import ConfigError
from eaglejax.models.packed import Kind

KEYS = ("quantization_config", "compression_config")
METHODS = "fp8 (e4m3), mxfp4, or compressed-tensors pack-quantized, float-quantized or int-quantized"
UNQUANTISED = "use a release in one of these forms, or one that is not quantised"


@dataclass(frozen=True)
class Scheme:
    """How a quantised weight X [out, in] lies in the file.

    Attributes:
        kind: of `models.packed.Packing`.
        rows, columns: the block that shares a scale; 0 stands for the whole of that axis.
        values, scale: what the names of the two tensors add to that of X.
    """

    kind: Kind
    rows: int
    columns: int
    values: str
    scale: str

    def divides(self, width: int) -> bool:
        """Whether rows of so many weights can be stored: only the blocks of fp8 may be cut by the end of a row."""
        return self.kind == "fp8" or width % (self.columns or width) == 0


@dataclass(frozen=True)
class Group:
    """The modules that are stored by one scheme: "Linear" for all projections, names, or "re:" and a pattern."""

    targets: tuple[str, ...]
    scheme: Scheme


@dataclass(frozen=True)
class Quantisation:
    """A quantization_config as read. `where`: file and key; `ignore`: modules that are not quantised; `notes`: for
    the load report."""

    where: str
    groups: tuple[Group, ...]
    ignore: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def ignored(self, module: str) -> bool:
        """Whether the config says that this module ("model.layers.0.mlp.up_proj") is not quantised."""
        return any(_named(pattern, module) for pattern in self.ignore)

    def scheme(self, module: str) -> Scheme | None:
        """How the weight of a module is stored; None where the config leaves it plain."""
        if self.ignored(module):
            return None
        # a name wins over the class of all projections
        for group in self.groups:
            if any(target != "Linear" and _named(target, module) for target in group.targets):
                return group.scheme
        return next((group.scheme for group in self.groups if "Linear" in group.targets), None)


def _named(pattern: str, module: str) -> bool:
    """ "re:" and a pattern for the beginning of a name; else a name, or one of its parts, "*" for any text."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    dotted = f".{module}."
    return f".{pattern}." in dotted or fnmatchcase(dotted, f"*.{pattern}.*")


def find_quantisation(places: Sequence[tuple[Mapping[str, Any], object]]) -> Quantisation | None:
    """The quantisation of the first config that has one; several (text part and whole) must agree.

    Arguments:
        places: configs, innermost first, each with its name in messages.

    Raises:
        ConfigError: an unknown method, or a setting that we do not run.
    """
    found = [(config[key], f"{where}: {key}") for config, where in places for key in KEYS if config.get(key)]
    if not found:
        return None
    setting, where = found[0]
    for other, other_where in found[1:]:
        if other != setting:
            raise ConfigError(
                "two different quantisations of one model", where=where, found=f"another in {other_where}"
            )
    if not isinstance(setting, Mapping):
        raise ConfigError("is no object", where=where, found=repr(setting))
    method = setting.get("quant_method")
    match method:
        case "fp8":
            return _read_fp8(setting, where)
        case "mxfp4":
            return Quantisation(
                where,
                (Group(("re:.*\\.experts\\.(gate_up|down)_proj$",), Scheme("mxfp4", 1, 32, "_blocks", "_scales")),),
                _names(setting, "modules_to_not_convert", where),
            )
        case "compressed-tensors":
            return _read_compressed(setting, where)
    raise ConfigError(
        f"weights quantised by {method!r} cannot be read",
        where=f"{where}.quant_method",
        found=repr(method),
        expected=METHODS,
        fix=UNQUANTISED,
    )


def _names(setting: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    names = setting.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError("must be a list of module names", where=f"{where}.{key}", found=repr(names))
    for name in names:
        if name.startswith("re:"):
            try:
                re.compile(name[3:])
            except re.error as e:
                raise ConfigError(f"no valid pattern ({e})", where=f"{where}.{key}", found=repr(name)) from e
    return tuple(names)


def _must(setting: Mapping[str, Any], where: str, allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuses a setting whose value is none of those we run; an absent key counts as the first of them."""
    for key, values in allowed.items():
        found = setting.get(key, values[0])
        if not any(found == value and type(found) is type(value) for value in values):
            raise ConfigError(
                "is not supported",
                where=f"{where}.{key}",
                found=repr(found),
                expected=" or ".join(repr(value) for value in values),
                fix=UNQUANTISED,
            )


def _block(setting: Mapping[str, Any], key: str, where: str) -> tuple[int, int]:
    block = setting.get(key)
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise ConfigError("must be two sizes", where=f"{where}.{key}", found=repr(block), expected="such as [128, 128]")
    return block[0], block[1]


def _read_fp8(setting: Mapping[str, Any], where: str) -> Quantisation:
    allowed = {"fmt": ("e4m3", None), "activation_scheme": ("dynamic", None), "expert_dtype": ("fp8", None)}
    _must(setting, where, allowed | {"scale_fmt": ("float", "ue8m0", None)})
    rows, columns = _block(setting, "weight_block_size", where)
    ignore = _names(setting, "modules_to_not_convert", where) + _names(setting, "ignored_layers", where)
    scheme = Scheme("fp8", rows, columns, "", "_scale_inv")
    return Quantisation(where, (Group(("Linear",), scheme),), ignore, (_weights_only("fp8 activations"),))


def _weights_only(what: str) -> str:
    return f"weights only: {what}, which the release may compute with, are not rounded here"


def _read_compressed(setting: Mapping[str, Any], where: str) -> Quantisation:
    allowed = {"quantization_status": ("compressed", "frozen", None), "kv_cache_scheme": (None,)}
    _must(setting, where, allowed | {"sparsity_config": (None, {}), "transform_config": (None, {})})
    groups = setting.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError("has no groups", where=f"{where}.config_groups", found=repr(groups))
    read, notes = [], []
    for name, group in groups.items():
        place = f"{where}.config_groups.{name}"
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise ConfigError("says nothing of weights", where=place, found=repr(group)[:80], expected="weights: {...}")
        scheme = _compressed_scheme(group, group.get("format") or setting.get("format"), place)
        read.append(Group(_names(group, "targets", place), scheme))
        if activations := group.get("input_activations"):
            notes.append(_weights_only(_activations(activations, f"{place}.input_activations")))
        _must(group, place, {"output_activations": (None,)})
    return Quantisation(where, tuple(read), _names(setting, "ignore", where), tuple(dict.fromkeys(notes)))


def _activations(setting: Any, where: str) -> str:
    """Dynamic activation scales come from the activations themselves and may be left out; stored ones may not."""
    if not isinstance(setting, Mapping) or setting.get("dynamic") is not True:
        raise ConfigError(
            "activations with stored scales are not supported",
            where=where,
            found=repr(setting)[:120],
            expected='"dynamic": true, or null',
            fix=UNQUANTISED,
        )
    return f"{setting.get('num_bits', '?')}-bit activations"


# bits and type of the weights of each format
WEIGHTS = {"pack-quantized": (4, "int"), "float-quantized": (8, "float"), "int-quantized": (8, "int")}


def _compressed_scheme(group: Mapping[str, Any], form: Any, where: str) -> Scheme:
    if form not in WEIGHTS:
        raise ConfigError(
            "a form of compressed-tensors that cannot be read",
            where=f"{where}.format",
            found=repr(form),
            expected=" or ".join(WEIGHTS),
            fix=UNQUANTISED,
        )
    weights, place = group["weights"], f"{where}.weights"
    bits, kind = WEIGHTS[form]
    # without these two keys the form would not be known, so absent is not enough
    for key, value in (("num_bits", bits), ("type", kind)):
        if weights.get(key) != value:
            raise ConfigError(
                f"does not go with {form}", where=f"{place}.{key}", found=repr(weights.get(key)), expected=repr(value)
            )
    _must(weights, place, {"symmetric": (True,), "dynamic": (False,), "actorder": (None, "weight", "static", False)})
    strategy = weights.get("strategy")
    match strategy:
        case "group" if form != "float-quantized":
            size = weights.get("group_size")
            if type(size) is not int or size < 1:
                raise ConfigError(
                    "must be a size", where=f"{place}.group_size", found=repr(size), expected="such as 32"
                )
            rows, columns = 1, size
        case "channel":
            rows, columns = 1, 0
        case "tensor":
            rows, columns = 0, 0
        case "block" if form == "float-quantized":
            rows, columns = _block(weights, "block_structure", place)
        case _:
            raise ConfigError(
                "is not supported",
                where=f"{place}.strategy",
                found=repr(strategy),
                expected="group, channel or tensor",
                fix=UNQUANTISED,
            )
    names = {"int4": "_packed", "int8": "", "fp8": ""}
    ours: Kind = "int4" if bits == 4 else "int8" if kind == "int" else "fp8"
    return Scheme(ours, rows, columns, names[ours], "_scale")

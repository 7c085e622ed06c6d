"""Which residual streams of the target a draft reads: every way of numbering them, turned into boundaries.

Boundary b is the residual stream after b blocks of the target, before any norm: 0 is the embedding, L (the number of
blocks) is the input of the final norm. Released configs number *layers*, by their input (id i is boundary i) or by
their output (id i is boundary i + 1), and the ids alone cannot always tell which. A wrong guess crashes nothing and
costs most of the acceptance, so a list that fits both ways is never guessed silently: both readings are handed back,
and the engine measures them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eaglejax.errors import ConfigError

IDS_KEY = "eagle_aux_hidden_state_layer_ids"
MANIFEST_KEY = "eaglejax"
OVERRIDE = "say which with capture='input', capture='output' or capture=(low, mid, high) as boundaries"

Capture = str | Sequence[int]  # "auto", "input", "output", or the boundaries themselves


@dataclass(frozen=True)
class CaptureReading:
    """The boundaries a draft reads, in the order in which its `fc` joins them.

    `boundaries`: empty only where the config names none and no target is at hand to count blocks of.
    `alternatives`: both named readings ("output", "input") where the config is ambiguous, the first being `boundaries`;
        else empty.
    `source`: one sentence for the load report. `warning`: something a user should look at, or "".
    """

    boundaries: tuple[int, ...]
    alternatives: tuple[tuple[str, tuple[int, ...]], ...] = ()
    source: str = ""
    warning: str = ""

    @property
    def ambiguous(self) -> bool:
        """Whether two readings fit, of which the first was taken for now."""
        return bool(self.alternatives)


def _reference(num_target_layers: int) -> tuple[int, int, int]:
    return 2, num_target_layers // 2, num_target_layers - 3


def default_boundaries(num_target_layers: int) -> tuple[int, int, int]:
    """2, L//2, L-3: what the EAGLE-3 reference captures. Refused for targets of fewer than 7 blocks, where these repeat
    or run backwards.
    """
    ids = _reference(num_target_layers)
    if not 2 < ids[1] < ids[2]:
        raise ConfigError(
            "the draft's config lists no capture layers, and the default 2, L//2, L-3 does not fit a target this small",
            where=IDS_KEY,
            found=f"L = {num_target_layers} blocks, which gives {list(ids)}",
            expected="three boundaries in ascending order (L of 7 or more)",
            fix="pass capture=(low, mid, high) as boundaries (0 = embedding, L = before the final norm)",
        )
    return ids


def read_capture(
    config: dict[str, Any],
    num_target_layers: int | None,
    n_captures: int,
    capture: Capture = "auto",
) -> CaptureReading:
    """Normalise a draft's capture layers to boundaries.

    Arguments:
        config: the draft's config.json.
        num_target_layers: blocks of the target, L; None where no target is at hand (then nothing is checked against L).
        n_captures: how many states the draft's `fc` joins.
        capture: "auto" (the rules below), "input" (id i is boundary i), "output" (id i is boundary i + 1), or the
            boundaries themselves.

    Rules of "auto": our own manifest states boundaries; ids at the top level are boundaries; ids under `eagle_config`
    whose first is 1 are layer outputs; other ids under `eagle_config` are ambiguous unless only one reading lies within
    0..L; negative ids are refused; no ids means 2, L//2, L-3.

    Raises ConfigError naming the key, what was found and what was expected.
    """
    limit = num_target_layers
    if not isinstance(capture, str):
        given = CaptureReading(_ids(capture, "capture"), source="given by capture=")
        _refuse_repeats(given.boundaries, config, limit)
        return _check(given, limit, n_captures, True)
    if capture not in ("auto", "input", "output"):
        raise ConfigError(
            "unknown way to number capture layers",
            where="capture",
            found=repr(capture),
            expected="'auto', 'input', 'output' or a tuple of boundaries",
        )
    top, nested = _listed(config)
    if capture == "auto":
        reading = _automatic(config, top, nested, limit)
    else:
        reading = _told(capture, top, nested)
    if reading is None:
        reading = _default(limit, n_captures)
    return _check(reading, limit, n_captures, False)


def _ids(value: Any, where: str) -> tuple[int, ...]:
    numbers = isinstance(value, Sequence) and not isinstance(value, str)
    if not numbers or not value or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise ConfigError(
            "capture layers must be a list of whole numbers", where=where, found=repr(value), fix=OVERRIDE
        )
    return tuple(value)


def _listed(config: dict[str, Any]) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """The ids at the top level and under `eagle_config`; null counts as absent."""
    top = config.get(IDS_KEY)
    inner = config.get("eagle_config") or {}
    nested = inner.get(IDS_KEY) if isinstance(inner, dict) else None
    return (
        None if top is None else _ids(top, IDS_KEY),
        None if nested is None else _ids(nested, f"eagle_config.{IDS_KEY}"),
    )


def _shift(ids: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(i + 1 for i in ids)


def _told(capture: str, top: tuple[int, ...] | None, nested: tuple[int, ...] | None) -> CaptureReading | None:
    """The convention is given. Where both places hold ids, each convention has its own: top level for inputs,
    eagle_config for outputs.
    """
    if capture == "input":
        ids = nested if top is None else top
        return (
            None
            if ids is None
            else CaptureReading(ids, source=f"ids {list(ids)} read as layer inputs (capture='input')")
        )
    ids = top if nested is None else nested
    return (
        None
        if ids is None
        else CaptureReading(_shift(ids), source=f"ids {list(ids)} read as layer outputs (capture='output')")
    )


def _nested_readings(ids: tuple[int, ...], limit: int | None) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The readings of ids under `eagle_config` that are possible."""
    if ids[0] == 1:
        return (("output", _shift(ids)),)
    both = (("output", _shift(ids)), ("input", ids))
    if limit is None:
        return both
    return tuple(reading for reading in both if all(0 <= b <= limit for b in reading[1]))


def _automatic(
    config: dict[str, Any], top: tuple[int, ...] | None, nested: tuple[int, ...] | None, limit: int | None
) -> CaptureReading | None:
    manifest = config.get(MANIFEST_KEY) or {}
    if isinstance(manifest, dict) and manifest.get("boundaries") is not None:
        stated = _ids(manifest["boundaries"], f"{MANIFEST_KEY}.boundaries")
        if (top is not None and top != stated) or (nested is not None and stated not in (nested, _shift(nested))):
            raise _contradiction(f"{MANIFEST_KEY}.boundaries {list(stated)}", top, nested)
        return CaptureReading(stated, source=f"boundaries stated by the draft's manifest ({MANIFEST_KEY}.boundaries)")
    if top is not None:
        if nested is not None and top not in [ids for _, ids in _nested_readings(nested, limit)]:
            raise _contradiction(None, top, nested)
        warning = ""
        if limit is not None and limit >= 7 and _shift(top) == default_boundaries(limit):
            warning = (
                f"the draft's top-level {IDS_KEY} {list(top)} are read as boundaries, but they are exactly the default"
                " in the layer-output numbering: if acceptance is poor, try capture='output'"
            )
        return CaptureReading(top, source=f"top-level {IDS_KEY} {list(top)} are boundaries", warning=warning)
    if nested is None:
        return None
    if min(nested) < 0:
        raise _negative(nested)
    readings = _nested_readings(nested, limit)
    where = f"eagle_config.{IDS_KEY} {list(nested)}"
    if not readings:
        raise ConfigError("capture layers lie outside the target", where=where, expected=f"0..{limit}", fix=OVERRIDE)
    if str(config.get("model_type") or "").startswith(("kimi", "deepseek")):
        readings = readings[::-1]  # heads for these targets are released with inputs more often than not
    name, boundaries = readings[0]
    if len(readings) == 2:
        both = " and ".join(f"layer {name}s (boundaries {list(b)})" for name, b in readings)
        source = f"AMBIGUOUS: {where} fit {both}"
        return CaptureReading(boundaries, readings, source)
    why = "the first is 1" if nested[0] == 1 else "the other reading lies outside the target"
    return CaptureReading(boundaries, source=f"{where} are layer {name}s ({why})")


def _negative(nested: tuple[int, ...]) -> ConfigError:
    """-1 is the embedding to a reader that adds one to every id, the last layer to one that indexes a list with it, and
    an unset value to others: no released head fixes which.
    """
    return ConfigError(
        "a negative capture layer has no agreed meaning",
        where=f"eagle_config.{IDS_KEY}",
        found=list(nested),
        expected="ids of 0 or more",
        fix="pass capture='output' if -1 is the embedding (the output of layer -1), else the boundaries themselves,"
        " capture=(low, mid, high), of which L is the last layer's output",
    )


def _refuse_repeats(given: tuple[int, ...], config: dict[str, Any], limit: int | None) -> None:
    """The same boundary twice is a slip of the hand, unless the draft was made so: its own config repeats an id in the
    same places, or it lists none and these are the reference's default for a target too small for it.
    """
    if len(set(given)) == len(given):
        return
    manifest = config.get(MANIFEST_KEY) or {}
    stated = manifest.get("boundaries") if isinstance(manifest, dict) else None
    listed = [tuple(ids) for ids in (*_listed(config), stated) if ids]
    if not listed and limit is not None and given == _reference(limit):
        return
    same = lambda ids: [ids.index(i) for i in ids]
    if any(len(ids) == len(given) and same(ids) == same(given) for ids in listed):
        return
    raise ConfigError(
        "capture= names a boundary more than once, which the draft's own config does not",
        where="capture",
        found=list(given),
        expected=f"boundaries that differ, like the config's {list(listed[0])}" if listed else "boundaries that differ",
        fix="give each of the captured boundaries once, low to high",
    )


def _contradiction(manifest: str | None, top: tuple[int, ...] | None, nested: tuple[int, ...] | None) -> ConfigError:
    found = [manifest] if manifest else []
    if top is not None:
        found.append(f"{list(top)} at the top level (boundaries)")
    if nested is not None:
        found.append(f"{list(nested)} under eagle_config")
    return ConfigError(
        "capture layers are written in several places that contradict each other",
        where=IDS_KEY,
        found=" and ".join(found),
        expected="places that name the same boundaries",
        fix=OVERRIDE,
    )


def _default(limit: int | None, n_captures: int) -> CaptureReading:
    if n_captures != 3:
        raise ConfigError(
            "the draft's config lists no capture layers, and the default has three",
            where=IDS_KEY,
            found=f"a draft of {n_captures} captures",
            fix="pass capture=(...) with that many boundaries",
        )
    if limit is None:
        return CaptureReading((), source="no capture layers in the config: 2, L//2, L-3 of a target that was not given")
    ids = default_boundaries(limit)
    return CaptureReading(
        ids, source=f"no capture layers in the config: assumed the default 2, L//2, L-3 = {list(ids)}"
    )


def _check(reading: CaptureReading, limit: int | None, n_captures: int, explicit: bool) -> CaptureReading:
    """Count, range and order. An explicit tuple may hold any order, for drafts that were trained so."""
    ids = reading.boundaries
    if not ids and limit is None:
        return reading
    if len(ids) != n_captures:
        raise ConfigError(
            "the number of capture layers is not what the draft's fc reads",
            where="capture" if explicit else IDS_KEY,
            found=f"{len(ids)} ({list(ids)})",
            expected=f"{n_captures} (columns of fc.weight / width of the target)",
        )
    low = [b for b in ids if b < 0 or (limit is not None and b > limit)]
    if low:
        top = "L" if limit is None else f"{limit} (the target's blocks)"
        raise ConfigError(
            "capture layers lie outside the target",
            where="capture" if explicit else IDS_KEY,
            found=f"boundaries {list(ids)}",
            expected=f"0 (embedding) to {top}",
            fix=OVERRIDE,
        )
    if not explicit and any(a >= b for a, b in zip(ids, ids[1:], strict=False)):
        raise ConfigError(
            "capture layers are not in ascending order, low to high",
            where=IDS_KEY,
            found=f"boundaries {list(ids)}",
            fix="pass capture=(...) with the boundaries in the order in which the draft's fc reads them",
        )
    return reading

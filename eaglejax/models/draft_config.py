"""A draft's config.json and tensor shapes, turned into `DraftConfig`. Tensors are trusted over copied config values;
contradictions are refused.

Only headers are needed: everything here runs before any weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.load_report import LoadReport
from eaglejax.models.capture import Capture, CaptureReading, read_capture
from eaglejax.models.config import DraftConfig
from eaglejax.models.draft_formats import FlatConfig, Shapes
from eaglejax.models.draft_layers import read_layers

PLAIN_EPS = 1e-6  # rms_norm_eps of a Llama config without the key


@dataclass(frozen=True)
class TargetFacts:
    """What a draft must know of its target. `layers` and `hidden_size` are None where only the embedding table is at
    hand.
    """

    vocab_size: int | None = None
    hidden_size: int | None = None
    layers: int | None = None
    norm_eps: float | None = None


@dataclass(frozen=True)
class DraftReading:
    """A draft's config as understood."""

    config: DraftConfig
    capture: CaptureReading


def read_draft_config(
    flat: FlatConfig, tensors: Shapes, target: TargetFacts, *, capture: Capture, where: object, report: LoadReport
) -> DraftReading:
    """Everything about a draft that its config and tensor headers tell.

    Arguments:
        flat: the config in flat form (`draft_formats.flatten`).
        tensors: shapes by our names.
        target: what is known of the target.
        capture: how capture layers are numbered (`capture.read_capture`).
        where: the config file, for messages. report: told what was found, assumed and overruled.

    Raises ConfigError or CheckpointError naming key or tensor, the value found and the value expected.
    """
    hidden = _hidden_size(flat, tensors, where)
    fc = _fc_shape(flat, tensors, hidden, where)
    target_hidden = _target_hidden(flat, target, where)
    aux = flat.flags.get("use_aux_hidden_state", True)
    count, target_hidden = _captures(flat, fc, hidden, target_hidden, where)
    reading = _reading(flat, target, count, aux, capture, where)
    norms = _norms(flat, tensors, count, target_hidden, where, report)
    layers = read_layers(flat, tensors, hidden, where, report)
    head, embedding = tensors.shape("lm_head.weight"), tensors.shape("embed_tokens.weight")
    vocab = embedding[0] if embedding else _vocab(flat, tensors, target)
    config = DraftConfig(
        vocab_size=vocab,
        draft_vocab_size=_draft_vocab(flat, tensors, target.vocab_size or vocab, where),
        hidden_size=hidden,
        target_hidden_size=target_hidden,
        boundaries=reading.boundaries,
        layers=layers,
        norm_eps=_norm_eps(flat, where, report),
        fc=fc is not None,
        fc_bias=tensors.shape("fc.bias") is not None,
        own_embedding=embedding is not None,
        own_head=head is not None,
        max_position=positive(flat.layer, "max_position_embeddings", where) or 0,
        captures=count,
        target_norm_eps=None if aux else target.norm_eps,
        **norms,
    )
    return DraftReading(config, reading)


def positive(layer: Mapping[str, Any], key: str, where: object) -> int | None:
    """A whole number above 0 in a config, or None where the key is absent or null."""
    value = layer.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value <= 0):
        raise ConfigError("must be a whole number above 0", where=f"{where}: {key}", found=repr(value))
    return value


def _hidden_size(flat: FlatConfig, tensors: Shapes, where: object) -> int:
    """Width of the draft, from a norm of its first layer; a config that says otherwise is refused."""
    shape = tensors.shape("layers.0.post_attention_layernorm.weight")
    said = positive(flat.layer, "hidden_size", where)
    if shape is None or len(shape) != 1:
        raise CheckpointError(
            "a tensor is missing or misshapen",
            where=f"{where}: layers.0.post_attention_layernorm.weight",
            found=shape,
            expected=[said],
        )
    if said is not None and said != shape[0]:
        raise ConfigError(
            "does not fit the tensors",
            where=f"{where}: hidden_size",
            found=said,
            expected=f"{shape[0]} (post_attention_layernorm.weight)",
        )
    return shape[0]


def _fc_shape(flat: FlatConfig, tensors: Shapes, hidden: int, where: object) -> tuple[int, ...] | None:
    shape = tensors.shape("fc.weight")
    flag = flat.flags.get("fc")
    if flag is not None and flag != (shape is not None):
        raise ConfigError(
            "contradicts the tensors", where=f"{where}: fc", found=flag, expected=f"fc.weight {shape or 'absent'}"
        )
    if shape is not None and (len(shape) != 2 or shape[0] != hidden):
        raise CheckpointError(
            "is misshapen",
            where=f"{where}: fc.weight",
            found=list(shape),
            expected=f"[{hidden}, captures x width of the target]",
        )
    return shape


def _target_hidden(flat: FlatConfig, target: TargetFacts, where: object) -> int | None:
    """Width of the target: its own where it is at hand, else the config's `target_hidden_size`, else None."""
    said = positive(flat.layer, "target_hidden_size", where)
    if said is not None and target.hidden_size is not None and said != target.hidden_size:
        raise ConfigError(
            "the draft was made for a target of another width",
            where=f"{where}: target_hidden_size",
            found=said,
            expected=f"{target.hidden_size} (hidden_size of the target)",
            fix="use a draft made for this target, or mend the key if it is a copy error",
        )
    return target.hidden_size or said


def _captures(
    flat: FlatConfig, fc: tuple[int, ...] | None, hidden: int, target_hidden: int | None, where: object
) -> tuple[int, int]:
    """How many states are captured, and the width of each: fc's columns are their product."""
    columns = hidden if fc is None else fc[1]
    what = "hidden_size (there is no fc)" if fc is None else "columns of fc.weight"
    if target_hidden is None:
        count = 1 if fc is None else _listed_count(flat)
        if columns % count:
            raise ConfigError(
                f"{columns} columns of fc.weight are not {count} captures",
                where=where,
                fix="set target_hidden_size in the draft's config to the target's hidden_size",
            )
        return count, columns // count
    if columns % target_hidden or columns == 0:
        raise CheckpointError(
            "the draft does not fit the width of the target",
            where=where,
            found=f"{columns} {what}",
            expected=f"a multiple of {target_hidden} (hidden_size of the target)",
            fix="use a draft made for this target",
        )
    return columns // target_hidden, target_hidden


def _listed_count(flat: FlatConfig) -> int:
    """The number of captures where the width of the target is unknown: as many as the config lists, else three."""
    if flat.flags.get("use_aux_hidden_state") is False:
        return 1
    try:
        return len(read_capture(flat.top, None, 0, "auto").boundaries)
    except ConfigError:
        return 3


def _reading(
    flat: FlatConfig, target: TargetFacts, count: int, aux: bool, capture: Capture, where: object
) -> CaptureReading:
    if aux:
        return read_capture(flat.top, target.layers, count, capture)
    if count != 1:
        raise ConfigError(
            "the draft reads one state (use_aux_hidden_state is false), but its fc reads more",
            where=f"{where}: use_aux_hidden_state",
            found=f"fc.weight for {count} captures",
            expected="1",
        )
    end = () if target.layers is None else (target.layers,)
    if not isinstance(capture, str) and tuple(capture) != end:
        raise ConfigError(
            "the draft reads the target's last state only (use_aux_hidden_state is false)",
            where="capture",
            found=tuple(capture),
            expected=end or "no capture=",
        )
    return CaptureReading(
        end, source="use_aux_hidden_state is false: the target's last state after its final norm is the only capture"
    )


def _norms(
    flat: FlatConfig, tensors: Shapes, count: int, target_hidden: int, where: object, report: LoadReport
) -> dict[str, bool]:
    """The flags of the norms; each must agree with the tensors, and none is assumed from a tensor alone."""
    flags = flat.flags
    if flags.get("use_mtp_layernorm"):
        raise ConfigError(
            "norms of a multi-token-prediction layer are not supported", where=f"{where}: use_mtp_layernorm", found=True
        )
    joint = _paired(flags, "norm_before_fc", tensors, ["input_norm.weight"], [count * target_hidden], where, report)
    names = [f"fc_norm.{i}.weight" for i in range(max(count, 1))]
    each = _paired(flags, "fc_norm", tensors, names, [target_hidden], where, report)
    if joint and each:
        raise ConfigError("norm_before_fc and fc_norm exclude each other", where=where, found="both true")
    final = flags.get("use_last_layernorm", True)
    embedded, hidden = _first_norms(flags.get("use_input_layernorm_in_first_layer", True), tensors, where)
    if not final and tensors.shape("norm.weight") is not None:
        report.warn("norm.weight is in the draft's file but switched off by use_last_layernorm: not used")
    residual = flags.get("norm_before_residual", False)
    if residual and not hidden:
        raise ConfigError(
            "norm_before_residual needs hidden_norm", where=where, found="no hidden_norm.weight in the file"
        )
    output = flags.get("norm_output", False)
    if output and not final:
        raise ConfigError(
            "norm_output needs the last norm, which use_last_layernorm switches off",
            where=where,
            found="norm_output true",
        )
    return dict(
        norm_before_residual=residual,
        norm_before_fc=joint,
        fc_norm=each,
        norm_output=output,
        input_norm=embedded,
        hidden_norm=hidden,
        final_norm=final,
    )


def _first_norms(flag: bool, tensors: Shapes, where: object) -> tuple[bool, bool]:
    """Whether the first layer norms its embedding half and its hidden half.

    `use_input_layernorm_in_first_layer` false takes one of the two away, and readers differ on which: the file tells
    by which weight it lacks.
    """
    embedded, hidden = (
        tensors.shape(f"layers.0.{name}.weight") is not None for name in ("input_layernorm", "hidden_norm")
    )
    if flag and not (embedded and hidden):
        missing = "hidden_norm" if embedded else "input_layernorm"
        raise CheckpointError("tensor is missing", where=f"{where}: layers.0.{missing}.weight", found="absent")
    if not flag and embedded and hidden:
        raise ConfigError(
            "the config switches off a norm of the first layer, but the file holds both",
            where=f"{where}: use_input_layernorm_in_first_layer",
            found="false, with input_layernorm.weight and hidden_norm.weight",
            expected="a file without one of them",
        )
    return embedded, hidden


def _paired(
    flags: Mapping[str, bool],
    flag: str,
    tensors: Shapes,
    names: list[str],
    shape: list[int],
    where: object,
    report: LoadReport,
) -> bool:
    """A flag that comes with tensors of its own."""
    there = [name for name in names if tensors.shape(name) is not None]
    if flag not in flags and there:
        raise ConfigError(
            f"{there[0]} is in the file, but the config does not say whether it is used",
            where=f"{where}: {flag}",
            fix=f"set {flag} to true (or to false, to leave the norm out)",
        )
    if not flags.get(flag, False):
        if there:
            report.warn(f"{there[0]} is in the draft's file but switched off by {flag}: not used")
        return False
    if missing := [name for name in names if name not in there]:
        raise CheckpointError(
            f"{flag} is true, but a tensor is missing", where=f"{where}: {missing[0]}", found="absent", expected=shape
        )
    return True


def _norm_eps(flat: FlatConfig, where: object, report: LoadReport) -> float:
    value = flat.layer.get("rms_norm_eps")
    if value is None:
        report.note("draft", f"rms_norm_eps is absent: assumed {PLAIN_EPS} (the default of a Llama config)")
        return PLAIN_EPS
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ConfigError("must be a number above 0 and below 1", where=f"{where}: rms_norm_eps", found=repr(value))
    return float(value)


def _vocab(flat: FlatConfig, tensors: Shapes, target: TargetFacts) -> int:
    """Rows of the embedding a draft without one borrows; tensors are trusted over the config's (often miscopied)
    vocab_size.
    """
    marked, head = tensors.shape("t2d"), tensors.shape("lm_head.weight")
    sizes = [target.vocab_size, marked[0] if marked else None, flat.layer.get("vocab_size"), head[0] if head else None]
    return next(size for size in [*sizes, 1] if size)


def _draft_vocab(flat: FlatConfig, tensors: Shapes, vocab: int, where: object) -> int:
    """Rows of the head: the draft's own, or those of the target's head that it borrows."""
    value = flat.layer.get("draft_vocab_size")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value <= 0):
        raise ConfigError(
            "is impossible",
            where=f"{where}: draft_vocab_size",
            found=repr(value),
            expected="a whole number above 0, or null where the draft shares the target's vocabulary",
        )
    head, mapped = tensors.shape("lm_head.weight"), tensors.shape("d2t")
    if head is None:
        return mapped[0] if mapped else vocab
    if value is not None and head[0] != value:
        raise ConfigError(
            "contradicts the draft's head",
            where=f"{where}: draft_vocab_size",
            found=value,
            expected=f"{head[0]} (rows of lm_head.weight)",
        )
    return head[0]

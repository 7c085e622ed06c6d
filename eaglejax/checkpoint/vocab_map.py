"""The map from a cut draft vocabulary to the target's: d2t, t2d and the target id of every draft id.

d2t holds offsets: target id = draft id + d2t[draft id]. t2d marks the target ids that the draft knows. A wrong map
crashes nothing: it proposes other tokens, so both are checked against each other.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int, Shaped

from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.load_report import LoadReport

MEANINGS = ("offsets", "ids")  # what d2t holds; the config key "d2t" says so where a file does not


def map_vocabulary(
    d2t: Shaped[np.ndarray, "..."] | None,
    t2d: Shaped[np.ndarray, "..."] | None,
    *,
    draft_vocab: int,
    target_vocab: int,
    where: object,
    report: LoadReport,
    meaning: str | None = None,
) -> Int[np.ndarray, " w"]:
    """The target id of every draft id, int32.

    Arguments:
        d2t, t2d: the tables of the file (any integer or bool type), or None.
        draft_vocab: rows of the draft's head, w.
        target_vocab: rows of the target's embedding; no proposal may reach beyond them.
        where: the file, for messages. report: gets one line on what was done.
        meaning: "offsets" (target id = draft id + d2t) or "ids" (target id = d2t) where that is told; None: offsets, and ids only
            where t2d proves it.

    Raises CheckpointError where a map is missing, misshapen, out of range, not ascending, or contradicted by t2d; ConfigError for a
    meaning that is none.
    """
    if meaning not in (None, *MEANINGS):
        raise ConfigError("unknown meaning", where="d2t", found=repr(meaning), expected='"offsets" or "ids"')
    member = None if t2d is None else _membership(t2d, draft_vocab, target_vocab, where)
    if d2t is None:
        if meaning is not None:
            raise ConfigError("says what d2t holds, and the draft's file has none", where="d2t", found=repr(meaning))
        return _without_map(draft_vocab, target_vocab, where, report)
    if d2t.shape != (draft_vocab,) or d2t.dtype.kind not in "iu":
        raise CheckpointError(
            "d2t does not fit the draft's head",
            where=f"{where}: d2t",
            found=f"{d2t.dtype} {list(d2t.shape)}",
            expected=f"whole numbers [{draft_vocab}] (one per row of lm_head)",
        )
    offsets = d2t.astype(np.int64)
    ids = np.arange(draft_vocab, dtype=np.int64) + offsets
    if meaning == "ids":
        return _told_ids(offsets, member, target_vocab, where, report)
    fault = _fault(ids, member, target_vocab)
    if fault is None:
        known = (
            "all ids, in order" if draft_vocab == target_vocab else f"{draft_vocab} of the target's {target_vocab} ids"
        )
        report.note("draft", f"vocabulary: {known} (d2t holds offsets{'; t2d agrees' if member is not None else ''})")
        return ids.astype(np.int32)
    if meaning is None and member is not None and _fault(offsets, member, target_vocab) is None:
        report.warn("d2t of the draft holds target ids, not offsets (t2d confirms it): converted")
        return offsets.astype(np.int32)
    hint = None
    if _fault(offsets, None, target_vocab) is None:
        hint = """if these are target ids, say so with draft_config={"d2t": "ids"} (or add t2d, which would prove it)"""
    raise CheckpointError(f"d2t is not a map into the target's vocabulary: {fault}", where=f"{where}: d2t", fix=hint)


def _told_ids(
    ids: Int[np.ndarray, " w"],
    member: Shaped[np.ndarray, " m"] | None,
    target_vocab: int,
    where: object,
    report: LoadReport,
) -> Int[np.ndarray, " w"]:
    """d2t itself, where the config says that it holds target ids."""
    if fault := _fault(ids, member, target_vocab):
        raise CheckpointError(
            f'd2t does not hold target ids, as "d2t": "ids" says: {fault}',
            where=f"{where}: d2t",
            fix="leave that setting out: offsets are what d2t holds in every released draft",
        )
    report.note("draft", f"vocabulary: {ids.size} of the target's {target_vocab} ids (d2t is read as ids, as told)")
    return ids.astype(np.int32)


def _fault(ids: Int[np.ndarray, " w"], member: Shaped[np.ndarray, " m"] | None, target_vocab: int) -> str | None:
    """What is wrong with target ids of draft ids 0, 1, ..., or None."""
    limit = target_vocab if member is None else min(target_vocab, member.shape[0])
    bad = np.flatnonzero((ids < 0) | (ids >= limit))
    if bad.size:
        return f"draft id {bad[0]} becomes target id {ids[bad[0]]}, expected 0..{limit - 1}"
    falling = np.flatnonzero(np.diff(ids) <= 0)
    if falling.size:
        i = int(falling[0])
        return f"draft ids {i} and {i + 1} become target ids {ids[i]} and {ids[i + 1]}, expected ascending ids"
    if member is not None:
        strange = np.flatnonzero(~member[ids])
        if strange.size:
            return f"draft id {strange[0]} becomes target id {ids[strange[0]]}, which t2d says the draft does not know"
    return None


def _membership(
    t2d: Shaped[np.ndarray, "..."], draft_vocab: int, target_vocab: int, where: object
) -> Shaped[np.ndarray, " m"]:
    values = t2d.astype(np.int64) if t2d.dtype.kind in "biu" else None
    if values is None or t2d.ndim != 1 or ((values != 0) & (values != 1)).any():
        raise CheckpointError(
            "t2d is no table of true and false",
            where=f"{where}: t2d",
            found=f"{t2d.dtype} {list(t2d.shape)}",
            expected="bool [vocabulary]",
        )
    check_vocabulary(t2d.shape[0], target_vocab, f"{where}: t2d", "entries of t2d")
    count = int(values.sum())
    if count != draft_vocab:
        raise CheckpointError(
            "t2d marks another number of ids than the draft knows",
            where=f"{where}: t2d",
            found=f"{count} true",
            expected=f"{draft_vocab} (rows of lm_head, entries of d2t)",
        )
    return values.astype(bool)


def _without_map(draft_vocab: int, target_vocab: int, where: object, report: LoadReport) -> Int[np.ndarray, " w"]:
    """No d2t: only a draft of the whole vocabulary needs none (up to padding rows of the target)."""
    if draft_vocab > target_vocab or not padding_only(draft_vocab, target_vocab):
        raise CheckpointError(
            "the draft's vocabulary is not the target's, and there is no d2t to map it",
            where=f"{where}: d2t",
            found=f"{draft_vocab} rows of lm_head",
            expected=f"{target_vocab} (the target's vocabulary), or d2t and t2d in the file",
            fix="use the file that holds d2t, or a draft made for this target",
        )
    rows = (
        "the target's whole vocabulary"
        if draft_vocab == target_vocab
        else f"the first {draft_vocab} of the target's {target_vocab} rows"
    )
    report.note("draft", f"vocabulary: {rows} (no d2t: draft ids are target ids)")
    return np.arange(draft_vocab, dtype=np.int32)


def padding_only(size: int, target_vocab: int) -> bool:
    """Whether a smaller vocabulary can be the target's without its padding rows: short of it by an eighth at most."""
    return 0 <= target_vocab - size <= target_vocab // 8


def check_vocabulary(size: int, target_vocab: int, where: object, what: str) -> None:
    """Refuses a draft made for another vocabulary. Padding rows of the target, an eighth of it at most, may be missing
    in the draft.
    """
    if not padding_only(size, target_vocab):
        raise CheckpointError(
            "the draft was made for another vocabulary than the target's",
            where=where,
            found=f"{size} {what}",
            expected=f"{target_vocab} (rows of the target's embedding; padding rows may be missing)",
            fix="use a draft made for this target",
        )

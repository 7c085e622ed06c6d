"""What a check finds, one line each, and what the loaded pair tells without a measurement: vocabularies, tokenizer, context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from eaglejax.loading import Pair
from eaglejax.models.config import GQAConfig

Status = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Item:
    """One finding. name: what was looked at. line: in words, with figures, and with the fix where something is wrong."""

    name: str
    status: Status
    line: str


def look_at_pair(pair: Pair, max_len: int) -> list[Item]:
    """Vocabulary map, vocabulary sizes, tokenizer, ends of text, context limits and the load's own warnings."""
    items = [_map(pair), *_sizes(pair), *_ends(pair), *_context(pair, max_len)]
    for line in pair.report.warnings:
        # the wiring is measured anew
        if not line.startswith("WIRING"):
            items.append(Item("load report", "warning", line))
    return items


def _map(pair: Pair) -> Item:
    """d2t and t2d, read once more from the tables as loaded; the loader refuses what does not fit."""
    assert pair.draft is not None and pair.origin is not None
    plan, rows = pair.origin.plan, pair.target.config.vocab_size
    ids = plan.target_ids
    tables = [name for name in ("d2t", "t2d") if name in plan.tensors.infos]
    stored = " and ".join(tables) or "no tables"
    wrong = ids.size and (ids.min() < 0 or ids.max() >= rows or bool((np.diff(ids) <= 0).any()))
    if wrong:
        return Item("vocabulary map", "wrong", f"the target ids of the draft's rows are not ascending ids below {rows}")
    return Item(
        "vocabulary map", "ok", f"{ids.size} of the target's {rows} ids, ascending, within range ({stored} in the file)"
    )


def _sizes(pair: Pair) -> list[Item]:
    assert pair.draft is not None
    rows, config = pair.target.config.vocab_size, pair.draft.config
    items = []
    if config.own_embedding and config.vocab_size != rows:
        line = f"the draft's own embedding has {config.vocab_size} rows, the target's {rows}: ids beyond it cannot be drafted after"
        items.append(Item("vocabulary size", "ok" if config.vocab_size < rows else "warning", line))
    else:
        owner = "own" if config.own_embedding else "borrowed from the target"
        items.append(
            Item(
                "vocabulary size",
                "ok",
                f"embedding of {rows} rows ({owner}); the draft's head has {config.draft_vocab_size}",
            )
        )
    if pair.tokenizer is None:
        items.append(Item("tokenizer", "ok", "none: token ids only"))
        return items
    size = pair.tokenizer.vocab_size
    if size > rows:
        line = f"the tokenizer has ids up to {size - 1}, the target's embedding {rows} rows: it is another model's tokenizer"
        items.append(Item("tokenizer", "wrong", line))
    else:
        padding = f"; {rows - size} rows are no token" if size < rows else ""
        items.append(Item("tokenizer", "ok", f"{size} tokens for {rows} rows{padding}"))
    return items


def _ends(pair: Pair) -> list[Item]:
    """Ids that end a text: within the target's rows, and known to the draft."""
    assert pair.origin is not None
    rows, known = pair.target.config.vocab_size, set(pair.origin.plan.target_ids.tolist())
    ids = pair.eos_ids
    outside = [i for i in ids if i >= rows]
    if outside:
        return [Item("end of text", "wrong", f"ids {outside} lie beyond the target's {rows} rows")]
    missing = [i for i in ids if i not in known]
    if missing:
        line = f"ids {missing} are not in the draft's vocabulary: the end of an answer is never drafted (a token per answer)"
        return [Item("end of text", "warning", line)]
    return [Item("end of text", "ok", f"ids {list(ids)} are in the draft's vocabulary" if ids else "none")]


def _context(pair: Pair, max_len: int) -> list[Item]:
    assert pair.draft is not None
    target, draft = pair.target.config.max_position, pair.draft.config.max_position
    attention = pair.draft.config.layers[0].attention
    window = attention.window if isinstance(attention, GQAConfig) else None
    seen = f", a draft layer sees {window} back" if window else ""
    line = f"max_len {max_len}; target {target or 'unlimited'}, draft {draft or 'unlimited'}{seen}"
    if target and max_len > target:
        return [Item("context", "wrong", f"{line}: beyond the target's context")]
    if draft and max_len > draft:
        return [Item("context", "warning", f"{line}: beyond {draft} the draft was not trained, and may accept less")]
    return [Item("context", "ok", line)]

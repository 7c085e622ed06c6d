"""Mistakes in reading a draft format, each as a change of the reference draft; used by make_draft_fixtures.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from draft_numpy import Draft, Layer, with_layers

Fault = Callable[[Draft], Draft]


def swapped_residual(draft: Draft) -> Draft:
    return replace(draft, norm_before_residual=not draft.norm_before_residual)


def swapped_feedback(draft: Draft) -> Draft:
    return replace(draft, norm_output=not draft.norm_output)


def position_gap(draft: Draft) -> Draft:
    """The chain starts one position late; the caller moves the positions."""
    return draft


def hidden_first(draft: Draft) -> Draft:
    """Attention input joined as [hidden, embedding]: the same as swapping the two halves of its projections."""

    def change(layer: Layer) -> Layer:
        if not layer.first:
            return layer
        swapped = dict(layer.weights)
        for name, weight in layer.weights.items():
            if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"):
                swapped[name] = np.concatenate(np.split(weight, 2, axis=1)[::-1], axis=1)
        return replace(layer, weights=swapped)

    return with_layers(draft, change)


def captures_reversed(count: int) -> Fault:
    def fault(draft: Draft) -> Draft:
        assert draft.fc is not None
        norms = draft.fc_norms[::-1] if draft.fc_norms else None
        fc = np.concatenate(np.split(draft.fc, count, axis=1)[::-1], axis=1)
        joined = draft.input_norm
        if joined is not None:
            joined = np.concatenate(np.split(joined, count)[::-1])
        return replace(draft, fc=fc, fc_norms=norms, input_norm=joined)

    return fault


def offsets_ignored(draft: Draft) -> Draft:
    return replace(draft, target_ids=np.arange(len(draft.target_ids)))


def offsets_as_ids(draft: Draft) -> Draft:
    return replace(draft, target_ids=draft.target_ids - np.arange(len(draft.target_ids)))


def without(*fields: str) -> Fault:
    """The tensors of these fields are ignored."""
    return lambda draft: replace(draft, **dict.fromkeys(fields))


def without_tensors(*names: str) -> Fault:
    """These tensors of the layers are ignored."""

    def change(layer: Layer) -> Layer:
        kept = {k: v for k, v in layer.weights.items() if k.removesuffix(".weight") not in names}
        return replace(layer, weights=kept)

    return lambda draft: with_layers(draft, change)


def window(size: int | None) -> Fault:
    return lambda draft: with_layers(draft, lambda layer: replace(layer, window=size))


def first_layer_only(draft: Draft) -> Draft:
    return replace(draft, layers=draft.layers[:1])


def rope_base(base: float, scale: float = 1.0) -> Fault:
    """Plain frequencies of that base; cos and sin times `scale`, and the softmax scale without a factor."""

    def fault(draft: Draft) -> Draft:
        width = 2 * len(draft.rope.inv_freq)
        plain = replace(draft.rope, inv_freq=base ** (-np.arange(0, width, 2) / width), scale=scale)
        return replace(draft, rope=plain, softmax_scale=draft.head_dim**-0.5)

    return fault


def rope_frequencies(base: float) -> Fault:
    """Plain frequencies of that base, every other factor kept."""
    return lambda draft: replace(rope_base(base, draft.rope.scale)(draft), softmax_scale=draft.softmax_scale)


def rope_unscaled(draft: Draft) -> Draft:
    return replace(draft, rope=replace(draft.rope, scale=1.0))


def pairing_swapped(draft: Draft) -> Draft:
    return replace(draft, rope=replace(draft.rope, interleaved=not draft.rope.interleaved))


def softmax_plain(draft: Draft) -> Draft:
    return replace(draft, softmax_scale=draft.head_dim**-0.5)


def softmax_nope_only(draft: Draft) -> Draft:
    """1/sqrt(nope) in place of 1/sqrt(nope + rope)."""
    assert draft.mla is not None
    factor = draft.softmax_scale * draft.head_dim**0.5
    return replace(draft, softmax_scale=factor * draft.mla["nope"] ** -0.5)


def norm_all_at_once(draft: Draft) -> Draft:
    """One norm over the joined captures in place of one for each."""
    assert draft.fc_norms is not None
    return replace(draft, fc_norms=None, input_norm=np.concatenate(draft.fc_norms))


def norm_each(count: int) -> Fault:
    """One norm for each capture in place of one over all."""

    def fault(draft: Draft) -> Draft:
        assert draft.input_norm is not None
        return replace(draft, fc_norms=np.split(draft.input_norm, count), input_norm=None)

    return fault


def with_norm_of_ones(draft: Draft) -> Draft:
    """A missing final norm is taken for one with weights of one."""
    return replace(draft, norm=np.ones(draft.lm_head.shape[1]))


COMMON: dict[str, Fault] = {
    "norm_before_residual flipped": swapped_residual,
    "norm_output flipped": swapped_feedback,
    "hidden before embedding": hidden_first,
    "chain positions one late": position_gap,
}
MAPPED: dict[str, Fault] = {"d2t ignored": offsets_ignored, "d2t read as ids": offsets_as_ids}

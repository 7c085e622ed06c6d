"""Kit M pairs with every wire a fault can be put into: captures with tags, norms, a map of the vocabulary, and RoPE.

`write_turned`: Kit M's draft sees its own position whatever RoPE does. Here it looks `BACK` positions back instead, found by the angle that
RoPE of its own base gives that distance, and knows what follows the token there that many steps on: with another base, or another
pairing of the channels, it reads the wrong row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kit_m
import numpy as np
import pairs

from eaglejax.measure.teacher_forced import Text

RIGHT = (2, 4, 5)
IDS = {"eagle_aux_hidden_state_layer_ids": list(RIGHT)}
RING = kit_m.ring()
P = kit_m.sharp(RING)
BACK, THETA = 5, 500_000.0
PLACES = (1, 2)  # the pairs of channels that carry the angle; the first turns alike under every base


def write_target(folder: Path) -> str:
    return str(kit_m.write_target(folder / "target", P, layers=8, rope_theta=THETA))


def write_draft(folder: Path, tensors: dict[str, np.ndarray] | None = None, ids: Any = None, **config: Any) -> str:
    return str(kit_m.write_draft(folder, P, RIGHT, ids=ids, tensors=tensors, **IDS | config))


def turned() -> dict[str, np.ndarray]:
    """Kit M's attention, looking `BACK` positions back under a base of `THETA`."""
    hidden, half = kit_m.HIDDEN, kit_m.HEAD_DIM // 2
    scale = 1 / np.sqrt(1 / hidden + 1e-5)
    angles = BACK * THETA ** (-np.arange(half) / half)
    looks, seen = np.zeros(kit_m.HEAD_DIM), np.zeros(kit_m.HEAD_DIM)
    for place in PLACES:
        seen[place] = 1
        looks[place], looks[place + half] = np.cos(angles[place]), -np.sin(angles[place])
    query = np.zeros((kit_m.HEADS * kit_m.HEAD_DIM, 2 * hidden))
    key = np.zeros((kit_m.KV_HEADS * kit_m.HEAD_DIM, 2 * hidden))
    query[:, : kit_m.VOCAB] = np.tile(looks, kit_m.HEADS)[:, None] / scale
    key[:, : kit_m.VOCAB] = np.tile(seen, kit_m.KV_HEADS)[:, None] * 3000 * np.sqrt(kit_m.HEAD_DIM) / scale
    onward = np.zeros((kit_m.VOCAB, kit_m.VOCAB))  # one-hot of a token -> one-hot of what follows it BACK steps on
    for token in range(kit_m.VOCAB):
        onward[pairs.walk(RING, token, BACK)[-1], token] = 1
    value = np.zeros((kit_m.VOCAB, 2 * hidden))
    value[:, : kit_m.VOCAB], value[:, hidden : hidden + kit_m.VOCAB] = onward / scale, -onward / scale
    name = lambda n: f"midlayer.self_attn.{n}_proj.weight"
    made = {name("q"): query, name("k"): key, name("v"): value}
    return {key: array.astype(np.float32) for key, array in made.items()}


def ring_texts(count: int = 4, tokens: int = 40) -> list[Text]:
    """The target's own greedy text, known by hand: the ring, from several places on."""
    starts = [3 + 15 * number for number in range(count)]
    return [Text([start, *pairs.walk(RING, start, tokens)], 1) for start in starts]


def random_texts(count: int = 4, tokens: int = 70) -> list[Text]:
    """Tokens of the ring in any order: what follows each is known all the same, and no place is like another."""
    rows = np.random.default_rng(7).integers(3, kit_m.VOCAB - 1, (count, tokens))
    return [Text(row, 1) for row in rows.tolist()]

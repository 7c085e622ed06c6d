"""Train the routed experts of `smollm2-moe`: SmolLM2 with its FFNs kept as shared experts and small routed ones beside them.

    python tools/train_moe.py --texts TEXTS --prompts prompts.npz --out OUT --train-seconds 400

TEXTS is made by gather_moe_text.py, prompts.npz by `train_first_draft.py prepare`. The base stays as it is. The text is
of several kinds, and answers of the base itself at temperature 1 to the training prompts (whose best model is the base:
they keep its manners). Down projections start at zero, so step 0 is the base. A second loss, on a quarter of the rows, keeps
experts apart: served to a token that did not choose them, they shall be worse than none. Routers: sigmoid scores, a correction
that evens the load (arXiv:2408.15664) and no auxiliary loss. It works by the clock, and leaves in --out: weights-N.npz
(bfloat16), curve.csv and report.json, measured with the weights as they are shipped (int8).
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from prompt_sets import read_prompts
from sample_answers import SIZES, Sampler
from weight_parts import load_parts, save_parts

from eaglejax.checkpoint.difference import difference_config
from eaglejax.checkpoint.difference_writer import RoutedLayer, write_difference
from eaglejax.checkpoint.reader import open_checkpoint
from eaglejax.checkpoint.source import resolve
from eaglejax.checkpoint.target_loader import load_target
from eaglejax.load_report import LoadReport
from eaglejax.models.attention import GroupedQueryAttention
from eaglejax.models.rope import rotate
from eaglejax.models.target import Target

ROW = 512
OWN = "own answers"
CHUNK = 2048  # rows whose logits exist at a time


class Shape(NamedTuple):
    """experts a layer, chosen for each row, their width, and how many first layers have none."""

    experts: int
    topk: int
    width: int
    dense: int


class Batch(NamedTuple):
    """[b, t] int32 each; segment -1 is padding."""

    tokens: jax.Array
    positions: jax.Array
    segments: jax.Array


def first_weights(shape: Shape, layers: int, features: int, seed: int) -> dict[str, jax.Array]:
    """Stacked over the layers that have experts; float32."""
    keys = jax.random.split(jax.random.key(seed), 3)
    count, (e, _, f, _) = layers - shape.dense, shape
    normal = lambda key, *size: jax.random.normal(key, (count, *size), jnp.float32) * features**-0.5
    return {
        "router": normal(keys[0], e, features),
        "gate": normal(keys[1], e, f, features),
        "up": normal(keys[2], e, f, features),
        "down": jnp.zeros((count, e, f, features), jnp.float32),  # transposed: one row per place of the width
    }


def rounded(weights: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """As they are shipped: int8 with one factor per row, the router in float32."""
    out = dict(weights)
    for name in ("gate", "up", "down"):
        scale = jnp.maximum(jnp.abs(weights[name]).max(-1, keepdims=True), 1e-12) / 127
        out[name] = jnp.round(weights[name] / scale) * scale
    return out


def without(weights: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The routed part zeroed: the base."""
    return weights | {"down": jnp.zeros_like(weights["down"])}


def exchanged(weights: dict[str, jax.Array], shift: int | jax.Array) -> dict[str, jax.Array]:
    """Every router's choice served by the expert `shift` places before the chosen one."""
    return weights | {name: jnp.roll(weights[name], shift, axis=1) for name in ("gate", "up", "down")}


def routed(layer: dict[str, jax.Array], correction, x, topk: int):
    """What the experts add to rows [n, d], and the share of choices of each expert [e]."""
    scores = jax.nn.sigmoid(jnp.einsum("nd,ed->ne", x.astype(jnp.float32), layer["router"], precision="highest"))
    _, ids = lax.top_k(scores + correction, topk)
    chosen = jax.nn.one_hot(ids, scores.shape[1], dtype=jnp.float32).sum(1)
    weights = scores * chosen
    weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    gate, up, down = (layer[name].astype(x.dtype) for name in ("gate", "up", "down"))
    hidden = jax.nn.silu(jnp.einsum("nd,efd->nef", x, gate)) * jnp.einsum("nd,efd->nef", x, up)
    return jnp.einsum("nef,efd->nd", hidden * weights[..., None].astype(x.dtype), down), chosen


def attend(attention, x, batch: Batch):
    """Causal attention within documents."""
    assert isinstance(attention, GroupedQueryAttention)
    config, (b, t, _) = attention.config, x.shape
    queries = rotate(attention.q(x).reshape(b, t, config.heads, config.head_dim), batch.positions, config.rope)
    both = attention.kv(x).reshape(b, t, 2, config.kv_heads, config.head_dim)
    keys = rotate(both[:, :, 0], batch.positions, config.rope)
    seen = (batch.segments[:, :, None] == batch.segments[:, None, :]) & jnp.tril(jnp.ones((t, t), bool))
    mixed = jax.nn.dot_product_attention(queries, keys, both[:, :, 1], mask=seen[:, None], scale=config.head_dim**-0.5)
    return attention.out(mixed.reshape(b, t, -1))


def states(target: Target, weights, corrections, batch: Batch, shape: Shape):
    """Last hidden states [b, t, d] after the final norm, and which experts each row of each layer chose [l, n, e]."""
    x, choices = target.embedding(batch.tokens), []
    for number, block in enumerate(target.layers):

        @jax.checkpoint
        def run(x, layer, correction, block=block):
            x = x + attend(block.attention, block.input_norm(x), batch)
            normed = block.post_norm(x)
            out, chosen = x + block.mlp(normed), None
            if layer is not None:
                added, chosen = routed(layer, correction, normed.reshape(-1, normed.shape[-1]), shape.topk)
                out = out + added.reshape(out.shape)
            return out, chosen

        one = number - shape.dense
        layer = None if one < 0 else {name: value[one] for name, value in weights.items()}
        x, chosen = run(x, layer, None if one < 0 else corrections[one])
        if chosen is not None:
            choices.append(chosen)
    return target.norm(x), jnp.stack(choices)


def nats(target: Target, hidden, batch: Batch):
    """Cross-entropy summed over the places that have a next token in their document, and their count, by chunks of rows."""
    head = target.embedding.weight[...] if target.head is None else target.head.weight[...]
    labels = jnp.roll(batch.tokens, -1, axis=1)
    counts = (batch.segments >= 0) & (jnp.roll(batch.segments, -1, axis=1) == batch.segments)
    counts = counts.at[:, -1].set(False)
    size = min(CHUNK, labels.size)

    @jax.checkpoint
    def chunk(part):
        states, label, count = part
        logits = jnp.einsum("nd,vd->nv", states, head, preferred_element_type=jnp.float32)
        lost = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, label[:, None], 1)[:, 0]
        return jnp.where(count, lost, 0).sum(), count.sum()

    cut = lambda x: x.reshape(-1, size, *x.shape[2:])
    return lax.map(chunk, (cut(hidden), cut(labels), cut(counts)))


def packed(documents: list[np.ndarray], seed: int) -> Batch:
    """Documents cut to rows of ROW and packed, first fit by falling size, rows in random order; numpy."""
    cut = [d[i : i + ROW] for d in documents for i in range(0, len(d), ROW) if len(d[i : i + ROW]) > 8]
    cut.sort(key=len, reverse=True)
    rows: list[list[np.ndarray]] = []
    open_rows: list[list[int]] = [[] for _ in range(ROW + 1)]  # by room left
    for document in cut:
        room = next((r for r in range(len(document), ROW + 1) if open_rows[r]), None)
        row = len(rows) if room is None else open_rows[room].pop()
        if room is None:
            rows.append([])
        rows[row].append(document)
        open_rows[(ROW if room is None else room) - len(document)].append(row)
    tokens, positions = np.zeros((2, len(rows), ROW), np.int32)
    segments = np.full((len(rows), ROW), -1, np.int32)
    for row, members in enumerate(rows):
        start = 0
        for number, document in enumerate(members):
            place = (row, slice(start, start + len(document)))
            tokens[place], positions[place], segments[place] = document, np.arange(len(document)), number
            start += len(document)
    order = np.random.default_rng(seed).permutation(len(rows))
    return Batch(tokens[order], positions[order], segments[order])


class Run:
    def __init__(self, args):
        if args.batch % 4 or (args.batch // 4 * ROW) % min(CHUNK, args.batch // 4 * ROW):
            raise SystemExit(f"--batch {args.batch}: a quarter of it, in rows of {ROW}, must be cut evenly by {CHUNK}")
        self.args, self.began = args, time.time()
        self.out = Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.target = load_target(resolve(args.target).path, dtype=args.dtype, report=LoadReport())
        self.shape = Shape(args.experts, args.topk, args.width, args.dense)
        self.graph, self.base = nnx.split(self.target)

    def log(self, line: str) -> None:
        print(f"[{time.time() - self.began:7.1f}] {line}", flush=True)

    def own_answers(self) -> list[np.ndarray]:
        """Answers at temperature 1 to the training prompts, for --sample-seconds."""
        prompts = read_prompts(Path(self.args.prompts), SIZES[0], self.args.limit)["train"]
        sampler = Sampler(self.target, self.args.places, self.args.seed)
        room, began, found = sampler.batch_size(SIZES[0]), time.time(), []
        order = np.random.default_rng(self.args.seed).permutation(len(prompts))
        for start in range(0, len(order), room):
            if found and time.time() - began > self.args.sample_seconds:
                break
            part = [prompts[i] for i in order[start : start + room]]
            found += sampler.answer(part, SIZES[0], np.ones(len(part), np.float32))
            self.log(f"{len(found)} own answers")
        return [document.tokens for document in found]

    def text(self) -> tuple[Batch, dict[str, Batch]]:
        """Rows to train on, and held-out rows by kind."""
        train: list[np.ndarray] = []
        held_out: dict[str, Batch] = {}
        for file in sorted(Path(self.args.texts).glob("*.npz")):
            with np.load(file) as stored:
                both = {}
                for part in ("train", "heldout"):
                    ends = np.cumsum(stored[f"{part}.lengths"].astype(np.int64))[:-1]
                    both[part] = np.split(stored[f"{part}.ids"].astype(np.int32), ends)
                    both[part] = both[part][: self.args.limit or None]
            train += both["train"]
            held_out[file.stem] = packed(both["heldout"], 0)
        own = self.own_answers()
        keep = max(1, len(own) // 50)
        held_out[OWN] = packed(own[:keep], 0)
        return packed(train + own[keep:], self.args.seed), held_out

    def train(self) -> None:
        args, shape = self.args, self.shape
        text, held_out = self.text()
        self.log(f"{len(text.tokens)} rows of {ROW}, {(text.segments >= 0).mean():.1%} filled")
        weights = first_weights(shape, len(self.target.layers), self.target.config.hidden_size, args.seed)
        corrections = jnp.zeros(weights["router"].shape[:2], jnp.float32)
        optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(0.9, 0.95))
        with jax.numpy_dtype_promotion("standard"):
            moments = optimiser.init(weights)

        @partial(jax.jit, donate_argnums=(0, 1, 2))
        def step(weights, corrections, moments, base, batch, rate, shift):
            target = nnx.merge(self.graph, base)

            some = Batch(*(part[: len(part) // 4] for part in batch))
            hidden, _ = states(target, without(weights), corrections, some, shape)
            total, count = nats(target, hidden, some)
            dense = total / jnp.maximum(count, 1)

            def objective(weights):
                hidden, choices = states(target, weights, corrections, batch, shape)
                total, count = nats(target, hidden, batch)
                loss = total.sum() / count.sum()
                hidden, _ = states(target, exchanged(weights, shift), corrections, some, shape)
                total, count = nats(target, hidden, some)
                other = total / jnp.maximum(count, 1)
                # experts that are somebody else's shall be worse than none: else all learn the same, and routing means nothing
                short = jax.nn.relu(dense + args.margin - other).mean()
                return loss + args.contrast * short, (loss, (other - dense).mean(), choices)

            (_, (loss, above, choices)), gradient = jax.value_and_grad(objective, has_aux=True)(weights)
            real = (batch.segments >= 0).reshape(-1)
            share = jnp.where(real[:, None], choices, 0).sum(1) / (real.sum() * shape.topk)
            with jax.numpy_dtype_promotion("standard"):
                updates, moments_after = optimiser.update(gradient, moments, weights)
            weights = jax.tree.map(lambda w, u: w - rate * u, weights, updates)
            after = corrections + args.balance * jnp.sign(1 / shape.experts - share)
            return weights, after, moments_after, (loss, share.min(), share.max(), optax.tree.norm(gradient), above)

        rng = np.random.default_rng(args.seed)
        curve = (self.out / "curve.csv").open("w", newline="", encoding="utf-8")
        writer = csv.writer(curve)
        began, number, order = time.time(), 0, []
        seconds = args.train_seconds
        while True:
            gone = (time.time() - began) / seconds
            if gone >= 1 or (args.max_steps and number >= args.max_steps):
                break
            if len(order) < args.batch:
                order = list(rng.permutation(len(text.tokens)))
            rows = [order.pop() for _ in range(min(args.batch, len(order)))]
            batch = Batch(*(jnp.asarray(part[rows]) for part in text))
            rate = args.rate * (
                min(1.0, gone / 0.03) if gone < 0.03 else 0.02 + 0.98 * 0.5 * (1 + np.cos(np.pi * gone))
            )
            weights, corrections, moments, figures = step(
                weights,
                corrections,
                moments,
                self.base,
                batch,
                jnp.float32(rate),
                jnp.int32(rng.integers(1, shape.experts)),
            )
            number += 1
            if number == 1:
                jax.block_until_ready(figures)
                began = time.time()
                if args.total_seconds:
                    seconds = max(1.0, min(seconds, args.total_seconds - (began - self.began)))
                self.log(f"first step done; training for {seconds:.0f} s")
            if number % 20 == 0:
                seen = [float(f) for f in figures]
                writer.writerow([number, round(time.time() - began, 1), *(round(f, 5) for f in seen)])
                if number % 200 == 0:
                    self.log(
                        f"step {number}: loss {seen[0]:.4f}, shares {seen[1]:.3f}..{seen[2]:.3f}, norm {seen[3]:.3f}, "
                        f"exchanged above none {seen[4]:.4f}"
                    )
        curve.close()
        self.log(f"{number} steps")
        facts = {"correction": np.asarray(corrections), **{k: np.asarray(v) for k, v in shape._asdict().items()}}
        save_parts(self.out, {name: np.asarray(value) for name, value in weights.items()}, facts)
        stored, _ = load_parts(self.out)
        self.write_model(stored, np.asarray(corrections))
        self.report({name: jnp.asarray(value) for name, value in stored.items()}, corrections, held_out, number)

    def write_model(self, weights: dict[str, np.ndarray], corrections: np.ndarray) -> None:
        """The folder that is shipped."""
        shape = self.shape
        base = open_checkpoint(resolve(self.args.target).path).hf_config
        assert base is not None, "a GGUF file holds its config"
        sizes = {"dense_layers": shape.dense, "experts": shape.experts, "topk": shape.topk, "width": shape.width}
        config = difference_config(base, self.args.target, **sizes)
        layers = {
            shape.dense + i: RoutedLayer(
                weights["router"][i],
                corrections[i],
                weights["gate"][i],
                weights["up"][i],
                weights["down"][i].swapaxes(1, 2),
            )
            for i in range(len(corrections))
        }
        written = write_difference(self.out / "model", config, layers)
        self.log(f"{self.out / 'model'}: {written.total} bytes")

    def report(self, weights, corrections, held_out: dict[str, Batch], steps: int) -> None:
        """Held-out losses of the base, of the whole, with the routed part zeroed and with the experts exchanged."""
        whole = rounded(weights)
        forms = {"base": without(whole), "moe": whole, "exchanged": exchanged(whole, 1)}

        @jax.jit
        def measure(weights, corrections, base, batch):
            target = nnx.merge(self.graph, base)
            hidden, choices = states(target, weights, corrections, batch, self.shape)
            real = (batch.segments >= 0).reshape(-1)
            share = jnp.where(real[:, None], choices, 0).sum(1)
            touched = []
            for rows in (1, 4, 16):
                windows = choices.reshape(choices.shape[0], -1, rows, choices.shape[-1]).any(2).sum(-1)
                full = real.reshape(-1, rows).all(-1)
                touched.append(jnp.where(full, windows, 0).sum(1) / full.sum())
            total, count = nats(target, hidden, batch)
            return total.sum(), count.sum(), share, jnp.stack(touched)

        found: dict[str, Any] = {"steps": steps, "shape": self.shape._asdict(), "losses": {}}
        shares, touched = [], []
        for kind, rows in held_out.items():
            losses = {}
            for form, values in forms.items():
                total = count = 0.0
                for start in range(0, len(rows.tokens), self.args.batch):
                    part = Batch(*(np.asarray(x[start : start + self.args.batch]) for x in rows))
                    rest = np.full((self.args.batch - len(part.tokens), ROW), -1, np.int32)
                    part = Batch(
                        *(np.concatenate([x, np.maximum(rest, low)]) for x, low in zip(part, (0, 0, -1), strict=True))
                    )
                    lost, places, share, seen = measure(values, corrections, self.base, part)
                    total, count = total + float(lost), count + float(places)
                    if form == "moe":
                        shares.append(np.asarray(share))
                        touched.append(np.asarray(seen))
                losses[form] = total / count
            found["losses"][kind] = {form: round(loss, 4) for form, loss in losses.items()}
            self.log(f"{kind}: {found['losses'][kind]}")
        share = np.sum(shares, 0)
        share = share / share.sum(-1, keepdims=True)
        found["least_share"], found["most_share"] = float(share.min()), float(share.max())
        found["dead"] = int((share < 1e-3).sum())
        found["touched_by_1_4_16"] = [round(float(x), 2) for x in np.mean(touched, 0).mean(-1)]
        (self.out / "report.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        self.log(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--texts", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--topk", type=int, default=4)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--dense", type=int, default=10, help="first layers without experts")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--balance", type=float, default=1e-3, help="how fast the correction evens the load")
    parser.add_argument(
        "--contrast", type=float, default=0.5, help="weight of the loss that exchanged experts lack of --margin"
    )
    parser.add_argument(
        "--margin", type=float, default=0.1, help="nats that exchanged experts shall be worse than none"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--places", type=int, default=1_080_000, help="cache places of one sampling batch")
    parser.add_argument("--sample-seconds", type=float, default=30)
    parser.add_argument("--train-seconds", type=float, default=400)
    parser.add_argument("--total-seconds", type=float, default=0, help="training ends by then, counted from the start")
    parser.add_argument("--limit", type=int, default=0, help="documents and prompts of a kind at most (a trial)")
    parser.add_argument("--max-steps", type=int, default=0)
    Run(parser.parse_args()).train()


if __name__ == "__main__":
    main()

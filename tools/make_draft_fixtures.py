"""Writes tests/data/draft_formats: one tiny checkpoint for each released EAGLE-3 draft format, with expected values.

    python tools/make_draft_fixtures.py [folder]

The formats that have no recorded values of a peer are covered by the numpy reference in tests/oracles. Everything
comes from fixed seeds, so a second run writes the same bytes. For every case it also plants the mistakes that a
reader of the format could make and records how far each moves the results: a test at a tolerance below that tells.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "oracles"), str(Path(__file__).resolve().parent)]

import draft_fixture_faults as faults  # noqa: E402
from draft_numpy import Draft, read_draft, run_case  # noqa: E402

Arrays = dict[str, np.ndarray]
V = 96


@dataclass
class Case:
    """One folder. `build` makes the draft's tensors, `notes` says what the format means and how sure that is."""

    name: str
    config: dict[str, Any]
    build: Callable[[np.random.Generator], Arrays]
    planted: dict[str, faults.Fault]
    notes: dict[str, Any]
    n: int = 7
    captures: int = 3
    target_width: int = 32
    borrows_embed: bool = False
    borrows_head: bool = False
    other_configs: dict[str, dict[str, Any]] = field(default_factory=dict)


def linear(rng: np.random.Generator, rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
    return (rng.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)


def norm(rng: np.random.Generator, width: int) -> np.ndarray:
    return (1.0 + 0.4 * rng.standard_normal(width)).astype(np.float32)


def shell(rng: np.random.Generator, prefix: str, hidden: int, inter: int) -> Arrays:
    """MLP and norms of a decoder layer; the first layer also has hidden_norm."""
    out = {
        f"{prefix}input_layernorm.weight": norm(rng, hidden),
        f"{prefix}post_attention_layernorm.weight": norm(rng, hidden),
        f"{prefix}mlp.gate_proj.weight": linear(rng, inter, hidden),
        f"{prefix}mlp.up_proj.weight": linear(rng, inter, hidden),
        f"{prefix}mlp.down_proj.weight": linear(rng, hidden, inter),
    }
    if prefix in ("midlayer.", "layers.0."):
        out[f"{prefix}hidden_norm.weight"] = norm(rng, hidden)
    return out


def gqa_layer(rng: np.random.Generator, prefix: str, config: dict[str, Any], qk_norm: bool = False) -> Arrays:
    hidden, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or hidden // heads
    inputs = 2 * hidden if prefix in ("midlayer.", "layers.0.") else hidden
    attention = f"{prefix}self_attn."
    out = shell(rng, prefix, hidden, config["intermediate_size"])
    out |= {
        f"{attention}q_proj.weight": linear(rng, heads * width, inputs, 1.7),
        f"{attention}k_proj.weight": linear(rng, kv * width, inputs, 1.7),
        f"{attention}v_proj.weight": linear(rng, kv * width, inputs, 1.5),
        f"{attention}o_proj.weight": linear(rng, hidden, heads * width, 1.5),
    }
    if qk_norm:
        out |= {f"{attention}q_norm.weight": norm(rng, width) + 0.5, f"{attention}k_norm.weight": norm(rng, width)}
    return out


def mla_layer(rng: np.random.Generator, prefix: str, config: dict[str, Any]) -> Arrays:
    hidden, heads, q_rank, rank = (
        config[k] for k in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    nope, rope, value = (config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    attention = f"{prefix}self_attn."
    return shell(rng, prefix, hidden, config["intermediate_size"]) | {
        f"{attention}q_a_proj.weight": linear(rng, q_rank, 2 * hidden),
        f"{attention}q_a_layernorm.weight": norm(rng, q_rank),
        f"{attention}q_b_proj.weight": linear(rng, heads * (nope + rope), q_rank, 1.5),
        f"{attention}kv_a_proj_with_mqa.weight": linear(rng, rank + rope, 2 * hidden, 1.5),
        f"{attention}kv_a_layernorm.weight": norm(rng, rank),
        f"{attention}kv_b_proj.weight": linear(rng, heads * (nope + value), rank, 1.3),
        f"{attention}o_proj.weight": linear(rng, hidden, heads * value, 1.5),
    }


def vocabulary(rng: np.random.Generator, draft_size: int) -> Arrays:
    """d2t holds offsets from draft id to target id, t2d marks the target ids that the draft knows."""
    known = np.sort(rng.choice(V, draft_size, replace=False))
    return {"d2t": (known - np.arange(draft_size)).astype(np.int64), "t2d": np.isin(np.arange(V), known)}


def ends(rng: np.random.Generator, hidden: int, inputs: int | None, draft_size: int | None) -> Arrays:
    """fc (none without `inputs`), norm and lm_head (none without `draft_size`)."""
    out = {"norm.weight": norm(rng, hidden)}
    if inputs:
        out["fc.weight"] = linear(rng, hidden, inputs)
    if draft_size:
        out["lm_head.weight"] = linear(rng, draft_size, hidden, 2.0)
    return out


def embedding(rng: np.random.Generator, hidden: int) -> np.ndarray:
    return rng.standard_normal((V, hidden)).astype(np.float32)


def capture(rng: np.random.Generator, case: Case) -> np.ndarray:
    """Joined captures; later ones are larger, as in real models, and some channels are far from zero."""
    chunks = []
    for i in range(case.captures):
        offset = rng.standard_normal(case.target_width) * (rng.random(case.target_width) < 0.1) * 4
        chunks.append((rng.standard_normal((case.n, case.target_width)) + offset) * (0.6 + 0.7 * i))
    return np.concatenate(chunks, axis=-1).astype(np.float32)[None]


def margin(values: Arrays) -> float:
    """Smallest gap between best and second logit over the rows whose argmax is fed on."""
    ordered = np.sort(np.concatenate([values["draft_logits"][0, -1:], values["chain_logits"]]), axis=-1)
    return float((ordered[:, -1] - ordered[:, -2]).min())


def rounding(case: Case, files: dict[str, Arrays], good: Arrays, inputs: Arrays, rng: np.random.Generator) -> float:
    """How far the logits move when every weight moves by a float32 rounding: a floor for a test's tolerance."""
    moved = {
        name: {
            k: v * (1 + 6e-8 * rng.standard_normal(v.shape)) if v.dtype.kind == "f" else v for k, v in arrays.items()
        }
        for name, arrays in files.items()
    }
    embed = moved.get("embed.safetensors", {}).get("model.embed_tokens.weight")
    head = moved.get("target_head.safetensors", {}).get("lm_head.weight")
    draft = read_draft(case.config, moved["model.safetensors"], embed, head)
    near = run_case(draft, inputs["aux_hidden"][0], inputs["input_ids"][0])
    return max(float(np.abs(near[k] - good[k]).max()) for k in ("draft_logits", "chain_logits"))


def differences(draft: Draft, good: Arrays, planted: dict[str, faults.Fault], inputs: Arrays) -> dict[str, Any]:
    out = {}
    for name, fault in planted.items():
        faulty, gap = fault(draft), 1 if fault is faults.position_gap else 0
        bad = run_case(faulty, inputs["aux_hidden"][0], inputs["input_ids"][0], gap=gap)
        by = {k: float(np.abs(bad[k] - good[k]).max()) for k in ("draft_logits", "chain_logits")}
        out[name] = {"max_abs_difference": round(max(by.values()), 4), **{k: round(v, 4) for k, v in by.items()}}
    return out


def make(case: Case, seed: int) -> tuple[dict[str, Arrays], dict[str, Any]] | None:
    """Files of a case and its description, or None where this seed leaves too small a margin or an invisible fault."""
    rng = np.random.default_rng(seed)
    tensors = case.build(rng)
    hidden = case.config.get("transformer_layer_config", case.config)["hidden_size"]
    files = {"model.safetensors": tensors}
    embed = head = None
    if case.borrows_embed:
        embed = embedding(rng, hidden)
        files["embed.safetensors"] = {"model.embed_tokens.weight": embed}
    if case.borrows_head:
        head = linear(rng, V, hidden, 2.0)
        files["target_head.safetensors"] = {"lm_head.weight": head}
    inputs = {"aux_hidden": capture(rng, case), "input_ids": rng.integers(3, V, (1, case.n + 1))}
    draft = read_draft(case.config, tensors, embed, head)
    good = run_case(draft, inputs["aux_hidden"][0], inputs["input_ids"][0])
    planted = differences(draft, good, case.planted, inputs)
    if margin(good) < 0.05 or min(f["max_abs_difference"] for f in planted.values()) < 0.05:
        return None
    noise = rounding(case, files, good, inputs, rng)
    positions = {"positions": np.arange(case.n), "chain_positions": np.arange(case.n, case.n + 3)}
    stored = {k: v.astype(np.float32) if v.dtype.kind == "f" else v for k, v in good.items()}
    files["expected.safetensors"] = inputs | positions | stored
    described = {
        "kind": "draft_format",
        "name": case.name,
        "seed": seed,
        "configs": ["config.json", *case.other_configs],
        "positions": "row i of the prefill holds token input_ids[i+1] and capture i, at position i; chain step j (1, "
        "2, "
        "3) is fed chain_tokens[j-1], the mapped argmax of the row before it, and that row's feedback, at position "
        "n-1+j; "
        "chain_hidden[j-1] (before the final norm) and chain_logits[j-1] are what it gives",
        "computed": "float64 by tests/oracles/draft_numpy.py from the float32 weights, stored as float32",
        "smallest_margin": round(margin(good), 4),
        "largest_logit": round(max(float(np.abs(good[k]).max()) for k in ("draft_logits", "chain_logits")), 2),
        "max_abs_logit_difference_for_rounded_weights": float(f"{noise:.1e}"),
        **case.notes,
        "faults": planted,
    }
    return files, described


def main(folder: Path) -> None:
    from draft_fixture_cases import cases

    for index, case in enumerate(cases()):
        seed = next(s for s in range(1000 * (index + 1), 1000 * (index + 2)) if make(case, s) is not None)
        made = make(case, seed)
        assert made is not None
        files, described = made
        out = folder / case.name
        out.mkdir(parents=True, exist_ok=True)
        for name, arrays in files.items():
            save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, out / name)
            (out / name).chmod(0o644)
        configs = {"config.json": case.config} | case.other_configs
        for name, content in (configs | {"case.json": described}).items():
            (out / name).write_text(json.dumps(content, indent=2) + "\n")
        size = sum(f.stat().st_size for f in out.iterdir())
        weakest = min(described["faults"].items(), key=lambda f: f[1]["max_abs_difference"])
        print(f"{case.name:24} seed {seed} {size / 1024:6.1f} KiB, weakest fault {weakest[0]!r} {weakest[1]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tests" / "data" / "draft_formats")

"""Pairs for whole-engine trials.

`ring_*`: Kit M on three blocks, whose answer is a walk along a ring and whose accepted counts are designed.
`random_*`: random attention, experts and norms (MLA or grouped-query) on top of a Markov chain. The text depends on the
whole context, so a fault of mask, position, cache or routing changes it; a draft that knows the chain is right often
enough that accepted paths of every length, and of every rank among siblings, occur.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import kit_m
import numpy as np
from flax import nnx
from type_checks import jaxtyping_off  # noqa: F401  trials take it from here

from eaglejax import EagleJaxEngine, Generation, Sampling, Speculation
from eaglejax.speculation.programs import Programs, prefill_plan
from eaglejax.speculation.state import Request, State
from eaglejax.wave import Job, Wave

VOCAB, HIDDEN, LAYERS = kit_m.VOCAB, kit_m.HIDDEN, 4
CAPTURE = (1, 2, 3)
CHAIN = Speculation(3, 1)
FIVE = Speculation(5, 1)
SEVEN = Speculation(7, 1)
TREE = Speculation(3, 4, 24)
MAX_LEN = 128


# Kit M on three blocks


def write_ring(folder: Path, p: np.ndarray, q: np.ndarray, **draft: Any) -> tuple[str, str]:
    """Target and draft folders of a small Kit M that ends at token 63 or 40; `draft` as for `kit_m.write_draft`."""
    target = kit_m.write_target(folder / "target", p, layers=3)
    (target / "generation_config.json").write_text('{"eos_token_id": [63, 40]}')
    return str(target), write_draft(folder / "draft", q, **draft)


def write_draft(folder: Path, q: np.ndarray, **more: Any) -> str:
    return str(kit_m.write_draft(folder, q, CAPTURE, **{"eagle_aux_hidden_state_layer_ids": list(CAPTURE)} | more))


def walk(following: np.ndarray, token: int, count: int) -> list[int]:
    """`count` tokens of a chain that always takes its first choice, `token` not included."""
    out = []
    for _ in range(count):
        token = int(following[token])
        out.append(token)
    return out


def around(first: int = 3, last: int = 63) -> np.ndarray:
    """A ring through `first`..`last` by ones; the other tokens lead into it."""
    following = np.full(VOCAB, first)
    following[first:last] = np.arange(first, last) + 1
    return following


# these pairs are wired as each trial says: no look at the wiring unless it is asked for
SETTINGS: dict[str, Any] = {"max_len": MAX_LEN, "speculation": CHAIN, "check_wiring": False}


def load(target: str, draft: str | None, **more: Any) -> EagleJaxEngine:
    return EagleJaxEngine.from_pretrained(target, draft=draft, **SETTINGS | more)


def share_programs(engine: EagleJaxEngine, other: EagleJaxEngine, spec: Speculation = CHAIN) -> EagleJaxEngine:
    """`engine` with the compiled programs of `other` where both have the same structure; weights are arguments."""
    parts = [nnx.split(module) for module in (engine._pair.target, engine._pair.draft)]
    theirs = [nnx.split(module)[0] for module in (other._pair.target, other._pair.draft)]
    same_captures = engine._pair.capture.boundaries == other._pair.capture.boundaries
    if same_captures and engine.max_len == other.max_len and [graph for graph, _ in parts] == theirs:
        programs = copy.copy(other._programs_for(spec))
        programs.arrays = tuple(jax.tree.leaves(arrays) for _, arrays in parts)
        programs._idle, programs.warned = {}, False
        engine._programs[spec] = programs
    return engine


# a random model on top of a chain


def ranked(following: np.ndarray, seed: int = 0) -> np.ndarray:
    """Q whose right token ranks first, second or third, by state; the others are other tokens, drawn at random."""
    rng = np.random.default_rng(seed)
    matrix = np.full((VOCAB, VOCAB), 0.01 / VOCAB)
    for state in range(VOCAB):
        others = [int(i) for i in rng.permutation(VOCAB) if i != following[state]][:3]
        others.insert((0, 0, 0, 1, 2)[state % 5], int(following[state]))
        for token, mass in zip(others, (0.7, 0.2, 0.07, 0.02), strict=True):
            matrix[state, token] += mass
    return matrix / matrix.sum(-1, keepdims=True)


def random_target(family: str, following: np.ndarray, seed: int = 0) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """config.json and tensors of a small "deepseek_v3" or "qwen3_moe" model."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape, scale=0.1: rng.normal(0, scale, shape).astype(np.float32)
    norm = lambda width: (1 + draw(width)).astype(np.float32)
    embedding = np.zeros((VOCAB, HIDDEN), np.float32)
    embedding[:, :VOCAB] = np.eye(VOCAB)
    head = np.zeros((VOCAB, HIDDEN), np.float32)
    head[:, :VOCAB] = (np.log(kit_m.sharp(following, 0.9)) / np.sqrt(HIDDEN)).T
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head + draw(VOCAB, HIDDEN, scale=0.02),
        "model.norm.weight": norm(HIDDEN),
    }
    config: dict[str, Any] = dict(
        model_type=family, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=8, vocab_size=VOCAB,
        rms_norm_eps=1e-6, rope_theta=10000.0, hidden_act="silu", max_position_embeddings=1024, bos_token_id=0,
        eos_token_id=None, tie_word_embeddings=False, torch_dtype="float32", norm_topk_prob=True,
        num_experts_per_tok=2, moe_intermediate_size=16, intermediate_size=32,
    )  # fmt: skip
    attention = _latent if family == "deepseek_v3" else _grouped
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {prefix + n + ".weight": norm(HIDDEN) for n in ("input_layernorm", "post_attention_layernorm")}
        tensors |= {prefix + "self_attn." + n: x for n, x in attention(draw, norm).items()}
        dense = family == "deepseek_v3" and layer == 0
        tensors |= {prefix + "mlp." + n: x for n, x in (_mlp(draw, 32) if dense else _experts(draw, family)).items()}
    if family == "deepseek_v3":
        config |= dict(
            architectures=["DeepseekV3ForCausalLM"], first_k_dense_replace=1, kv_lora_rank=24, q_lora_rank=32,
            qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, n_group=2, topk_group=1, n_routed_experts=8,
            n_shared_experts=1, num_key_value_heads=8, routed_scaling_factor=1.5, scoring_func="sigmoid",
            topk_method="noaux_tc", moe_layer_freq=1, attention_bias=False,
        )  # fmt: skip
    else:
        config |= dict(
            architectures=["Qwen3MoeForCausalLM"], num_key_value_heads=4, head_dim=24, num_experts=8,
            decoder_sparse_step=1, mlp_only_layers=[], attention_bias=False,
        )  # fmt: skip
    return config, tensors


OUT = (
    0.012  # scale of what each sublayer writes into the stream: much context, and still a chain that a draft can learn
)


def _mlp(draw, width: int, out: float = OUT) -> dict[str, np.ndarray]:
    return {
        "gate_proj.weight": draw(width, HIDDEN),
        "up_proj.weight": draw(width, HIDDEN),
        "down_proj.weight": draw(HIDDEN, width, scale=out),
    }


def _experts(draw, family: str) -> dict[str, np.ndarray]:
    out = {"gate.weight": draw(8, HIDDEN, scale=0.2)}
    for expert in range(8):
        out |= {f"experts.{expert}.{name}": x for name, x in _mlp(draw, 16).items()}
    if family == "deepseek_v3":
        out["gate.e_score_correction_bias"] = draw(8, scale=0.2)
        out |= {f"shared_experts.{name}": x for name, x in _mlp(draw, 16).items()}
    return out


def _latent(draw, norm) -> dict[str, np.ndarray]:
    return {
        "q_a_proj.weight": draw(32, HIDDEN), "q_a_layernorm.weight": norm(32),
        "q_b_proj.weight": draw(8 * 24, 32, scale=0.3),
        "kv_a_proj_with_mqa.weight": draw(32, HIDDEN), "kv_a_layernorm.weight": norm(24),
        "kv_b_proj.weight": draw(8 * 28, 24, scale=0.3), "o_proj.weight": draw(HIDDEN, 96, scale=OUT),
    }  # fmt: skip


def _grouped(draw, norm) -> dict[str, np.ndarray]:
    return {
        "q_proj.weight": draw(192, HIDDEN), "k_proj.weight": draw(96, HIDDEN), "v_proj.weight": draw(96, HIDDEN),
        "o_proj.weight": draw(HIDDEN, 192, scale=OUT), "q_norm.weight": norm(24), "k_norm.weight": norm(24),
    }  # fmt: skip


def random_draft(q: np.ndarray, seed: int = 5) -> dict[str, np.ndarray]:
    """Kit M's draft without its alarm for wrong captures; four of its eight heads are random ones over all rows."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape, scale=0.1: rng.normal(0, scale, shape).astype(np.float32)
    tensors = kit_m.draft_tensors(q, CAPTURE, seed=seed)
    fc = draw(HIDDEN, 3 * HIDDEN, scale=0.01)
    fc[:, :HIDDEN] += np.eye(HIDDEN, dtype=np.float32)
    half, width = 64, 2 * HIDDEN
    name = lambda n: f"midlayer.self_attn.{n}_proj.weight"
    # heads 0..3 are Kit M's (constant queries and keys see their own position), now with a key head each
    query = np.concatenate([tensors[name("q")][:half], draw(half, width)])
    key = np.concatenate([tensors[name("k")][:half], draw(half, width)])
    value = np.concatenate([tensors[name("v")], draw(half, width)])
    out = np.zeros((HIDDEN, HIDDEN), np.float32)
    out[:half, :half] = np.eye(half)
    out[:, half:] = draw(HIDDEN, half, scale=0.006)
    down = draw(HIDDEN, 32, scale=0.006)
    return tensors | {
        "fc.weight": fc, name("q"): query, name("k"): key, name("v"): value, name("o"): out,
        "midlayer.mlp.gate_proj.weight": draw(32, HIDDEN), "midlayer.mlp.up_proj.weight": draw(32, HIDDEN),
        "midlayer.mlp.down_proj.weight": down,
    }  # fmt: skip


def write_random(folder: Path, family: str) -> tuple[str, str]:
    """Folders of a random target and of a draft that is often right about it."""
    order = np.random.default_rng(9).permutation(VOCAB)
    following = np.zeros(VOCAB, int)
    following[order] = np.roll(order, -1)  # one cycle through all tokens
    config, tensors = random_target(family, following)
    target = kit_m.write_folder(folder / "target", config, tensors)
    settings = kit_m.draft_config(VOCAB, num_key_value_heads=8, eagle_aux_hidden_state_layer_ids=list(CAPTURE))
    draft = kit_m.write_folder(folder / "draft", settings, random_draft(ranked(following)))
    return str(target), str(draft)


# driving the compiled programs by hand


def prompts(lengths: list[int], seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[int(i) for i in rng.integers(0, VOCAB, n)] for n in lengths]


def ids(answers: list[Generation]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def counts(answers: list[Generation]) -> list[list[int]]:
    return [answer.stats.accepted_per_cycle for answer in answers]


def request_of(
    programs: Programs, asked: list[list[int]], sampling: Sampling, slots: int
) -> tuple[Request, np.ndarray]:
    """The request and the padded prompts as a wave hands them to the programs."""
    jobs = [Job(prompt, sampling, sampling.seed or 0, ()) for prompt in asked]
    return Wave(programs, jobs, None, slots)._arrays(max(map(len, asked)))


def prefilled(programs: Programs, state: State, longest: int) -> State:
    for offset, rows in prefill_plan(longest):
        state = programs.prefill(state, offset, rows)
    return state


def snapshot(state: State) -> SimpleNamespace:
    """Copies of the fields that trials look at; caches as lists of arrays."""
    names = ("tokens", "length", "pending_count", "pending_features", "accepted", "cycles")
    caches = {name: [np.array(leaf) for leaf in jax.tree.leaves(getattr(state, name))] for name in CACHES}
    return SimpleNamespace(**{name: np.array(getattr(state, name)) for name in names}, **caches)


CACHES = ("target_cache", "draft_cache")


def rounds(programs: Programs, asked: list[list[int]], count: int, spoil: bool = False) -> Iterator[SimpleNamespace]:
    """The state after the prefill and after each of `count` cycles; with `spoil` all caches start as NaN."""
    request, padded = request_of(programs, asked, Sampling(max_new_tokens=MAX_LEN), len(asked))
    state = programs.start(request, padded)
    if spoil:
        nan = lambda caches: jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), caches)
        state = replace(state, target_cache=nan(state.target_cache), draft_cache=nan(state.draft_cache))
    state = prefilled(programs, state, padded.shape[1])
    yield snapshot(state)
    for _ in range(count):
        state = programs.decode(state, 1, np.zeros(len(asked), bool))
        yield snapshot(state)


def committed(state: SimpleNamespace, slot: int) -> list[int]:
    return [int(i) for i in state.tokens[slot, : int(state.length[slot])]]


def caches_are_fresh(programs: Programs, state: SimpleNamespace, atol: float = 1e-5) -> bool:
    """Whether the valid rows of both caches are those that a prefill of the committed tokens writes."""
    texts = [committed(state, slot) for slot in range(len(state.length))]
    *_, fresh = rounds(programs, texts, 0)
    target_rows = state.length - 1
    for mine, theirs, valid in (
        (state.target_cache, fresh.target_cache, target_rows),
        (state.draft_cache, fresh.draft_cache, target_rows - state.pending_count),
    ):
        for one, other in zip(mine, theirs, strict=True):
            for slot, count in enumerate(valid):
                if not np.allclose(one[slot, :count], other[slot, :count], rtol=1e-5, atol=atol):
                    return False
    return True

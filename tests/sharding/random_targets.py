"""Random checkpoints for any config, and answers to compare: what one device says and what a mesh says must be the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from eaglejax import EagleJaxEngine, Sampling
from eaglejax.checkpoint.weight_plan import Stems, target_plan
from eaglejax.models.target_config import read_target_config

QWEN = dict(
    model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], hidden_size=64, num_hidden_layers=2, head_dim=16,
    num_attention_heads=8, num_key_value_heads=4, vocab_size=160, rms_norm_eps=1e-6, rope_theta=10000.0, hidden_act="silu",
    max_position_embeddings=512, tie_word_embeddings=False, torch_dtype="float32", norm_topk_prob=True, num_experts_per_tok=2,
    moe_intermediate_size=32, intermediate_size=64, num_experts=8, decoder_sparse_step=1, mlp_only_layers=[], attention_bias=False,
)  # fmt: skip
SHARED = dict(
    model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], hidden_size=64, num_hidden_layers=2, vocab_size=160,
    num_attention_heads=8, num_key_value_heads=8, rms_norm_eps=1e-6, rope_theta=10000.0, hidden_act="silu", moe_layer_freq=1,
    max_position_embeddings=512, tie_word_embeddings=False, torch_dtype="float32", norm_topk_prob=True, num_experts_per_tok=2,
    moe_intermediate_size=32, intermediate_size=64, first_k_dense_replace=1, kv_lora_rank=24, q_lora_rank=32, qk_nope_head_dim=16,
    qk_rope_head_dim=8, v_head_dim=12, n_group=2, topk_group=2, n_routed_experts=8, n_shared_experts=1, routed_scaling_factor=1.5,
    scoring_func="sigmoid", topk_method="noaux_tc", attention_bias=False,
)  # fmt: skip


def write(folder: Path, config: dict[str, Any], seed: int = 0, change=lambda name, tensor: tensor) -> str:
    """A folder with random weights for a config; `change` may replace tensors by name."""
    reading = read_target_config(config, where="test", generation={})
    plan = target_plan(reading.config, reading.family, Stems("model.", "", "model.layers."))
    rng, tensors = np.random.default_rng(seed), {}
    for recipes in plan.values():
        for part in recipes[0]:
            if part.name not in tensors:
                values = rng.normal(0, 0.15, part.shape) + (1 if len(part.shape) == 1 and "norm" in part.name else 0)
                tensors[part.name] = change(part.name, values.astype(np.float32))
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


REQUESTS = [
    ([5, 9, 100, 3, 77, 21, 8], Sampling(max_new_tokens=12, ignore_eos=True)),
    ([11], Sampling(max_new_tokens=9, temperature=0.9, seed=3, ignore_eos=True)),
    ([40, 2, 61], Sampling(max_new_tokens=12, temperature=1.0, top_p=0.9, top_k=30, min_p=0.01, seed=4, ignore_eos=True)),
]  # fmt: skip


def engine(folder: str, mesh: str | None = None, **more: Any) -> EagleJaxEngine:
    return EagleJaxEngine.from_pretrained(folder, mesh=mesh, dtype="float32", max_len=32, slots=4, **more)


def answers(made: EagleJaxEngine) -> list[list[int]]:
    """Three requests at once: greedy, sampled, sampled with every filter."""
    prompts, samplings = zip(*REQUESTS, strict=True)
    return [answer.token_ids for answer in made.generate(list(prompts), list(samplings))]


def assert_same(folder: str, meshes: tuple[str, ...], atol: float = 5e-5, **more: Any) -> list[EagleJaxEngine]:
    """Logits, boundaries and tokens of every mesh against one device; returns the engines."""
    one, made = engine(folder), []
    score, tokens = one.score(REQUESTS[0][0]), answers(one)
    for mesh in meshes:
        made.append(engine(folder, mesh, **more))
        other = made[-1].score(REQUESTS[0][0])
        np.testing.assert_allclose(other.logits, score.logits, rtol=0, atol=atol, err_msg=mesh)
        for boundary, stream in score.boundaries.items():
            np.testing.assert_allclose(
                other.boundaries[boundary], stream, rtol=0, atol=atol, err_msg=f"{mesh} {boundary}"
            )
        assert answers(made[-1]) == tokens, mesh
    return made

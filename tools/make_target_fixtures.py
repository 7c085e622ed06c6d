"""Makes tests/data/targets/*: tiny random targets of many families with what transformers computes from them.

    python tools/make_target_fixtures.py [NAME ...]

Needs torch and transformers 5 (made with 2.13.0+cpu and 5.24.0); nothing of EagleJax is imported. A case is a folder
with config.json, model.safetensors and expected.safetensors: input_ids, logits, hidden_in_0, hidden_out_i,
final_norm, router_indices_i, router_weights_i, greedy_tokens, and the same with the prefix "len1." for one prompt of
one token. Everything is computed in float32.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

OUT = Path(__file__).parent.parent / "tests" / "data" / "targets"
NEW_TOKENS = 12
FLOAT32 = ("llama_biased", "mixtral_fused")  # the other checkpoints are bfloat16, widened to compute

SMALL = dict(
    hidden_size=32,
    vocab_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=None,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
LATENT = SMALL | dict(
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=12,
    intermediate_size=48,
    moe_intermediate_size=12,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    routed_scaling_factor=2.5,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    num_hidden_layers=3,
    num_mtp_layers=0,
)

CASES: dict[str, tuple[str, dict]] = {
    "llama_biased": (
        "Llama",
        SMALL
        | dict(
            num_hidden_layers=2,
            intermediate_size=40,
            head_dim=10,
            attention_bias=True,
            mlp_bias=True,
            hidden_act="gelu",
        )
        | dict(rope_parameters=LLAMA3),
    ),
    "llama_tied_linear": (
        "Llama",
        SMALL
        | dict(num_hidden_layers=3, intermediate_size=40, tie_word_embeddings=True)
        | dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=3.0)),
    ),
    "mistral_window": (
        "Mistral",
        SMALL | dict(num_hidden_layers=2, intermediate_size=40, head_dim=12, sliding_window=5),
    ),
    "qwen2_window": (
        "Qwen2",
        SMALL
        | dict(
            num_hidden_layers=3, intermediate_size=40, use_sliding_window=True, sliding_window=4, max_window_layers=1
        ),
    ),
    "qwen3_yarn": ("Qwen3", SMALL | dict(num_hidden_layers=2, intermediate_size=40, head_dim=12, rope_parameters=YARN)),
    "mixtral_fused": (
        "Mixtral",
        SMALL
        | dict(num_hidden_layers=2, intermediate_size=12, num_local_experts=5, num_experts_per_tok=2, sliding_window=6),
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        SMALL
        | dict(num_hidden_layers=4, intermediate_size=40, moe_intermediate_size=12, shared_expert_intermediate_size=24)
        | dict(num_experts=6, num_experts_per_tok=3, norm_topk_prob=False, mlp_only_layers=[2], decoder_sparse_step=1),
    ),
    "qwen3_moe_sparse_step": (
        "Qwen3Moe",
        SMALL
        | dict(num_hidden_layers=4, intermediate_size=40, moe_intermediate_size=12, head_dim=12, attention_bias=True)
        | dict(num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=2, rope_parameters=YARN),
    ),
    "glm4_moe": (
        "Glm4Moe",
        SMALL
        | dict(
            num_hidden_layers=3,
            intermediate_size=40,
            moe_intermediate_size=12,
            head_dim=12,
            attention_bias=True,
            use_qk_norm=True,
        )
        | dict(
            n_routed_experts=8,
            n_shared_experts=2,
            num_experts_per_tok=3,
            n_group=2,
            topk_group=1,
            routed_scaling_factor=1.5,
        )
        | dict(first_k_dense_replace=1, norm_topk_prob=True, num_mtp_layers=0),
    ),
    "gpt_oss": (
        "GptOss",
        SMALL
        | dict(
            num_hidden_layers=3,
            intermediate_size=16,
            head_dim=12,
            num_local_experts=6,
            num_experts_per_tok=2,
            sliding_window=4,
        )
        | dict(rope_parameters=YARN | dict(truncate=False, beta_fast=8.0, beta_slow=1.0)),
    ),
    "kimi_k25": (
        "DeepseekV3",
        LATENT
        | dict(n_group=1, n_routed_experts=10, num_experts_per_tok=3, routed_scaling_factor=2.827)
        | dict(rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0, beta_fast=1.0, beta_slow=1.0)),
    ),
    "deepseek_no_q_lora": (
        "DeepseekV3",
        LATENT
        | dict(
            num_hidden_layers=2, q_lora_rank=None, attention_bias=True, n_group=4, topk_group=2, norm_topk_prob=False
        )
        | dict(rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=1.3)),
    ),
    "deepseek_dense": (
        "DeepseekV3",
        LATENT | dict(num_hidden_layers=2, first_k_dense_replace=2, rope_interleave=False, n_shared_experts=1),
    ),
}


def stored(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, and the buffers that are part of a checkpoint."""
    return dict(model.named_parameters()) | {k: v for k, v in model.named_buffers() if "correction" in k}


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Weights with which every part matters: norms around 1, biases, sinks and correction biases far from 0."""
    for name, tensor in stored(model).items():
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            value = 1 + 0.2 * noise
        elif "embed" in name or "lm_head" in name:
            value = 0.6 * noise
        elif "correction" in name:
            value = 0.3 * noise
        elif name.endswith("bias") or "sinks" in name:
            value = 0.5 * noise
        elif "gate.weight" in name or "router" in name:
            value = 0.5 * noise
        else:
            value = noise * tensor.shape[-1] ** -0.5
        tensor.data.copy_(value)


def run(model, ids: torch.Tensor, prefix: str) -> tuple[dict[str, torch.Tensor], float]:
    """Everything expected of one batch, and the smallest margin of any greedy or router choice."""
    out, margins, handles = {}, [], []
    layers = model.model.layers

    def keep(name):
        def hook(_, inputs, output):
            out[name] = (output[0] if isinstance(output, tuple) else output).detach().clone()

        return hook

    def router(index):
        def hook(_, inputs, output):
            logits, weights, chosen = output
            order = chosen.argsort(-1)
            shape = (*ids.shape, -1)
            out[f"router_indices_{index}"] = chosen.gather(-1, order).reshape(shape).clone()
            out[f"router_weights_{index}"] = weights.gather(-1, order).float().reshape(shape).clone()
            best = logits.float().topk(min(weights.shape[-1] + 1, logits.shape[-1]), dim=-1)[0]
            margins.append((best[:, -2] - best[:, -1]).min().item())

        return hook

    for index, layer in enumerate(layers):
        handles.append(layer.register_forward_hook(keep(f"hidden_out_{index}")))
        gate = getattr(layer.mlp, "gate", getattr(layer.mlp, "router", None))
        if gate is not None:
            handles.append(gate.register_forward_hook(router(index)))
    handles.append(model.model.embed_tokens.register_forward_hook(keep("hidden_in_0")))
    handles.append(model.model.norm.register_forward_hook(keep("final_norm")))
    out["logits"] = model(ids, use_cache=False).logits.detach()
    for handle in handles:
        handle.remove()
    text = ids
    for _ in range(NEW_TOKENS):
        logits = model(text, use_cache=False).logits[:, -1]
        best = logits.topk(2, dim=-1)[0]
        margins.append((best[:, 0] - best[:, 1]).min().item())
        text = torch.cat([text, logits.argmax(-1, keepdim=True)], dim=1)
    out["greedy_tokens"], out["input_ids"] = text[:, ids.shape[1] :], ids
    return {prefix + name: value.contiguous() for name, value in out.items()}, min(margins)


def build(name: str, seed: int):
    """A random model of the case in float32 (with bfloat16 values where the checkpoint is bfloat16)."""
    family, settings = CASES[name]
    config = getattr(transformers, f"{family}Config")(**settings)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    randomise(model, torch.Generator().manual_seed(seed))
    if name not in FLOAT32:
        # only what is stored: model.bfloat16() would round the rotary frequencies too
        for tensor in stored(model).values():
            tensor.data.copy_(tensor.data.bfloat16().float())
    return model


def make(name: str) -> None:
    for seed in range(50):
        model = build(name, seed)
        generator = torch.Generator().manual_seed(1000 + seed)
        batch, margin = run(model, torch.randint(3, 64, (2, 10), generator=generator), "")
        single, margin_single = run(model, torch.randint(3, 64, (1, 1), generator=generator), "len1.")
        if min(margin, margin_single) > 2e-3:
            break
    else:
        raise SystemExit(f"{name}: no seed without near ties")
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    if name not in FLOAT32:
        model = model.bfloat16()
    model.save_pretrained(folder, save_original_format=not name.endswith("fused"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if name == "kimi_k25":
        wrap_kimi(folder)
    save_file(batch | single, folder / "expected.safetensors")
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}: seed {seed}, smallest margin {min(margin, margin_single):.4f}, {size / 1024:.0f} KiB")


def wrap_kimi(folder: Path) -> None:
    """Kimi-K2.5's form: the text model's config nested and in the old layout, its tensors prefixed, vision tensors
    beside them."""
    text = json.loads((folder / "config.json").read_text())
    rope = text.pop("rope_parameters")
    text |= dict(
        rope_theta=rope.pop("rope_theta"), rope_scaling=dict(rope, type=rope.pop("rope_type")), model_type="kimi_k2"
    )
    text |= dict(
        architectures=["DeepseekV3ForCausalLM"], scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1
    )
    outer = dict(
        architectures=["KimiK25ForConditionalGeneration"],
        model_type="kimi_k25",
        text_config=text,
        tie_word_embeddings=False,
        vision_config=dict(hidden_size=16, num_hidden_layers=1),
        media_placeholder_token_id=63,
        ignore_index=-100,
    )
    (folder / "config.json").write_text(json.dumps(outer, indent=2, sort_keys=True) + "\n")
    tensors = {f"language_model.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    tensors["vision_tower.encoder.blocks.0.wqkv.weight"] = torch.ones(6, 2)
    tensors["vision_tower.patch_embed.proj.weight"] = torch.ones(4, 3)
    tensors["mm_projector.proj.0.weight"] = torch.ones(4, 4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for case in sys.argv[1:] or CASES:
        make(case)

"""Configs of a plan: every built-in one, latent drafts, drafts of another width, what is packed."""

import json

import pytest

from eaglejax.errors import ConfigError
from eaglejax.models.config import MLAConfig, MoEConfig
from eaglejax.models.packed import Packing
from eaglejax.sharding.plan_models import PLACES, known_models, read_models

# layers, experts, top-k, boundaries of the head that comes with it
KNOWN = {
    "deepseek-v3": (61, 256, 8, (2, 30, 58)),
    "kimi-k2": (61, 384, 8, (2, 30, 58)),
    "kimi-k2.5": (61, 384, 8, (3, 31, 59)),
    "mixtral-8x7b": (32, 8, 2, None),
    "qwen3-235b-a22b": (94, 128, 8, (2, 47, 91)),
    "qwen3-30b-a3b": (48, 128, 8, (2, 24, 45)),
}


def test_all_built_in_configs_are_here():
    assert known_models() == sorted(KNOWN)


@pytest.mark.parametrize("name", KNOWN)
def test_built_in(name):
    models = read_models(name, "auto")
    layers, experts, topk, boundaries = KNOWN[name]
    last = models.target.layers[-1].mlp
    assert isinstance(last, MoEConfig)
    assert (models.target.num_layers, last.experts, last.topk) == (layers, experts, topk)
    assert (None if models.draft is None else models.draft.boundaries) == boundaries
    if models.draft is not None:
        assert models.draft.target_hidden_size == models.target.hidden_size
        assert models.draft.draft_vocab_size == 32000 and not models.draft.own_embedding and models.draft.own_head


def test_what_is_packed():
    kimi = read_models("kimi-k2.5", None).storage
    assert kimi is not None
    assert set(kimi.packings) == {
        f"layers.{i}.mlp.experts.{part}" for i in range(1, 61) for part in ("gate_up", "down")
    }
    assert kimi.packings["layers.1.mlp.experts.down"] == Packing("int4", 1, 32, "bfloat16")
    deepseek = read_models("deepseek-v3", None).storage
    assert deepseek is not None
    assert deepseek.packings["layers.0.attention.q_a.weight"] == Packing("fp8", 128, 128, "float32")
    assert deepseek.packings["layers.9.attention.value_up"].rows == 128
    left = {
        path
        for path in deepseek.packings
        if "router" in path or "norm" in path or path in ("head.weight", "embedding.weight")
    }
    assert not left
    assert read_models("qwen3-30b-a3b", None).storage is None


def edited(tmp_path, **changes):
    config = json.loads((PLACES[-1] / "kimi-k2" / "draft" / "config.json").read_text())
    path = tmp_path / "draft.json"
    path.write_text(json.dumps({**config, **changes}))
    return str(path)


def test_a_latent_draft(tmp_path):
    latent = dict(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    path = edited(tmp_path, architectures=["Eagle3DeepseekV2ForCausalLM"], draft_vocab_size=163840, **latent)
    draft = read_models("kimi-k2.5", path).draft
    assert draft is not None and isinstance(draft.layers[0].attention, MLAConfig)
    assert draft.draft_vocab_size == 163840


def test_a_draft_of_another_width_brings_its_own_embedding(tmp_path):
    path = edited(tmp_path, hidden_size=4096, target_hidden_size=7168, num_attention_heads=32, num_key_value_heads=8)
    draft = read_models("kimi-k2.5", path).draft
    assert draft is not None and draft.own_embedding and draft.hidden_size == 4096


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(intermediate_size=None), "intermediate_size"),
        (dict(target_hidden_size=4096), "target of another width"),
        (dict(architectures=["MedusaModel"]), "Medusa"),
        (dict(num_attention_heads=60), "heads do not divide"),
    ],
)
def test_impossible_drafts_are_refused(tmp_path, changes, said):
    with pytest.raises(ConfigError, match=said):
        read_models("kimi-k2.5", edited(tmp_path, **changes))

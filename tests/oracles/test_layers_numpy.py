"""The layers of the numpy draft against one decoder layer of the targets that the peers ran.

The draft formats with latent attention, yarn or per-head norms have no recorded values of their own, but their
attention is the target's: with the input width of an ordinary layer it must reproduce the peers' layer 0.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from draft_numpy import Draft, read_draft, rms_norm
from safetensors import safe_open
from safetensors.numpy import load_file

DATA = Path(__file__).parent.parent / "data"


def golden(name: str) -> Path:
    """Folder of a golden target case: in the tests' data, or under EAGLEJAX_GOLDEN."""
    for folder in (*DATA.glob(f"*/{name}"), Path(os.environ.get("EAGLEJAX_GOLDEN", "")) / name):
        if (folder / "expected.safetensors").exists():
            return folder
    pytest.skip(f"golden case {name} is not here; set EAGLEJAX_GOLDEN")


def layer_zero(folder: Path) -> tuple[Draft, dict[str, np.ndarray]]:
    """The target's layer 0 as the only, ordinary layer of a draft, and its tensors without the prefix."""
    tensors = {}
    for shard in folder.glob("model*.safetensors"):
        with safe_open(shard, "numpy") as opened:
            for name in opened.keys():
                if name.startswith("model.layers.0."):
                    tensors[name.removeprefix("model.")] = opened.get_tensor(name).astype(np.float64)
    config = json.loads((folder / "config.json").read_text())
    hidden = np.zeros((1, config["hidden_size"]))
    draft = read_draft(config, tensors | {"lm_head.weight": hidden, "embed_tokens.weight": hidden})
    return replace(draft, layers=[replace(draft.layers[0], first=False)]), tensors


@pytest.mark.parametrize("name", ["target_llama_tied", "target_deepseek_v3", "target_kimi_k2"])
def test_dense_layer_reproduces_the_peer(name: str) -> None:
    folder = golden(name)
    draft, _ = layer_zero(folder)
    expected = load_file(folder / "expected.safetensors")
    for row, wanted in zip(expected["hidden_in_0"], expected["hidden_out_0"], strict=True):
        found, _ = draft.step(np.zeros(len(row), int), row.astype(np.float64), np.arange(len(row)))
        np.testing.assert_allclose(found, wanted, atol=2e-5, rtol=0)


def test_attention_with_head_norms_reproduces_the_peer() -> None:
    """Qwen3: the experts of the layer are added by hand, with the peer's choice and weights."""
    folder = golden("target_qwen3_moe")
    draft, tensors = layer_zero(folder)
    expected = load_file(folder / "expected.safetensors")
    width = expected["hidden_in_0"].shape[-1]
    silent = {f"mlp.{m}.weight": np.zeros((width, width)) for m in ("gate_proj", "up_proj", "down_proj")}
    draft = replace(draft, layers=[replace(draft.layers[0], weights=draft.layers[0].weights | silent)])
    for b, row in enumerate(expected["hidden_in_0"]):
        found, _ = draft.step(np.zeros(len(row), int), row.astype(np.float64), np.arange(len(row)))
        x = rms_norm(found, tensors["layers.0.post_attention_layernorm.weight"], draft.eps)
        for t, (experts, weights) in enumerate(
            zip(expected["router_indices_0"][b], expected["router_weights_0"][b], strict=True)
        ):
            for expert, weight in zip(experts, weights, strict=True):
                gate, up, down = (
                    tensors[f"layers.0.mlp.experts.{expert}.{m}.weight"] for m in ("gate_proj", "up_proj", "down_proj")
                )
                pre = x[t] @ gate.T
                found[t] += weight * ((pre / (1 + np.exp(-pre)) * (x[t] @ up.T)) @ down.T)
        np.testing.assert_allclose(found, expected["hidden_out_0"][b], atol=2e-5, rtol=0)

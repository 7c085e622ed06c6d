"""The plan's arithmetic against the compiled program, to the byte: small models of each kind on meshes of virtual devices.

The mesh needs devices of its own, so the programs are compiled in one process of their own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = {
    "mla_int4": ("kimi_k2", "data=1,model=8", "replicated", (3, 1, 4)),
    "mla_fp8": ("deepseek_v3", "data=1,model=4", "sharded", (2, 2, 5)),
    "gqa": ("qwen3_moe", "data=2,model=4", "sharded", (3, 1, 4)),
    "odd": ("mixtral", "data=1,model=8", "replicated", (0, 1, 1)),
    "one": ("qwen3_moe", "data=1,model=1", "replicated", (3, 1, 4)),
}

PROGRAM = """
import json, sys
from pathlib import Path
from eaglejax.config import Speculation
from eaglejax.measure.hardware import read_hardware
from eaglejax.sharding.aot import compile_decode, make_devices
from eaglejax.sharding.plan import MeshSize, Question, make_plan
from eaglejax.sharding.plan_models import read_models
make_devices(8)
said = {}
for name, (model, draft, mesh, placement, tree) in json.loads(sys.stdin.read()).items():
    size = MeshSize.read(mesh)
    models = read_models(model, draft if tree[0] else None)
    hardware = read_hardware("h200-nvlink")
    plan = make_plan(Question(models, size, Speculation(*tree), 2 * size.data, 48, hardware, placement=placement, context=16))
    compiled = compile_decode(plan)
    said[name] = {"compiled": compiled.to_json(plan), "arguments": plan.argument_bytes, "state": sum(plan.state.values()),
        "decoding": [(p.name, p.collective_count, p.collective_bytes) for p in plan.decoding], "layers": models.target.num_layers}
print(json.dumps(said))
"""

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
        }
    },
}
MLA = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "kv_lora_rank": 32, "q_lora_rank": 24,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 8,
    "num_hidden_layers": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_routed_experts": 16, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6, "vocab_size": 96, "max_position_embeddings": 64, "rope_theta": 1e4,
}  # fmt: skip
GQA = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6, "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "kimi_k2": {**MLA, "model_type": "kimi_k2", "quantization_config": INT4},
    "deepseek_v3": {**MLA, "model_type": "deepseek_v3", "quantization_config": FP8},
    "qwen3_moe": {
        **GQA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 32,
        "norm_topk_prob": True, "decoder_sparse_step": 1,
    },
    # nothing divides over 8: 9 heads, 97 words; 12 experts are split over their width
    "mixtral": {
        **GQA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_attention_heads": 9, "num_key_value_heads": 3,
        "vocab_size": 97, "num_local_experts": 12, "intermediate_size": 64,
    },
}  # fmt: skip
DRAFT = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "num_hidden_layers": 1, "rms_norm_eps": 1e-6, "vocab_size": 96, "draft_vocab_size": 48,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("configs")
    for name, config in {**CONFIGS, "draft": DRAFT}.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    asked = {
        name: (str(folder / f"{model}.json"), str(folder / "draft.json"), mesh, placement, tree)
        for name, (model, mesh, placement, tree) in CASES.items()
    }
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(asked),
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_bytes_of_the_compiled_program(compiled, case):
    said = compiled[case]
    assert said["compiled"]["argument_bytes"] == said["arguments"]
    assert said["compiled"]["updated_in_place_bytes"] == said["state"]
    assert said["compiled"]["differences"] == []


def counts(said) -> dict[str, dict[str, int]]:
    found = said["compiled"]["collectives"]
    return {phase: {kind: both["count"] for kind, both in kinds.items()} for phase, kinds in found.items()}


def test_at_most_two_all_reduces_a_layer(compiled):
    for case in ("mla_int4", "mla_fp8", "gqa"):
        said = compiled[case]
        # and one for the embedding; the choice of a token is one gather
        assert said["compiled"]["most_in_a_target_layer"] == 2
        assert counts(said)["verify"] == {"all-reduce": 2 * said["layers"] + 1, "all-gather": 1}
    # attention and vocabulary are whole on every device: only the experts are summed
    assert counts(compiled["odd"]) == {"verify": {"all-reduce": compiled["odd"]["layers"]}}


def test_a_replicated_draft_has_none(compiled):
    assert set(counts(compiled["mla_int4"])) == {"verify"}
    assert counts(compiled["one"]) == {}
    sharded = counts(compiled["gqa"])
    assert set(sharded) == {"verify", "draft_extend", "draft_step_1", "draft_step_2", "draft_step_3"}
    assert sharded["draft_step_1"] == {"all-gather": 1}
    assert sharded["draft_step_2"] == sharded["draft_step_3"] == {"all-reduce": 3, "all-gather": 1}


def test_nothing_but_sums_and_small_gathers(compiled):
    """No gather of a weight or of a cache: the largest holds a few numbers per row and device."""
    for said in compiled.values():
        kinds = {kind for phase in said["compiled"]["collectives"].values() for kind in phase}
        assert kinds <= {"all-reduce", "all-gather"}
        gathered = [
            phase["all-gather"]["bytes"] for phase in said["compiled"]["collectives"].values() if "all-gather" in phase
        ]
        assert all(size <= 8 * 2 * 10 * 4 * 4 for size in gathered)

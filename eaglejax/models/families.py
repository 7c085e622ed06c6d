"""The model families as data: which config keys say what, and what the tensors are called.

A new family is one more `Family` in the table at the end of this file (or in one beside it). `target_config.py` reads
a config.json by it,
`checkpoint/weight_plan.py` finds the weights by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from eaglejax.models.hf_config import REQUIRED


@dataclass(frozen=True)
class Key:
    """A value that the config holds under `name`; a default other than REQUIRED is that of the released code."""

    name: str
    default: Any = REQUIRED
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class GQATraits:
    """How a family has its grouped-query attention. `window`: which layers see only the last `sliding_window`
    positions."""

    qkv_bias: Key | bool = False
    output_bias: Key | bool = False
    qk_norm: Key | bool = False
    sinks: bool = False
    head_dim: Literal["given", "given or hidden/heads"] = "given or hidden/heads"
    kv_heads_default: bool = False  # an absent num_key_value_heads means one per query head
    window: Literal["none", "all", "all if used", "later layers if used", "layer types if used", "layer types"] = "none"
    window_default: int | None = None  # where the config has no sliding_window at all; null always means none
    theta: float = 10000.0
    partial_rotary: float | None = None  # None: a partial_rotary_factor is not part of the family


@dataclass(frozen=True)
class MLATraits:
    """Multi-head latent attention as DeepSeek has it; its norms always use 1e-6."""

    theta: float = 10000.0


@dataclass(frozen=True)
class MoETraits:
    """Which layers have experts, and how they are chosen and weighted (`models/config.py` says what each field
    means)."""

    experts: Key
    width: Key
    placement: Literal["all", "after first dense", "sparse step"]
    topk: Key = Key("num_experts_per_tok")
    score: Literal["softmax", "sigmoid", "softmax_topk"] = "softmax"
    normalise: Key | bool = True
    scaling: Key | float = 1.0
    groups: Key | int = 1
    topk_groups: Key | int = 1
    correction_bias: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    expert_activation: Literal["silu", "gpt_oss"] = "silu"
    shared_width: Key | int = 0
    shared_count: Key | int = 1
    shared_gate: bool = False


@dataclass(frozen=True)
class ExpertNames:
    """Tensor names inside a layer's MoE; `{e}` is the expert. `fused` lists the 3-D forms that are met beside the one
    by one form."""

    block: str = "mlp"
    router: str = "mlp.gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_experts"
    transposed: bool = False  # fused tensors lie [e, in, out] with gate and up interleaved (gpt-oss)
    fused_only: bool = False


@dataclass(frozen=True)
class Family:
    """One family of targets.

    `must_be`: config keys that change the forward pass and of which we run one value only (absent means that value).
    `ignored`: keys that the family's released code does not use.
    `prefixes`: what stands before "embed_tokens" and before "lm_head", as released or as transformers 5 writes it.
    `skipped`: beginnings of tensor names that belong to another part of a multimodal model.
    """

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    attention: GQATraits | MLATraits
    moe: MoETraits | None = None
    mlp_bias: Key | bool = False
    names: ExpertNames = field(default_factory=ExpertNames)
    must_be: tuple[tuple[str, Any], ...] = ()
    ignored: tuple[str, ...] = ()
    text_config: bool = False
    prefixes: tuple[tuple[str, str], ...] = (("model.", ""), ("", ""))
    skipped: tuple[str, ...] = ()


ATTENTION_BIAS = Key("attention_bias", False)
QKV_BIAS = Key("qkv_bias", True)

LLAMA = Family(
    "llama",
    ("llama",),
    ("LlamaForCausalLM",),
    GQATraits(qkv_bias=ATTENTION_BIAS, output_bias=ATTENTION_BIAS, kv_heads_default=True),
    mlp_bias=Key("mlp_bias", False),
)
MISTRAL = Family(
    "mistral",
    ("mistral",),
    ("MistralForCausalLM",),
    GQATraits(window="all", window_default=4096, kv_heads_default=True),
)
QWEN2 = Family(
    "qwen2",
    ("qwen2",),
    ("Qwen2ForCausalLM",),
    GQATraits(qkv_bias=True, kv_heads_default=True, window="later layers if used"),
)
QWEN3 = Family(
    "qwen3",
    ("qwen3",),
    ("Qwen3ForCausalLM",),
    GQATraits(
        qkv_bias=ATTENTION_BIAS,
        output_bias=ATTENTION_BIAS,
        qk_norm=True,
        head_dim="given",
        window="later layers if used",
    ),
)
MIXTRAL = Family(
    "mixtral",
    ("mixtral",),
    ("MixtralForCausalLM",),
    GQATraits(window="all", theta=1000000.0),
    MoETraits(
        experts=Key("num_local_experts", aliases=("num_experts",)), width=Key("intermediate_size"), placement="all"
    ),
    names=ExpertNames("block_sparse_moe", "block_sparse_moe.gate", "w1", "w3", "w2"),
)
QWEN_EXPERTS = Key("num_experts", aliases=("num_local_experts",))
QWEN2_MOE = Family(
    "qwen2_moe",
    ("qwen2_moe",),
    ("Qwen2MoeForCausalLM",),
    GQATraits(qkv_bias=QKV_BIAS, kv_heads_default=True, window="layer types if used"),
    MoETraits(
        experts=QWEN_EXPERTS,
        width=Key("moe_intermediate_size"),
        placement="sparse step",
        normalise=Key("norm_topk_prob"),
        shared_width=Key("shared_expert_intermediate_size"),
        shared_gate=True,
    ),
    names=ExpertNames(shared="mlp.shared_expert"),
)
QWEN3_MOE = Family(
    "qwen3_moe",
    ("qwen3_moe",),
    ("Qwen3MoeForCausalLM",),
    GQATraits(qkv_bias=ATTENTION_BIAS, output_bias=ATTENTION_BIAS, qk_norm=True, window="all if used"),
    MoETraits(
        experts=QWEN_EXPERTS,
        width=Key("moe_intermediate_size"),
        placement="sparse step",
        normalise=Key("norm_topk_prob"),
    ),
    must_be=(("use_qk_norm", True), ("qkv_bias", False), ("shared_expert_intermediate_size", 0)),
)
GROUPED_SIGMOID = MoETraits(
    experts=Key("n_routed_experts", aliases=("num_local_experts",)),
    width=Key("moe_intermediate_size"),
    placement="after first dense",
    score="sigmoid",
    normalise=Key("norm_topk_prob"),
    scaling=Key("routed_scaling_factor"),
    groups=Key("n_group"),
    topk_groups=Key("topk_group"),
    correction_bias=True,
    shared_width=Key("moe_intermediate_size"),
    shared_count=Key("n_shared_experts", 0),
)
NOAUX = (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"))
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    ("deepseek_v3",),
    ("DeepseekV3ForCausalLM",),
    MLATraits(),
    GROUPED_SIGMOID,
    must_be=NOAUX,
    ignored=("num_key_value_heads", "head_dim", "qk_head_dim"),
)
KIMI_K2 = Family(
    "kimi_k2",
    ("kimi_k2",),
    ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM"),
    MLATraits(),
    GROUPED_SIGMOID,
    must_be=NOAUX,
    ignored=("num_key_value_heads", "head_dim", "qk_head_dim"),
)
KIMI_K25 = Family(
    "kimi_k25",
    ("kimi_k25",),
    ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
    MLATraits(),
    GROUPED_SIGMOID,
    must_be=NOAUX,
    ignored=("num_key_value_heads", "head_dim", "qk_head_dim"),
    text_config=True,
    prefixes=(("language_model.model.", "language_model."), ("model.language_model.", "")),
    skipped=(
        "vision_tower.",
        "mm_projector.",
        "model.vision_tower.",
        "model.mm_projector.",
        "model.multi_modal_projector.",
    ),
)
GLM4_MOE = Family(
    "glm4_moe",
    ("glm4_moe",),
    ("Glm4MoeForCausalLM",),
    GQATraits(qkv_bias=ATTENTION_BIAS, qk_norm=Key("use_qk_norm", False), partial_rotary=0.5),
    GROUPED_SIGMOID,
    must_be=NOAUX,
)
GPT_OSS = Family(
    "gpt_oss",
    ("gpt_oss",),
    ("GptOssForCausalLM",),
    GQATraits(
        qkv_bias=Key("attention_bias", True),
        output_bias=Key("attention_bias", True),
        sinks=True,
        head_dim="given",
        window="layer types",
        theta=150000.0,
    ),
    MoETraits(
        experts=Key("num_local_experts", aliases=("num_experts",)),
        width=Key("intermediate_size"),
        placement="all",
        topk=Key("num_experts_per_tok", aliases=("experts_per_token",)),
        score="softmax_topk",
        router_bias=True,
        expert_bias=True,
        expert_activation="gpt_oss",
    ),
    names=ExpertNames(router="mlp.router", transposed=True, fused_only=True),
    must_be=(("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)),
)

FAMILIES = (
    LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN2_MOE, QWEN3_MOE, DEEPSEEK_V3, KIMI_K2, KIMI_K25, GLM4_MOE, GPT_OSS,
)  # fmt: skip

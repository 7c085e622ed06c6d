"""A Hugging Face config.json read with care: every value checked, every key read or known to be harmless, every
default noted."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from eaglejax.errors import ConfigError

REQUIRED: Any = object()

# Keys that say nothing about the forward pass of a trained model.
HARMLESS = {
    # identity, dtype and tokens
    "_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype", "auto_map", "architectures",
    "model_type", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id",
    "decoder_start_token_id", "tokenizer_class", "_commit_hash", "license", "is_llama_config",
    "transformers.js_config", "unsloth_fixed", "unsloth_version", "initial_context_length", "quantization_config",
    "compression_config", "language", "torchscript", "model_name", "base_model",
    # training only
    "initializer_range", "initializer_factor", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop",
    "attn_pdrop", "dropout", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
    "router_z_loss_coef", "aux_loss_alpha", "seq_aux", "pretraining_tp", "gradient_checkpointing", "ep_size",
    "moe_aux_loss_coeff", "router_dtype", "use_cache", "mask_token_id",
    # has an effect only beside a window, and is read there
    "max_window_layers",
    # more layers than the target's own, which are skipped
    "num_nextn_predict_layers", "num_mtp_layers", "mtp_loss_scaling_factor",
    # generation and plumbing of transformers
    "output_attentions", "output_hidden_states", "return_dict", "return_dict_in_generate", "use_bfloat16",
    "pruned_heads", "is_decoder", "is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size",
    "tie_encoder_decoder", "chunk_size_feed_forward", "temperature", "top_k", "top_p", "typical_p",
    "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "num_beams", "num_beam_groups",
    "diversity_penalty", "do_sample", "early_stopping", "max_length", "min_length", "num_return_sequences",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    "output_scores", "problem_type", "finetuning_task", "id2label", "label2id", "num_labels", "task_specific_params",
    "prefix", "_attn_implementation", "attn_implementation", "_attn_implementation_internal",
    "_attn_implementation_autoset", "tf_legacy_loss", "experts_implementation",
}  # fmt: skip

# Names of training, of kernels that compute the same, and of token ids, whatever their value.
HARMLESS_NAMES = re.compile(
    r"dropout|layerdrop|flash_attn|flash_attention|^use_sdpa$|fused?_|_token_ids?$|_tokens?$|gradient|recompute|"
    r"tensor_parallel|sequence_parallel|pipeline_parallel|^paddlenlp_|^use_return_dict$"
)
# Words in an unknown key that name a part of a forward pass: refused.
FORWARD = re.compile(
    r"norm|scal|multipl|softcap|clip|bias|resid|rope|rotary|attn|attention|window|sliding|mask|parallel|gate|router|expert|moe|lora|adapter|"
    r"hidden|embed|head|layer|proj|mlp|conv|sink|^use_|position|alibi|nope|chunk|temperature|limit|alpha|index|group|topk|top_k|mixer|ssm|"
    r"(^|_)acts?(_|$)|activation|logit|softmax|swiglu|interleav|bidirect|rotat|yarn|(^|_)qk|(^|_)eps|epsilon|loop|recur"
)
# Words that may or may not: said loudly in the load report.
DOUBTFUL = re.compile(
    r"(^|_)dim|factor|beta|theta|rank|freq|depth|width|share|dense|sparse|hash|memory|state|branch|stream|hyper"
)
# What stands beside the text part of a multimodal config.
OTHER_PARTS = re.compile(
    r"vision|image|video|media|audio|projector|^mm_|^text_config$|^tie_word_embeddings$|^ignore_index$"
)


class HFConfig:
    """The values of a config.json, or of its nested text part, with the place each came from.

    Attributes:
        assumed: one line for each key that was absent and whose default of the family was taken.
        doubtful: "key = value" of each unknown key that `unread` neither refused nor knows to be harmless.
    """

    def __init__(self, values: Mapping[str, Any], where: object):
        self.values = values
        self.where = where
        self.assumed: list[str] = []
        self.doubtful: list[str] = []
        self._read: set[str] = set()

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = REQUIRED, *aliases: str) -> Any:
        """The value of `key` or of one of its aliases, checked for its type; absent and null give the default.

        Raises ConfigError where a required key is absent, the type is wrong, or two aliases contradict each other.
        """
        names = (key, *aliases)
        self._read.update(names)
        found = {name: self.values[name] for name in names if self.values.get(name) is not None}
        if not found:
            if default is REQUIRED:
                raise ConfigError(f"{key!r} is missing", where=self.where, fix="add it as in the model's release")
            return default
        values = [self._checked(name, value, kind) for name, value in found.items()]
        if any(value != values[0] for value in values):
            raise ConfigError("two names of one setting contradict each other", where=self.where, found=f"{found}")
        return values[0]

    def assume(self, key: str, kind: type | tuple[type, ...], default: Any, *aliases: str) -> Any:
        """As `get`, and a default that was taken is noted for the load report."""
        value = self.get(key, kind, None, *aliases)
        if value is not None:
            return value
        self.assumed.append(f"{key} is absent: {default!r}, as the family has it")
        return default

    def count(self, key: str, default: Any = REQUIRED, *aliases: str) -> int:
        """A whole number of at least 1."""
        value = self.get(key, int, default, *aliases)
        if value < 1:
            raise ConfigError("must be at least 1", where=f"{self.where}: {key}", found=value)
        return value

    def _checked(self, key: str, value: Any, kind: type | tuple[type, ...]) -> Any:
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if float in kinds and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        right = isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)
        if right and isinstance(value, float) and not math.isfinite(value):
            right = False
        if not right:
            expected = " or ".join(k.__name__ for k in kinds)
            raise ConfigError("has the wrong type", where=f"{self.where}: {key}", found=repr(value), expected=expected)
        return value

    def refuse(self, key: str, found: Any, expected: object) -> ConfigError:
        """The refusal of a value that we cannot run."""
        return ConfigError("is not supported", where=f"{self.where}: {key}", found=repr(found), expected=expected)

    def mark(self, *keys: str) -> None:
        """Notes that keys were read in another way (RoPE)."""
        self._read.update(keys)

    def unread(self) -> list[str]:
        """Unknown keys that change nothing as far as their names and values tell.

        A value that switches nothing on (null, false, 0, empty, a factor of 1) and a name of training or plumbing are
        harmless. Of the others, a name with a word of `FORWARD` raises ConfigError, for it could change the forward
        pass; one with a word of `DOUBTFUL` is noted in `doubtful`.
        """
        listed = []
        for key, value in self.values.items():
            if key in self._read or key in HARMLESS:
                continue
            known = HARMLESS_NAMES.search(key) is not None or _neutral(key, value)
            if not known and FORWARD.search(key):
                raise ConfigError(
                    "a key that EagleJax does not know could change the forward pass",
                    where=f"{self.where}: {key}",
                    found=repr(value)[:200],
                    fix="this model is not supported; if the key has no effect in this family, remove it",
                )
            if not known and DOUBTFUL.search(key):
                self.doubtful.append(f"{key} = {repr(value)[:80]}")
            else:
                listed.append(key)
        return listed


def doubtful_outside(outer: Mapping[str, Any], text: Mapping[str, Any]) -> list[str]:
    """ "key = value" of each unknown key beside the text part of a multimodal config that could change the text model.

    Never refused: what stands there mostly belongs to the other parts.
    """
    return [
        f"{key} = {repr(value)[:80]}"
        for key, value in outer.items()
        if key not in HARMLESS
        and not OTHER_PARTS.search(key)
        and not HARMLESS_NAMES.search(key)
        and not _neutral(key, value)
        and text.get(key) != value
        and (FORWARD.search(key) or DOUBTFUL.search(key))
    ]


def _neutral(key: str, value: Any) -> bool:
    """Whether a value switches nothing on: null, false, zero, empty, or a factor of one."""
    if value is None or value is False or value == 0 or value in ("", [], {}):
        return True
    factor = re.search(r"scal|multipl|factor", key) is not None and not isinstance(value, bool)
    return factor and value == 1

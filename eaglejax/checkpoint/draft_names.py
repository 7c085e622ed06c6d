"""The tensor names of every draft format, brought to one set of names; leftovers listed, unknown weights refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from eaglejax.checkpoint.tensors import TensorInfo
from eaglejax.errors import CheckpointError
from eaglejax.models.draft_keys import FORWARD, LEFTOVER

PREFIXES = ("module.", "model.", "draft_model.", "eagle_module.")
OLD_CAPTURE_NORMS = {"aux_norm_low": 0, "aux_norm_mid": 1, "aux_norm_high": 2}
SCALE = "_scale"  # X.weight_scale holds the factors of a quantised X.weight

_PROJECTION = r"(weight|bias)(_scale)?"
KNOWN = re.compile(
    rf"(?:d2t|t2d|embed_tokens\.weight(_scale)?|lm_head\.weight(_scale)?|norm\.weight|input_norm\.weight|fc_norm\.\d+\.weight|fc\.{_PROJECTION}"
    rf"|layers\.\d+\.(?:(input_layernorm|hidden_norm|post_attention_layernorm)\.weight"
    rf"|self_attn\.(q_norm|k_norm|q_a_layernorm|kv_a_layernorm)\.weight"
    rf"|self_attn\.(q_proj|k_proj|v_proj|o_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj)\.{_PROJECTION}"
    rf"|mlp\.(gate_proj|up_proj|down_proj)\.{_PROJECTION}))"
)


@dataclass(frozen=True)
class DraftTensors:
    """The tensors of a draft by our names, e.g. "layers.0.self_attn.q_proj.weight".

    `infos`: our name -> header entry (which knows the file's own name). `skipped`: tables and leftovers that are
        computed here or not needed.
    `unknown`: tensors nobody knows and whose names say nothing of a forward pass.
    """

    infos: dict[str, TensorInfo]
    skipped: tuple[str, ...]
    unknown: tuple[str, ...]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape in the file, or None where the file has no such tensor."""
        info = self.infos.get(name)
        return None if info is None else info.shape

    def layer_count(self) -> int:
        """The number of decoder layers, counted from the tensors; a gap in the numbering is refused."""
        found = {int(m.group(1)) for name in self.infos if (m := re.match(r"layers\.(\d+)\.", name))}
        if not found or found != set(range(len(found))):
            raise CheckpointError("the draft's layers are not numbered from 0 without a gap", found=sorted(found))
        return len(found)


def own_name(name: str) -> str:
    """Our name of a tensor of a draft file: prefixes dropped, `midlayer` is layer 0, old names of the per-capture
    norms.
    """
    while prefix := next((p for p in PREFIXES if name.startswith(p)), ""):
        name = name[len(prefix) :]
    if name.startswith("midlayer."):
        name = "layers.0." + name.removeprefix("midlayer.")
    first, _, rest = name.partition(".")
    return f"fc_norm.{OLD_CAPTURE_NORMS[first]}.{rest}" if first in OLD_CAPTURE_NORMS else name


def read_names(tensors: Mapping[str, TensorInfo], where: Path) -> DraftTensors:
    """Sorts a draft's tensors into known ones, leftovers and unknown ones.

    Raises CheckpointError for two names of one tensor, and for an unknown tensor whose name says that it takes part in
    a forward pass.
    """
    infos: dict[str, TensorInfo] = {}
    skipped, unknown = [], []
    for name, info in tensors.items():
        own = own_name(name)
        if LEFTOVER.search(own):
            skipped.append(name)
        elif KNOWN.fullmatch(own):
            if own in infos:
                raise CheckpointError(
                    "two tensors are the same weight", where=where, found=f"{infos[own].name} and {name}"
                )
            infos[own] = info
        elif FORWARD.search(own):
            raise CheckpointError(
                "an unknown weight could change the draft's forward pass",
                where=where,
                found=f"{name} {list(info.shape)}",
                fix="this draft is of a kind that EagleJax does not know; it is not loaded without that weight",
            )
        else:
            unknown.append(name)
    return DraftTensors(infos, tuple(skipped), tuple(unknown))

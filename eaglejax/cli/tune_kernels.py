"""`eaglejax tune_kernels`: measure the tiles of our GPU kernels at a model's shapes on this device, and store the best."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl.flags import FlagValues

from eaglejax.cli.flags import UsageError, given
from eaglejax.cli.values import wrong_usage
from eaglejax.config import whole_number
from eaglejax.errors import ConfigError
from eaglejax.measure.outputs import check_file

if TYPE_CHECKING:
    from eaglejax.kernels.tiles import Key

GROUPS = ("tune_kernels", "refusal")
MOST_SLOTS, MOST_TOKENS, MOST_ROWS = 64, 1 << 20, 64


def main(flags: FlagValues) -> int:
    """The command; returns its exit code. Raises UsageError and EagleJaxError."""
    values, out = _usage(flags), given(flags, "out")
    only_print = bool(flags["print"].value)
    if out is not None and not only_print:
        check_file(Path(out), f"--out {out}", replaced=True)

    # jax from here on
    from eaglejax.kernels import select
    from eaglejax.kernels.tile_store import here, read, stored_path, write
    from eaglejax.measure.kernel_cases import rows_for
    from eaglejax.measure.tune_kernels import listing, to_text, tune_key

    now = here()
    if now is None and not only_print:
        raise ConfigError(f"no kernel of ours can run here, so there is nothing to measure: {select.no_pallas()}")
    keys = _keys(values)
    path = Path(out) if out is not None else None if now is None else stored_path(now.device)
    if only_print:
        kept = {} if now is None or path is None or not path.exists() else read(path, now)
        if now is None:
            print(f"no kernel of ours runs here, so nothing stored is looked at: {select.no_pallas()}")
        else:
            print(f"stored in {path}" if kept else f"nothing is stored in {path}")
        print(listing(keys, kept))
        return 0
    assert now is not None and path is not None
    measured = []
    for key in keys:
        rows = rows_for(key, values["rows"], values["slots"])
        if not rows:
            print(f"{key}: no kernel serves so many rows", file=sys.stderr)
            continue
        print(f"{key}: {', '.join(map(str, rows))} rows ...", file=sys.stderr, flush=True)
        measured.append(tune_key(key, rows))
        # each as soon as it is known: a run that is stopped keeps what it has
        write(path, now, {key: measured[-1].found})
    if flags["json"].value:
        print(json.dumps({**vars(now), "file": str(path), "tiles": [one.found.to_json() for one in measured]}))
    else:
        print(to_text(measured, now))
        print(f"\nstored in {path}")
    return 0


def _keys(values: dict[str, Any]) -> list[Key]:
    """The shapes of the model's part on one device. Raises ConfigError where our kernels serve none of it."""
    from eaglejax.kernels import select
    from eaglejax.measure.kernel_cases import keys_of
    from eaglejax.models.config import MoEConfig
    from eaglejax.sharding.local_shapes import local_config
    from eaglejax.sharding.plan import MeshSize
    from eaglejax.sharding.plan_models import read_models
    from eaglejax.sharding.rules import Placement, split_draft, split_target

    mesh = wrong_usage(lambda: MeshSize.read(values["mesh"]))
    if uneven := [slots for slots in values["slots"] if slots % mesh.data]:
        raise UsageError(f"--slots: not whole shares of data={mesh.data}; found {uneven[0]}")
    models = read_models(values["model"], values["draft"])
    packings = {} if models.storage is None else models.storage.packings
    placement = Placement(values["expert_split"], values["draft_placement"])
    configs: list[Any] = [local_config(models.target, split_target(models.target, mesh.model, placement, []))]
    if models.draft is not None:
        configs.append(local_config(models.draft, split_draft(models.draft, mesh.model, placement, [])))
    # where there is no card the shapes of one are listed
    with select.compiling_for("gpu"):
        if (reason := select.no_pallas()) is not None:
            raise ConfigError(f"no kernel of ours would run on any device: {reason}")
        slots = [each // mesh.data for each in values["slots"]]
        keys = [key for config in configs for key in keys_of(config, slots, values["max_len"])]
    if any("experts" in name for name in packings):
        keys = [key for key in keys if key.kernel not in ("gateup", "down", "route")]
        print("packed experts have their rule alone, and the router before them is XLA's", file=sys.stderr)
    # which expert is where a router does not know
    whole = {layer.mlp.experts for layer in models.target.layers if isinstance(layer.mlp, MoEConfig)}
    keys = [key for key in keys if key.kernel != "route" or key.named()["experts"] in whole]
    if not keys:
        raise ConfigError(
            "our kernels serve no part of it, or by rule alone",
            where="--model",
            found=values["model"],
            fix="eaglejax plan tells its shapes; docs/kernels.md what is served",
        )
    return list(dict.fromkeys(keys))


def _usage(flags: FlagValues) -> dict[str, Any]:
    """The flags' values, checked. Raises UsageError."""
    text = lambda name, default: given(flags, name) or default
    if given(flags, "model") is None:
        raise UsageError("--model is needed: a built-in config (--model=qwen3-30b-a3b), a folder or a config.json")
    draft = flags["draft"].value
    for name, known in (("draft_placement", "replicated sharded"), ("expert_split", "auto experts width")):
        if (found := text(name, known.split()[0])) not in known.split():
            raise UsageError(f"--{name}: unknown; found {found!r}; expected one of {known}")

    def numbers(name: str, default: str, most: int) -> list[int]:
        parts = str(text(name, default)).split(",")
        return wrong_usage(lambda: [whole_number(f"--{name}", part, 1, most) for part in parts])

    return {
        "model": given(flags, "model"),
        "draft": "auto" if draft is None else None if draft.lower() in ("none", "") else draft,
        "mesh": text("mesh", "model=1"),
        "draft_placement": text("draft_placement", "replicated"),
        "expert_split": text("expert_split", "auto"),
        "slots": numbers("slots", "1", MOST_SLOTS),
        "max_len": numbers("max_len", "8192", MOST_TOKENS),
        "rows": numbers("rows", "1,4,8", MOST_ROWS),
    }

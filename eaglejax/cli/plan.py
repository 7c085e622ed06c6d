"""`eaglejax plan`: whether and how a model fits a mesh, and what a cycle costs there at least; from its config alone."""

from __future__ import annotations

import json
import sys
from typing import Any

from absl.flags import FlagValues

from eaglejax.cli.flags import UsageError, given
from eaglejax.cli.values import tree, wrong_usage
from eaglejax.config import Speculation, real_number, whole_number

GROUPS = ("plan", "plan hardware", "plan output", "run")
TREE = "3,1,4"
MOST_SLOTS, MOST_TOKENS = 65536, 10**8
# what any device may have, in the units of the flags
RANGES = {
    "bandwidth_gbs": (1, 1e6),
    "tflops": (0.01, 1e6),
    "allreduce_us": (0.01, 1e6),
    "device_memory_gb": (0.01, 1e5),
}
# XLA's CPU dies of more virtual devices
MOST_COMPILED = 1024


def main(flags: FlagValues) -> int:
    values = _usage(flags)

    # jax from here on
    from eaglejax.measure.hardware import read_hardware
    from eaglejax.sharding.absent_gpu import stay_on_cpu
    from eaglejax.sharding.aot import compile_decode, make_devices
    from eaglejax.sharding.plan import MeshSize, Question, make_plan
    from eaglejax.sharding.plan_models import read_models
    from eaglejax.sharding.plan_report import to_json, to_text

    if flags["story"].value:
        print(_story())
        return 0
    mesh = wrong_usage(lambda: MeshSize.read(values["mesh"]))
    compiling = flags["compile"].value is not False
    if compiling and mesh.devices > MOST_COMPILED:
        compiling = False
        print(f"not compiled: {mesh.devices} devices, and XLA on a CPU bears {MOST_COMPILED}", file=sys.stderr)
    if values["compile_for"]:
        stay_on_cpu()
    elif compiling:
        make_devices(mesh.devices)
    hardware = wrong_usage(lambda: read_hardware(values["hardware"]))
    memory = _scaled(values["device_memory_gb"], 1e9)
    hardware = hardware.having(
        bandwidth=_scaled(values["bandwidth_gbs"], 1e9),
        flops=_scaled(values["tflops"], 1e12),
        allreduce=_scaled(values["allreduce_us"], 1e-6),
        memory=None if memory is None else int(memory),
    )
    question = Question(
        read_models(values["model"], values["draft"]),
        mesh,
        values["tree"],
        values["slots"],
        values["max_len"],
        hardware,
        values["dtype"],
        values["draft_placement"],
        values["expert_split"],
        min(1024, values["max_len"]) if values["context"] is None else values["context"],
        values["tau"],
    )
    plan = make_plan(question)
    as_json, refusal = bool(flags["json"].value), plan.refusal()
    if not as_json:
        print(to_text(plan), flush=True)
    compiled = None
    if refusal is None and compiling:
        print("compiling the decode program ... (--nocompile leaves that out)", file=sys.stderr)
        compiled = compile_decode(plan, values["compile_for"])
    if as_json:
        print(json.dumps({**to_json(plan), "compiled": compiled.to_json(plan) if compiled else None}), flush=True)
    elif compiled:
        print("\n" + compiled.to_text(plan))
    if refusal is not None:
        raise refusal
    return 0


def _story() -> str:
    from eaglejax.measure.hardware import read_hardware
    from eaglejax.measure.story import tale, tell
    from eaglejax.sharding.plan import MeshSize, Question, make_plan
    from eaglejax.sharding.plan_models import read_models

    hardware = read_hardware("rtx-pro-6000-pcie")
    models = read_models("kimi-k2.5", "auto")
    question = Question(models, MeshSize(1, 8), Speculation(2, 1, 3), 1, 8192, hardware, placement="sharded")
    plan = make_plan(question)
    assert plan.draft is not None
    return tale(tell(plan.target, plan.draft))


def _usage(flags: FlagValues) -> dict[str, Any]:
    """The flags' values, checked. Raises UsageError."""
    text = lambda name, default=None: given(flags, name) or default
    whole = lambda name, default, most: whole_number(f"--{name}", text(name, default), 1, most)
    real = lambda name: None if text(name) is None else real_number(f"--{name}", text(name), *RANGES[name])
    if text("model") is None and not flags["story"].value:
        raise UsageError("--model is needed: a built-in config (--model=kimi-k2.5), a folder or a config.json")
    draft = flags["draft"].value
    values: dict[str, Any] = {
        "model": text("model"),
        "draft": "auto" if draft is None else None if draft.lower() in ("none", "") else draft,
        "draft_placement": text("draft_placement", "replicated"),
        "expert_split": text("expert_split", "auto"),
        "mesh": text("mesh", "model=1"),
        "hardware": text("hardware", "h200-nvlink"),
        "dtype": text("dtype", "bfloat16"),
        "compile_for": text("compile_for"),
    }
    if values["dtype"] not in ("float32", "bfloat16"):
        raise UsageError(f"--dtype: not a compute dtype; found {values['dtype']!r}; expected float32 or bfloat16")
    for name, known in (("draft_placement", "replicated sharded"), ("expert_split", "auto experts width")):
        if values[name] not in known.split():
            raise UsageError(f"--{name}: unknown; found {values[name]!r}; expected one of {known}")
    return wrong_usage(
        lambda: {
            **values,
            "tree": tree(str(text("tree", TREE))),
            "slots": whole("slots", 1, MOST_SLOTS),
            "max_len": whole("max_len", 8192, MOST_TOKENS),
            "context": None if text("context") is None else whole("context", None, MOST_TOKENS),
            "tau": tuple(real_number("--tau", part, 1, 64) for part in str(text("tau", "2,3")).split(",")),
            **{name: real(name) for name in RANGES},
        }
    )


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit

"""A plan as a table for people and as JSON for machines."""

from __future__ import annotations

from typing import Any

from eaglejax.measure.roofline import Phase, floor
from eaglejax.measure.work import collectives_by_kind, touched
from eaglejax.models.config import MoEConfig
from eaglejax.sharding.memory import total
from eaglejax.sharding.plan import Plan

ESTIMATE = "estimate by our own formula (sharding/memory.py); weights and state are exact"


def to_json(plan: Plan) -> dict[str, Any]:
    """Everything a plan says. Bytes and FLOPs are per device, seconds are floors."""
    asked = plan.question
    hardware = asked.hardware
    return {
        "model": asked.models.name,
        "draft": asked.models.draft_name,
        "draft_placement": asked.placement if plan.draft else None,
        "mesh": {"data": asked.mesh.data, "model": asked.mesh.model},
        "dtype": asked.dtype,
        "quantisation": asked.models.storage.name if asked.models.storage else None,
        "tree": [plan.spec.num_steps, plan.spec.topk, plan.spec.nodes],
        "slots": asked.slots,
        "max_len": asked.max_len,
        "notes": plan.notes,
        "memory": {
            "device_bytes": hardware.memory,
            "target_weights": plan.target_weights,
            "draft_weights": plan.draft_weights,
            "draft_borrowed_copies": plan.borrowed_copies,
            "state": plan.state,
            "temporaries": plan.temporaries,
            "temporaries_of": plan.hungrier,
            "temporaries_are": ESTIMATE,
            "needed_bytes": plan.needed,
            "free_bytes": plan.free,
            "fits": plan.fits,
            "largest": [{"slots": slots, "max_len": most} for slots, most in plan.largest()],
        },
        "hardware": {
            "name": hardware.name,
            "bandwidth_bytes_per_s": hardware.bandwidth,
            "flops_per_s": hardware.flops,
            "allreduce_s": hardware.allreduce,
            "link_bytes_per_s": hardware.link,
            "sources": hardware.sources,
        },
        "context": asked.context,
        "busiest_experts": {str(rows): round(count, 3) for rows, count in busiest(plan)},
        "plain": _part(plan, plan.plain),
        "cycle": _part(plan, plan.cycle) if plan.cycle else None,
        "breakeven_tau": plan.breakeven,
        "tokens_per_second": rates(plan),
    }


def _part(plan: Plan, phases: list[Phase]) -> dict[str, Any]:
    return {
        "seconds": plan.seconds(phases),
        "collectives": {kind: {"count": n, "bytes": size} for kind, (n, size) in collectives_by_kind(phases).items()},
        "phases": [_phase(plan, phase) for phase in phases],
    }


def _phase(plan: Plan, phase: Phase) -> dict[str, Any]:
    least = floor(phase, plan.question.hardware, plan.question.mesh.model)
    return {
        "name": phase.name,
        "bytes_read": phase.bytes,
        "flops": phase.flops,
        "device_s": least.device,
        "bound": least.bound,
        "collectives_s": least.collectives,
        "collectives": [vars(part) for part in phase.collectives],
    }


def busiest(plan: Plan) -> list[tuple[int, float]]:
    """(rows, experts that the busiest device touches in one layer) for a plain step and for a verification."""
    pairs = zip(plan.target.whole.layers, plan.target.local.config.layers, strict=True)
    both = next(((a.mlp, b.mlp) for a, b in pairs if isinstance(a.mlp, MoEConfig)), None)
    if both is None or not isinstance(both[1], MoEConfig):
        return []
    rows = dict.fromkeys((plan.local_slots, plan.local_slots * plan.spec.nodes))
    return [(count, touched(both[0], both[1], count, plan.target.devices)) for count in rows]


def rates(plan: Plan) -> dict[str, float]:
    """Tokens/s of all slots together: plain, and at each tau asked for."""
    slots = plan.question.slots
    sums = {"plain": slots / plan.seconds(plan.plain)}
    if plan.cycle:
        cycle = plan.seconds(plan.cycle)
        sums |= {f"tau {tau:g}": tau * slots / cycle for tau in plan.question.taus}
    return sums


def to_text(plan: Plan) -> str:
    """The plan as a table."""
    return "\n".join([*_heading(plan), "", *_memory(plan), "", *_times(plan)])


def _heading(plan: Plan) -> list[str]:
    asked, spec = plan.question, plan.spec
    stored = asked.models.storage.name if asked.models.storage else asked.dtype
    lines = [
        f"{asked.models.name} on mesh {asked.mesh}: {asked.mesh.devices} devices, weights {stored}, computing in {asked.dtype}"
    ]
    if plan.draft:
        lines.append(f"draft: {asked.models.draft_name}, {asked.placement}; {spec.describe()}")
    else:
        lines.append("plain decoding" if not spec.num_steps else "")
    lines += [f"! {note}" for note in plan.notes]
    return lines


def _memory(plan: Plan) -> list[str]:
    hardware = plan.question.hardware
    lines = [
        f"Bytes per device, {plan.question.slots} slot{'s' if plan.question.slots > 1 else ''} of {plan.question.max_len} tokens:"
    ]
    lines += _rows("target", plan.target_weights)
    if plan.draft:
        lines += _rows("draft", plan.draft_weights)
        if plan.borrowed_copies:
            lines.append(f"    of these borrowed from the target, kept as copies: {plan.borrowed_copies:,}")
    lines += _rows("state", plan.state)
    lines += _rows(f"{plan.hungrier}, estimate", plan.temporaries)
    lines.append(_line("needed", "", plan.needed))
    lines.append(_line("there", hardware.name, hardware.memory))
    lines.append(_line("free" if plan.fits else "DOES NOT FIT, too many", "", abs(plan.free)))
    largest = plan.largest()
    if largest:
        fitting = ", ".join(f"{slots} x {most:,}" for slots, most in largest[:8])
        lines.append(f"  largest slots x max_len that fit: {fitting}")
    if plan.fits and (share := plan.needed / hardware.memory) > 0.75:
        lines.append(
            f"  JAX takes 75 % of a device unless told: set XLA_PYTHON_CLIENT_MEM_FRACTION to {min(share + 0.02, 0.99):.2f} or more"
        )
    return lines


def _rows(group: str, parts: dict[str, int]) -> list[str]:
    lines = [_line(group, name, size) for name, size in parts.items() if size]
    return [*lines, _line(group, "total", total(parts))]


def _line(group: str, name: str, size: int) -> str:
    return f"  {group:<22} {name:<36} {size:>19,}  {size / 1e9:9.3f} GB"


def _times(plan: Plan) -> list[str]:
    asked, hardware = plan.question, plan.question.hardware
    lines = [
        f"Floor times on {hardware.name}: {hardware.bandwidth / 1e12:.2f} TB/s, {hardware.flops / 1e12:.0f} TFLOP/s, "
        f"{hardware.allreduce * 1e6:.1f} us a collective; {asked.context} tokens of context, random routing",
    ]
    lines += [f"    {figure}: {source}" for figure, source in hardware.sources.items()]
    if counted := busiest(plan):
        shown = ", ".join(f"{count:.1f} at {rows} row{'s' if rows > 1 else ''}" for rows, count in counted)
        lines.append(f"  experts touched on the busiest device, a layer: {shown}")
    lines.append(
        f"  {'phase':<26} {'GB read':>9} {'GFLOP':>9} {'collectives':>12} {'their KB':>10} {'device ms':>10} {'waiting ms':>11}"
    )
    for title, phases in (("plain step", plan.plain), ("cycle", plan.cycle)):
        if not phases:
            continue
        lines += [_phase_line(plan, phase) for phase in phases]
        lines.append(f"  {title}: {1e3 * plan.seconds(phases):.2f} ms, {_counted(phases)}")
    shown = ", ".join(f"{name}: {rate:.1f}" for name, rate in rates(plan).items())
    lines.append(f"  tokens/s at these floors, all slots: {shown}")
    if plan.breakeven is not None:
        lines.append(f"  speculation beats plain decoding above {plan.breakeven:.2f} tokens per cycle, bonus included")
    return lines


def _phase_line(plan: Plan, phase: Phase) -> str:
    least = floor(phase, plan.question.hardware, plan.question.mesh.model)
    return (
        f"  {phase.name:<26} {phase.bytes / 1e9:>9.3f} {phase.flops / 1e9:>9.2f} {phase.collective_count:>12} "
        f"{phase.collective_bytes / 1e3:>10.1f} {1e3 * least.device:>10.3f} {1e3 * least.collectives:>11.3f}"
    )


def _counted(phases: list[Phase]) -> str:
    kinds = collectives_by_kind(phases)
    if not kinds:
        return "no collectives"
    return ", ".join(f"{n} {kind}s of {size / 1e3:.1f} KB in all" for kind, (n, size) in kinds.items())

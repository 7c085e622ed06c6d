"""A profile as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eaglejax.measure.profile_phases import group_of
from eaglejax.measure.profile_result import PhaseTime, Profile
from eaglejax.measure.timing import Spread

HEAD = f"{'phase':<24}{'ms':>9}{'share':>8}{'running':>9}{'waiting':>9}{'ops':>7}{'MB':>9}{'MFLOP':>9}{'floor ms':>10}{'x floor':>9}"

LEAST_FLOOR = 1e-6  # seconds: beside less than a launch takes, a ratio says nothing
LEAST_SHARE = 0.05  # of a cycle, of what the sentence below the table names


def to_text(profile: Profile) -> str:
    """The table, the figures around it and what to doubt."""
    setting = profile.setting
    wall = profile.cycle_seconds
    lines = [
        f"{setting.model}: {setting.spec.describe()}",
        f"{setting.device}, mesh {setting.mesh}, {setting.dtype}, {setting.slots} slot{'s' * (setting.slots > 1)}; {setting.versions}",
        f"{setting.prompt_tokens} prompt tokens, {profile.new_tokens} new ones in {profile.cycles} cycles, tau {profile.tau:.2f}; "
        f"{setting.compile_seconds:.1f} s of compiling before the first run, in no figure",
        "",
        f"untraced {_rate(profile.untraced)}, {1e3 * profile.untraced_cycle.median:.2f} ms a cycle",
        f"traced   {_rate(profile.traced)}, {1e3 * wall:.2f} ms a cycle in the run shown here",
        _distortion(profile),
        "",
        "one traced cycle, device events by phase:",
        HEAD,
        *(_row(phase, wall) for phase in profile.phases),
        "",
        *(f"{name:<24}{1e3 * seconds:>9.3f}{100 * seconds / wall:>7.1f}%" for name, seconds in profile.groups.items()),
        "",
        f"named phases add up to {100 * profile.named:.1f} % of the cycle's wall time; their operations run for "
        f"{100 * profile.busy:.1f} % of it",
        _in_short(profile),
    ]
    if profile.named_by_kernel:
        lines.append(
            f"{100 * profile.named_by_kernel:.0f} % of the operations were told by their kernel's name and its place in the cycle"
        )
    lines += [
        "",
        f"the prefill, once, {1e3 * profile.prefill_seconds:.2f} ms:",
        HEAD,
        *(_row(phase, profile.prefill_seconds) for phase in profile.prefill),
        "",
        _floors(profile),
    ]
    if profile.twice is not None:
        lines += ["", profile.twice.to_text(), ""]
    if profile.trace is not None:
        lines.append(f"trace: {profile.trace} (Perfetto opens the .json.gz, XProf the folder)")
    return "\n".join([*lines, *(f"doubt this: {warning}" for warning in profile.warnings)])


def _rate(spread: Spread) -> str:
    return f"{spread.median:.1f} tokens/s (median of {len(spread.values)}, {spread.low:.1f} to {spread.high:.1f})"


def _distortion(profile: Profile) -> str:
    noise = "" if profile.told_apart else " (within the noise: the ranges overlap)"
    if len(profile.untraced.values) == 1:
        noise = " (one run of each: how much of it is noise cannot be told)"
    tokens = "the same in every run" if profile.same_tokens else "NOT the same"
    return f"distortion {profile.distortion:.2f}{noise}; tokens {tokens}"


def _row(phase: PhaseTime, wall: float) -> str:
    ms = lambda seconds: f"{1e3 * seconds:>9.3f}"
    row = f"{phase.name:<24}{ms(phase.seconds)}{100 * phase.seconds / wall:>7.1f}%{ms(phase.busy)}{ms(phase.waiting)}{phase.ops:>7.0f}"
    if phase.work is None or phase.floor is None:
        return row
    ratio = _beside_floor(phase)
    told = "-" if ratio is None else f"{ratio:.1f}"
    return (
        row + f"{phase.work.bytes / 1e6:>9.2f}{phase.work.flops / 1e6:>9.1f}{1e3 * phase.floor.total:>10.3f}{told:>9}"
    )


def _beside_floor(phase: PhaseTime) -> float | None:
    """How many times its floor a phase takes; None where the floor is nothing to speak of."""
    return None if phase.floor is None or phase.floor.total < LEAST_FLOOR else phase.seconds / phase.floor.total


def _in_short(profile: Profile) -> str:
    """What the cycle consists of, in a sentence: groups by share, and what their largest phases are beside their floors."""
    wall, parts = profile.cycle_seconds, []
    for group, seconds in sorted(profile.groups.items(), key=lambda pair: -pair[1]):
        if seconds < LEAST_SHARE * wall:
            continue
        largest = sorted((p for p in profile.phases if group_of(p.name) == group), key=lambda p: -p.seconds)[:2]
        told = [
            f"{p.name.removeprefix(f'{group}: ')} {100 * p.seconds / wall:.0f} %"
            + ("" if (ratio := _beside_floor(p)) is None else f", {ratio:.1f} x its floor")
            for p in largest
            if p.seconds >= LEAST_SHARE * wall and p.name != group
        ]
        parts.append(f"{group} {100 * seconds / wall:.0f} %" + (f" ({'; '.join(told)})" if told else ""))
    return (
        f"in short: {', '.join(parts)}. A cycle makes {profile.tau:.2f} tokens: bench tells what plain decoding makes"
    )


def _floors(profile: Profile) -> str:
    hardware, setting = profile.setting.hardware, profile.setting
    text = (
        f"floors: {hardware.bandwidth / 1e9:.1f} GB/s ({hardware.sources['bandwidth']}), {hardware.flops / 1e9:.0f} GFLOP/s "
        f"({hardware.sources['flops']}); {setting.context} tokens in the caches"
    )
    if hardware.allreduce:
        text += f"; an all-reduce {1e6 * hardware.allreduce:.0f} us ({hardware.sources['allreduce']})"
    return text


def to_json(profile: Profile) -> dict[str, Any]:
    """Seconds, bytes and FLOPs; phases in the order of a cycle."""
    setting, hardware = profile.setting, profile.setting.hardware
    spec = setting.spec
    return {
        "model": setting.model,
        "num_steps": spec.num_steps,
        "topk": spec.topk,
        "num_draft_tokens": spec.nodes,
        "slots": setting.slots,
        "dtype": setting.dtype,
        "mesh": setting.mesh,
        "device": setting.device,
        "versions": setting.versions,
        "prompt_tokens": setting.prompt_tokens,
        "context": setting.context,
        "compile_seconds": setting.compile_seconds,
        "cycles": profile.cycles,
        "new_tokens": profile.new_tokens,
        "tau": profile.tau,
        "same_tokens": profile.same_tokens,
        "untraced_tokens_per_second": profile.untraced.to_json(),
        "traced_tokens_per_second": profile.traced.to_json(),
        "untraced_cycle_seconds": profile.untraced_cycle.to_json(),
        "distortion": profile.distortion,
        "distortion_beyond_noise": profile.told_apart,
        "cycle_seconds": profile.cycle_seconds,
        "named_share": profile.named,
        "busy_share": profile.busy,
        "named_by_kernel_share": profile.named_by_kernel,
        "phases": _phases(profile.phases, profile.cycle_seconds),
        "groups": {name: {"seconds": s, "share": s / profile.cycle_seconds} for name, s in profile.groups.items()},
        "prefill_seconds": profile.prefill_seconds,
        "prefill": _phases(profile.prefill, profile.prefill_seconds),
        "hardware": {
            "name": hardware.name,
            "bytes_per_second": hardware.bandwidth,
            "flops_per_second": hardware.flops,
            "allreduce_seconds": hardware.allreduce,
            "sources": hardware.sources,
        },
        "trace": None if profile.trace is None else str(profile.trace),
        "twice": None if profile.twice is None else profile.twice.to_json(),
        "warnings": profile.warnings,
    }


def _phases(phases: Sequence[PhaseTime], wall: float) -> list[dict[str, Any]]:
    return [
        {
            "name": phase.name,
            "seconds": phase.seconds,
            "share": phase.seconds / wall,
            "running_seconds": phase.busy,
            "waiting_seconds": phase.waiting,
            "operations": phase.ops,
            "bytes": None if phase.work is None else phase.work.bytes,
            "flops": None if phase.work is None else phase.work.flops,
            "collectives": None if phase.work is None else phase.work.collective_count,
            "floor_seconds": None if phase.floor is None else phase.floor.total,
            "floor_bound": None if phase.floor is None else phase.floor.bound,
        }
        for phase in phases
    ]

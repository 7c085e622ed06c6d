"""Where the time of a cycle goes: the share of every phase, from a trace of the devices, beside the floor of each.

    profile = engine.profile(prompt)
    print(profile.to_text())

The same wave of prompts runs untraced and traced in turns; nothing inside the loop is synchronised or changed. The traced run of median
speed is read (`profile_events.py`), its instructions are mapped to phases by the named scopes of the source (`profile_hlo.py`), and one
sweep gives every instant of the wall time to one phase (`profile_sweep.py`).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from eaglejax.config import Speculation, whole_number
from eaglejax.errors import ConfigError
from eaglejax.generation import Generation
from eaglejax.loading import Pair
from eaglejax.measure.device_speed import measure_speed
from eaglejax.measure.outputs import check_folder
from eaglejax.measure.profile_events import Events, Op, Span, read_trace
from eaglejax.measure.profile_floor import cycle_work, placed, prefill_work
from eaglejax.measure.profile_hlo import Instructions
from eaglejax.measure.profile_programs import ProfiledPrograms
from eaglejax.measure.profile_request import check_wave
from eaglejax.measure.profile_result import LEAST_NAMED, MOST_DISTORTION, Profile, Setting, phase_times
from eaglejax.measure.profile_sweep import Times, sweep
from eaglejax.measure.profile_twice import time_twice
from eaglejax.measure.timing import Spread, alternate
from eaglejax.sharding.mesh import DATA, MODEL, axis_size
from eaglejax.speculation.programs import prefill_plan
from eaglejax.text.tokenizer import Tokenizer
from eaglejax.wave import COLLECT, DECODE, PREFILL, Job, Wave

HOST_COLLECT = "host: collect"


@dataclass(frozen=True)
class Run:
    """One run of the wave: its answers, and the trace of it where it was traced."""

    answers: list[Generation]
    trace: Path | None
    programs: tuple[Instructions, ...]  # of every program that ran, in order

    @property
    def rate(self) -> float:
        """Tokens/s of all slots together, after the first token of each."""
        made = sum(max(answer.stats.new_tokens - 1, 0) for answer in self.answers)
        return made / self.answers[0].stats.decode_seconds

    @property
    def cycles(self) -> int:
        """Rounds of the loop: those of the slot that needed most."""
        return max(answer.stats.cycles for answer in self.answers)

    @property
    def cycle_seconds(self) -> float:
        return self.answers[0].stats.decode_seconds / self.cycles


def check_request(jobs: Sequence[Job], slots: int) -> None:
    """Refuse what a profile does not measure. Raises ConfigError."""
    if jax.process_count() > 1:
        raise ConfigError(
            "a profile is taken by one process: each process would trace its own devices alone",
            where="profile",
            found=f"{jax.process_count()} processes",
            expected="1",
            fix="run one process with a mesh over its own devices",
        )
    check_wave([job.sampling for job in jobs], slots)


def take_profile(
    pair: Pair,
    jobs: Sequence[Job],
    spec: Speculation,
    max_len: int,
    slots: int,
    *,
    repeats: int = 3,
    trace_dir: str | Path | None = None,
    twice: bool = False,
    done: Callable[[], object] = lambda: None,
) -> Profile:
    """Run the jobs as one wave, untraced and traced in turns, and read the traced run of median speed.

    Arguments:
        repeats: runs of each kind, after a warm one that compiles.
        trace_dir: folder in which that run's trace is kept; None keeps none.
        twice: also time parts of the cycle without a trace, each done twice inside the loop (`profile_twice.py`); done anyway where the
            trace names less than 95 % of the wall time, or slowed every one of several runs, by more than 1.3 times in the middle.
        done: called after every run: 2 * repeats + 1 times, and more with `twice`.

    Raises ConfigError: before any compile for what a profile does not measure and a folder that cannot be written; after the runs where
        no cycle ran, or the trace lost a part of the loop.
    """
    check_request(jobs, slots)
    whole_number("repeats", repeats, 1)
    folder = None if trace_dir is None else Path(trace_dir).expanduser()
    if folder is not None:
        check_folder(folder, f"trace_dir {folder}")
    boundaries = pair.capture.boundaries if pair.capture is not None else ()
    programs = ProfiledPrograms(pair.target, pair.draft, boundaries, spec, max_len, pair.dtype, pair.mesh)
    with tempfile.TemporaryDirectory(prefix="eaglejax-profile-") as scratch:
        wave = lambda trace: _run(programs, jobs, pair.tokenizer, slots, trace)
        first = wave(None)
        done()
        if not first.cycles:
            raise ConfigError("no cycle ran: the answer ended with its first token", where="prompts", fix="other ones")
        numbers = iter(range(repeats))
        tasks = {"untraced": lambda: wave(None), "traced": lambda: wave(Path(scratch) / str(next(numbers)))}
        runs = alternate(tasks, repeats=repeats, warm_up=0, done=done)
        traced = sorted(runs["traced"], key=lambda run: run.rate)[(repeats - 1) // 2]
        assert traced.trace is not None
        events = read_trace(traced.trace, traced.programs)
        if folder is not None:
            shutil.copytree(traced.trace, folder, dirs_exist_ok=True)
    profile = _profile(traced, runs, events, _setting(pair, programs, spec, first.answers, slots), folder)
    # one run of each tells nothing of the noise
    slowed = repeats > 1 and profile.told_apart and profile.distortion > MOST_DISTORTION
    if not twice and not slowed and profile.named >= LEAST_NAMED:
        return profile
    return replace(profile, twice=time_twice(pair, jobs, spec, max_len, slots, repeats=repeats, done=done))


def _setting(
    pair: Pair, programs: ProfiledPrograms, spec: Speculation, answers: list[Generation], slots: int
) -> Setting:
    """What was profiled, with the work of each phase in it; the device's speed is measured here."""
    device = jax.devices()[0] if pair.mesh is None else pair.mesh.devices.flat[0]
    cores = f", {os.cpu_count()} cores" if device.platform == "cpu" else ""
    longest = max(len(answer.prompt_token_ids) for answer in answers)
    held = sum(len(answer.prompt_token_ids) + len(answer.token_ids) / 2 for answer in answers) / len(answers)
    target, draft = placed(pair)
    width = programs.slots_for(len(answers), slots)
    local, context = width // axis_size(pair.mesh, DATA), round(held)
    drafted = draft if spec.num_steps else None
    return Setting(
        model=pair.name,
        spec=spec,
        slots=width,
        prompt_tokens=longest,
        context=context,
        dtype=pair.dtype.name,
        mesh="none" if pair.mesh is None else ",".join(f"{name}={size}" for name, size in pair.mesh.shape.items()),
        device=device.device_kind + cores,
        versions=f"jax {jax.__version__}",
        hardware=measure_speed(pair.mesh, pair.dtype),
        work=cycle_work(target, drafted, spec, local, context)
        | prefill_work(target, drafted, prefill_plan(longest), local),
        model_devices=axis_size(pair.mesh, MODEL),
        compile_seconds=programs.compile_seconds,
    )


def _run(
    programs: ProfiledPrograms, jobs: Sequence[Job], tokenizer: Tokenizer | None, slots: int, trace: Path | None
) -> Run:
    programs.ran.clear()
    wave = Wave(programs, jobs, tokenizer, slots)
    if trace is None:
        return Run(wave.run(), None, tuple(programs.ran))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's calls would be the largest part of the trace and of its cost
    options.host_tracer_level = 1
    jax.profiler.start_trace(str(trace), profiler_options=options)
    try:
        answers = wave.run()
    finally:
        jax.profiler.stop_trace()
    return Run(answers, trace, tuple(programs.ran))


def _profile(
    traced: Run, runs: dict[str, list[Run]], events: Events, setting: Setting, trace_dir: Path | None
) -> Profile:
    decode = next((span for span in events.spans if span.name == DECODE), None)
    prefill = next((span for span in events.spans if span.name == PREFILL), None)
    if decode is None or prefill is None or not events.ops:
        raise ConfigError(
            "the trace holds no event of the device",
            where="profile",
            found=f"{len(events.ops)} operations",
            fix="see docs/profile.md",
        )
    _check_complete(events, traced, decode)
    cycle = _averaged(events.ops, decode)
    collect = [s for s in events.spans if s.name == COLLECT and s.begin >= decode.begin]
    collected = sum(span.end - span.begin for span in collect)
    cycle.busy[HOST_COLLECT] = collected
    rates = {kind: Spread.of([run.rate for run in of_kind]) for kind, of_kind in runs.items()}
    texts = {tuple(tuple(a.token_ids) for a in run.answers) for of_kind in runs.values() for run in of_kind}
    return Profile(
        setting=setting,
        untraced=rates["untraced"],
        traced=rates["traced"],
        untraced_cycle=Spread.of([run.cycle_seconds for run in runs["untraced"]]),
        cycle_seconds=(decode.end - decode.begin + collected) * 1e-9 / traced.cycles,
        cycles=traced.cycles,
        new_tokens=sum(answer.stats.new_tokens for answer in traced.answers),
        tau=_tau(traced.answers),
        same_tokens=len(texts) == 1,
        phases=phase_times(cycle.scaled(1 / traced.cycles), setting),
        prefill=phase_times(_averaged(events.ops, prefill), setting),
        prefill_seconds=(prefill.end - prefill.begin) * 1e-9,
        named_by_kernel=events.by_kernel / len(events.ops),
        trace=trace_dir,
    )


def _averaged(ops: list[Op], window: Span) -> Times:
    """The times inside a window, the mean over the devices: every device's own add up to the window."""
    times, devices = Times(), sorted({op.device for op in ops})
    for device in devices:
        times.add(sweep([op for op in ops if op.device == device], window))
    return times.scaled(1 / len(devices)) if devices else times


def _check_complete(events: Events, traced: Run, decode: Span) -> None:
    """Every instruction that each cycle runs must be there as often as cycles ran, on every device: a profiler's buffers are finite."""
    once = traced.programs[-1].every_cycle
    counts = Counter((op.device, op.name) for op in events.ops if op.name in once and op.begin >= decode.begin)
    short = [(name, count) for (_, name), count in counts.items() if count < traced.cycles]
    if not counts or short:
        found = f"{short[0][1]} of {traced.cycles} cycles ({short[0][0]})" if short else "no event inside the loop"
        raise ConfigError(
            "the trace does not hold the whole loop",
            where="profile",
            found=found,
            fix="fewer tokens (max_new_tokens) make a smaller trace",
        )


def _tau(answers: list[Generation]) -> float:
    cycles = sum(answer.stats.cycles for answer in answers)
    return sum(sum(answer.stats.accepted_per_cycle) for answer in answers) / cycles + 1

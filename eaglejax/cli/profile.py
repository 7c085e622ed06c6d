"""`eaglejax profile`: where the time of a cycle goes, from a trace of the devices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl.flags import FlagValues

from eaglejax.cli.flags import UsageError, given
from eaglejax.cli.processes import read_processes
from eaglejax.cli.progress import progress
from eaglejax.cli.prompts import KINDS, read_flags, require_tokenizer, text_flag
from eaglejax.cli.settings import read_settings
from eaglejax.config import whole_number
from eaglejax.errors import ConfigError
from eaglejax.measure.outputs import check_folder
from eaglejax.measure.profile_request import check_wave
from eaglejax.run_config import RunConfig

if TYPE_CHECKING:
    from eaglejax.engine import EagleJaxEngine

GROUPS = ("profile", "prompts", "system", "model", "speculation", "sampling", "processes", "run")
NEW_TOKENS = 64  # enough cycles to average over, and a trace of some MB
REPEATS = 3


def main(flags: FlagValues) -> int:
    """The command; returns its exit code. Raises UsageError and EagleJaxError, which `main.run` turns into messages."""
    settings = _settings(flags)
    try:
        repeats = whole_number("--repeats", given(flags, "repeats") or REPEATS, 1)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    prompts = _given_prompts(flags)
    processes = read_processes(flags)
    if processes is not None and processes[1] > 1:
        raise ConfigError(
            "a profile is taken by one process",
            where="--num_processes",
            found=processes[1],
            fix="leave out --coordinator, --num_processes and --process_id; --mesh spreads over this process's own devices",
        )
    folder, picture = given(flags, "trace_dir"), given(flags, "picture")
    if folder is not None:
        check_folder(Path(folder).expanduser(), f"trace_dir {folder}")
    _check_input(settings, prompts, given(flags, "prompts") or "mt_bench")

    # jax from here on
    from eaglejax.cli.session import Session
    from eaglejax.measure.profile_picture import check_picture
    from eaglejax.measure.profile_twice import run_count

    if picture is not None:
        check_picture(Path(picture))
    engine = Session(settings, report=bool(flags["report"].value)).engine
    chosen = prompts if prompts is not None else _from_set(flags, settings, engine)
    twice = bool(flags["twice"].value)
    total = 2 * repeats + 1 + (run_count(engine.speculation, repeats) if twice else 0)
    with progress("runs", total, silent_until_done=True) as advance:
        profile = engine.profile(
            chosen, settings.sampling, repeats=repeats, trace_dir=folder, twice=twice, done=lambda: advance(1)
        )
    print(json.dumps(profile.to_json()) if flags["json"].value else profile.to_text(), flush=True)
    if picture is not None:
        profile.save_picture(picture)
    return 0


def _settings(flags: FlagValues) -> RunConfig:
    """The settings, with fewer new tokens than `generate` makes where nobody says how many."""
    settings = read_settings(flags)
    if given(flags, "max_new_tokens") is None and given(flags, "config") is None:
        return replace(settings, sampling=replace(settings.sampling, max_new_tokens=NEW_TOKENS))
    return settings


def _given_prompts(flags: FlagValues) -> list[Any] | None:
    """The prompts of the command line, or None where a set is to be used."""
    if all(given(flags, name) is None for name in KINDS):
        return None
    if given(flags, "prompts") is not None:
        raise UsageError("--prompts names a set of prompts, and others are given")
    return read_flags(flags)


def _check_input(settings: RunConfig, prompts: list[Any] | None, name: str) -> None:
    """What can be refused without a model."""
    check_wave([settings.sampling] * (1 if prompts is None else len(prompts)), settings.slots)
    if prompts is not None:
        if (needs_text := text_flag(prompts, settings.sampling.stop)) is not None:
            require_tokenizer(settings.model, needs_text)
        return
    from eaglejax.measure.prompt_sets import RANDOM, check_prompts

    check_prompts(name)
    if name != RANDOM and not Path(name).is_file():
        require_tokenizer(settings.model, "--prompts")


def _from_set(flags: FlagValues, settings: RunConfig, engine: EagleJaxEngine) -> list[Any]:
    from eaglejax.measure.prompt_sets import read_prompts

    count = settings.slots if given(flags, "slots") is not None else 1
    name, chat = given(flags, "prompts") or "mt_bench", flags["chat"].value is not False
    return [prompt.content for prompt in read_prompts(name, count, vocab_size=engine.vocab_size, chat=chat)]

"""`eaglejax generate`: answers to prompts, streamed for one, in order for many."""

from __future__ import annotations

import sys

from absl.flags import FlagValues

from eaglejax.cli.flags import UsageError
from eaglejax.cli.prompts import Prompt, read_prompts
from eaglejax.cli.settings import read_settings

GROUPS = ("prompts", "system", "model", "speculation", "sampling", "output", "run")


def main(flags: FlagValues) -> int:
    settings = read_settings(flags)
    prompts = read_prompts(flags, settings.sampling)
    as_json = bool(flags["json"].value)
    stream = flags["stream"].value
    if stream and (as_json or len(prompts) > 1):
        raise UsageError("--stream prints one answer as it comes; leave it out with --json and with several prompts")

    # jax from here on
    from eaglejax.cli.session import Session

    session = Session(settings, report=bool(flags["report"].value))
    if len(prompts) == 1:
        _one(session, prompts[0], as_json=as_json, stream=stream is not False and not as_json)
    else:
        _many(session, prompts, as_json=as_json, together=settings.slots)
    return 0


def _one(session, prompt: Prompt, *, as_json: bool, stream: bool) -> None:
    from eaglejax.cli.answers import closing_line, to_json

    show = (lambda text: print(text, end="", flush=True)) if stream else (lambda text: None)
    answer, times = session.stream(prompt.content, prompt.sampling, show)
    spec = session.engine.speculation
    if as_json:
        print(to_json(answer, prompt.name, spec, times), flush=True)
        return
    print("" if stream else answer.text, flush=True)
    print(closing_line([answer], spec, times), file=sys.stderr)


def _many(session, prompts: list[Prompt], *, as_json: bool, together: int) -> None:
    """Answers in the order of the prompts, as soon as each group that runs together is done."""
    from eaglejax.cli.answers import Times, closing_line, to_json
    from eaglejax.cli.progress import progress

    spec = session.engine.speculation
    answers, all_times = [], []
    with progress("prompts", len(prompts)) as advance:
        for first in range(0, len(prompts), together):
            group = prompts[first : first + together]
            made, times = session.generate([p.content for p in group], [p.sampling for p in group])
            for prompt, answer in zip(group, made, strict=True):
                line = to_json(answer, prompt.name, spec, times) if as_json else f"[{prompt.name}] {answer.text}"
                print(line, flush=True)
            answers, all_times = answers + made, all_times + [times]
            advance(len(group))
    if not as_json:
        summed = Times(
            all_times[0].first,
            all_times[0].compile_first,
            sum(t.decode for t in all_times),
            sum(t.compile_decode for t in all_times),
        )
        print(closing_line(answers, spec, summed), file=sys.stderr)

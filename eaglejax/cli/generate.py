"""`eaglejax generate`: answers to prompts, as they come for one, in order for many."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from absl.flags import FlagValues

from eaglejax.cli.flags import UsageError
from eaglejax.cli.processes import read_processes, together
from eaglejax.cli.prompts import read_flags, require_tokenizer, text_flag
from eaglejax.cli.settings import read_settings
from eaglejax.config import Sampling

if TYPE_CHECKING:
    from eaglejax.cli.session import Session
    from eaglejax.generation import Generation

GROUPS = ("prompts", "system", "model", "speculation", "sampling", "output", "processes", "run")


def main(flags: FlagValues) -> int:
    """The command; returns its exit code. Raises UsageError and EagleJaxError, which `main.run` turns into messages."""
    settings = read_settings(flags)
    prompts = read_flags(flags)
    as_json = bool(flags["json"].value)
    stream = flags["stream"].value
    if stream and (as_json or len(prompts) > 1):
        raise UsageError("--stream prints one answer as it comes; leave it out with --json and with several prompts")

    processes = read_processes(flags)
    if (needs_text := text_flag(prompts, settings.sampling.stop)) is not None:
        require_tokenizer(settings.model, needs_text)

    # jax from here on
    from eaglejax.cli.session import Session

    with together(processes):
        session = Session(settings, report=bool(flags["report"].value))
        if len(prompts) == 1 and not as_json and stream is not False:
            _streamed(session, prompts[0], settings.sampling)
        else:
            _whole(session, prompts, settings.sampling, as_json=as_json)
    return 0


def _shown(session: Session, answer: Generation) -> str:
    """The answer's text; its ids where the model has no tokenizer."""
    return answer.text if session.has_text else ",".join(map(str, answer.token_ids))


def _streamed(session: Session, prompt: Any, sampling: Sampling) -> None:
    from eaglejax.cli.answers import closing_line

    answer, times = session.stream(prompt, sampling, lambda text: print(text, end="", flush=True))
    print("" if session.has_text else _shown(session, answer), flush=True)
    print(closing_line(answer, session.engine.speculation, times), file=sys.stderr)


def _whole(session: Session, prompts: list[Any], sampling: Sampling, *, as_json: bool) -> None:
    """Answers in the order of the prompts, as soon as each group that runs together is done."""
    from eaglejax.cli.answers import closing_line, closing_line_of_many, to_json
    from eaglejax.cli.progress import progress

    spec, together = session.engine.speculation, session.engine.slots
    prompts = session.engine.encode(prompts)  # a prompt that is refused is refused before the first answer
    answers, calls = [], []
    with progress("prompts", len(prompts)) as advance:
        for first in range(0, len(prompts), together):
            made, times = session.generate(prompts[first : first + together], sampling)
            for index, answer in enumerate(made, first):
                label = f"[{index}] " if len(prompts) > 1 else ""
                print(to_json(answer, index, spec, times) if as_json else label + _shown(session, answer), flush=True)
            answers, calls = answers + made, [*calls, times]
            advance(len(made))
    if as_json:
        return
    alone = len(answers) == 1
    line = closing_line(answers[0], spec, calls[0]) if alone else closing_line_of_many(answers, spec, calls)
    print(line, file=sys.stderr)

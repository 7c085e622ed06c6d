"""`eaglejax chat`: a conversation in the terminal. /reset forgets it, /exit or the end of input ends it.

Piped input works line by line.
"""

from __future__ import annotations

import sys
from typing import Any

from absl.flags import FlagValues

from eaglejax.cli.flags import given
from eaglejax.cli.prompts import require_tokenizer, system_message
from eaglejax.cli.settings import read_settings
from eaglejax.errors import PromptError

GROUPS = ("system", "model", "speculation", "sampling", "run")


def main(flags: FlagValues) -> int:
    """The command; returns its exit code. Raises UsageError and EagleJaxError, which `main.run` turns into messages."""
    settings = read_settings(flags)
    beginning = system_message(given(flags, "system"))
    require_tokenizer(settings.model, "chat")

    # jax from here on
    from eaglejax.cli.answers import closing_line
    from eaglejax.cli.session import Session

    session = Session(settings, report=bool(flags["report"].value))
    session.engine.tokenizer.render_chat(
        [*beginning, {"role": "user", "content": "."}]
    )  # a model that cannot chat says so now
    show = lambda text: print(text, end="", flush=True)
    messages: list[dict[str, Any]] = list(beginning)
    if sys.stdin.isatty():
        print("/reset starts over, /exit ends", file=sys.stderr)
    while (line := _read_line()) is not None:
        if line in ("/exit", "/quit"):
            break
        if line == "/reset":
            messages = list(beginning)
        elif line.startswith("/"):
            print(f"unknown command {line.split()[0]}; there are /reset and /exit", file=sys.stderr)
        elif line:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                answer, times = session.stream(asked, settings.sampling, show)
            except PromptError as error:
                if not sys.stdin.isatty():
                    raise
                print(f"error: {error}", file=sys.stderr)  # too long, mostly: a person can /reset
                continue
            print(flush=True)
            print(closing_line(answer, session.engine.speculation, times), file=sys.stderr)
            messages = [*asked, {"role": "assistant", "content": answer.text}]
    return 0


def _read_line() -> str | None:
    """The next line without surrounding space; None at the end of input."""
    if sys.stdin.isatty():
        try:
            import readline  # noqa: F401  line editing and history for input(), where Python has it
        except ImportError:
            pass
        try:
            return input("> ").strip()
        except EOFError:
            return None
    line = sys.stdin.readline()
    return line.strip() if line else None

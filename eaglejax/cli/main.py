"""`eaglejax COMMAND --flag=value`: finds the command, reads its flags, turns refusals into messages and exit codes.

Exit codes: 0 done, 1 refused input (one message, no traceback), 2 wrong usage, 130 interrupted.
Nothing heavy is imported before the flags are checked, so that wrong usage answers at once.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import logging
import os
import sys
from collections.abc import Sequence

from absl import flags as absl_flags

from eaglejax.cli.flags import UsageError, define, help_text
from eaglejax.errors import EagleJaxError

# command -> what it does; each is a module of this package with GROUPS (its flags) and main(flags) -> exit code; one that
# takes words without a flag names them in PLACES and has main(flags, *words)
COMMANDS = {
    "generate": "answer prompts: text, token ids, chat messages or a JSONL file",
    "chat": "talk with the model in the terminal",
    "bench": "plain and speculative decoding side by side, over trees, batches and temperatures, on named prompts",
    "check": "a doctor for a target and its draft: wiring, losslessness, vocabularies, context; exit code 1 where something is wrong",
    "profile": "where the time of a cycle goes, phase by phase, from a trace of the devices; beside the floor of each phase",
    "plan": "whether and how a model fits a mesh of devices, and what a cycle costs there; from its config alone",
    "tune": "measure this machine and pair, and store the trees that --speculation=auto then chooses among",
    "tune_kernels": "measure the tiles of our GPU kernels at a model's shapes, and store the best for this kind of device",
    "train": "train a draft on the target's own answers; the same command goes on with a run that was stopped",
    "export": "a draft, or a training run's best, in the layout that another engine reads",
    "convert": "a checkpoint in another form, bit for bit or quantised; the same command continues a run that was killed",
}
OK, REFUSED, WRONG_USAGE, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name) and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except UsageError as error:
        command = arguments[0] if arguments and arguments[0] in COMMANDS else ""
        print(f"eaglejax {command}".rstrip() + f": {error}", file=sys.stderr)
        print(f"see: eaglejax {command}".rstrip() + " --help", file=sys.stderr)
        return WRONG_USAGE
    except EagleJaxError as error:
        if "--traceback" in arguments:
            raise
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # the reader of our output has left; what Python flushes at its end must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        raise UsageError(f"no command given\n\n{_overview()}\n")
    name, rest = arguments[0], arguments[1:]
    if name in ("help", "--help", "-h", "-help"):
        print(_overview())
        return OK
    if name in ("version", "--version"):
        print(f"eaglejax {importlib.metadata.version('eaglejax')}")
        return OK
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UsageError(f"unknown command {name!r}.{hint} There are: {', '.join(COMMANDS)}")
    command = importlib.import_module(f"eaglejax.cli.{name}")
    places = getattr(command, "PLACES", ())
    if any(word in ("--help", "-h", "-help") for word in rest):
        print(help_text(name, COMMANDS[name], command.GROUPS, places))
        return OK
    flags = define(command.GROUPS)
    try:
        left = flags([f"eaglejax {name}", *rest])[1:]
    except absl_flags.Error as error:
        raise UsageError(str(error)) from None
    if len(left) > len(places):
        raise UsageError(f"unexpected argument {left[len(places)]!r}; everything else is given as --flag=value")
    _warnings_to_terminal()
    return command.main(flags, *left)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: eaglejax COMMAND --flag=value ...",
            "",
            "commands:",
            *lines,
            "",
            "flags of a command: eaglejax COMMAND --help",
        ]
    )


def _warnings_to_terminal() -> None:
    """The engine's warnings, one line each on standard error."""
    log = logging.getLogger("eaglejax")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("warning: %(message)s"))
        log.addHandler(handler)
        log.propagate = False

"""A progress bar on standard error, where a person looks at it and answers do not already show how far the run is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(what: str, total: int, *, silent_until_done: bool = False) -> Iterator[Callable[[int], None]]:
    """Yields `advance(n)`. `silent_until_done`: nothing is printed meanwhile, so the bar may share its terminal."""
    if not sys.stderr.isatty() or (sys.stdout.isatty() and not silent_until_done):
        yield lambda n: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda n: bar.advance(task, n)


@contextmanager
def stage(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """`progress` of one stage of a command that takes minutes and prints its result last: a line where no bar can be drawn."""
    if not sys.stderr.isatty():
        print(f"{what} ...", file=sys.stderr, flush=True)
    with progress(what, total, silent_until_done=True) as advance:
        yield advance

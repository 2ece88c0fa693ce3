"""How far long work is, on stderr: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

INTERVAL = 60.0  # seconds between two lines

Update = Callable[[int, int], None]


@contextmanager
def progress(what: str, unit: str, *, shown: bool = True) -> Iterator[Update]:
    """Yields a function to call with how much is done, and of how much (0: not known).

    `shown`: false on all ranks but one.
    """
    if not shown:
        yield lambda done, total: None
    elif sys.stderr.isatty():
        with _bar(what) as update:
            yield update
    else:
        start = last = time.monotonic()

        def update(done: int, total: int) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= INTERVAL:
                last = now
                print(describe(what, unit, done, total, now - start), file=sys.stderr, flush=True)

        yield update


def describe(what: str, unit: str, done: int, total: int, seconds: float) -> str:
    """One line: how much is done after `seconds`, and how long the rest takes at that speed."""
    if not total:
        return f"{what}: {done:,} {unit}, {done / seconds:,.0f} a second"
    left = time_left(seconds / max(done, 1) * (total - done))
    return f"{what}: {done:,} of {total:,} {unit} ({done / total:.0%}), {left} left"


def time_left(seconds: float) -> str:
    """Hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))


@contextmanager
def _bar(what: str) -> Iterator[Update]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)

"""Errors that one rank meets and all ranks must end by, printed once.

Three collectives around work of one rank or of each, and one that compares what all must have
alike: what fails on one rank is raised on every rank, marked so that only rank 0 prints it.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from vlmtrain.core.errors import UserError

T = TypeVar("T")

_SILENCE = 600.0  # seconds without a sign of life from a rank that others wait for
_BEAT = 5.0  # seconds between its signs of life
_calls = itertools.count()  # the same on every rank: the calls are collective


def on_first_rank(work: Callable[[], T]) -> T:
    """Run `work` on rank 0; every rank returns its (picklable) value or raises its UserError.

    The work may take hours (a scan of much data): the others wait outside of any collective, so
    that the process group's timeout does not run, for as long as rank 0 shows signs of life.
    """
    box: list[Any] = [None, None]
    failed: Exception | None = None
    key = f"vlmtrain/on_first_rank/{next(_calls)}"
    if dist.get_rank() == 0:
        with _alive(key):
            try:
                box[0] = work()
            except UserError as error:
                box[1] = str(error)
            except Exception as error:  # the others must hear of it too, then it goes its way
                box[1], failed = "rank 0 failed while reading the input", error
    else:
        _wait(key, 0)
    dist.broadcast_object_list(box, src=0)
    if failed is not None:
        raise failed
    if box[1] is not None:
        raise shared_error(box[1])
    return box[0]


@contextmanager
def _alive(key: str) -> Iterator[None]:
    """Signs of life in the process group's store, and at the end that `key` is over."""
    if dist.get_world_size() == 1:
        yield
        return
    store = _store()
    over = threading.Event()

    def beat() -> None:
        for count in itertools.count():
            store.set(f"{key}/beat", str(count))
            if over.wait(_BEAT):
                return

    thread = threading.Thread(target=beat, name="alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    store.set(key, "over")


def _wait(key: str, rank: int) -> None:
    """Until `key` is over on that rank.

    Raises:
        UserError: it gives no sign of life; a killed one is noticed by the launcher before.
    """
    store, pause = _store(), 0.001
    heard, last = time.monotonic(), b""
    while not store.check([key]):
        if store.check([f"{key}/beat"]):
            beat = store.get(f"{key}/beat")
            if beat != last:
                heard, last = time.monotonic(), beat
        if time.monotonic() - heard > _SILENCE:
            raise UserError(
                f"rank {rank} has given no sign of life for {_SILENCE:g} s while others waited for "
                "its work; see what it printed, and whether its machine or file system hangs"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def on_every_rank(work: Callable[[], T]) -> T:
    """Run `work` on all ranks; a UserError on any is raised on all, the lowest rank's first, with
    that rank and its machine where others have none.

    `work` must not wait for other ranks after the point where it can fail.
    """
    value: Any = None
    error_here: str | None = None
    try:
        value = work()
    except UserError as error:
        error_here = str(error)
    _raise_first(error_here, where=True)
    return value


class _OtherFailed(Exception):
    """Another rank has failed: this one's work is not wanted any more."""


def long_on_every_rank(work: Callable[[Callable[[], None]], T]) -> T:
    """As `on_every_rank`, of work that may take some ranks hours longer than others: those that are
    done wait outside of any collective, as in `on_first_rank`. `work` gets a function to call now
    and then, which ends it where another rank has failed."""
    key = f"vlmtrain/long_on_every_rank/{next(_calls)}"
    size = dist.get_world_size()
    value: Any = None
    error_here: str | None = None

    def check() -> None:
        if size > 1 and _store().check([f"{key}/failed"]):
            raise _OtherFailed

    with _alive(f"{key}/{dist.get_rank()}"):
        try:
            value = work(check)
        except _OtherFailed:
            pass
        except UserError as error:
            error_here = str(error)
            if size > 1:
                _store().set(f"{key}/failed", "1")
    for rank in range(size) if size > 1 else ():
        _wait(f"{key}/{rank}", rank)
    _raise_first(error_here)
    return value


def _raise_first(error_here: str | None, where: bool = False) -> None:
    """Collective: the error of the lowest rank that has one, raised on all. `where`: and which rank
    that is, unless all have one."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (error_here, socket.gethostname()))
    for rank, (message, host) in enumerate(found):
        if message is None:
            continue
        if where and any(other is None for other, _ in found):
            message = f"rank {rank} on {host}: {message}"
        raise shared_error(message)


def check_same(facts: Mapping[str, str], remedy: str) -> None:
    """Collective: all ranks must have the same facts.

    Where they differ, what most ranks have is right; of equally many, what the lowest has.

    Raises:
        UserError: on all ranks, the first fact that differs, the ranks that are alone with theirs,
            and the `remedy`.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (socket.gethostname(), dict(facts)))
    for name in {name: None for _, known in everyone for name in known}:
        values = [known.get(name, "nothing") for _, known in everyone]
        usual = Counter(values).most_common(1)[0][0]
        odd = [rank for rank, value in enumerate(values) if value != usual]
        if odd:
            more = f" and {len(odd) - 1} more ranks" if len(odd) > 1 else ""
            raise shared_error(
                f"rank {odd[0]} on {everyone[odd[0]][0]}{more} would hang the run: {name} is "
                f"{values[odd[0]]} there and {usual} on rank {values.index(usual)}; {remedy}"
            )


def shared_error(message: str) -> UserError:
    """An error that every rank raises at the same point: rank 0 prints it."""
    error = UserError(message)
    error.print_here = dist.get_rank() == 0
    return error

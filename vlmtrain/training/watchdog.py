"""A run that is stuck says where each rank is, and ends.

Every rank of a step waits for every other, so one that stops, dies or waits for a disk stops all.
A thread of each rank looks at its `Clock.place`. Where nothing has moved for the time allowed, the
ranks write where they are to torch's store, over a connection of their own; the first of them
prints it all as one report, and all end. Saving has half an hour at least: a slow disk may take its
time.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist

from vlmtrain.core.clock import Place
from vlmtrain.core.errors import UserError, shown
from vlmtrain.core.launch import peer_gone

T = TypeVar("T")

SAVING = "checkpoint"  # a phase
_SAVING = 1800.0  # seconds it has at least
_ANSWER = 5.0  # seconds for the store to answer
_COLLECT = 10.0  # seconds for all ranks to write where they are: they look every _LOOK
_LOOK = 4.0
_READS = (".item()", ".tolist()", ".cpu()", "num_tokens > 0")  # of a tensor
_WRAPPERS = ("wrapper", "__torch_function__", "handle_torch_function")


class Watchdog:
    """Ends this process where the run makes no progress. Entering it is collective.

    Args:
        place: this rank's.
        minutes: without progress; 0: never.

    Raises:
        UserError: on leaving it, where another rank is gone: which, and where this one was.
    """

    def __init__(self, place: Place, minutes: float) -> None:
        self.place, self.seconds = place, 60 * minutes
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._main = threading.get_ident()
        self._over, self._ending = threading.Event(), threading.Event()
        self._peers: list[Any] = [None] * self.world  # (host, process id, when it began)
        self._store: Any = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        began = psutil.Process().create_time()
        dist.all_gather_object(self._peers, (socket.gethostname(), os.getpid(), began))
        # torchrun's store outlives a run that it starts again: not the same key twice.
        self._key = f"vlmtrain/stuck/{self._peers[0]}"
        self.place.enter("start")
        if self.seconds and self.world > 1:
            # One thread that may block on a store whose process has stopped.
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="store")
            self._store = dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=_ANSWER),
            )
        if self.seconds:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._over.set()
        if self._thread is not None and (error is None or self._ending.is_set()):
            self._thread.join()  # where the report is under way, it ends this process
            if self._store is not None:
                self._pool.shutdown()
        if error is not None and peer_gone(error):
            raise UserError(f"rank {self.rank} ends at {where(self.place)}: {self._gone()}")

    # --- the thread -----------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._over.wait(min(_LOOK, self.seconds / 4)):
            limit = max(self.seconds, _SAVING if self.place.phase == SAVING else 0.0)
            if time.monotonic() - self.place.moved > limit or self._asked():
                return self._end()

    def _asked(self) -> bool:
        """Whether another rank has called for reports."""
        if self._store is None:
            return False
        try:
            return self._ask(lambda: self._store.check([self._key]))
        except (Late, RuntimeError):  # the store is gone or stopped: this rank notices by itself
            return False

    def _ask(self, question: Callable[[], T]) -> T:
        return self._pool.submit(question).result(_ANSWER)

    def _end(self) -> None:
        self._ending.set()
        own = describe(self.place, self._main)
        try:
            if self._store is None:
                self._print({self.rank: own})
            else:
                self._share(own)
        except (Late, RuntimeError):
            self._print({self.rank: own}, "torch's store, by which the ranks tell, is silent")
        finally:
            sys.stderr.flush()
            os._exit(1)

    def _share(self, own: dict[str, str]) -> None:
        store, end = self._store, time.monotonic() + _COLLECT
        self._ask(lambda: store.set(f"{self._key}/{self.rank}", json.dumps(own)))
        first = self._ask(lambda: store.add(self._key, 1)) == 1
        if not first:
            with contextlib.suppress(Late, RuntimeError):  # the store went with the one that prints
                while time.monotonic() < end + _ANSWER and not self._ask(
                    lambda: store.check([f"{self._key}/over"])
                ):
                    time.sleep(0.2)
            return
        reports: dict[int, dict[str, str]] = {}
        while len(reports) < self.world and time.monotonic() < end:
            for rank in set(range(self.world)) - set(reports):
                key = f"{self._key}/{rank}"
                if self._ask(partial(store.check, [key])):
                    reports[rank] = json.loads(self._ask(partial(store.get, key)))
            time.sleep(0.2)
        self._print(reports)
        self._ask(lambda: store.set(f"{self._key}/over", "1"))
        time.sleep(1.0)  # the others hear of it before a store of this process goes

    def _print(self, reports: dict[int, dict[str, str]], note: str = "") -> None:
        """The report, and the end of those on this machine that do not answer."""
        silent = [] if note else sorted(set(range(self.world)) - set(reports))
        cause = note or self._cause(reports, silent)
        lines = [f"vlmtrain: no progress for {self.seconds:g} s, the run ends: {cause}"]
        for rank in sorted({*reports, *silent}):
            if rank in silent:
                lines.append(f"  rank {rank}: no answer; {self._state(rank)}")
                continue
            one = reports[rank]
            lines.append(f"  rank {rank}: {one['place']}; samples {one['samples']}")
            lines += [f"    {one[name]}" for name in ("line", "waits", "loader") if one[name]]
        lines.append(
            "The last complete checkpoint is untouched: go on from it with --checkpoint.resume "
            "latest. --train.timeout sets the minutes."
        )
        print("\n".join(lines), file=sys.stderr, flush=True)
        for rank in silent:  # one that has stopped: only SIGKILL reaches it
            with contextlib.suppress(psutil.Error):
                if (process := _process(*self._peers[rank])) is not None:
                    process.kill()

    def _cause(self, reports: dict[int, dict[str, str]], silent: list[int]) -> str:
        if silent:
            return "; ".join(
                f"rank {rank} does not answer ({self._state(rank)})" for rank in silent
            )
        busy = [rank for rank, one in sorted(reports.items()) if not one["waits"]]
        if busy and len(busy) < len(reports):
            return "; ".join(f"the others wait for rank {r} in {reports[r]['place']}" for r in busy)
        return "no rank is found to hold up the others"

    # --- processes ------------------------------------------------------------------------------

    def _state(self, rank: int) -> str:
        host, number, _ = self._peers[rank]
        return f"process {number} on {host}: {_status(*self._peers[rank])}"

    def _gone(self) -> str:
        """Which ranks of this machine have ended; a process is gone a moment after its sockets."""
        for _ in range(10):
            gone = [
                f"rank {rank} is gone (process {peer[1]} on {peer[0]})"
                for rank, peer in enumerate(self._peers)
                if rank != self.rank and _status(*peer) in ("ended", psutil.STATUS_ZOMBIE)
            ]
            if gone:
                return ", ".join(gone)
            time.sleep(0.1)
        return "another rank is gone"


def _process(host: str, number: int, began: float) -> psutil.Process | None:
    """A rank's process on this machine; None: it runs on another, which may have the same name."""
    if host != socket.gethostname():
        return None
    process = psutil.Process(number)
    return process if process.create_time() == began else None


def _status(host: str, number: int, began: float) -> str:
    try:
        process = _process(host, number, began)
        return "on another machine" if process is None else process.status()
    except psutil.NoSuchProcess:
        return "ended"


# --- where a rank is ------------------------------------------------------------------------------


def where(place: Place) -> str:
    """Step, phase and microbatch."""
    total = len(place.packs) * place.chunks
    text = f"step {place.step}" if place.step else "rehearsal"
    text += f", {place.phase}"
    if place.passes and total:
        counts = (f"{name} pass {done} of {total}" for name, done in place.passes.items())
        text += f" ({', '.join(counts)})"
    return text


def describe(place: Place, thread: int) -> dict[str, str]:
    """What the report says of this rank, whose work is done by `thread`."""
    frames = sys._current_frames()
    names = {t.ident: t.name for t in threading.enumerate() if t.ident is not None}
    stack = _stack(frames.get(thread))
    if stack and stack[0].f_code.co_name == "_engine_run_backward":
        # On a GPU autograd works in threads of its own, which Python did not start.
        others = [_stack(frame) for number, frame in frames.items() if number not in names]
        stack = max([*others, stack], key=_waits)
    reading: list[FrameType] = []
    if place.phase == "data" and not _waits(stack):  # it waits for the loader's thread
        prefetch = [number for number, name in names.items() if name.startswith("prefetch")]
        reading = _stack(frames.get(prefetch[0])) if prefetch else []
    return {
        "place": where(place),
        "samples": _samples(place),
        "line": _line(stack, "vlmtrain"),
        "waits": _waits(stack),
        "loader": _line(reading, "vlmtrain"),
    }


def _samples(place: Place) -> str:
    """Of the microbatch in work where it is known, else of the step."""
    packs = place.packs
    direction = place.phase.split("-")[-2] if "-" in place.phase else ""
    if place.chunks == 1 and direction in ("forward", "backward"):
        # what is received is the next pass's
        number = place.passes.get(direction, 0) + place.phase.endswith("recv")
        packs = packs[number - 1 : number] or packs
    ids = [name for pack in packs for name in pack]
    return shown(ids) or "none"


def _stack(frame: FrameType | None) -> list[FrameType]:
    """Innermost first, without torch's and the CPU shim's wrappers of a call."""
    stack = []
    while frame is not None:
        if frame.f_code.co_name not in _WRAPPERS:
            stack.append(frame)
        frame = frame.f_back
    return stack


def _line(stack: list[FrameType], package: str = "") -> str:
    """The innermost line, or the innermost one of a package."""
    for frame in stack:
        path = Path(frame.f_code.co_filename)
        if not package or package in path.parts:
            text = linecache.getline(str(path), frame.f_lineno).strip()
            place = "/".join(path.parts[-3:])
            return f"{place}:{frame.f_lineno} {frame.f_code.co_name}: {text}"
    return ""


def _waits(stack: list[FrameType]) -> str:
    """The collective that a thread waits in, as far as Python sees it; empty: none."""
    call = ""
    for i, frame in enumerate(stack):
        if Path(frame.f_code.co_filename).parts[-3:-1] != ("torch", "distributed"):
            if call:
                return f"waits in {call}, called at {_line(stack[i:])}"
            break
        call = frame.f_code.co_name
    line = _line(stack)
    if line.endswith((".wait()", ".synchronize()")):
        return f"waits at {line}"
    # With NCCL a collective is launched, and the host waits where it reads a result.
    reads = torch.cuda.is_initialized() and any(one in line for one in _READS)
    return f"waits for its GPU at {line}" if reads else ""

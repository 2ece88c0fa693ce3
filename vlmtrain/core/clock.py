"""Where a step's time goes on one rank: timers that a GPU does not feel.

On CUDA a span is a pair of events on the current stream, read after the step, when the host has
waited for the device anyway; on a CPU it is the wall clock. A `Clock` also is what megatron-core's
schedules take as `config.timers`: their 'forward-compute' and 'backward-compute' are the work of a
stage, without the waiting for its neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# megatron-core's names of the work of a microbatch on a stage.
_COMPUTE = {"forward-compute": "compute", "backward-compute": "compute"}


class Clock:
    """Adds up the seconds of named spans between two calls of `read`.

    Args:
        cuda: time the device's work by events, not the host's.
    """

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._seconds: dict[str, float] = {}
        self._pairs: list[tuple[str, Any, Any]] = []
        self._spare: list[Any] = []
        self._timers: dict[str, _Timer | _NoTimer] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a block."""
        start = self.now()
        yield
        self.add(name, start)

    def now(self) -> Any:
        """A moment, for `add`."""
        if not self._cuda:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, name: str, start: Any) -> None:
        """Count the time from `start` until now under `name`."""
        end = self.now()
        if self._cuda:
            self._pairs.append((name, start, end))
        else:
            self._seconds[name] = self._seconds.get(name, 0.0) + end - start

    def read(self) -> dict[str, float]:
        """Seconds by name since the last call. On CUDA the device must have finished the step."""
        seconds, self._seconds = self._seconds, {}
        for name, start, end in self._pairs:
            seconds[name] = seconds.get(name, 0.0) + start.elapsed_time(end) / 1000
            self._spare += [start, end]
        self._pairs = []
        return seconds

    def __call__(self, name: str, log_level: int | None = None) -> _Timer | _NoTimer:
        """megatron-core's interface; all its timers but those of compute do nothing."""
        if name not in self._timers:
            ours = _COMPUTE.get(name)
            self._timers[name] = _NoTimer() if ours is None else _Timer(self, ours)
        return self._timers[name]


class _Timer:
    def __init__(self, clock: Clock, name: str) -> None:
        self._clock, self._name = clock, name
        self._start: Any = None

    def start(self, barrier: bool = False) -> None:
        self._start = self._clock.now()

    def stop(self, barrier: bool = False) -> None:
        self._clock.add(self._name, self._start)


class _NoTimer:
    def start(self, barrier: bool = False) -> None:
        pass

    def stop(self, barrier: bool = False) -> None:
        pass

"""Where a step's time goes on one rank: timers that a GPU does not feel.

On CUDA a span is a pair of events on the current stream, read after the step, when the host has
waited for the device anyway; on a CPU it is the wall clock. A `Clock` also is what megatron-core's
schedules take as `config.timers`: their 'forward-compute' and 'backward-compute' are the work of a
stage, without the waiting for its neighbours.

What starts a timer also says where this rank is: `Clock.place`, which the watchdog reads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

# megatron-core's names of the work of a microbatch on a stage.
_COMPUTE = {"forward-compute": "compute", "backward-compute": "compute"}


@dataclass
class Place:
    """Where a rank is in its run. Another thread reads it while this one is stuck."""

    step: int = 0  # from 1
    phase: str = "start"  # a span's name, or the name of a timer of megatron-core
    passes: dict[str, int] = field(default_factory=dict)  # of this step: forward, backward
    packs: list[list[str]] = field(default_factory=list)  # sample ids of each pack of the step
    chunks: int = 1  # virtual pipeline chunks: passes of each pack
    moved: float = field(default_factory=time.monotonic)  # the last change

    def begin(self, step: int, packs: list[list[str]]) -> None:
        """A step begins with waiting for its data."""
        self.step, self.packs, self.passes = step, packs, {}
        self.enter("data")

    def enter(self, phase: str) -> str:
        """Returns the phase before."""
        before, self.phase, self.moved = self.phase, phase, time.monotonic()
        return before


class Clock:
    """Adds up the seconds of named spans between two calls of `read`.

    Args:
        cuda: time the device's work by events, not the host's.
    """

    def __init__(self, cuda: bool) -> None:
        self.place = Place()
        self._cuda = cuda
        self._seconds: dict[str, float] = {}
        self._pairs: list[tuple[str, Any, Any]] = []
        self._spare: list[Any] = []
        self._timers: dict[str, _Timer] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a block."""
        start, before = self.now(), self.place.enter(name)
        yield
        self.place.enter(before)
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
        self.place.passes = {}
        seconds, self._seconds = self._seconds, {}
        for name, start, end in self._pairs:
            seconds[name] = seconds.get(name, 0.0) + start.elapsed_time(end) / 1000
            self._spare += [start, end]
        self._pairs = []
        return seconds

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        """megatron-core's interface; of its timers those of compute count."""
        if name not in self._timers:
            self._timers[name] = _Timer(self, name)
        return self._timers[name]


class _Timer:
    def __init__(self, clock: Clock, name: str) -> None:
        self._clock, self._name, self._counted = clock, name, _COMPUTE.get(name)
        self._start: Any = None
        self._before = ""

    def start(self, barrier: bool = False) -> None:
        place = self._clock.place
        self._before = place.enter(self._name)
        if self._counted is not None:
            direction = self._name.split("-")[0]
            place.passes[direction] = place.passes.get(direction, 0) + 1
            self._start = self._clock.now()

    def stop(self, barrier: bool = False) -> None:
        if self._counted is not None:
            self._clock.add(self._counted, self._start)
        self._clock.place.enter(self._before)

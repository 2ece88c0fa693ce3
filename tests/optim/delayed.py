"""A device whose copies are done late, in random order, and whose targets are NaN until then.

A copy reads its source when it is done, not when it was begun: whoever writes the source too early,
reads the target too early, or counts on the order of two copies gets other numbers.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class Copy:
    source: Tensor
    target: Tensor
    after: Any = None
    done: bool = False


class DelayedTransfers:
    """As vlmkernels.optim.transfer.Transfers."""

    def __init__(self) -> None:
        self.random = random.Random(random.getrandbits(32))
        self.pending: list[Copy] = []
        self.d2h_copies = self.h2d_copies = self.calls = self.bytes = 0
        self.lock = threading.RLock()

    def d2h(self, sources: list[Tensor], targets: list[Tensor], after: Any = None) -> list[Copy]:
        self.d2h_copies += len(sources)
        self.calls += 1
        pairs = zip(sources, targets, strict=True)
        return [self._begin(source, target, after) for source, target in pairs]

    def h2d(self, sources: list[Tensor], targets: list[Tensor], unread: bool = False) -> list[Copy]:
        pairs = list(zip(sources, targets, strict=True))
        assert all(s.dtype == t.dtype and s.is_contiguous() for s, t in pairs)
        self.h2d_copies += len(pairs)
        self.calls += 1
        return [self._begin(source, target) for source, target in pairs]

    def wait(self, ticket: list[Copy]) -> None:
        with self.lock:
            while not all(copy.done for copy in ticket):
                self._finish_one()

    device_wait = wait

    def _begin(self, source: Tensor, target: Tensor, after: Any = None) -> Copy:
        with self.lock:
            for other in self.pending:
                assert other.target.data_ptr() != target.data_ptr(), "two copies to one place"
            with torch.no_grad():
                target.fill_(float("nan"))
            copy = Copy(source, target, after)
            self.bytes += target.numel() * target.element_size()
            self.pending.append(copy)
            while self.pending and self.random.random() < 0.2:
                self._finish_one()
            return copy

    def _finish_one(self) -> None:
        copy = self.pending.pop(self.random.randrange(len(self.pending)))
        if copy.after is not None:
            copy.after.wait()
        with torch.no_grad():
            copy.target.copy_(copy.source)
        copy.done = True

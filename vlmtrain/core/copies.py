"""A step's packs to the device, beside what it computes: each is waited for where it is used first.

The copies are made on a stream of their own. Only that of the first pack is waited for before the
step begins.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vlmtrain.core.batch import PackedBatch
from vlmtrain.core.device import Backend


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@dataclass
class Copies:
    """Packs on the device; of those still on their way, when they are there."""

    packs: list[PackedBatch]
    arrived: list[torch.cuda.Event]

    @classmethod
    def start(cls, packs: list[PackedBatch], backend: Backend) -> Copies:
        """From page-locked memory without waiting. Packs may be dropped once they are used."""
        if not backend.is_cuda:
            return cls([pack.to(backend.device) for pack in packs], [])
        stream, reader = _stream(backend.device), torch.cuda.current_stream(backend.device)
        moved, arrived = [], []
        with torch.cuda.stream(stream):
            for pack in packs:
                moved.append(pack.to(backend.device, non_blocking=True))
                arrived.append(stream.record_event())
        for pack in moved:
            pack.record_stream(reader)
        return cls(moved, arrived)

    def in_turn(self) -> Iterator[PackedBatch]:
        """Each pack when it is there; work that is launched afterwards waits for it, the host
        doesn't."""
        for i, pack in enumerate(self.packs):
            if self.arrived:
                self.arrived[i].wait()
            yield pack

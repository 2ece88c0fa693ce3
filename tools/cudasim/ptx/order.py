"""What each warp of a block is ordered after: vector clocks of warps, matrix products and barriers.

An agent is something whose accesses others must learn of: a warp (numbers 0 on), the tensor core of
a warpgroup (its reads), an mbarrier (the copies that it counts). A clock holds, of each agent, how
much of it a warp is ordered after: of a warp its epoch, of a tensor core the groups waited for, of
an mbarrier the phases waited for. A second one holds, of each thread, up to which epoch its writes
are visible to the asynchronous proxy.
"""

from __future__ import annotations

import numpy as np

from .ptxtypes import Array

WARP, WARPGROUP = 32, 128

#: Both clocks of a release: what the one who acquires it learns.
Knowledge = tuple[Array, Array]


class Order:
    """The clocks of one block."""

    def __init__(self, threads: int) -> None:
        self.warps = -(-threads // WARP)
        self.readers = self.warps + -(-threads // WARPGROUP)  # agents that read shared memory
        self._agents = self.readers
        self.now = np.zeros((self.warps, self._agents + 32), np.int32)
        self.visible = np.zeros((self.warps, self.warps * WARP), np.int32)
        self._own = np.arange(self.warps)
        self.now[self._own, self._own] = 1

    def tensor_core(self, warpgroup: int) -> int:
        """The agent that reads for a warpgroup's matrix products."""
        return self.warps + warpgroup

    def new_agent(self) -> int:
        if self._agents == self.now.shape[1]:
            self.now = np.concatenate([self.now, np.zeros_like(self.now)], axis=1)
        self._agents += 1
        return self._agents - 1

    def epochs(self, warps: Array) -> Array:
        return self.now[warps, warps]

    def nothing(self) -> Knowledge:
        return np.zeros_like(self.now[0]), np.zeros_like(self.visible[0])

    def release(self, warps: Array, into: Knowledge) -> Knowledge:
        """`into` and what these warps know; what they do from here on is not in it."""
        clock, visible = into
        known = self.now[warps].max(axis=0)
        known[: len(clock)] = np.maximum(known[: len(clock)], clock)
        visible = np.maximum(visible, self.visible[warps].max(axis=0))
        self.now[warps, warps] += 1
        return known, visible

    def acquire(self, warps: Array, knowledge: Knowledge) -> None:
        clock, visible = knowledge
        part = self.now[warps, : len(clock)]
        self.now[warps, : len(clock)] = np.maximum(part, clock)
        self.visible[warps] = np.maximum(self.visible[warps], visible)

    def join(self) -> None:
        """A barrier of all warps."""
        self.now[:] = self.now.max(axis=0)
        self.visible[:] = self.visible.max(axis=0)
        self.now[self._own, self._own] += 1

    def fence(self, threads: Array) -> None:
        """fence.proxy.async: these threads' writes so far become visible to the other proxy."""
        warps = threads // WARP
        self.visible[warps, threads] = self.epochs(warps)
        self.now[np.unique(warps), np.unique(warps)] += 1

    def knows(self, warps: Array, agents: Array, epochs: Array) -> Array:
        """Whether the warps are ordered after these agents' epochs; elementwise."""
        return self.now[warps, agents] >= epochs

    def learn(self, warps: Array, agent: int, epoch: Array | int) -> None:
        self.now[warps, agent] = np.maximum(self.now[warps, agent], epoch)

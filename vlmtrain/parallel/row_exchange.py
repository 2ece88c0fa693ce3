"""Rows of a step that were computed on other ranks than embed them: who sends what, both ways.

`vlmkernels.row_exchange` answers for one pack. A step's packs travel together: one message between
two ranks and direction, in which the packs' rows lie one after another. A row goes only to the rank
that writes it: under tensor parallelism each rank of the group writes the rows of its part of the
sequence (see docs/embedding.md), so each gets 1/t of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vlmkernels import exchange_rows, row_exchange
from vlmkernels._native import to_device
from vlmkernels.embedding.row_exchange import RowExchange


class StepRows:
    """The exchange of one step, as one rank of `group` sees it.

    Args:
        indices: visual_index of each pack, int32 [S], in host memory.
        owners: for each pack, int64 [n]: the member that computes each of its rows.
        shards: for each member, the part of every pack's sequence that it embeds; None: nothing.
        group: the members.
    """

    def __init__(
        self,
        indices: Sequence[Tensor],
        owners: Sequence[Tensor],
        shards: Sequence[tuple[int, int] | None],
        group: dist.ProcessGroup,
    ) -> None:
        self.group, rank = group, dist.get_rank(group)
        self.packs = [
            row_exchange(index, owner, shards, rank)
            for index, owner in zip(indices, owners, strict=True)
        ]
        before, send = 0, [[torch.empty(0, dtype=torch.int64)] for _ in shards]
        for pack, owner in zip(self.packs, owners, strict=True):
            for member, rows in enumerate(pack.send):
                send[member].append(rows + before)
            before += int((owner == rank).sum())
        counts = np.array([pack.receive for pack in self.packs], dtype=np.int64)  # [packs, members]
        # Rows arrive member by member, packs one after another inside; they are used pack by pack,
        # in the order of their positions.
        starts = np.concatenate([[0], counts.T.reshape(-1).cumsum()])[:-1].reshape(counts.T.shape).T
        order = [np.empty(0, dtype=np.int64)]
        self.indices: list[Tensor] = []  # visual_index of each pack into the rows of `send`
        for pack, begins, lengths in zip(self.packs, starts, counts, strict=True):
            arrivals = [np.arange(b, b + n) for b, n in zip(begins, lengths, strict=True)]
            index = pack.visual_index
            order.append(np.concatenate(arrivals)[index[index >= 0].numpy()])
            self.indices.append(torch.where(index >= 0, (index >= 0).cumsum(0) - 1, -1).int())
        self._order = torch.from_numpy(np.concatenate(order))
        self._sizes = counts.sum(1).tolist()
        self._exchange = RowExchange(
            [torch.cat(parts) for parts in send],
            counts.sum(0).tolist(),
            torch.empty(0, dtype=torch.int32),  # each pack has an index of its own
        )

    def send(self, rows: Tensor, learns: bool) -> list[Tensor]:
        """This rank's rows [n, h] to where they are written. Collective.

        Returns:
            For each pack the rows that this rank writes, leaves that collect a gradient if
            `learns`; `indices` says where.
        """
        self._computed = rows.detach().requires_grad_(learns)
        self._received = exchange_rows(self._computed, self._exchange, self.group, learns=learns)
        self._order = to_device(self._order, rows.device)
        arrived = self._received.detach()[self._order]
        # Nobody reads the values in their order of arrival again: only the graph is kept of them.
        self._received.untyped_storage().resize_(0)
        self._leaves = [x.detach().requires_grad_(learns) for x in arrived.split(self._sizes)]
        return self._leaves

    def send_back(self) -> Tensor:
        """The gradients of this rank's own rows [n, h], from who has written them. Collective."""
        gradients = torch.cat(
            [torch.zeros_like(x) if x.grad is None else x.grad for x in self._leaves]
        )
        arrived = torch.empty_like(gradients)
        arrived[self._order] = gradients
        torch.autograd.backward(self._received, arrived)
        assert self._computed.grad is not None
        return self._computed.grad

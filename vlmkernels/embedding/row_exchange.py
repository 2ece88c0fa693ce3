"""Which visual rows must go from the ranks that have computed them to the ranks that embed them.

S = positions of the pack, n = visual rows, h = hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from vlmkernels._native import (
    check_tensor,
    check_tensors,
    check_whole,
    learning,
    recorded,
    to_device,
)
from vlmkernels.embedding.visual_index import check_index, shard_rows


@dataclass(frozen=True)
class RowExchange:
    """What one rank sends and receives so that it can embed its part of a sequence."""

    #: for each rank, int64: which of this rank's rows go to it, in the order they are needed
    send: list[Tensor]
    #: for each rank, how many rows come from it; they are laid end to end in this order
    receive: list[int]
    #: int32 [S]: which of the rows received stands at each position, -1 for text and for positions
    #: that this rank does not embed: the visual_index of `visual_embedding` with `shard`
    visual_index: Tensor


def row_exchange(
    visual_index: Tensor,
    owner: Tensor,
    shards: Sequence[tuple[int, int] | None],
    rank: int,
) -> RowExchange:
    """Which visual rows go from where to where: every rank computes it for itself, and all agree.

    A row travels once for each rank that embeds its position, and to nobody else: with sequence
    parallelism, to one. Nothing is sorted afterwards: the index follows the order of arrival.

    Args:
        visual_index: int32 [S], from `visual_index`, of the whole sequence.
        owner: int [n], the rank that has computed each visual row; a rank holds its rows in
            ascending order.
        shards: [ranks], the part of the sequence that each rank embeds: (i, k) for part i of k
            equal ones, (0, 1) for all of it, None for nothing. TP with sequence parallelism:
            [(0, tp), (1, tp), ..]; a tower on other ranks than the embedding: [None, .., (0, 1)].
        rank: the rank that asks.

    Raises:
        TypeError: visual_index or owner is no tensor.
        ValueError: an argument of another kind; a row, an owner or the rank out of range.
    """
    check_index(visual_index)
    check_tensor("owner", owner, dtypes=[torch.int32, torch.int64], shape="[n]", dim=1)
    check_whole(rank=rank)
    if not isinstance(shards, Sequence):
        raise ValueError(f"shards is {shards!r}; it must hold a part, or None, for each rank")
    index, owner, ranks = visual_index.cpu().long(), owner.cpu().long(), len(shards)
    if not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank}; shards has {ranks} entries, so it must be below that")
    if len(owner) and not 0 <= int(owner.min()) <= int(owner.max()) < ranks:
        wrong = int(((owner < 0) | (owner >= ranks)).nonzero()[0])
        raise ValueError(
            f"owner[{wrong}] is {int(owner[wrong])}; shards has {ranks} entries, so it must be 0 "
            f"to {ranks - 1}"
        )
    if len(index) and int(index.max()) >= len(owner):
        position = int(index.argmax())
        raise ValueError(
            f"visual_index[{position}] is {int(index[position])}, but owner has {len(owner)} rows"
        )
    local = torch.empty_like(owner)  # number of each row among its owner's
    for member in range(ranks):
        mine = owner == member
        local[mine] = torch.arange(int(mine.sum()), device=owner.device)
    send, receive = [], [0] * ranks
    arrivals = torch.full_like(index, -1)
    for member, shard in enumerate(shards):
        first, count = 0, 0
        if shard is not None:
            first, count = shard_rows(shard, len(index), f"shards[{member}]")
        here = index[first : first + count]
        positions = (here >= 0).nonzero()[:, 0]
        wanted = here[positions]
        source = owner[wanted]
        send.append(local[wanted[source == rank]])
        if member == rank:
            receive = source.bincount(minlength=ranks).tolist()
            arrival = torch.empty_like(wanted)
            arrival[source.argsort(stable=True)] = torch.arange(len(wanted), device=owner.device)
            arrivals[first + positions] = arrival
    return RowExchange(send, receive, arrivals.to(visual_index.device, torch.int32))


def exchange_rows(
    rows: Tensor,
    exchange: RowExchange,
    group: dist.ProcessGroup | None = None,
    *,
    learns: bool | None = None,
) -> Tensor:
    """Send and receive what `exchange` says; in a backward pass, gradients the other way.

    Args:
        rows: [n of this rank, h], the rows that it owns, in ascending order.
        exchange: from `row_exchange`, of this rank in `group`.
        group: the default group if None. Every rank of it must call this, and where gradients go
            back each must run a backward pass through its result.
        learns: whether gradients go back, alike on all ranks. None: where the rows of any rank
            require them; to ask takes an all-reduce, which the host waits for.

    Returns:
        [rows received, h]. Its gradients go back to the owners, where those of a row that several
        ranks have taken are added in the order of the ranks.

    Raises:
        TypeError: rows is no tensor.
    """
    check_tensors(rows=rows)
    if learns is None:
        asks = torch.tensor([float(rows.requires_grad and learning())], device=rows.device)
        dist.all_reduce(asks, dist.ReduceOp.MAX, group)
        learns = bool(asks)
    if rows.requires_grad != learns:  # as of a rank that has no rows
        rows = rows.detach().requires_grad_(learns)
    return _exchange(rows, exchange, group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, exchange: RowExchange, group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.exchange, ctx.group, ctx.shape = exchange, group, rows.shape
        numbers = to_device(torch.cat(exchange.send), rows.device)
        return _swap(rows[numbers], [len(x) for x in exchange.send], exchange.receive, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        sizes = [len(numbers) for numbers in ctx.exchange.send]
        back = _swap(grad.contiguous(), ctx.exchange.receive, sizes, ctx.group)
        out = grad.new_zeros(ctx.shape)
        for numbers, part in zip(ctx.exchange.send, back.split(sizes), strict=True):
            # One rank's rows are different ones, so there is no order inside to depend on.
            out.index_add_(0, to_device(numbers, grad.device), part)
        return out, None, None


_exchange = recorded(_Exchange)


def _swap(
    rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None
) -> Tensor:
    """send[r] rows to each rank r, receive[r] from it, both in the ranks' order. One collective: by
    messages between pairs NCCL would hang where a rank has none and they are a group's first."""
    received = rows.new_empty(sum(receive), rows.shape[1])
    dist.all_to_all_single(received, rows, receive, send, group=group)
    return received

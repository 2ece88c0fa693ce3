"""Which visual row stands at which position, and which rank it must go to.

S = positions of the pack, n = visual rows, k = samples of the pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._native import check_tensor

#: Rows of one stream: their number, or numbers to be summed (rows of each image).
Count: TypeAlias = "int | Sequence[int] | Tensor"


def shard_rows(shard: tuple[int, int] | None, positions: int) -> tuple[int, int]:
    """First position and number of positions of part `shard` = (rank, size) of a sequence.

    Raises:
        ValueError: no such part, or size does not divide the positions.
    """
    if shard is None:
        return 0, positions
    rank, size = shard
    if not 0 <= rank < size:
        raise ValueError(f"shard is {(rank, size)}; it must be (rank, size) with 0 <= rank < size")
    if positions % size != 0:
        raise ValueError(
            f"visual_index has {positions} positions, which {size} shards cannot share equally: "
            f"pad the pack to a multiple of {size}"
        )
    return positions // size * rank, positions // size


def visual_index_reference(
    input_ids: Tensor, token_ids: int | Sequence[int], *, separate: bool = False
) -> Tensor:
    """What `visual_index` returns, position by position."""
    ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
    groups = [[token] for token in ids] if separate else [ids]
    rows, row = [-1] * len(input_ids), 0
    for wanted in groups:
        for position, token in enumerate(input_ids.tolist()):
            if token in wanted:
                rows[position], row = row, row + 1
    return torch.tensor(rows, dtype=torch.int32, device=input_ids.device)


def visual_index(
    input_ids: Tensor,
    token_ids: int | Sequence[int],
    counts: Count | Sequence[Count] | None = None,
    *,
    separate: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    names: Sequence[str] | None = None,
) -> Tensor:
    """The row of the merged visual features that stands at each position.

    Args:
        input_ids: int64 [S].
        token_ids: the placeholder's id, or the ids of several (image and video).
        counts: how many visual rows there are, to be compared with the placeholders found (which
            on CUDA waits for the device): a number, or a sequence that is summed (rows per image).
            With `separate`, one of these per id; with `cu_seqlens`, one of these per sample.
        separate: False: the features of all ids form one stream in sequence order. True: each id
            has a stream of its own, and the features are these streams one after another, as
            transformers keeps images and videos.
        cu_seqlens: [k + 1], borders of the samples in input_ids. With `counts` each sample is
            compared by itself, so that the error can name it. Not together with `separate`.
        names: [k], what to call the samples in the error; else their numbers.

    Returns:
        int32 [S]: rows 0, 1, 2, ... at the placeholders in order, -1 elsewhere.

    Raises:
        ValueError: an argument of another kind; or the placeholders are not `counts` in number:
            the message gives both numbers and, where known, the sample.
    """
    check_tensor("input_ids", input_ids, dtypes=[torch.int64], shape="[S]", dim=1)
    ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
    if not ids:
        raise ValueError("token_ids is empty; it must name at least one placeholder id")
    if separate and cu_seqlens is not None:
        raise ValueError("cu_seqlens is given with separate=True; give one of the two")
    if separate:
        if counts is not None and (isinstance(counts, int) or len(counts) != len(ids)):
            raise ValueError(
                f"counts is {counts}; with separate=True it must hold one entry for each of "
                f"token_ids {ids}"
            )
        masks = [input_ids == token for token in ids]
        for i, mask in enumerate(masks if counts is not None else []):
            _check_count(int(mask.sum()), _total(counts[i]), [ids[i]], "")  # type: ignore[index]
        index, before = input_ids.new_full(input_ids.shape, -1, dtype=torch.int32), 0
        for mask in masks:
            running = mask.cumsum(0, dtype=torch.int32)
            index = torch.where(mask, running - 1 + before, index)
            before = before + running[-1] if len(running) else 0
        return index
    found = input_ids == ids[0]
    for token in ids[1:]:
        found = found | (input_ids == token)
    running = found.cumsum(0, dtype=torch.int32)
    if counts is not None and cu_seqlens is not None:
        _check_samples(running, counts, cu_seqlens, ids, names)
    elif counts is not None:
        _check_count(int(running[-1]) if len(running) else 0, _total(counts), ids, "")
    return torch.where(found, running - 1, -1)


def _total(count: Count | Sequence[Count]) -> int:
    if isinstance(count, (int, Integral)):  # Integral: numpy's too
        return int(count)
    if isinstance(count, Tensor):
        return int(count.sum())
    return sum(_total(part) for part in count)


def _check_count(have: int, wanted: int, ids: list[int], where: str) -> None:
    if have != wanted:
        raise ValueError(
            f"{where or 'input_ids'} holds {have} placeholders of token_ids {ids}, but counts says "
            f"that there are {wanted} visual rows"
        )


def _check_samples(
    running: Tensor,
    counts: Count | Sequence[Count],
    cu_seqlens: Tensor | Sequence[int],
    ids: list[int],
    names: Sequence[str] | None,
) -> None:
    borders = [int(b) for b in cu_seqlens]
    if isinstance(counts, int) or len(counts) != len(borders) - 1:
        raise ValueError(
            f"counts is {counts}; with cu_seqlens it must hold one entry for each of its "
            f"{len(borders) - 1} samples"
        )
    if borders[0] != 0 or borders[-1] != len(running) or borders != sorted(borders):
        raise ValueError(
            f"cu_seqlens is {borders}; it must rise from 0 to the {len(running)} positions of "
            "input_ids"
        )
    up_to = [0, *running.tolist()]
    for i, (begin, end) in enumerate(zip(borders, borders[1:], strict=False)):
        where = f"sample {names[i] if names is not None else i} of input_ids"
        _check_count(up_to[end] - up_to[begin], _total(counts[i]), ids, where)


# ---- rows that another rank has computed ---------------------------------------------------------


@dataclass(frozen=True)
class RowExchange:
    """What one rank sends and receives so that it can embed its part of a sequence."""

    #: for each rank, int64: which of this rank's own rows go to it, in the order they are needed
    send: list[Tensor]
    #: for each rank, how many rows come from it; they are laid end to end in this order
    receive: list[int]
    #: int32 [S]: place of the row at each position among the rows received, -1 for text and for
    #: positions that this rank does not embed: the visual_index of `visual_embedding` with `shard`
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
        ValueError: an argument of another kind; a row, an owner or the rank out of range.
    """
    check_tensor("visual_index", visual_index, dtypes=[torch.int32], shape="[S]", dim=1)
    check_tensor("owner", owner, dtypes=[torch.int32, torch.int64], shape="[n]", dim=1)
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
        place = int(index.argmax())
        raise ValueError(
            f"visual_index[{place}] is {int(index[place])}, but owner has {len(owner)} rows"
        )
    local = torch.empty_like(owner)  # number of each row among its owner's
    for member in range(ranks):
        own = owner == member
        local[own] = torch.arange(int(own.sum()))
    send, receive = [], [0] * ranks
    mine = torch.full_like(index, -1)
    for member, shard in enumerate(shards):
        first, count = (0, 0) if shard is None else shard_rows(shard, len(index))
        here = index[first : first + count]
        positions = (here >= 0).nonzero()[:, 0]
        wanted = here[positions]
        source = owner[wanted]
        send.append(local[wanted[source == rank]])
        if member == rank:
            receive = source.bincount(minlength=ranks).tolist()
            arrival = torch.empty_like(wanted)
            arrival[source.argsort(stable=True)] = torch.arange(len(wanted))
            mine[first + positions] = arrival
    return RowExchange(send, receive, mine.to(visual_index.device, torch.int32))


def exchange_rows(
    rows: Tensor, exchange: RowExchange, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Send and receive what `exchange` says.

    Args:
        rows: [n of this rank, h], the rows that it owns, in ascending order.
        exchange: from `row_exchange`, of this rank in `group`.
        group: the default group if None. Every rank of it must call this.

    Returns:
        [rows received, h]. Its gradients go back to the owners, where those of a row that several
        ranks have taken are added in the order of the ranks.
    """
    return _Exchange.apply(rows, exchange, group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, exchange: RowExchange, group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.exchange, ctx.group, ctx.own = exchange, group, rows.shape
        send = [places.to(rows.device) for places in exchange.send]
        return torch.cat(_swap([rows[places] for places in send], exchange.receive, group))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        exchange = ctx.exchange
        parts = list(grad.contiguous().split(exchange.receive))
        back = _swap(parts, [len(places) for places in exchange.send], ctx.group)
        out = grad.new_zeros(ctx.own)
        for places, part in zip(exchange.send, back, strict=True):
            # One rank's rows are different ones, so there is no order inside to depend on.
            out.index_add_(0, places.to(grad.device), part)
        return out, None, None


def _swap(parts: list[Tensor], counts: list[int], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Give parts[r] to rank r and take counts[r] rows from it."""
    mine = dist.get_rank(group)
    taken = [parts[mine].new_empty(count, parts[mine].shape[1]) for count in counts]
    taken[mine] = parts[mine]
    operations = []
    for other in range(len(parts)):
        peer = other if group is None else dist.get_global_rank(group, other)
        if other != mine and len(parts[other]):
            operations.append(dist.P2POp(dist.isend, parts[other].contiguous(), peer, group))
        if other != mine and counts[other]:
            operations.append(dist.P2POp(dist.irecv, taken[other], peer, group))
    for request in dist.batch_isend_irecv(operations) if operations else []:
        request.wait()
    return taken

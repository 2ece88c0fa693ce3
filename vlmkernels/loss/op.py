"""The op: chunks of logits between products.

T = tokens, N = those with a target, h = hidden size, V = classes of this rank. Logits exist for R
rows by C classes at a time, a block, in the dtype of hidden; the native kernel turns them into
statistics and, in place, into their gradient. A row's softmax must be known before its first
gradient, so the blocks of a chunk of rows are gone through twice, for the statistics and for the
gradients, and three products a row need all its logits to be kept meanwhile. Where (`plan`):

    in the weight's gradient, if that is made here: until it is written, its memory has room for the
        logits of h rows. Those of block j lie where the gradient of the classes of block j - 1 will
        be, and the gradients are written from the last block to the first.
    in KEPT blocks, rows by rows, C = V / KEPT, or V where N rows of it fit. The weight's gradient
        is added to N / R times.
    nowhere, columns by columns, all rows: the logits of all but the last KEPT blocks are made
        again. Every sum over rows is one product. So it is, without a fourth product, where the
        statistics are all that is wanted, or are known. FLOPs and elements moved, of N rows:

                         FLOPs     weight read   gradient of the weight, read and written
        in the gradient  6 N V h   2 V h         V h, written
        rows             6 N V h   2 V h N / R   2 V h N / R
        columns          8 N V h   3 V h         V h, written

    Rows beyond the first h, or of a gradient that others add to, go by rows, unless the gradient
    has 16 bits and would be rounded too often: k sums of equal parts have sqrt((k + 1) / 2) times
    the error of one rounding, 1.9 for MOST_ROUNDINGS. R is 441 there for 152,064 classes, and 1,764
    on CUDA.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from vlmkernels._native import DTYPES, define, launch, pointer, to_device
from vlmkernels.product import accumulates, mm

#: Largest block, and largest tensor made beside inputs and results.
CHUNK_BYTES = 64 << 20
#: The same on CUDA: products of fewer rows wait for the weight and its gradient. Into a float32
#: gradient an H100 makes those of 448 rows at 211 TFLOP/s, of 1,760 at 553.
CUDA_CHUNK_BYTES = 256 << 20
#: Blocks of logits beside the gradient. Two: half as many passes over the weight and its gradient.
KEPT = 2
#: Classes in a block are a multiple of this, but for the last one's: rows of logits are then whole
#: units of 16 bytes. For others cuBLAS has an A100's products alone.
WHOLE = 64
#: Of a 16-bit gradient, so that its error is less than twice that of one.
MOST_ROUNDINGS = 6
#: Of a 16-bit product before it is added to a float32 gradient, on the CPU: it stays in cache.
_PRODUCT_BYTES = 4 << 20
#: Of the weight that one product reads or writes, on the CPU: it stays in the last cache.
_WEIGHT_BYTES = 24 << 20


def plan(
    rows: int,
    classes: int,
    hidden: int,
    item: int,
    largest: int,
    *,
    twice: bool,
    inside: bool,
    rounded: bool,
) -> list[tuple[slice, int]]:
    """Chunks of rows, each with the columns of its blocks, logits being of `item` bytes and a block
    of `largest`; twice: for statistics and gradients; inside: the first chunk's lie in the weight's
    gradient; rounded: a sum over rows has 16 bits. Pure, for tests."""
    most = max(1, largest // (4 * hidden))  # rows of hidden, summed in float32
    classes = max(classes, 1)
    part = _whole(-(-classes // KEPT))
    fitting = min(most, largest // (item * part))  # rows with all columns, in KEPT blocks
    if not twice:
        return _chunks(0, rows, most, classes, largest // (2 * item))
    first = min(rows, hidden, most) if inside and rows > fitting else 0
    chunks = _chunks(0, first, most, classes, largest // (2 * item))
    few = rows - first <= (MOST_ROUNDINGS - len(chunks)) * fitting or fitting == most
    if few or (fitting > 0 and not rounded):
        count = _even(rows - first, fitting)
        columns = classes if item * count * classes <= largest else part
        return chunks + [(x, columns) for x in _parts(first, rows, count)]
    return chunks + _chunks(first, rows, most if rounded else 1, classes, largest // item)


def _chunks(start: int, end: int, most: int, classes: int, room: int) -> list[tuple[slice, int]]:
    """Of `most` rows at most, in blocks as wide as `room` logits allow."""
    count = _even(end - start, most)
    fitting = max(1, room // count)
    fitting -= fitting % WHOLE if fitting > WHOLE else 0
    columns = min(fitting, _whole(_even(classes, fitting)))
    return [(x, columns) for x in _parts(start, end, count)]


def _whole(columns: int) -> int:
    """The next multiple of WHOLE of more than it."""
    return -(-columns // WHOLE) * WHOLE if columns > WHOLE else columns


def _even(count: int, largest: int) -> int:
    """The size of equal parts of `count`, each of `largest` at most."""
    return -(-count // -(-count // largest)) if count else 1


def _parts(start: int, end: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, end)) for i in range(start, end, size)]


def _run(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Tensor | None,
    stats: Tensor | None,
    main_grad: Tensor | None,
    ignore_index: int,
    first_class: int,
    classes: int,
    widest: int,
    label_smoothing: float,
    z_loss: float,
    group: str,
    hidden_grad: bool,
    weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses [T]; statistics [4, T], as CrossEntropyParams has them; gradients of hidden [T, h] and
    weight [V, h], each row's times scale [T]. Without `scale`, and what nobody wants, is empty.

    widest: the largest V of the group's ranks, so that all have the same rows in a chunk.
    hidden may be a part of the T tokens, the same number on each rank of the group, in its order.
    targets in host memory: nothing here waits for the device.
    """
    if not group and classes > len(weight):
        raise ValueError(f"weight has {len(weight)} rows; it must have {classes}, one for a class")
    rows = (targets != ignore_index).nonzero()[:, 0]
    labels = targets[rows].long()
    _check_labels(labels, rows, classes, ignore_index)
    process_group = dist.distributed_c10d._resolve_process_group(group) if group else None
    shares = _shares(rows, len(hidden), len(targets))
    rows, labels = (to_device(x, hidden.device) for x in (rows, labels))
    backward = scale is not None and (hidden_grad or weight_grad)
    row_scale = scale[rows].float() if scale is not None and backward else None
    dhidden = torch.zeros_like(hidden) if backward and hidden_grad else hidden.new_empty(0)
    dweight = weight.new_empty(0)
    into = main_grad if backward and weight_grad else None
    if backward and weight_grad and main_grad is None:
        into = dweight = torch.empty_like(weight) if len(rows) else torch.zeros_like(weight)

    known = stats is not None
    if stats is not None:
        work = stats[:, rows].float().contiguous()
    else:
        work = hidden.new_zeros(4, len(rows), dtype=torch.float32)
        work[0] = torch.finfo(torch.float32).min

    chunks = plan(
        len(rows),
        widest,
        hidden.shape[1],
        hidden.itemsize,
        CUDA_CHUNK_BYTES if hidden.is_cuda else CHUNK_BYTES,
        twice=backward and not known,
        inside=into is dweight,
        rounded=into is not None and into.dtype != torch.float32,
    )
    largest = max((c.stop - c.start) * min(n, len(weight)) for c, n in chunks) if chunks else 0
    buffers = [hidden.new_empty(largest)]

    for part, columns in chunks:
        x, local = _gather(hidden, rows, part, shares, process_group), work[:, part]
        part_scale = None if row_scale is None else row_scale[part]
        chunk = labels[part], local, first_class, classes, label_smoothing, z_loss
        blocks = _parts(0, len(weight), columns) or [slice(0, 0)]
        at_once = len(blocks) == 1 and process_group is None
        written = into is dweight and part.start == 0  # over what lies there, not added
        if written and len(x) <= hidden.shape[1]:
            kept = buffers[:1] + [dweight[block] for block in blocks[:-1]]
        else:
            buffers += [torch.empty_like(buffers[0]) for _ in blocks[len(buffers) : KEPT]]
            kept = buffers[: len(blocks)]
        if not known:
            for i, block in enumerate(blocks):
                z = _logits(x, weight[block], kept[i % len(kept)])
                _cross_entropy(z, block, part_scale if at_once else None, True, *chunk)
            if process_group is not None:
                local.copy_(_over_group(local, process_group))
        if not backward:
            continue
        # What blocks or ranks add up is float32.
        summed = hidden_grad and (len(blocks) > 1 or process_group is not None)
        total = x.new_zeros(x.shape, dtype=torch.float32) if summed else x.new_empty(0)
        for i, block in reversed(list(enumerate(blocks))):
            made = not known and i >= len(blocks) - len(kept)
            z = _logits(x, weight[block], kept[i % len(kept)], not made)
            if known or not at_once:
                _cross_entropy(z, block, part_scale, False, *chunk)
            if summed:
                _add_to_hidden(total, z, weight[block])
            elif hidden_grad:
                total = mm(z, weight[block])
            if into is not None:
                _add_product(into[block], z, x, written)
        if hidden_grad:
            _scatter(total, dhidden, rows, part, shares, process_group)

    losses = hidden.new_zeros(len(targets), dtype=torch.float32)
    losses[rows] = _losses(work, classes, label_smoothing, z_loss)
    all_stats = hidden.new_zeros(4, len(targets), dtype=torch.float32)
    all_stats[:, rows] = work
    return losses, all_stats, dhidden, dweight


def _logits(x: Tensor, weight: Tensor, buffer: Tensor, make: bool = True) -> Tensor:
    """In `buffer`, where they are already unless `make`."""
    out = buffer.view(-1)[: len(x) * len(weight)].view(len(x), len(weight))
    for part in _columns(weight) if make else []:
        mm(x, weight[part].t(), out=out[:, part])
    return out


def _cross_entropy(
    logits: Tensor,
    block: slice,
    scale: Tensor | None,
    statistics: bool,
    labels: Tensor,
    stats: Tensor,
    first_class: int,
    *settings: float,
) -> None:
    """One pass of the native kernel over the columns `block` of a chunk; in place with `scale`."""
    launch(
        "cross_entropy",
        logits,
        pointer(logits),
        pointer(labels),
        *map(pointer, stats),
        pointer(scale),
        *logits.shape,
        first_class + block.start,
        *settings,
        statistics,
        DTYPES[logits.dtype],
    )


def _check_labels(labels: Tensor, rows: Tensor, classes: int, ignore_index: int) -> None:
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise ValueError(
            f"targets[{int(rows[i])}] is {int(labels[i])}; it must be 0 to {classes - 1}, or "
            f"ignore_index ({ignore_index})"
        )


# ---- ranks ---------------------------------------------------------------------------------------


def _shares(rows: Tensor, shard: int, tokens: int) -> list[slice]:
    """Which of the rows with a target each rank's `shard` of the tokens has; []: all have all."""
    if shard == tokens:
        return []
    ends = torch.arange(shard, tokens + 1, shard, device=rows.device)
    cuts = [0, *torch.searchsorted(rows, ends).tolist()]
    return [slice(a, b) for a, b in itertools.pairwise(cuts)]


def _inside(part: slice, shares: list[slice]) -> Iterator[tuple[int, slice, slice]]:
    """Ranks with rows in `part`: which rows, counted from the first of `part` and of all."""
    for rank, share in enumerate(shares):
        start, stop = max(share.start, part.start), min(share.stop, part.stop)
        if start < stop:
            yield rank, slice(start - part.start, stop - part.start), slice(start, stop)


def _gather(
    hidden: Tensor,
    rows: Tensor,
    part: slice,
    shares: list[slice],
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Rows `part` of those with a target [R, h], each from the rank that has it."""
    if not shares:
        return hidden[part] if len(rows) == len(hidden) else hidden[rows[part]]
    x = hidden.new_empty(part.stop - part.start, hidden.shape[1])
    for rank, local, which in _inside(part, shares):
        if rank == dist.get_rank(group):
            x[local] = hidden[rows[which] - rank * len(hidden)]
        dist.broadcast(x[local], _global_rank(group, rank), group=group)
    return x


def _scatter(
    total: Tensor,
    dhidden: Tensor,
    rows: Tensor,
    part: slice,
    shares: list[slice],
    group: dist.ProcessGroup | None,
) -> None:
    """The gradient of rows `part` [R, h], summed over the group, to the ranks that have them."""
    if shares:
        for rank, local, which in _inside(part, shares):
            dist.reduce(total[local], _global_rank(group, rank), group=group)
            if rank == dist.get_rank(group):
                dhidden[rows[which] - rank * len(dhidden)] = total[local].to(dhidden.dtype)
        return
    if group is not None:
        dist.all_reduce(total, group=group)
    dhidden[rows[part]] = total.to(dhidden.dtype)


def _global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def _over_group(stats: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Statistics of all ranks' columns: one all-reduce of the maxima, one of the sums."""
    largest = stats[0].clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    sums = stats[1:].clone()
    sums[0] *= (stats[0] - largest).exp()
    dist.all_reduce(sums, group=group)
    return torch.cat([largest[None], sums])


def _columns(weight: Tensor) -> list[slice]:
    """Parts of the weight's rows, which are columns of the logits; on a GPU all of them."""
    if weight.is_cuda:
        return [slice(None)]
    return _parts(0, len(weight), max(1, _WEIGHT_BYTES // (weight.itemsize * weight.shape[1])))


def _add_to_hidden(total: Tensor, z: Tensor, weight: Tensor) -> None:
    """total += z weight, float32."""
    for part in _columns(weight):
        mm(z[:, part], weight[part], out=total, add=True)


def _add_product(to: Tensor, z: Tensor, x: Tensor, first: bool) -> None:
    """to = z^T x, or added to what it holds."""
    parts = _columns(to)
    if to.dtype != z.dtype and not (to.is_cuda and accumulates(z.dtype, to.device)):
        # made, and then added
        most = CUDA_CHUNK_BYTES if to.is_cuda else _PRODUCT_BYTES
        parts = _parts(0, len(to), max(1, most // (x.itemsize * x.shape[1])))
    for part in parts:
        mm(z[:, part].t(), x, out=to[part], add=not first)


def _losses(stats: Tensor, classes: int, label_smoothing: float, z_loss: float) -> Tensor:
    """As the head of csrc/cpu/loss/kernel.cpp says."""
    largest, total, target, logit_sum = stats.double()
    losses = largest - target + total.log()
    if label_smoothing:
        losses += label_smoothing * (target - logit_sum / classes)
    if z_loss:
        losses += z_loss * (largest + total.log()).square()
    return losses.float()


def _fake(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Tensor | None,
    stats: Tensor | None,
    main_grad: Tensor | None,
    *settings: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden_grad, weight_grad = settings[-2:]
    tokens, kind = targets.shape[0], torch.float32
    dense = scale is not None and weight_grad and main_grad is None
    return (
        hidden.new_empty(tokens, dtype=kind),
        hidden.new_empty(4, tokens, dtype=kind),
        torch.empty_like(hidden) if scale is not None and hidden_grad else hidden.new_empty(0),
        torch.empty_like(weight) if dense else weight.new_empty(0),
    )


linear_cross_entropy = define(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, Tensor? scale,"
    " Tensor? stats, Tensor(a!)? main_grad, int ignore_index, SymInt first_class, SymInt classes,"
    " SymInt widest, float label_smoothing, float z_loss, str group, bool hidden_grad,"
    " bool weight_grad) -> (Tensor, Tensor, Tensor, Tensor)",
    _run,
    fake=_fake,
    capturable=False,  # it looks which rows have a target
)

"""`linear_cross_entropy`: arguments checked, reductions, and when gradients are computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from vlmkernels._native import (
    DTYPES,
    check_pair,
    check_tensor,
    check_whole,
    describe,
    have_tangents,
    is_plain,
    is_traced,
    learning,
    main_grad_of,
    no_rows,
    once,
    recorded,
    saved_tensor_hooks,
    to_device,
    without_transforms,
)
from vlmkernels.loss import op
from vlmkernels.loss.reference import Reduction

#: first and end of a rank's classes, or of each rank's.
VocabRange = tuple[int, int] | Sequence[tuple[int, int]]


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        main_grad: Tensor | None,
        expected: Tensor | None,
        reduction: Reduction,
        wanted: tuple[bool, bool],
        valid: int,
        *settings: Any,
    ) -> Tensor:
        ctx.reduction, ctx.settings, ctx.wanted, ctx.valid = reduction, settings, wanted, valid
        ctx.main_grad = main_grad = main_grad if main_grad is None else main_grad[:valid]
        ctx.count = (targets != settings[0]).sum()
        ctx.now = expected is not None and any(wanted)
        ctx.spent = False  # whether what the forward added to main_grad has had its backward
        scale = _row_scale(ctx, expected, targets) if expected is not None and ctx.now else None
        losses, stats, *gradients = op.linear_cross_entropy(
            *(hidden, weight[:valid], targets, scale, None, main_grad if ctx.now else None),
            *settings,
            *wanted,
        )
        ctx.save_for_backward(hidden, weight, targets, stats, expected, *gradients)
        if reduction == "none":
            return losses
        return losses.sum() / ctx.count if reduction == "mean" else losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        hidden, weight, targets, stats, expected, *gradients = ctx.saved_tensors
        if ctx.main_grad is not None and torch.is_grad_enabled():
            raise ValueError("create_graph=True needs weight_grad='dense'")
        # Under create_graph all is computed again, by an op that refuses to be differentiated.
        again = not ctx.now or torch.is_grad_enabled()
        on_cuda = grad.device.type == "cuda"  # torch 2.6 compiles no grad.is_cuda
        if ctx.main_grad is not None and ctx.spent:  # by a backward that retained the graph
            again = True
        elif ctx.now and ctx.main_grad is not None:
            ctx.spent = True
            message = (
                "the gradient of the loss is not grad_scale, with which weight.main_grad "
                "was added to in the forward pass; give the right one, or no grad_scale"
            )
            if on_cuda or torch.compiler.is_compiling():  # seen there, and not waited for
                torch._assert_async((grad == expected).all(), message)
            elif not is_traced() and not _same(grad, expected):
                raise ValueError(message)
        elif ctx.now and ((on_cuda and grad.dim() == 0) or not _same(grad, expected)):
            small = hidden.dtype == torch.float16 and not on_cuda  # digits that were lost stay so
            again = again or ctx.reduction == "none" or small
            if not again:
                ratio = _ratio(grad, expected, ctx.count)
                gradients = [_times(g, ratio) for g in gradients]
        elif ctx.now and not again and _retained():  # they are for the next backward too
            gradients = [g.clone() for g in gradients]
        if again:
            scale = _row_scale(ctx, grad, targets)
            arguments = (hidden, weight[: ctx.valid], targets, scale, stats, ctx.main_grad)
            with torch.autocast(grad.device.type, enabled=False):  # as in the forward pass
                made = once(op.linear_cross_entropy, *arguments, *ctx.settings, *ctx.wanted)
            gradients = made[2:]
        dhidden, dweight = (g if w else None for g, w in zip(gradients, ctx.wanted, strict=True))
        if ctx.wanted[1] and ctx.main_grad is not None:
            dweight = no_rows(weight)
        elif dweight is not None and ctx.valid < len(weight):
            dweight = F.pad(dweight, (0, 0, 0, len(weight) - ctx.valid))
        return dhidden, dweight, *(None,) * (6 + len(ctx.settings))


_loss = without_transforms("linear_cross_entropy", recorded(_Loss))


def _row_scale(ctx: Any, grad: Tensor, targets: Tensor) -> Tensor:
    """The gradient of each row's loss [T], from that of the result."""
    return (grad / ctx.count if ctx.reduction == "mean" else grad).expand(targets.shape)


def _ratio(grad: Tensor, expected: Tensor, count: Tensor) -> Tensor:
    """grad / expected, 1 where no row counts: all gradients are 0 then. Doesn't wait for a GPU."""
    if grad.device.type == "cuda" and count.device.type == "cpu":
        if not torch.compiler.is_compiling():
            return grad / expected if count else torch.ones_like(grad)
    return torch.where(count == 0, 1, grad / expected)


def _times(gradient: Tensor, ratio: Tensor) -> Tensor:
    """gradient * ratio, a float32 [], which CUDA alone would round to the gradient's type."""
    if gradient.dtype == torch.float32 or not gradient.is_cuda or torch.compiler.is_compiling():
        return gradient * ratio
    result = torch.empty_like(gradient)
    rows = max(1, (16 << 20) // max(1, gradient[:1].numel()))
    for to, part in zip(result.split(rows), gradient.split(rows), strict=True):
        to.copy_(part.float() * ratio)
    return result


def _known(*tensors: Tensor) -> bool:
    """Whether their values can be asked for, and are all that they have: not those of a tracer or
    of FakeTensorMode, of a batch of gradients, or with tangents."""
    if torch.compiler.is_compiling() or is_traced() or not is_plain(*tensors):
        return False
    return not have_tangents(*tensors)


def _same(grad: Tensor, expected: Tensor) -> bool:
    return _known(grad, expected) and torch.equal(grad, expected.expand(grad.shape))


def _retained() -> bool:
    """Inside a backward: whether the graph is kept for another."""
    compiling = torch.compiler.is_compiling()
    return not compiling and torch._C._autograd._get_current_graph_task_keep_graph()


# ---- argument checks -----------------------------------------------------------------------------


def _check_classes(
    hidden: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None,
    vocab_range: VocabRange | None,
    wanted: tuple[bool, ...],
) -> tuple[int, int, int, int]:
    """Classes of this rank, the first, number of all ranks' and of the rank that has most. All
    ranks raise the same."""
    if group is None:
        first, end = 0, len(weight)
        if vocab_range is not None:
            first, end = check_pair("vocab_range", vocab_range)
        if first != 0 or not 0 < end <= len(weight):
            raise ValueError(
                f"weight has {len(weight)} rows and vocab_range is {vocab_range}; without group it "
                "must be (0, classes), and weight have a row for each class"
            )
        return end, 0, end, end
    if vocab_range is None:
        raise ValueError("group is given and vocab_range is None; give this rank's (first, end)")
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    kinds = tuple, list
    if not isinstance(vocab_range, kinds) or not all(isinstance(x, kinds) for x in vocab_range):
        pair = check_pair("vocab_range", vocab_range)
        ours = torch.tensor([*pair, len(weight), *hidden.shape, *wanted], device=hidden.device)
        gathered = [torch.empty_like(ours) for _ in range(world)]
        dist.all_gather(gathered, ours, group=group)
        ranks = [x.tolist() for x in gathered]
        shown = (
            "vocab_range, rows of weight, then shape of hidden and which of hidden, weight and "
            f"main_grad get a gradient are {'; '.join(str(x) for x in ranks)} on the ranks of group"
        )
    else:
        ranks = [[*check_pair(f"vocab_range[{i}]", x)] for i, x in enumerate(vocab_range)]
        shown = f"vocab_range is {vocab_range} and weight has {len(weight)} rows on rank {rank}"
        if len(ranks) == world:
            ranks[rank].append(len(weight))
    classes, right = 0, len(ranks) == world
    for first, end, *rest in sorted(ranks):
        right &= first == classes and end >= first and rest[1:] in ([], ranks[0][3:])
        right &= not rest or end - first <= rest[0]
        classes = end
    if not right or classes == 0:
        raise ValueError(
            f"{shown}; the {world} ranges must adjoin from 0 on, hold a class and be no longer "
            "than weight, and the rest be the same on all"
        )
    first, end = ranks[rank][:2]
    return end - first, first, classes, max(end - first for first, end, *_ in ranks)


def _check_shard(
    shard: tuple[int, int] | None, group: dist.ProcessGroup | None, hidden: Tensor, targets: Tensor
) -> None:
    parts = 1
    if shard is not None:
        if group is None:
            raise ValueError(f"shard is {shard} and group None; give its ranks")
        here = dist.get_rank(group), dist.get_world_size(group)
        if check_pair("shard", shard) != here:
            raise ValueError(f"shard is {shard}; on this rank of group it must be {here}")
        parts = shard[1]
    if len(targets) != parts * len(hidden):
        needs = (f"{parts} x " if parts > 1 else "") + f"hidden's {len(hidden)} rows"
        raise ValueError(f"targets has {len(targets)} entries; it must have {needs}")


def _expected(
    grad_scale: float | Tensor | None,
    reduction: Reduction,
    into_main_grad: bool,
    targets: Tensor,
    hidden: Tensor,
) -> Tensor | None:
    """The result's gradient if it is known in the forward pass."""
    if grad_scale is None:
        # In float16 gradients for 1 may be 0, for the 65,536 of a GradScaler not.
        if reduction == "none" or into_main_grad or hidden.dtype == torch.float16:
            return None
        return torch.ones((), dtype=torch.float32, device=hidden.device)
    if isinstance(grad_scale, Tensor):
        known = grad_scale.detach()
    elif isinstance(grad_scale, (int, float)) and 0 < abs(grad_scale) < math.inf:
        known = torch.full((), grad_scale, dtype=torch.float32, device=hidden.device)
    else:
        raise ValueError(f"grad_scale is {grad_scale!r}; it must be a finite number, not 0")
    shapes = [(), tuple(targets.shape)] if reduction == "none" else [()]
    if tuple(known.shape) not in shapes or known.dtype != torch.float32:
        kind = str(known.dtype)[6:]
        raise ValueError(
            f"grad_scale is {kind} {list(known.shape)}; it must be a number or float32 "
            + " or ".join(str(list(shape)) for shape in shapes)
        )
    if torch.compiler.is_compiling() and reduction == "none":
        return None
    if known.dim() == 0 and known.is_cpu and _known(known) and not 0 < abs(float(known)) < math.inf:
        raise ValueError(f"grad_scale is {float(known)}; it must be a finite number, not 0")
    if known.device != hidden.device:
        known = to_device(known, hidden.device)
    if into_main_grad and saved_tensor_hooks():  # of a checkpoint, which runs the forward again
        return None
    return known


# ---- public function -----------------------------------------------------------------------------


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    group: dist.ProcessGroup | None = None,
    vocab_range: VocabRange | None = None,
    shard: tuple[int, int] | None = None,
    weight_grad: Literal["dense", "main_grad"] = "dense",
    grad_scale: float | Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Cross entropy of hidden @ weight.T, without the logits of all rows ever being in memory.

    On the CPU and on CUDA. The largest tensors made beside the result and the gradients are two of
    64 MB, on CUDA of 256 MB. Logits of h rows with a target lie in the memory of a "dense" gradient
    of weight until it is written.

    Args:
        hidden: [T, h], float32, bfloat16 or float16.
        weight: [V, h], dtype of hidden, contiguous.
        targets: int64 [T], classes. Rows whose target is `ignore_index` are never multiplied. In
            host memory: then a GPU is not waited for.
        reduction: "mean" over the rows with a target, "sum", or "none": [T], 0 where there is no
            target.
        group: tensor-parallel ranks, each with its rows of weight; hidden and targets are the same
            on all. Two all-reduces of a few numbers a row, besides one of hidden's gradient:
            **it is summed over the group here**, in float32, as megatron-core's
            ColumnParallelLinear does, so the caller must not sum it again.
        vocab_range: (first, end): the classes of this rank; the ranks compare them, which waits for
            a GPU. Or those of all ranks in group's order, [(first, end), ..]: nothing is compared,
            hidden, targets and what gets a gradient must be alike. Ranges adjoin from 0 on. Rows of
            weight from end - first on are padding: not multiplied, their gradient is 0. Without
            group (0, classes).
        shard: with group, (i, k): hidden is part i of k equal ones of the tokens, [T/k, h], i and k
            being rank and size of the group (sequence parallelism). Only rows with a target travel:
            each to all, and its gradient back.
        weight_grad: "dense": [V, h] in the dtype of weight. In 16 bits, where more rows have a
            target than h + 5 x 64 MB / V (h + 2,205 of 152,064 classes; 8,820 on CUDA), those
            beyond the first h take a fourth product a row, so that the sum isn't rounded more than
            6 times (up to 6 x 64 MB / 4h rows, 65,536 at h = 1,536).
            "main_grad": added to weight.main_grad, a contiguous float32 [V, h]; autograd gets an
            empty sparse tensor, so that Megatron's hooks fire. Under torch.compile as "dense".
        grad_scale: the gradient that the result will get in the backward pass, if it is known: a
            number, or float32 [] or, with "none", [T], and not 0 but in [T]. Gradients are then
            computed in the forward pass: three products a row instead of four. Without it this is
            so for "mean" and "sum" with "dense" in float32 and bfloat16, for a gradient of 1; one
            of another value multiplies what is there. With "main_grad" another gradient is an
            error: **weight.main_grad is added to in the forward pass**, but under hooks of saved
            tensors (a checkpoint that is not reentrant) in the backward pass.
        label_smoothing: as torch.nn.functional.cross_entropy's.
        z_loss: this times the square of the row's log-sum-exp is added to each loss.

    Returns:
        float32, [] or [T]. "mean" without any target is NaN, as torch's, its gradients are zeros.

    A gradient that nobody needs costs no product. float16 products are torch's, slow on the CPU.

    Raises:
        TypeError: hidden, weight or targets is no tensor.
        ValueError: a wrong argument; a target that is no class, by its position.
    """
    check_tensor("hidden", hidden, dtypes=DTYPES, shape="[T, h]", dim=2)
    if hidden.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"hidden is on {hidden.device}; linear_cross_entropy runs on the CPU and on CUDA: use "
            "F.linear and F.cross_entropy"
        )
    device = hidden.device
    check_tensor("weight", weight, dtypes=[hidden.dtype], shape="[V, h]", dim=2, device=device)
    if not hidden.shape[1]:
        raise ValueError(f"hidden is {describe(hidden)}; its rows must have an element")
    if weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"weight has rows of {weight.shape[1]} elements; they must be as long as hidden's, "
            f"{hidden.shape[1]}"
        )
    if not weight.is_contiguous():
        raise ValueError("weight is not contiguous; pass weight.contiguous()")
    check_tensor("targets", targets, dtypes=[torch.int64], shape="[T]", dim=1)
    if targets.device not in (device, torch.device("cpu")):
        raise ValueError(f"targets is on {targets.device}; it must be on {device} or the CPU")
    _check_shard(shard, group, hidden, targets)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'mean', 'sum' or 'none'")
    check_whole(ignore_index=ignore_index)
    for option, value in (("label_smoothing", label_smoothing), ("z_loss", z_loss)):
        if not isinstance(value, Real) and not (isinstance(value, Tensor) and value.dim() == 0):
            raise ValueError(f"{option} is {value!r}; it must be a number")
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{option} is a tensor that requires a gradient and would get none")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be 0 to 1")
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss is {z_loss}; it must be finite and not negative")
    if weight_grad not in ("dense", "main_grad"):
        raise ValueError(f"weight_grad is {weight_grad!r}; it must be 'dense' or 'main_grad'")
    wanted = tuple(learning() and x.requires_grad for x in (hidden, weight))
    main_grad = main_grad_of(weight) if weight_grad == "main_grad" else None
    expected = _expected(grad_scale, reduction, main_grad is not None, targets, hidden)
    flags = *wanted, main_grad is not None
    valid, *sizes = _check_classes(hidden, weight, group, vocab_range, flags)
    name = "" if group is None else group.group_name
    settings = (ignore_index, *sizes, float(label_smoothing), float(z_loss), name)
    given = hidden, weight, targets, main_grad, expected, reduction, wanted
    with torch.autocast(device.type, enabled=False):  # products are in hidden's dtype
        return _loss(*given, valid, *settings)

"""linear_cross_entropy beside F.linear and F.cross_entropy, torch's F.linear_cross_entropy, Liger's
chunks of rows and Megatron's vocabulary-parallel loss, time and memory.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import FAULT_FREE, Ceiling, Comparison, Context, Row, compare, say
from vlmkernels import linear_cross_entropy
from vlmkernels.product import mm

IGNORE = -100
Result = tuple[Tensor, Tensor, Tensor]  # loss, gradients of hidden and weight


@dataclass
class Inputs:
    hidden: Tensor  # [T, h]
    weight: Tensor  # [V, h]
    targets: Tensor  # int64 [T]

    @property
    def counted(self) -> int:
        return int((self.targets != IGNORE).sum())


def make(
    tokens: int, hidden: int, classes: int, dtype: torch.dtype, share: float, device: str = "cpu"
) -> Inputs:
    """`share` of the tokens have a target, in runs of 16 as answers do."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, classes, (tokens,), generator=generator)
    period = round(16 / share)
    targets[torch.arange(tokens) % period >= 16] = IGNORE
    x = torch.randn(tokens, hidden, generator=generator, dtype=torch.float32)
    weight = torch.empty(classes, hidden, dtype=dtype).normal_(0, 0.02, generator=generator)
    x, weight = (t.to(device, dtype).requires_grad_() for t in (x, weight))
    return Inputs(x, weight, targets.to(device))


def _step(x: Inputs, loss: Callable[..., Tensor]) -> Callable[[], Result]:
    def run() -> Result:
        value = loss(x.hidden, x.weight, x.targets)
        return value.detach(), *torch.autograd.grad(value, (x.hidden, x.weight))

    return run


def _liger(x: Inputs) -> Callable[[], Result]:
    """Liger-Kernel's fused_linear_cross_entropy in torch: rows in chunks as wide as hidden, losses
    and gradients in the forward pass, the weight's gradient summed in its dtype."""
    tokens, hidden = x.hidden.shape
    chunks = -(-len(x.weight) // hidden)
    size = 1 << (-(-tokens // chunks) - 1).bit_length()

    def run() -> Result:
        rows, weight = x.hidden.detach(), x.weight.detach()
        dhidden, dweight = torch.empty_like(rows), torch.zeros_like(weight)
        loss, count = torch.zeros((), device=rows.device), (x.targets != IGNORE).sum()
        for begin in range(0, tokens, size):
            part = slice(begin, begin + size)
            labels = x.targets[part]
            logits = F.linear(rows[part], weight)
            log_p = logits.float().log_softmax(1)
            loss += F.nll_loss(log_p, labels, reduction="sum", ignore_index=IGNORE) / count
            g = log_p.exp_()
            counted = (labels != IGNORE).nonzero()[:, 0]
            g[counted, labels[counted]] -= 1
            g *= ((labels != IGNORE) / count)[:, None]
            g = g.to(logits.dtype)
            torch.mm(g, weight, out=dhidden[part])
            dweight.addmm_(g.t(), rows[part])
        return loss, dhidden, dweight

    return run


def _megatron(x: Inputs) -> Callable[[], Result]:
    """megatron-core's VocabParallelCrossEntropy on one rank, losses masked as its trainer does."""
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy as Parts

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
            logits, largest = Parts.calculate_logits_max(logits)
            classes = logits.shape[-1]
            mask, picked, predicted, total, exp = Parts.calculate_predicted_logits(
                logits, targets, largest, 0, classes
            )
            softmax, loss = Parts.calculate_cross_entropy_loss(exp, predicted, total)
            ctx.save_for_backward(softmax, mask, picked)
            return loss

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            softmax, mask, picked = ctx.saved_tensors
            rows, places, update, out = Parts.prepare_gradient_calculation_operands(softmax, mask)
            return Parts.calculate_gradients(rows, places, picked, update, out, grad), None

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        counted = (targets != IGNORE).float()
        return (Loss.apply(F.linear(hidden, weight), targets) * counted).sum() / counted.sum()

    return _step(x, loss)


def peers(x: Inputs) -> dict[str, Callable[[], Result]]:
    found = {
        "F.linear, F.cross_entropy": _step(x, lambda h, w, t: F.cross_entropy(F.linear(h, w), t)),
        "Liger's chunks": _liger(x),
    }
    if importlib.util.find_spec("megatron") is not None:
        found["Megatron's"] = _megatron(x)
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13
        options = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
        found["F.linear_cross_entropy"] = _step(x, F.linear_cross_entropy)
        found["F.linear_cross_entropy, chunks"] = _step(
            x, lambda h, w, t: F.linear_cross_entropy(h, w, t, options=options)
        )
    return found


def _bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _same(theirs: Sequence[Tensor], ours: Sequence[Tensor]) -> str | None:
    for name, a, b in zip(("loss", "dhidden", "dweight"), theirs, ours, strict=True):
        error = float((a.float() - b.float()).norm() / b.float().norm())
        if not error <= 3e-2:
            return f"{name} differs from ours by {error:.1e}"
    return None


def dense(x: Inputs, context: Context, bar: float) -> Comparison:
    """Forward and backward, both gradients fresh."""
    return Comparison(
        op="linear_cross_entropy, forward and backward",
        ours=_step(x, linear_cross_entropy),
        peers=peers(x),
        check=_same,
        results_bytes=_bytes(x.hidden, x.weight),
        **_common(x, context, bar),
    )


def into_main_grad(x: Inputs, context: Context, bar: float) -> Comparison:
    """What a Megatron trainer needs: the weight's gradient added to a float32 buffer."""
    main_grad = torch.zeros_like(x.weight, dtype=torch.float32)
    x.weight.main_grad = main_grad  # type: ignore[attr-defined]
    total = torch.zeros_like(x.weight, dtype=torch.float32)

    def ours() -> tuple[Tensor, Tensor]:
        loss = linear_cross_entropy(
            x.hidden, x.weight, x.targets, weight_grad="main_grad", grad_scale=1.0
        )
        return loss.detach(), torch.autograd.grad(loss, (x.hidden, x.weight))[0]

    def added(step: Callable[[], Result]) -> Callable[[], tuple[Tensor, Tensor]]:
        def run() -> tuple[Tensor, Tensor]:
            loss, dhidden, dweight = step()
            total.add_(dweight)
            return loss, dhidden

        return run

    def same(theirs: Any, ours: Any) -> str | None:
        """Asked after the first run of ours and of each peer: what they added too."""
        wrong = _same((*theirs, total), (*ours, main_grad))
        total.zero_()
        return wrong

    return Comparison(
        op="linear_cross_entropy, forward and backward into main_grad",
        ours=ours,
        peers={f"{name}; add": added(step) for name, step in peers(x).items()},
        check=same,
        results_bytes=_bytes(x.hidden),
        **_common(x, context, bar),
    )


def _common(x: Inputs, context: Context, bar: float) -> dict[str, Any]:
    tokens, hidden = x.hidden.shape
    dtype, classes = x.weight.dtype, len(x.weight)
    return dict(
        shape=f"[{tokens}, {hidden}], {x.counted / tokens:.0%} targets, {classes} classes",
        dtype=str(dtype)[6:],
        ceilings=products(x),
        bar=None if context.quick else bar,
        memory_bar=None if context.quick else 8.0,
        first_counts=not context.quick and context.device == "cpu",
    )


def products(x: Inputs) -> dict[str, Ceiling]:
    """The three products that no formulation can do without, of at most 512 rows, by torch or the
    faster kernel of vlmkernels.product: what ours would take if all else cost nothing."""
    rows = min(512, x.counted)
    hidden, weight = x.hidden.detach()[:rows], x.weight.detach()
    logits = torch.zeros(rows, len(weight), dtype=weight.dtype, device=weight.device)
    dhidden, dweight = torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> None:
        mm(hidden, weight.t(), out=logits)
        mm(logits, weight, out=dhidden)
        mm(logits.t(), hidden, out=dweight)

    work = 6e-9 * rows * weight.numel()
    return {f"{rows} rows' products": Ceiling(run, x.counted / rows, work, "GFLOP/s")}


#: Tokens and hidden size of the larger models, measured once, as memory comes.
LARGER = {"8192 tokens": (8192, 1536), "h 3584": (2048, 3584)}
CLASSES = 151936


def _needed(tokens: int, hidden: int, item: int) -> int:
    """Bytes of the hungriest peer: logits and their gradient, in float32 where Megatron's are, the
    weight, two gradients of it and the ceiling's."""
    return tokens * CLASSES * (item + 8) + 4 * CLASSES * hidden * item + 512 * CLASSES * item


def parts(context: Context) -> list[str | None]:
    """A process each: gradients of gigabytes must not stay for the next."""
    found: list[str | None] = []
    for share in (100, 25):
        found += [f"{dtype}, {share}%" for dtype in ("float32", "bfloat16")]
        found.append(f"bfloat16, {share}%, main_grad")
        if context.memory != FAULT_FREE and not context.quick:
            found += [f"bfloat16, {share}%, {size}" for size in LARGER]
    return found


def rows(context: Context) -> Iterator[Row]:
    for part in [context.part] if context.part else parts(context):
        dtype, share, *size = str(part).replace("%", "").split(", ")
        bar = 1.15 if share == "100" else 3.0
        into = size == ["main_grad"]
        tokens, hidden = LARGER[size[0]] if size and not into else (2048, 1536)
        kind = getattr(torch, dtype)
        if context.quick:
            tokens, hidden, classes = 256, 128, 8192
        else:
            classes = CLASSES
            if (missing := _needed(tokens, hidden, kind.itemsize) - available(context.device)) > 0:
                say(f"loss, {part}: left out, {missing / 1e9:.1f} GB of memory are missing")
                continue
        x = make(tokens, hidden, classes, kind, int(share) / 100, context.device)
        yield compare((into_main_grad if into else dense)(x, context, bar), context)


def available(device: str) -> int:
    """Bytes of memory that are free (Linux), or free on the GPU."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * int(next(x for x in lines if x.startswith("MemAvailable")).split()[1])

"""linear_cross_entropy beside F.linear and F.cross_entropy, torch's F.linear_cross_entropy and
Liger's chunks of rows. `python -m benchmarks.loss` prints the memory that each needs.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import ceilings
from benchmarks.harness import Comparison, Context, Row, compare
from vlmkernels import linear_cross_entropy

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


def peers(x: Inputs) -> dict[str, Callable[[], Result]]:
    found = {
        "F.linear, F.cross_entropy": _step(x, lambda h, w, t: F.cross_entropy(F.linear(h, w), t)),
        "Liger's chunks": _liger(x),
    }
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13
        options = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
        found["F.linear_cross_entropy"] = _step(x, F.linear_cross_entropy)
        found["F.linear_cross_entropy, chunks"] = _step(
            x, lambda h, w, t: F.linear_cross_entropy(h, w, t, options=options)
        )
    return found


def _same(theirs: Result, ours: Result) -> str | None:
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
        **_common(x, context, bar),
    )


def into_main_grad(x: Inputs, context: Context, bar: float) -> Comparison:
    """What a Megatron trainer needs: the weight's gradient added to a float32 buffer."""
    x.weight.main_grad = torch.zeros_like(x.weight, dtype=torch.float32)  # type: ignore[attr-defined]
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
        return _same((*theirs, torch.ones(1)), (*ours, torch.ones(1)))

    return Comparison(
        op="linear_cross_entropy, forward and backward into main_grad",
        ours=ours,
        peers={f"{name}; add": added(step) for name, step in peers(x).items()},
        check=same,
        **_common(x, context, bar),
    )


def _common(x: Inputs, context: Context, bar: float) -> dict[str, Any]:
    tokens, hidden = x.hidden.shape
    dtype, classes = x.weight.dtype, len(x.weight)
    return dict(
        shape=f"[{tokens}, {hidden}], {x.counted / tokens:.0%} targets, {classes} classes",
        dtype=str(dtype)[6:],
        ceilings=ceilings.arithmetic(6.0 * x.counted * hidden * classes, dtype, context),
        bar=None if context.quick else bar,
    )


def parts(context: Context) -> list[str | None]:
    """A process each: gradients of gigabytes must not stay for the next."""
    return [f"{dtype}, {share}%" for dtype in ("float32", "bfloat16") for share in (100, 25)]


def rows(context: Context) -> Iterator[Row]:
    sizes = (256, 128, 8192) if context.quick else (2048, 1536, 151936)
    for part in [context.part] if context.part else parts(context):
        dtype, share = str(part).rstrip("%").split(", ")
        x = make(*sizes, getattr(torch, dtype), int(share) / 100)
        bar = 1.15 if share == "100" else 3.0
        yield compare(dense(x, context, bar), context)
        if dtype == "bfloat16":
            yield compare(into_main_grad(x, context, bar), context)


# ---- memory --------------------------------------------------------------------------------------


def peak_memory(run: Callable[[], Any]) -> int:
    """Bytes by which this process grew at most while `run` ran (Linux)."""

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(x for x in lines if x.startswith(name)).split()[1])

    run()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    run()
    return status("VmHWM") - before


def memory(tokens: int) -> None:
    """A line for each contestant: the most that it needs beside inputs and gradients, in MB."""
    for dtype in (torch.float32, torch.bfloat16):
        x = make(tokens, 1536, 151936, dtype, 1.0)
        gradients = sum(t.numel() * t.element_size() for t in (x.hidden, x.weight))
        for name, run in {"ours": _step(x, linear_cross_entropy), **peers(x)}.items():
            extra = (peak_memory(run) - gradients) / 1e6
            print(f"{str(dtype)[6:]:9} {tokens} tokens  {name:32} {extra:8.0f} MB", flush=True)


if __name__ == "__main__":
    memory(int(sys.argv[1]) if len(sys.argv) > 1 else 2048)

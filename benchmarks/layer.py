"""RMSNorm and SwiGLU beside plain torch's ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import ceilings
from benchmarks.harness import Comparison, Context, Row, compare, difference
from vlmkernels.layer import rms_norm, swiglu_

#: Rows, width, the MLP's width, whether it has a bias: of the step's 112M model the tower and the
#: language model.
SHAPES = [(2680, 640, 1728, True), (1007, 640, 1792, False)]


def _swiglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    gate, up = (x if bias is None else x + bias).chunk(2, -1)
    return F.silu(gate) * up


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def comparisons(
    op: str,
    ours: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    inputs: list[Tensor],
    numbers: tuple[int, int],
    context: Context,
) -> Iterator[Comparison]:
    """numbers: of a row's elements that must be read and written, forward and backward."""
    x = inputs[0]
    shape = f"[{', '.join(map(str, x.shape))}]{', bias' if op == 'SwiGLU' and inputs[1:] else ''}"
    leaves = [t.clone().requires_grad_() for t in inputs]

    def forward(run: Callable[..., Tensor]) -> tuple[Tensor]:
        with torch.no_grad():
            return (run(*inputs),)

    def backward(out: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, upstream, retain_graph=True)

    outs = [run(leaves[0] * 1, *leaves[1:]) for run in (ours, plain)]
    upstream = torch.randn_like(outs[0])
    calls = [[partial(forward, run) for run in (ours, plain)]]
    calls += [[partial(backward, out, upstream) for out in outs]]
    for name, (mine, torchs), count in zip(("forward", "backward"), calls, numbers, strict=True):
        yield Comparison(
            op=f"{op}, {name}",
            shape=shape,
            dtype=str(x.dtype)[6:],
            ours=mine,
            peers={"plain torch": torchs},
            check=partial(difference, allowed=max(1e-5, 2 * torch.finfo(x.dtype).eps)),
            ceilings=ceilings.copy(float(len(x) * count * x.element_size()), context),
        )


def rows(context: Context) -> Iterator[Row]:
    if context.device != "cpu":
        return
    for dtype in (torch.float32, torch.bfloat16):
        for count, width, inner, biased in [(64, 64, 96, True)] if context.quick else SHAPES:
            x, weight = torch.randn(count, width).to(dtype), torch.ones(width).to(dtype)
            # In place x + 0 stays what it is, call by call.
            both = [torch.randn(count, 2 * inner).to(dtype)]
            both += [torch.zeros(2 * inner).to(dtype)] if biased else []
            norm, moved = partial(rms_norm, eps=1e-6), (5 if biased else 3) * inner
            for comparison in (
                *comparisons(
                    "RMSNorm", norm, _rms_norm, [x, weight], (2 * width, 3 * width), context
                ),
                *comparisons("SwiGLU", swiglu_, _swiglu, both, (moved, 5 * inner), context),
            ):
                yield compare(comparison, context)

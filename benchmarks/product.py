"""The products of a linear layer in float32 beside torch's (MKL) and oneDNN's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks import ceilings
from benchmarks.harness import Comparison, Context, Row, compare
from vlmkernels.product import mm

#: Tokens, inputs, outputs: a layer of the step's 112M model, one of 2B's MLP, a part of the
#: vocabulary (vlmkernels/loss/op.py).
SHAPES = [(1007, 640, 3584), (2048, 1536, 8960), (220, 1536, 4096)]


def _same(theirs: Tensor, ours: Tensor) -> str | None:
    error = float((theirs - ours).norm() / ours.norm())
    return None if error <= 1e-5 else f"differs from ours by {error:.1e}"


def comparisons(tokens: int, ins: int, outs: int, context: Context) -> Iterator[Comparison]:
    x, w, dy = torch.randn(tokens, ins), torch.randn(outs, ins), torch.randn(tokens, outs)
    onednn = torch.ops.mkldnn._linear_pointwise
    passes: dict[str, tuple[Tensor, Tensor, dict[str, Callable[[], Tensor]]]] = {
        "x W^T": (x, w.t(), {"oneDNN": partial(onednn, x, w, None, "none", [], "")}),
        "dy W": (dy, w, {}),
        "dy^T x": (dy.t(), x, {}),
    }
    for name, (a, b, more) in passes.items():
        out, other = torch.empty(len(a), b.shape[1]), torch.empty(len(a), b.shape[1])
        yield Comparison(
            op=f"product of a linear layer, {name}",
            shape=f"x [{tokens}, {ins}], W [{outs}, {ins}]",
            dtype="float32",
            ours=partial(mm, a, b, out=out),
            peers={"torch.mm": partial(torch.mm, a, b, out=other), **more},
            check=_same,
            ceilings=ceilings.arithmetic(2.0 * tokens * ins * outs, torch.float32, context),
        )


def rows(context: Context) -> Iterator[Row]:
    if context.device != "cpu":
        return
    for tokens, ins, outs in [(256, 192, 256)] if context.quick else SHAPES:
        for comparison in comparisons(tokens, ins, outs, context):
            yield compare(comparison, context)

"""The products of a linear layer beside torch's (MKL's in float32, oneDNN's in bfloat16)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks import ceilings
from benchmarks.harness import Comparison, Context, Row, compare, difference
from vlmkernels import _native
from vlmkernels.product import mm, our_work, smallest

#: Tokens, inputs, outputs: a layer of the step's 112M model, one of 2B's MLP, a part of the
#: vocabulary (vlmkernels/loss/op.py), few tokens, a layer of the demo's packs, its merger. Left out
#: where no product is ours.
SHAPES = [
    (1007, 640, 3584),
    (2048, 1536, 8960),
    (220, 1536, 4096),
    (64, 640, 1024),
    (231, 192, 512),
    (55, 512, 512),
]


def _same(theirs: Tensor, ours: Tensor) -> str | None:
    """Both rounded to their dtype."""
    return difference([theirs], [ours], max(1e-5, torch.finfo(ours.dtype).eps))


def comparisons(
    tokens: int, ins: int, outs: int, dtype: torch.dtype, context: Context
) -> Iterator[Comparison]:
    sizes = (tokens, ins), (outs, ins), (tokens, outs)
    x, w, dy = (torch.randn(size).to(dtype) for size in sizes)
    onednn = partial(torch.ops.mkldnn._linear_pointwise, x, w, None, "none", [], "")
    passes: dict[str, tuple[Tensor, Tensor, dict[str, Callable[[], Tensor]]]] = {
        "x W^T": (x, w.t(), {"oneDNN": onednn} if dtype == torch.float32 else {}),
        "dy W": (dy, w, {}),
        "dy^T x": (dy.t(), x, {}),
    }
    for name, (a, b, more) in passes.items():
        out, other = (torch.empty(len(a), b.shape[1], dtype=dtype) for _ in range(2))
        yield Comparison(
            op=f"product of a linear layer, {name}",
            shape=f"x [{tokens}, {ins}], W [{outs}, {ins}]",
            dtype=str(dtype)[6:],
            ours=partial(mm, a, b, out=out),
            peers={"torch.mm": partial(torch.mm, a, b, out=other), **more},
            check=_same,
            ceilings=ceilings.arithmetic(2.0 * tokens * ins * outs, dtype, context),
        )


def _some_are_ours(tokens: int, ins: int, outs: int, dtype: torch.dtype) -> bool:
    isa, work = _native._C.isa(), tokens * ins * outs
    enough = min(tokens, ins, outs) >= smallest(isa, dtype)
    return enough and any(work in our_work(isa, dtype, transposed) for transposed in (False, True))


def parts(context: Context) -> list[str]:
    return ["float32", "bfloat16"] if context.device == "cpu" else []


def rows(context: Context) -> Iterator[Row]:
    dtype = getattr(torch, str(context.part))
    for shape in [(256, 192, 256)] if context.quick else SHAPES:
        if not (context.quick or _some_are_ours(*shape, dtype)):
            continue
        for comparison in comparisons(*shape, dtype, context):
            yield compare(comparison, context)

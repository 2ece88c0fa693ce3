"""The torch ops, called without the functions that check their arguments: no foreign memory is
read or written, what does not fit is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import vlmkernels  # noqa: F401
from tests.kernels.numeric import assert_accurate

F32, F64, U8 = torch.float32, torch.float64, torch.uint8


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def embedding(**changed: Any) -> Callable[[Any], Any]:
    given = dict(ids=ids(0, 1, 2, 0), visual=torch.zeros(0, 8), index=i32(-1, -1, -1, -1), rows=4)
    given |= changed
    tensors = given["ids"], torch.randn(3, 8), given["visual"], given["index"]
    return lambda o: o.visual_embedding(*tensors, 0, True, 0, given["rows"], -1, F32, True)


def attention(out: torch.Tensor, stats: torch.Tensor, scale: float = 1.0) -> Callable[[Any], Any]:
    q = torch.randn(16, 2, 8)
    tensors = q, q, q, q, i32(0, 16), out, stats
    return lambda o: o.varlen_attention_backward(*tensors, None, False, scale, "cpu")


def table(rows: int) -> torch.Tensor:
    return torch.zeros(rows, 256)


RIGHT = torch.zeros(16, 2, 8), torch.ones(2, 2, 16)
CALLS: dict[str, Callable[[Any], Any]] = {
    "more rows than positions": embedding(rows=4_000_000),
    "int32 ids": embedding(ids=i32(0, 1, 2, 0)),
    "fewer ids than positions": embedding(ids=ids(0)),
    "visual rows of another size": embedding(visual=torch.zeros(2, 4)),
    "scatter: visual rows of another size": lambda o: o.scatter_visual(
        torch.randn(3, 8), torch.randn(2, 4), i32(0, 1, -1), 0, True
    ),
    "scatter: a short index": lambda o: o.scatter_visual(
        torch.randn(3000, 8), torch.randn(2, 8), i32(0, 1, -1), 0, True
    ),
    "scatter_: transposed": lambda o: o.scatter_visual_(
        torch.zeros(8, 4).t(), torch.ones(2, 8), i32(0, -1, 1, -1), 0, False
    ),
    "add: a short index": lambda o: o.add_visual_(
        torch.zeros(300, 8), torch.ones(2, 8), i32(0, -1, 1, -1), 0, False
    ),
    "gradient of visual rows: a short index": lambda o: o.visual_embedding_visual_grad(
        torch.randn(4, 8), i32(0, 1), 0, 4, F32
    ),
    "gradient of the table: narrow": lambda o: o.visual_embedding_weight_grad_into(
        torch.zeros(3, 2), torch.randn(4, 8000), ids(0, 1, 2, 2), i32(-1, -1, -1, -1), 0, 0, -1
    ),
    "patchify: a small result": lambda o: o.patchify(
        torch.zeros(1, 2800, 2800, 3, dtype=U8), table(3), torch.zeros(1, 1), 14, 2, 2, 1
    ),
    "patchify: a small table": lambda o: o.patchify(
        torch.zeros(1, 28, 28, 3, dtype=U8), table(1), torch.zeros(4, 1176), 14, 2, 2, 1
    ),
    "patchify: grey frames": lambda o: o.patchify(
        torch.zeros(1, 28, 28, 1, dtype=U8), table(3), torch.zeros(4, 1176), 14, 2, 2, 1
    ),
    "patchify: an expanded result": lambda o: o.patchify(
        torch.zeros(1, 28, 28, 3, dtype=U8), table(3), torch.zeros(4, 1).expand(4, 1176),
        14, 2, 2, 1,
    ),
    "patchify: patches of nothing": lambda o: o.patchify(
        torch.zeros(1, 28, 28, 3, dtype=U8), table(3), torch.zeros(4, 1176), 0, 2, 2, 1
    ),
    "patchify: frames of floats": lambda o: o.patchify(
        torch.zeros(1, 28, 28, 3), table(3), torch.zeros(4, 1176), 14, 2, 2, 1
    ),
    "resize: grey frames": lambda o: o.resize(
        torch.zeros(1, 8, 8, 1, dtype=U8), torch.zeros(1, 64, 64, 3, dtype=U8), 12, 1
    ),
    "resize: an expanded result": lambda o: o.resize(
        torch.zeros(1, 8, 8, 3, dtype=U8),
        torch.zeros(1, 1, 1, 3, dtype=U8).expand(1, 64, 64, 3), 12, 1,
    ),
    "resize: no threads": lambda o: o.resize(
        torch.zeros(1, 8, 8, 3, dtype=U8), torch.zeros(1, 64, 64, 3, dtype=U8), 12, 0
    ),
    "resize: a result of one channel": lambda o: o.resize(
        torch.zeros(1, 8, 8, 3, dtype=U8), torch.zeros(1, 3000, 3000, 1, dtype=U8), 12, 1
    ),
    "attention: a small result": attention(torch.zeros(1, 1, 1), RIGHT[1]),
    "attention: small statistics": attention(RIGHT[0], torch.zeros(1)),
    "attention: a scale that is no number": attention(*RIGHT, float("nan")),
    "loss: more classes than rows": lambda o: o.linear_cross_entropy(
        torch.randn(3, 8), torch.randn(5, 8), ids(1, 2, 9), None, None, None,
        -100, 0, 10, 10, 0.0, 0.0, "", False, False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_does_not_fit_is_an_error(call: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match="must|needs|gave|but visual_index"):
        call(torch.ops.vlmkernels)


def test_what_fits_is_computed() -> None:
    ops = torch.ops.vlmkernels
    weight = torch.randn(3, 8)
    tensors = ids(0, 1, 2, 0), weight, torch.zeros(0, 8), i32(-1, -1, -1, -1)
    actual = ops.visual_embedding(*tensors, 0, True, 0, 4, -1, F32, True)
    assert torch.equal(actual, weight[[0, 1, 2, 0]])

    frames, values = torch.randint(256, (1, 2, 2, 3), dtype=U8), torch.randn(256, 3).T
    patch = torch.zeros(1, 12)
    ops.patchify(frames, values, patch, 2, 1, 1, 1)  # of a table that is not contiguous
    channels = [values[c][frames[0, :, :, c].long()].flatten() for c in range(3)]
    assert torch.equal(patch[0], torch.cat(channels))

    qkv, upstream, scale = torch.randn(3, 16, 2, 8), torch.randn(16, 2, 8), 8**-0.5

    def by_torch(dtype: torch.dtype) -> torch.Tensor:
        x = qkv.to(dtype).requires_grad_()
        heads = x.transpose(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(*heads, scale=scale)
        return torch.autograd.grad(out, x, upstream.to(dtype).transpose(0, 1))[0]

    settings = i32(0, 16), None, False, scale, "cpu"
    out, stats = ops.varlen_attention(*qkv, *settings)
    rest = settings[0], out, stats, *settings[1:]
    gradients = ops.varlen_attention_backward(upstream, *qkv, *rest)
    for name, *all_three in zip("qkv", gradients, by_torch(F32), by_torch(F64), strict=True):
        assert_accurate(f"d{name}", *all_three)

"""RMSNorm and SwiGLU on a real GPU, beside plain torch there, for `make gpu-check`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.numeric import assert_bitwise
from tests.kernels.test_layer import (
    DTYPES,
    add_norm,
    check,
    plain_add_norm,
    plain_norm,
    plain_swiglu,
    run,
)
from vlmkernels import _native
from vlmkernels.layer import has_norm, has_swiglu, rms_norm, swiglu_

if not torch.cuda.is_available():
    pytest.skip("no GPU: torch.cuda.is_available() is False", allow_module_level=True)
if not _native.has_cuda_kernels():
    pytest.skip("vlmkernels was built without CUDA kernels", allow_module_level=True)

#: Rows and columns: Qwen's and some that end inside a warp, a block or a part of a sum.
SIZES = [(3, 40), (33, 128), (700, 1280), (45, 3584), (18, 8192)]


def make(dtype: torch.dtype, *shape: int) -> Any:
    return torch.randn(shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_rms_norm(dtype: torch.dtype, rows: int, width: int) -> None:
    x, weight, upstream = (make(dtype, *s) for s in ((rows, 1, width), (width,), (rows, 1, width)))
    terms = plain_norm(x.double(), torch.ones_like(weight, dtype=torch.float64)) * upstream
    check(lambda x, w: rms_norm(x, w, 1e-6), plain_norm, [x, weight], upstream, {2: terms})


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_add_rms_norm(dtype: torch.dtype, bias: bool, rows: int, width: int) -> None:
    inputs = [make(dtype, rows, 1, width), make(dtype, rows, 1, width), make(dtype, width)]
    inputs += [make(dtype, width)] if bias else []
    upstream = make(dtype, rows, 1, 2 * width)
    total = sum(part.double() for part in (*inputs[:2], *inputs[3:]))
    ones = torch.ones(width, dtype=torch.float64, device="cuda")
    terms = plain_norm(total, ones) * upstream[..., width:]
    check(add_norm, plain_add_norm, inputs, upstream, {3: terms, 4: None})
    for a, b in zip(*(run(add_norm, inputs, upstream) for _ in range(2)), strict=True):
        assert_bitwise("a second time", a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(3, 40), (33, 20), (700, 3420), (45, 11008)])
def test_swiglu(dtype: torch.dtype, bias: bool, rows: int, width: int) -> None:
    """Units of 16 bytes and, of 20 and 3,420 columns in 16 bits, of 8."""
    inputs = [3 * make(dtype, rows, 1, 2 * width)] + ([make(dtype, 2 * width)] if bias else [])
    apart = make(dtype, rows, 1, width + 4)[..., :width]
    expanded = make(dtype, 1, 1, width).expand(rows, 1, width)  # as that of a sum over rows
    for upstream in (apart.contiguous(), apart, expanded):
        check(swiglu_, plain_swiglu, inputs, upstream, {2: None})


def test_swiglu_with_zeros_behind() -> None:
    """Rows of 3,420 in 16 bits are no whole units of 16 bytes, of 3,424 they are."""
    x, bias = 3 * make(torch.bfloat16, 700, 1, 6840), make(torch.bfloat16, 6840)
    upstream = make(torch.bfloat16, 700, 1, 3424)
    found = []
    for padding in (0, 4):
        leaf = x.clone().requires_grad_()
        y = swiglu_(leaf * 1, bias, padding=padding)
        grads = torch.autograd.grad(y, leaf, upstream[..., : 3420 + padding])
        found.append((y.detach(), *grads))
    (plain, plain_grad), (padded, padded_grad) = found
    assert padded.shape[-1] == 3424 and not padded[..., 3420:].any()
    assert_bitwise("y", padded[..., :3420].contiguous(), plain)
    assert_bitwise("dx", padded_grad, plain_grad)
    with pytest.raises(ValueError, match="padding is 2 for x, .* a multiple of 8 bytes"):
        swiglu_(x, padding=2)


def test_what_has_no_kernel_says_so() -> None:
    x = make(torch.bfloat16, 3, 12)
    assert not has_norm(x) and not has_swiglu(x[:, :6])
    with pytest.raises(ValueError, match="rows of whole units of 16 bytes, at most 8192 elements"):
        rms_norm(x, x[0], 1e-6)
    with pytest.raises(ValueError, match="on CUDA swiglu_ takes halves of rows"):
        swiglu_(x[:, :6].contiguous())

"""Rotary embedding on a real GPU, beside plain torch there, for `make gpu-check`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.numeric import assert_accurate
from tests.kernels.test_rotary import check_qkv
from vlmkernels import _native, rotary
from vlmkernels.rotary import apply_rotary, apply_rotary_reference

if not torch.cuda.is_available():
    pytest.skip("no GPU: torch.cuda.is_available() is False", allow_module_level=True)
if not _native.has_cuda_kernels():
    pytest.skip("vlmkernels was built without CUDA kernels", allow_module_level=True)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def table_of(tokens: int, width: int) -> tuple[Tensor, Tensor]:
    angles = torch.rand(tokens, width // 2, device="cuda") * 1000
    cos, sin = torch.cat([angles.cos(), angles.sin()], -1).chunk(2, -1)
    return cos, sin


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(
    ("tokens", "kv_heads", "group", "width", "by_kernel"),
    [(700, 2, 8, 128, True), (33, 3, 1, 64, True), (5, 1, 2, 80, True), (9, 2, 3, 12, False)],
)
def test_fused_projection(
    dtype: torch.dtype, tokens: int, kv_heads: int, group: int, width: int, by_kernel: bool
) -> None:
    """Heads of 12 columns have no kernel, and torch serves."""
    qkv = torch.randn(tokens, kv_heads, group + 2, width, device="cuda").to(dtype)
    cos, sin = table_of(tokens, width)
    assert rotary._launchable(qkv[:, :, :group], qkv, cos, sin) == by_kernel
    check_qkv(qkv, cos, sin)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_heads(dtype: torch.dtype) -> None:
    """Dense ones, views, and one that starts between two units."""
    cos, sin = table_of(45, 64)
    base = torch.randn(45, 4, 3 * 64 + 1, device="cuda").to(dtype)
    for x in (base[..., :64].contiguous(), base[..., 1:65]):
        exact = apply_rotary_reference(x.double(), cos.to(dtype), sin.to(dtype))
        assert_accurate(
            "rotation", apply_rotary(x, cos, sin), apply_rotary_reference(x, cos, sin), exact
        )

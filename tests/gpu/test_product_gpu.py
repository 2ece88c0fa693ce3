"""Products added to float32 matrices on a real GPU, for `make gpu-check`."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.numeric import assert_accurate
from vlmkernels.product import mm
from vlmtrain.models.weight_gradients import wgrad_gemm_accum_fp32

if not torch.cuda.is_available():
    pytest.skip("no GPU: torch.cuda.is_available() is False", allow_module_level=True)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(("outputs", "inputs", "padding"), [(96, 64, 0), (1280, 3420, 4)])
def test_weight_gradients(dtype: torch.dtype, outputs: int, inputs: int, padding: int) -> None:
    """Into main_grad, of rows as they are and with zeros behind them, twice."""
    x = torch.randn(700, inputs + padding, device="cuda").to(dtype)
    x[:, inputs:] = 0
    grad = torch.randn(700, outputs, device="cuda").to(dtype)
    before = torch.randn(outputs, inputs, device="cuda")
    main_grad = before.clone()
    for _ in range(2):
        wgrad_gemm_accum_fp32(x, grad, main_grad)
    exact = before + 2 * (grad.double().t() @ x[:, :inputs].double())
    plain = before + 2 * (grad.t() @ x[:, :inputs]).float()
    assert_accurate("main_grad", main_grad, plain, exact)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=lambda d: str(d)[6:])
def test_sums_are_not_rounded_between(dtype: torch.dtype) -> None:
    """A product that the type can't hold: 2,048 and 1 are 2,049 in float32."""
    a, b = torch.ones(32, 64, device="cuda", dtype=dtype), torch.ones(64, 16, device="cuda")
    out = torch.full((32, 16), 1 / 64, device="cuda")
    mm(a * 32, b.to(dtype), out=out, add=True)
    assert bool((out == 2048 + 1 / 64).all())

"""linear_cross_entropy on a real GPU, against float64 there, for `make gpu-check`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.numeric import assert_accurate, assert_bitwise
from tests.kernels.test_linear_cross_entropy import DTYPES, IGNORE, make, outputs, plain
from vlmkernels import _native, linear_cross_entropy
from vlmkernels.loss import op

if not torch.cuda.is_available():
    pytest.skip("no GPU: torch.cuda.is_available() is False", allow_module_level=True)
if not _native.has_cuda_kernels():
    pytest.skip("vlmkernels was built without CUDA kernels", allow_module_level=True)

OPTIONS: list[dict[str, Any]] = [
    {"reduction": "mean"},
    {"reduction": "sum", "label_smoothing": 0.1, "z_loss": 1e-2},
]


def to_gpu(*tensors: Tensor) -> Any:
    return tuple(x.detach().cuda() for x in tensors)


#: One block of rows, several, and columns of all rows in 16 bits.
@pytest.mark.parametrize("chunk", [op.CUDA_CHUNK_BYTES, 1 << 20, 200_000])
@pytest.mark.parametrize("options", OPTIONS, ids=["mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_against_float64(
    dtype: torch.dtype, options: dict[str, Any], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "CUDA_CHUNK_BYTES", chunk)
    for tokens, classes, hidden in ((300, 20_011, 128), (40, 151_936, 64)):
        x, weight, targets = make(tokens, classes, hidden, dtype, 0.6)
        targets[0] = classes - 1
        inputs = *to_gpu(x, weight, targets), torch.ones((), device="cuda")
        got = outputs(linear_cross_entropy, *inputs, **options)
        theirs = outputs(plain, *inputs, **options)
        exact = outputs(plain, inputs[0].double(), inputs[1].double(), *inputs[2:], **options)
        for name in ("dhidden", "dweight"):
            assert_accurate(name, got[name], theirs[name], exact[name])
        unit = torch.finfo(dtype).eps
        assert abs(float(got["loss"] / exact["loss"]) - 1) <= unit
        again = outputs(linear_cross_entropy, *inputs, **options)
        for name, result in got.items():
            assert_bitwise(f"{name}, a second time", again[name], result)


#: One chunk of rows, and several; targets in host memory, as training has them, and on the GPU.
@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("chunk", [op.CUDA_CHUNK_BYTES, 400_000])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_main_grad(
    dtype: torch.dtype, chunk: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Added in float32, twice."""
    monkeypatch.setattr(op, "CUDA_CHUNK_BYTES", chunk)
    x, weight, targets = make(500, 9001, 256, dtype, 0.5)
    hidden, table = (t.requires_grad_() for t in to_gpu(x, weight))
    table.main_grad = torch.zeros(table.shape, device="cuda")
    for _ in range(2):
        loss = linear_cross_entropy(
            hidden, table, targets.to(where), weight_grad="main_grad", grad_scale=1.0
        )
        loss.backward()
    inputs = *to_gpu(x, weight, targets), torch.ones((), device="cuda")
    theirs = outputs(plain, *inputs)["dweight"]
    exact = outputs(plain, inputs[0].double(), inputs[1].double(), *inputs[2:])["dweight"]
    assert_accurate("main_grad", table.main_grad, 2 * theirs.float(), 2 * exact)


@pytest.mark.parametrize("options", [{}, {"grad_scale": 1.0}, {"grad_scale": torch.tensor(2.0)}])
def test_targets_in_host_memory_make_nobody_wait(options: dict[str, Any]) -> None:
    x, weight, targets = make(300, 2003, 128, torch.bfloat16, 0.6)
    hidden, table = (t.requires_grad_() for t in to_gpu(x, weight))
    upstream = torch.tensor(3.0, device="cuda")
    for mode in ("default", "error"):  # the first call allocates
        torch.cuda.set_sync_debug_mode(mode)
        try:
            loss = linear_cross_entropy(hidden, table, targets, **options)
            got = torch.autograd.grad(loss, (hidden, table), upstream)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    inputs = *to_gpu(x, weight, targets), upstream
    theirs = outputs(plain, *inputs)
    exact = outputs(plain, inputs[0].double(), inputs[1].double(), *inputs[2:])
    for name, value in zip(("dhidden", "dweight"), got, strict=True):
        assert_accurate(name, value, theirs[name], exact[name])


def test_a_grad_scaler_finds_finite_gradients_of_scale_1() -> None:
    """Its first scale is no float16."""
    x, weight, targets = to_gpu(*make(300, 2003, 128, torch.float16, 0.6))
    got = outputs(
        linear_cross_entropy,
        x,
        weight,
        targets,
        torch.tensor(65536.0, device="cuda"),
        grad_scale=1.0,
    )
    exact = outputs(plain, x.double(), weight.double(), targets, torch.tensor(1.0, device="cuda"))
    for name in ("dhidden", "dweight"):
        assert got[name].isfinite().all(), name
        error = (got[name].double() / 65536 - exact[name]).abs().max()
        assert error <= 2.0**-10 * exact[name].abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_the_kernel_has_the_results_of_the_cpu(dtype: torch.dtype) -> None:
    """Statistics of columns in two calls and the gradient: a few roundings of float32 apart."""
    logits, targets = 3 * torch.randn(9, 30_011), torch.randint(0, 30_011, (9,))
    logits[4, 7] = torch.nan
    results = []
    for device in ("cpu", "cuda"):
        x, labels = logits.to(device, dtype, copy=True), targets.to(device)
        stats = torch.zeros(4, 9, device=device)
        stats[0] = torch.finfo(torch.float32).min
        chunk = labels, stats, 0, 30_011, 0.1, 1e-2
        for block in (slice(0, 10_001), slice(10_001, 30_011)):
            op._cross_entropy(x[:, block].contiguous(), block, None, True, *chunk)
        scale = torch.linspace(0.5, 2, 9, device=device)
        op._cross_entropy(x, slice(0, 30_011), scale, False, *chunk)
        stats[3] /= 30_011 * 3  # a sum of logits of both signs
        results.append((stats.cpu(), x.cpu().float()))
    unit = max(torch.finfo(dtype).eps, 4e-6)
    for a, b, tolerance in zip(*results, (4e-6, unit), strict=True):
        torch.testing.assert_close(b, a, rtol=tolerance, atol=1e-6, equal_nan=True)


def test_targets_out_of_range() -> None:
    x, weight, targets = to_gpu(*make(9, 13, 8, torch.bfloat16))
    targets[2], targets[6] = IGNORE, 13
    with pytest.raises(ValueError, match=r"targets\[6\] is 13; it must be 0 to 12"):
        linear_cross_entropy(x, weight, targets)

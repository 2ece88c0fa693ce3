"""The product of many experts against one expert after another in float64."""

from __future__ import annotations

import pytest
import torch

from vlmtrain.models.common.experts import _Product

COUNTS = [3, 0, 5, 1]  # an expert that no row has chosen


@pytest.mark.parametrize("learns", ["main_grad", "grad", "nothing"])
def test_product(learns: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(COUNTS), 7, generator=generator, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(len(COUNTS), 6, 7, generator=generator))
    grad = torch.randn(sum(COUNTS), 6, generator=generator)
    before = torch.randn(weight.shape, generator=generator)
    weight.requires_grad_(learns != "nothing")
    if learns == "main_grad":
        weight.main_grad = before.clone()  # type: ignore[attr-defined]
    y = _Product.apply(x, weight, COUNTS)
    kept = y.grad_fn.saved_tensors
    assert (kept[0] is None) == (learns == "nothing")  # the input is kept for the weight alone
    y.backward(grad)

    x64, w64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    rows = x64.split(COUNTS)
    want = torch.cat([r @ w.t() for r, w in zip(rows, w64, strict=True)])
    want.backward(grad.double())
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(y.double(), want, **close)
    torch.testing.assert_close(x.grad.double(), x64.grad, **close)
    if learns == "main_grad":
        added = weight.main_grad - before  # type: ignore[attr-defined]
        torch.testing.assert_close(added.double(), w64.grad, **close)
        assert weight.grad.is_sparse and weight.grad._nnz() == 0  # what Megatron's hook adds
    elif learns == "grad":
        torch.testing.assert_close(weight.grad.double(), w64.grad, **close)
        assert not weight.grad[1].any()

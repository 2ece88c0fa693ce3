"""Linears of a tensor-parallel group of one: product, bias and gradients against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.numeric import LARGE, assert_accurate, assert_bitwise, product_noise, sum_noise
from vlmtrain.models import weight_gradients
from vlmtrain.models.common import linears
from vlmtrain.models.common.linears import (
    PlainLinear,
    WholeColumnParallelLinear,
    WholeRowParallelLinear,
)


@pytest.mark.parametrize("kind", [WholeColumnParallelLinear, WholeRowParallelLinear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", ["none", "added", "handed on"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("shape", ["small", "large", "padded"])
@pytest.mark.parametrize("skips", [False, True])
def test_product_and_gradients(
    kind: type,
    dtype: torch.dtype,
    bias: str,
    frozen: bool,
    shape: str,
    skips: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """skips: no reduction waits behind autograd, so it hears of neither weight nor bias. padded:
    rows as on a GPU, where they are no whole units of 16 bytes."""
    if shape == "padded":
        monkeypatch.setattr(linears, "row_padding", lambda matrix: 8 - matrix.shape[-1] % 8)
    weight_gradients.enable()
    ours = round(LARGE ** (1 / 3)) + 1
    sizes = (ours, ours + 100) if shape == "large" else (1, 60)
    tokens, inputs, outputs = torch.randint(*sizes, (3,)).tolist()
    linear = kind.__new__(kind)
    torch.nn.Module.__init__(linear)
    linear.weight = torch.nn.Parameter(torch.randn(outputs, inputs).to(dtype))
    linear.weight.requires_grad_(not frozen)
    linear.bias = None if bias == "none" else torch.nn.Parameter(torch.randn(outputs).to(dtype))
    linear.skip_bias_add = bias == "handed on"
    before = torch.randn(outputs, inputs)
    linear.weight.main_grad = before.clone()
    linear.weight.skips_autograd = skips
    if linear.bias is not None:
        linear.bias.main_grad = torch.zeros(outputs)
        linear.bias.skips_autograd = skips
    x = torch.randn(tokens, 1, inputs).to(dtype).requires_grad_()
    upstream = torch.randn(tokens, 1, outputs).to(dtype)

    out, handed_on = linear(x)
    out.backward(upstream)
    assert out.shape == upstream.shape
    assert handed_on is (linear.bias if linear.skip_bias_add else None)

    def plain(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        leaves = [x.detach().to(dtype), linear.weight.detach().to(dtype)]
        leaves += [linear.bias.detach().to(dtype)] if bias == "added" else []
        leaves = [leaf.requires_grad_() for leaf in leaves]
        want = F.linear(*leaves)
        want.backward(upstream.to(dtype))
        found = {"out": want.detach(), "dx": leaves[0].grad}
        if bias == "added":
            found["dbias"] = leaves[2].grad
        if not frozen:
            found["main_grad"] = before + leaves[1].grad.float()
            if dtype == torch.float64:
                found["main_grad"] = before + leaves[1].grad
        return found

    got = {"out": out.detach(), "dx": x.grad, "main_grad": linear.weight.main_grad}
    if bias == "added":
        got["dbias"] = linear.bias.main_grad.to(dtype) if skips else linear.bias.grad
        assert (linear.bias.grad is None) == skips
    stock, exact = plain(dtype), plain(torch.float64)
    rows, columns, weight = x.detach()[:, 0], upstream[:, 0], linear.weight.detach()
    noise = {
        "out": product_noise(rows, weight.t())[:, None],
        "dx": product_noise(columns, weight)[:, None],
        "main_grad": product_noise(columns.t(), rows),
        "dbias": sum_noise(columns.double().square().sum(0), tokens),
    }
    for name, want in exact.items():
        assert_accurate(name, got[name], stock[name], want, noise[name])
    if frozen:
        assert torch.equal(linear.weight.main_grad, before) and linear.weight.grad is None
    elif skips:
        assert linear.weight.grad is None
        assert not hasattr(linear.weight, "grad_added_to_main_grad")
    else:
        assert linear.weight.grad_added_to_main_grad


def test_an_evaluation_has_the_product_of_training() -> None:
    """Without Megatron's buffers, too: no sum is in another order."""
    linear: Any = PlainLinear(1176, 1280, dtype=torch.bfloat16)
    x = torch.randn(300, 1176).bfloat16()
    with torch.no_grad():
        evaluated = linear(x)
    for parameter in linear.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    assert_bitwise("output", evaluated, linear(x).detach())

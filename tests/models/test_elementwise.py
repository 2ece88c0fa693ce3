"""The CPU's element-wise layer parts against float64, beside plain torch in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.numeric import assert_accurate, sum_noise
from vlmtrain.models.common import elementwise

Op = Callable[..., Tensor]


def compare(
    ours: Op,
    plain: Op,
    inputs: list[Tensor | None],
    *,
    consumes_first: bool,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Output and gradients of ours and of plain torch (both in dtype) against plain in float64."""
    inputs = [None if x is None else x.to(dtype) for x in inputs]

    def run(op: Op, dtype: torch.dtype, copy: bool) -> list[Tensor]:
        leaves = [
            None if x is None else x.detach().to(dtype).clone().requires_grad_() for x in inputs
        ]
        args = list(leaves)
        if copy:  # the op may write over it
            assert args[0] is not None
            args[0] = args[0] * 1.0
        out = op(*args)
        out.backward(upstream.to(dtype))
        return [out.detach(), *(x.grad for x in leaves if x is not None)]

    upstream = torch.randn(plain(*inputs).shape).to(dtype)
    exact = run(plain, torch.float64, False)
    stock = run(plain, dtype, False)
    results = run(ours, dtype, consumes_first)
    for got, peer, want in zip(results, stock, exact, strict=True):
        assert_accurate("result", got, peer, want)


def sizes() -> tuple[int, int]:
    """Tokens and width. Each result has 64 elements or more: over fewer, plain torch's error, from
    which the tolerance is derived, is luck."""
    tokens, width = torch.randint(1, 70, ()), torch.randint(64, 160, ())
    return int(tokens), int(width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype) -> None:
    tokens, width = sizes()
    x = torch.randn(tokens, 1, width) * 10.0 ** torch.randint(-2, 3, ())

    def norm(kind: type[torch.nn.RMSNorm]) -> Op:
        module = kind(width, eps=1e-6)

        def apply(x: Tensor, weight: Tensor) -> Tensor:
            return torch.func.functional_call(module, {"weight": weight}, (x,))

        return apply

    compare(
        norm(elementwise.RMSNorm),
        norm(torch.nn.RMSNorm),
        [x, torch.randn(width)],
        consumes_first=False,
        dtype=dtype,
    )


@pytest.mark.parametrize("bias", [False, True])
def test_swiglu(bias: bool) -> None:
    tokens, width = sizes()

    def plain(x: Tensor, b: Tensor | None) -> Tensor:
        gate, up = (x if b is None else x + b).chunk(2, -1)
        return F.silu(gate) * up

    compare(
        elementwise.swiglu,
        plain,
        [torch.randn(tokens, 1, 2 * width) * 3, torch.randn(2 * width) if bias else None],
        consumes_first=True,
    )


@pytest.mark.parametrize("bias", [False, True])
def test_quick_gelu(bias: bool) -> None:
    tokens, width = sizes()

    def plain(x: Tensor, b: Tensor | None) -> Tensor:
        x = x if b is None else x + b
        return x * torch.sigmoid(1.702 * x)

    compare(
        elementwise.quick_gelu,
        plain,
        [torch.randn(tokens, 1, width) * 3, torch.randn(width) if bias else None],
        consumes_first=True,
    )


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("name", ["swiglu", "quick_gelu", "gelu_tanh", "bias_dropout_add"])
def test_a_bias_past_autograd(name: str, skips: bool) -> None:
    """Its gradient is what autograd would have had, added to main_grad."""
    bias, start = torch.nn.Parameter(torch.randn(12)), torch.randn(12)
    bias.main_grad, bias.skips_autograd = start.clone(), skips  # type: ignore[attr-defined]
    x, residual = (t.requires_grad_() for t in torch.randn(2, 30, 1, 12))
    if name == "bias_dropout_add":
        out = elementwise.bias_dropout_add(True, False)((x * 1.0, bias), residual, 0.0)
    else:
        out = getattr(elementwise, name)(x * 1.0, bias)
    out.sin().sum().backward()
    assert x.grad is not None and (bias.grad is None) == skips
    terms = x.grad.double()  # every op adds the bias to x first
    noise = sum_noise(terms.square().sum((0, 1)), len(terms))
    got = bias.main_grad if bias.grad is None else start + bias.grad  # type: ignore[attr-defined]
    exact = start.double() + terms.sum((0, 1))
    assert_accurate("bias", got, start + x.grad.sum((0, 1)), exact, noise)
    frozen = torch.ones(12)
    frozen.skips_autograd = skips  # type: ignore[attr-defined]
    assert elementwise.past_autograd(x, frozen) is None
    assert elementwise.past_autograd(x.detach(), bias) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("bias", [False, True])
def test_sums_and_their_norms(dtype: torch.dtype, kind: str, bias: bool) -> None:
    """A layer's first norm, and what attention returns added to the layer's input, and its norm."""
    tokens, width = sizes()
    add = elementwise.bias_dropout_add(True, False)

    def ours(x: Tensor, out: Tensor, weight: Tensor, b: Tensor | None = None) -> Tensor:
        norm = (
            elementwise.RMSNorm(1, 1e-6) if kind == "RMSNorm" else torch.nn.LayerNorm(1, bias=False)
        )
        norm.normalized_shape = (width,)
        del norm.weight
        norm.weight = weight  # type: ignore[assignment]
        x, first = elementwise.with_norm(norm, x)
        x, second = elementwise.with_norm(norm, elementwise.Sum(add, (out * 1.0, b), x, 0.0))
        return torch.cat([x, first, second], -1)

    def plain(x: Tensor, out: Tensor, weight: Tensor, b: Tensor | None = None) -> Tensor:
        def norm(x: Tensor) -> Tensor:
            if kind == "RMSNorm":
                return F.rms_norm(x, (width,), weight, 1e-6)
            return F.layer_norm(x, (width,), weight)

        first = norm(x)
        x = x + (out if b is None else out + b)
        return torch.cat([x, first, norm(x)], -1)

    inputs: list[Tensor | None] = [*torch.randn(2, tokens, 1, width), torch.randn(width)]
    inputs += [torch.randn(width)] if bias else []
    compare(ours, plain, inputs, consumes_first=False, dtype=dtype)


@pytest.mark.parametrize("bias", [False, True])
def test_bias_dropout_add(bias: bool) -> None:
    tokens, width = sizes()
    add = elementwise.bias_dropout_add(True, False)

    def ours(x: Tensor, residual: Tensor, b: Tensor | None = None) -> Tensor:
        return add((x, b), residual, 0.0)

    def plain(x: Tensor, residual: Tensor, b: Tensor | None = None) -> Tensor:
        return x + residual if b is None else x + b + residual

    inputs: list[Tensor | None] = [torch.randn(tokens, 1, width), torch.randn(tokens, 1, width)]
    compare(ours, plain, [*inputs, torch.randn(width)] if bias else inputs, consumes_first=True)


def test_dropout_is_megatrons() -> None:
    x, residual = torch.ones(64, 1, 64), torch.zeros(64, 1, 64)
    out = elementwise.bias_dropout_add(True, False)((x, None), residual, 0.5)
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert x.eq(1).all()  # not written over

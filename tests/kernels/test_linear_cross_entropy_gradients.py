"""linear_cross_entropy's gradients where the forward pass computes them: under a loss scale, in
checkpoints, in a graph that is kept, with another default dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

from tests.kernels.numeric import assert_bitwise
from vlmkernels import _native, linear_cross_entropy

SCALE = 65536.0  # a GradScaler's first


def float16_step() -> tuple[Tensor, Tensor, Tensor]:
    """Rows whose gradients for a loss of 1 are below float16's smallest number."""
    hidden = torch.randn(512, 64).half().requires_grad_()
    weight = (torch.randn(8000, 64) * 0.02).half().requires_grad_()
    return hidden, weight, torch.randint(0, 250, (512,))


@pytest.mark.parametrize("grad_scale", [None, 1.0])
def test_float16_under_a_loss_scale(grad_scale: float | None) -> None:
    hidden, weight, targets = float16_step()
    loss = linear_cross_entropy(hidden, weight, targets, grad_scale=grad_scale)
    got = torch.autograd.grad(loss * SCALE, (hidden, weight))
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = torch.autograd.grad(F.cross_entropy(F.linear(*leaves), targets) * SCALE, leaves)
    stock = torch.autograd.grad(
        F.cross_entropy(F.linear(hidden, weight).float(), targets) * SCALE, (hidden, weight)
    )
    for ours, theirs, want in zip(got, stock, exact, strict=True):
        assert (ours.double() - want).norm() <= 2 * (theirs.double() - want).norm()


def accumulated(run: Callable[[], None], weight: Any) -> Tensor:
    """What `run` adds to weight.main_grad."""
    main_grad: Tensor = torch.zeros(weight.shape)
    weight.main_grad = main_grad
    run()
    return main_grad


@pytest.mark.parametrize("grad_scale", [None, 1.0])
def test_main_grad_gets_a_gradient_once(grad_scale: float | None) -> None:
    """Whoever runs the forward pass again: both kinds of checkpoint, and torch's hooks that keep
    tensors elsewhere."""
    hidden = torch.randn(6, 8, requires_grad=True)
    weight, targets = torch.nn.Parameter(torch.randn(10, 8)), torch.arange(6)

    def loss(x: Tensor) -> Tensor:
        return linear_cross_entropy(
            x, weight, targets, weight_grad="main_grad", grad_scale=grad_scale
        )

    def recomputed(reentrant: bool) -> None:
        checkpoint(loss, hidden, use_reentrant=reentrant).backward()

    def saved_elsewhere() -> None:
        with torch.autograd.graph.save_on_cpu():
            result = loss(hidden)
        result.backward()

    want = accumulated(lambda: loss(hidden).backward(), weight)
    for run in (partial(recomputed, True), partial(recomputed, False), saved_elsewhere):
        torch.testing.assert_close(accumulated(run, weight), want)


@pytest.mark.parametrize("grad_scale", [None, 1.0])
def test_main_grad_gets_the_gradient_of_each_backward(grad_scale: float | None) -> None:
    hidden = torch.randn(6, 8, requires_grad=True)
    weight, targets = torch.nn.Parameter(torch.randn(10, 8)), torch.arange(6)

    def times(count: int) -> Tensor:
        def run() -> None:
            loss = linear_cross_entropy(
                hidden, weight, targets, weight_grad="main_grad", grad_scale=grad_scale
            )
            for _ in range(count):
                loss.backward(retain_graph=True)

        return accumulated(run, weight)

    torch.testing.assert_close(times(3), 3 * times(1))


def test_hooks_on_saved_tensors_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch 2.6's way too."""
    for _ in range(2):
        assert not _native.saved_tensor_hooks()
        with torch.autograd.graph.save_on_cpu():
            assert _native.saved_tensor_hooks()
        monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks", raising=False)


@pytest.mark.parametrize("grad_scale", [None, 1 / 3])
def test_the_default_dtype_changes_nothing(grad_scale: float | None) -> None:
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(10, 8, requires_grad=True)
    targets = torch.tensor([1, 2, 3, -100, 5, 9])
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            loss = linear_cross_entropy(hidden, weight, targets, grad_scale=grad_scale)
            results.append(torch.autograd.grad(loss, (hidden, weight)))
        finally:
            torch.set_default_dtype(torch.float32)
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert_bitwise("gradient", got, want)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_of_a_kept_graph_are_their_own(reduction: Any) -> None:
    """What is written into those of one backward is not in the next one's."""
    x, weight = (torch.randn(n, 8, requires_grad=True) for n in (5, 11))
    targets = torch.tensor([1, 10, -100, 0, 3])
    loss = linear_cross_entropy(x, weight, targets, reduction=reduction)
    want = torch.autograd.grad(
        F.cross_entropy(x @ weight.t(), targets, reduction=reduction), (x, weight)
    )
    for last in (False, False, True):
        got = torch.autograd.grad(loss, (x, weight), retain_graph=not last)
        torch.testing.assert_close(got, want)
        for gradient in got:
            gradient.data.mul_(2)


@pytest.mark.parametrize("scale", [0.5, 0.25])
def test_grad_scale_under_compiled_autograd(scale: float) -> None:
    """main_grad was added to in the forward pass, with grad_scale: another one is an error."""
    hidden = torch.randn(24, 32, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(50, 32))
    weight.main_grad = torch.zeros_like(weight)
    targets = torch.randint(0, 50, (24,))
    plain = weight.detach().clone().requires_grad_()
    linear_cross_entropy(hidden.detach(), plain, targets).mul(0.5).backward()
    loss = linear_cross_entropy(hidden, weight, targets, weight_grad="main_grad", grad_scale=0.5)
    with compiled_autograd._enable(partial(torch.compile, backend="eager")):
        if scale == 0.5:
            loss.mul(scale).backward()
            torch.testing.assert_close(weight.main_grad, plain.grad)
        else:
            with pytest.raises(RuntimeError, match="the gradient of the loss is not grad_scale"):
                loss.mul(scale).backward()
    torch._dynamo.reset()

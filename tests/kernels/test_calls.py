"""How a call reaches its kernel: past torch's dispatcher, unless somebody looks on there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from vlmkernels import (
    VisionLayout,
    varlen_attention,
    vision_attention,
    visual_embedding,
    visual_index,
)

CU_SEQLENS = torch.tensor([0, 5, 12], dtype=torch.int32)
LAYOUT = VisionLayout.from_grid([[1, 4, 4]], window_size=28)
IDS = torch.tensor([1, 7, 7, 2])
INDEX = visual_index(IDS, 7)

OPS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "varlen_attention": (lambda x: varlen_attention(x, x, x, CU_SEQLENS), (12, 2, 8)),
    "vision_attention": (lambda x: vision_attention(x, LAYOUT, window=True), (16, 3, 2, 4)),
    "visual_embedding": (lambda x: visual_embedding(IDS, x, torch.ones(2, 4), INDEX), (9, 4)),
}


class Seen(TorchDispatchMode):
    """The names of the ops that a mode of torch's sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(op.name())
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", OPS)
def test_a_mode_sees_forward_and_backward(name: str) -> None:
    call, shape = OPS[name]
    x = torch.randn(shape, requires_grad=True)
    with Seen() as seen:
        call(x).sum().backward()
    ours = [op for op in seen.names if op.startswith("vlmkernels::")]
    assert ours[0] == f"vlmkernels::{name}"
    assert any(op.startswith(f"vlmkernels::{name}_") for op in ours[1:])


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_a_profiler_sees_a_call(name: str, gradients: bool) -> None:
    call, shape = OPS[name]
    x = torch.randn(shape, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, torch.set_grad_enabled(gradients):
        call(x)
    assert name in {event.key for event in profiler.key_averages()}


@pytest.mark.parametrize("name", OPS)
def test_the_result_is_the_same_whoever_looks_on(name: str) -> None:
    call, shape = OPS[name]
    x = torch.randn(shape)
    wanted = call(x.clone().requires_grad_())
    assert wanted.grad_fn is not None
    results = {"no input learns": call(x)}
    with torch.no_grad():
        results["no_grad"] = call(x.clone().requires_grad_())
    with torch.inference_mode():
        results["inference mode"] = call(x)
    with Seen():
        results["a mode"] = call(x)
    for way, result in results.items():
        assert not result.requires_grad and result.grad_fn is None, way
        assert torch.equal(result, wanted), way


def functions_called(call: Callable[[], object]) -> set[str]:
    """The names of the Python functions that run."""
    names = set()
    sys.setprofile(lambda frame, event, _: names.add(frame.f_code.co_name))
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


def test_only_autograd_makes_a_context() -> None:
    q = torch.randn(12, 2, 8)
    learning = q.clone().requires_grad_()
    assert "setup_context" in functions_called(lambda: varlen_attention(learning, q, q, CU_SEQLENS))
    called = functions_called(lambda: varlen_attention(q, q, q, CU_SEQLENS))
    assert "_varlen_forward" in called and "setup_context" not in called


@pytest.mark.parametrize("name", ["varlen_attention", "vision_attention"])
def test_no_zeros_stand_for_the_gradient_of_statistics(name: str) -> None:
    """They would be as large as the probabilities that are kept."""
    call, shape = OPS[name]
    x = torch.randn(shape, requires_grad=True)
    out = call(x)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.autograd.grad(out, x, torch.ones_like(out))
    with Seen() as seen:
        out = call(x)
        torch.autograd.grad(out, x, torch.ones_like(out))
    for names in ({event.key for event in profiler.key_averages()}, seen.names):
        assert any("attention_backward" in each for each in names)
        assert not any("zero" in each for each in names)


class Ends(torch.autograd.Function):
    """Gives its input no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize("name", OPS)
def test_a_result_without_a_gradient_gives_none(name: str) -> None:
    call, shape = OPS[name]
    x = torch.randn(shape, requires_grad=True)
    (dx,) = torch.autograd.grad(Ends.apply(call(x)).sum(), x, allow_unused=True)
    assert dx is None or not dx.any()

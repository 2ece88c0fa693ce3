"""What autograd, inference mode and tracers may ask for that no kernel gives: an error, or the
right result, and never a wrong one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vlmkernels import (
    VisionLayout,
    linear_cross_entropy,
    scatter_visual,
    varlen_attention,
    vision_attention,
    visual_embedding,
    visual_index,
)

BORDERS = torch.tensor([0, 3, 8], dtype=torch.int32)
IDS = torch.tensor([1, 7, 7, 2])
INDEX = visual_index(IDS, 7)


def layout() -> VisionLayout:
    return VisionLayout.from_grid([[1, 4, 4]], window_size=28)


TWICE: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "varlen_attention": (lambda x: varlen_attention(x, x, x, BORDERS), (8, 2, 4)),
    "vision_attention": (lambda x: vision_attention(x, layout(), window=True), (16, 3, 2, 4)),
    "table": (lambda x: visual_embedding(IDS, x, torch.ones(2, 4), INDEX), (9, 4)),
    "sparse table": (
        lambda x: visual_embedding(IDS, x, torch.ones(2, 4), INDEX, weight_grad="sparse"),
        (9, 4),
    ),
    "visual rows": (lambda x: visual_embedding(IDS, torch.ones(9, 4), x, INDEX), (2, 4)),
    "last layer": (
        lambda x: linear_cross_entropy(x, torch.ones(9, 4), IDS, reduction="none"),
        (4, 4),
    ),
    "scattered rows": (lambda x: scatter_visual(torch.ones(4, 4), x, INDEX), (2, 4)),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_second_derivative_is_refused(name: str):
    function, shape = TWICE[name]
    x = torch.randn(shape, requires_grad=True)
    (first,) = torch.autograd.grad(function(x).pow(3).sum(), x, create_graph=True)
    (plain,) = torch.autograd.grad(function(x).pow(3).sum(), x)
    assert torch.equal(first.to_dense(), plain.to_dense())
    penalty = first.to_dense().pow(2).sum() + x.sum()  # the second term has a derivative
    with pytest.raises(RuntimeError, match=r"vlmkernels.* has no derivative: .* once, not twice"):
        penalty.backward()


def test_a_layout_seen_in_inference_mode_can_be_trained_with():
    one, qkv = layout(), torch.randn(16, 3, 2, 4, requires_grad=True)
    with torch.inference_mode():
        seen = vision_attention(qkv, one, window=True)
        assert one.rotary_table(4) is one.rotary_table(4)
    out = vision_attention(qkv, one, window=True)
    out.sum().backward()
    assert torch.equal(out, seen) and qkv.grad is not None


def test_a_layout_seen_by_a_tracer_keeps_nothing_of_it():
    from torch._subclasses.fake_tensor import FakeTensorMode

    one = layout()
    with FakeTensorMode(allow_non_fake_inputs=True):
        vision_attention(torch.randn(16, 3, 2, 4), one, window=True)
    qkv = torch.randn(16, 3, 2, 4)
    out = vision_attention(qkv, one, window=True)
    assert type(out) is Tensor
    assert torch.equal(out, vision_attention(qkv, layout(), window=True))

"""What autograd, inference mode and tracers may ask for that no kernel gives: an error, or the
right result, and never a wrong one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.tensor import distribute_tensor

from vlmkernels import (
    VisionLayout,
    add_visual_,
    linear_cross_entropy,
    patchify,
    resize,
    scatter_visual,
    scatter_visual_,
    varlen_attention,
    vision_attention,
    visual_embedding,
    visual_index,
)
from vlmkernels.layer import add_rms_norm_, rms_norm, swiglu_
from vlmkernels.product import product
from vlmkernels.rotary import apply_rotary

BORDERS = torch.tensor([0, 3, 8], dtype=torch.int32)
IDS = torch.tensor([1, 7, 7, 2])
INDEX = visual_index(IDS, 7)


def layout() -> VisionLayout:
    return VisionLayout.from_grid([[1, 4, 4]], window_size=28)


LAYOUT = layout()

TWICE: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "varlen_attention": (lambda x: varlen_attention(x, x, x, BORDERS), (8, 2, 4)),
    "vision_attention": (lambda x: vision_attention(x, LAYOUT, window=True), (16, 3, 2, 4)),
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
    "added rows": (lambda x: add_visual_(torch.ones(4, 4), x, INDEX), (2, 4)),
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


#: Ours; of torch.func; torch's own, of an autograd.Function.
FORWARD = "no forward-mode derivative|by torch.func|must implement the jvp function"


def test_forward_mode_is_refused():
    """torch's own answer would be tangents of zero."""
    for name, (function, shape) in TWICE.items():
        x, tangent = torch.randn(2, *shape)
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match=FORWARD):
            function(forward_ad.make_dual(x, tangent))
        with pytest.raises(RuntimeError, match=FORWARD):
            torch.func.jvp(function, (x,), (tangent,))
        with forward_ad.dual_level():  # tangents of other tensors are none of ours
            other = forward_ad.make_dual(tangent, x)
            assert torch.equal(function(x), function(x + 0 * x)), name
            assert forward_ad.unpack_dual(other).tangent is not None
    words, visual = torch.randn(4, 4), torch.randn(2, 4)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=FORWARD):
        scatter_visual_(words, forward_ad.make_dual(visual, visual), INDEX)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=FORWARD):
        dual = forward_ad.make_dual(visual, visual)
        torch.ops.vlmkernels.scatter_visual_(words, dual, INDEX, 0, False)


@pytest.mark.parametrize("name", TWICE)
def test_torch_func_is_refused_in_one_sentence(name: str):
    function, shape = TWICE[name]
    x = torch.randn(shape)
    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(RuntimeError, match=r"vlmkernels.* by torch.func .*use torch.auto"):
            transform(lambda x: function(x).sum())(x)
    many = torch.stack([x, -x])
    # Without a derivative the others map.
    if name in ("sparse table", "last layer", "added rows"):
        with pytest.raises(RuntimeError, match="can't be mapped by torch.func.vmap; use a loop"):
            torch.func.vmap(function)(many)
    else:
        assert torch.equal(torch.func.vmap(function)(many)[1], function(-x))


def negated(x: Tensor) -> Tensor:
    """Equal to x; in memory lies -x, as torch's imag of a conjugate has it."""
    view = torch._neg_view(-x)
    assert view.is_neg() and torch.equal(view, x)
    return view


@pytest.mark.parametrize("name", [*TWICE, "rotary", "added rows in place", "scattered in place"])
def test_negated_views_count_with_their_sign(name: str):
    angles = torch.rand(8, 2)
    more: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
        "rotary": (lambda x: apply_rotary(x, angles.cos(), angles.sin()), (8, 2, 4)),
        "added rows in place": (lambda x: add_visual_(torch.ones(4, 4), x, INDEX), (2, 4)),
        "scattered in place": (lambda x: scatter_visual_(torch.ones(4, 4), x, INDEX), (2, 4)),
    }
    function, shape = (TWICE | more)[name]
    x = torch.randn(shape)
    leaves = [x.clone().requires_grad_(), negated(x).requires_grad_()]
    out, same = map(function, leaves)
    assert torch.equal(out, same)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, leaves[0], grad)[0].to_dense()
    for result, leaf, dy in (
        (function(leaves[0]), leaves[0], negated(grad)),
        (same, leaves[1], grad),
    ):
        assert torch.equal(torch.autograd.grad(result, leaf, dy)[0].to_dense(), expected)


def test_layers_take_negated_gradients_and_refuse_what_they_would_write():
    x, weight = torch.randn(5, 8), torch.randn(8)
    calls: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "rms_norm": lambda x, _, w: rms_norm(x, w, 1e-6),
        "add_rms_norm_": lambda x, r, w: add_rms_norm_(x.clone(), r, w, 1e-6)[1],
        "swiglu_": lambda x, _, w: swiglu_(x.clone(), w),
    }
    for name, call in calls.items():
        leaf = x.clone().requires_grad_()
        dy = torch.randn_like(call(leaf, x, weight))
        grads = [
            torch.autograd.grad(call(leaf, x, weight), leaf, grad)[0] for grad in (dy, negated(dy))
        ]
        assert torch.equal(*grads), name
    assert torch.equal(rms_norm(negated(x), negated(weight), 1e-6), rms_norm(x, weight, 1e-6))
    sums = (add_rms_norm_(x.clone(), r, weight, 1e-6)[1] for r in (x, negated(x)))
    assert torch.equal(*sums)
    gates = (swiglu_(x.clone(), bias) for bias in (weight, negated(weight)))
    assert torch.equal(*gates)
    for function in (
        lambda: add_rms_norm_(negated(x), None, weight, 1e-6),
        lambda: swiglu_(negated(x), None),
    ):
        with pytest.raises(
            ValueError, match=r"a tensor is .*a negated view \(pass its resolve_neg"
        ):
            function()
    for write in (add_visual_, scatter_visual_):
        with pytest.raises(ValueError, match="is a negated view, so it can't be written in place"):
            write(negated(torch.ones(4, 4)), torch.ones(2, 4), INDEX)


def freed(x: Tensor) -> Tensor:
    """Without memory, as those that FSDP has freed."""
    x.untyped_storage().resize_(0)
    return x


def test_tensors_without_memory_are_refused():
    """Kernels are given addresses."""
    x, weight = torch.randn(8, 2, 4), torch.randn(4)
    frames = torch.zeros(1, 28, 28, 3, dtype=torch.uint8)
    seen, nothing = x.clone().requires_grad_(), torch._efficientzerotensor(x.shape)
    out = varlen_attention(seen, x, x, BORDERS)
    calls: dict[str, Callable[[], object]] = {
        "q": lambda: varlen_attention(freed(x.clone()), x, x, BORDERS),
        "cu_seqlens": lambda: varlen_attention(x, x, x, freed(BORDERS.clone())),
        "dout": lambda: torch.autograd.grad(out, seen, freed(x.clone())),
        "torch's zeros": lambda: varlen_attention(x, nothing, x, BORDERS),
        "a row": lambda: rms_norm(freed(x.clone()), weight, 1e-6),
        "a weight": lambda: rms_norm(x, freed(weight.clone()), 1e-6),
        "a gate": lambda: swiglu_(freed(x.clone()), None),
        "table": lambda: visual_embedding(IDS, freed(torch.ones(9, 4)), torch.ones(2, 4), INDEX),
        "visual": lambda: add_visual_(torch.ones(4, 4), freed(torch.ones(2, 4)), INDEX),
        "patches": lambda: patchify(freed(frames.clone())),
        "frames": lambda: resize(freed(frames.clone()), 7, 7),
        "a factor": lambda: product(freed(torch.ones(64, 64)), torch.ones(64, 64)),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=r"a tensor, .* has no memory: its storage was freed"):
            call()
            pytest.fail(name)


def test_a_dtensor_is_named_as_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = distribute_tensor(torch.ones(4, 8), dist.init_device_mesh("cpu", (1,)))
        for call in (lambda: rms_norm(x, torch.ones(8), 1e-6), lambda: swiglu_(x.clone(), None)):
            with pytest.raises(ValueError, match=r"it is a DTensor; pass its to_local\(\)"):
                call()
    finally:
        dist.destroy_process_group()


def test_layers_refuse_what_was_exchanged_before_the_backward_pass():
    """`.data =` counts as no change: shapes say so, or nothing."""
    for of in ("x", "weight"):
        x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(8)
        out = rms_norm(x, weight, 1e-6)
        {"x": x, "weight": weight}[of].data = torch.empty(1)
        with pytest.raises(ValueError, match="their data was exchanged after the forward pass"):
            out.backward(torch.ones(6, 8))
    for shape in ((2, 8), (6, 80)):
        x = torch.randn(6, 8, requires_grad=True) * 1
        out = swiglu_(x)
        x.data = torch.empty(shape)
        with pytest.raises(ValueError, match="their data was exchanged after the forward pass"):
            out.backward(torch.ones(6, 4))


def _written() -> dict[str, tuple[Tensor, Callable[[Tensor], object]]]:
    frames = torch.zeros(1, 28, 28, 3, dtype=torch.uint8)
    rows, ops = torch.randn(2, 4), torch.ops.vlmkernels
    return {
        "patchify": (torch.empty(4, 1176), lambda out: patchify(frames, out=out)),
        "resize": (
            torch.empty(1, 7, 7, 3, dtype=torch.uint8),
            lambda out: resize(frames, 7, 7, out=out),
        ),
        "scatter_visual_": (torch.ones(4, 4), lambda x: scatter_visual_(x, rows, INDEX)),
        "add_visual_": (torch.ones(4, 4), lambda x: add_visual_(x, rows, INDEX)),
        "its op": (torch.ones(4, 4), lambda x: ops.scatter_visual_(x, rows, INDEX, 0, False)),
        "main_grad": (
            torch.ones(9, 4),
            lambda x: ops.visual_embedding_weight_grad_into(x, x[:4], IDS, INDEX, 0, 0, -1),
        ),
    }


@pytest.mark.parametrize("name", _written())
def test_autograd_sees_what_was_written(name: str):
    """A tensor that autograd has saved and an op has written: an error in backward, no wrong
    gradient. In inference mode there is nothing to count."""
    out, write = _written()[name]
    version = out._version
    write(out)
    assert out._version > version
    if out.is_floating_point():
        factor = torch.ones_like(out, requires_grad=True)
        product = factor * out
        write(out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
    with torch.inference_mode():
        write(out.clone())


def test_what_is_no_tensor_is_a_type_error():
    x, ones = torch.randn(8, 2, 4), torch.ones(9, 4)
    calls: dict[str, Callable[[object], object]] = {
        "q": lambda q: varlen_attention(q, x, x, BORDERS),  # type: ignore[arg-type]
        "k": lambda k: varlen_attention(x, k, x, BORDERS),  # type: ignore[arg-type]
        "cu_seqlens": lambda cu: varlen_attention(x, x, x, cu),  # type: ignore[arg-type]
        "qkv": lambda qkv: vision_attention(qkv, layout(), window=True),  # type: ignore[arg-type]
        "input_ids": lambda ids: visual_embedding(ids, ones, None, INDEX),  # type: ignore[arg-type]
        "weight": lambda w: visual_embedding(IDS, w, None, INDEX),  # type: ignore[arg-type]
        "visual_index": lambda i: visual_embedding(IDS, ones, None, i),  # type: ignore[arg-type]
        "visual": lambda v: scatter_visual(ones[:4], v, INDEX),  # type: ignore[arg-type]
        "embeddings": lambda e: scatter_visual(e, ones[:2], INDEX),  # type: ignore[arg-type]
        "frames": lambda f: patchify(f),  # type: ignore[arg-type]
        "x": lambda x: apply_rotary(x, ones, ones),  # type: ignore[arg-type]
    }
    for name, call in calls.items():
        for value, kind in ((None, "NoneType"), (np.ones((4, 4)), "ndarray"), ([1.0], "list")):
            with pytest.raises(TypeError, match=rf"^{name} is a {kind}; it must be a torch"):
                call(value)
    with pytest.raises(TypeError, match="pass torch.from_numpy"):
        visual_index(IDS.numpy(), 7)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="layout is a NoneType; it must be a VisionLayout"):
        vision_attention(torch.randn(16, 3, 2, 4), None, window=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="grid_thw is None"):
        VisionLayout.from_grid(None)  # type: ignore[arg-type]
    assert visual_index(IDS, np.int64(7)).tolist() == [-1, 0, 1, -1]  # type: ignore[arg-type]


def test_a_layout_seen_in_inference_mode_can_be_trained_with():
    one, qkv = layout(), torch.randn(16, 3, 2, 4, requires_grad=True)
    with torch.inference_mode():
        seen = vision_attention(qkv, one, window=True)
        assert one.rotary_table(4) is one.rotary_table(4)
    out = vision_attention(qkv, one, window=True)
    out.sum().backward()
    assert torch.equal(out, seen) and qkv.grad is not None
    one = layout()
    with torch.inference_mode():
        torch.compile(vision_attention, backend="eager")(qkv, one, window=True)
    vision_attention(qkv, one, window=True).sum().backward()
    torch._dynamo.reset()


def test_batched_gradients_are_computed() -> None:
    """By torch's older vmap, whose tensors look like others."""
    rows, index = torch.randn(4, 8, requires_grad=True), torch.tensor([-1, 0, 1, -1]).int()
    out = scatter_visual(rows, torch.randn(2, 8), index)
    upstream = torch.randn(3, 4, 8)
    (got,) = torch.autograd.grad(out, rows, upstream, is_grads_batched=True)
    assert torch.equal(got, torch.where(index[:, None] >= 0, 0, upstream))


def test_layer_functions_name_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), pytest.raises(RuntimeError, match="not run under FakeTensorMode"):
        rms_norm(torch.ones(4, 8), torch.ones(8), 1e-6)


def test_a_layout_seen_by_a_tracer_keeps_nothing_of_it():
    from torch._subclasses.fake_tensor import FakeTensorMode

    one = layout()
    with FakeTensorMode(allow_non_fake_inputs=True):
        vision_attention(torch.randn(16, 3, 2, 4), one, window=True)
    qkv = torch.randn(16, 3, 2, 4)
    out = vision_attention(qkv, one, window=True)
    assert type(out) is Tensor
    assert torch.equal(out, vision_attention(qkv, layout(), window=True))

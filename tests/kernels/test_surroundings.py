"""The same results whatever surrounds a call: gradients switched on in inference mode, hooks that
keep what is saved in another dtype, tracers, batches of gradients; or an error, where torch has
one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import Parameter

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
from vlmkernels.rotary import apply_rotary, apply_rotary_qkv

BORDERS = torch.tensor([0, 4], dtype=torch.int32)
IDS = torch.tensor([1, 7, 7, 2])
INDEX = visual_index(IDS, 7)
LAYOUT = VisionLayout.from_grid([[1, 4, 4]], window_size=28)
ANGLES = torch.rand(4, 4)
Q, QKV, WEIGHT, TABLE = (
    Parameter(torch.randn(shape)) for shape in ((4, 2, 8), (16, 3, 2, 8), (8,), (10, 8))
)


def rows(*shape: int) -> Tensor:
    return torch.ones(shape or (4, 8))


CALLS: dict[str, Callable[[], Tensor]] = {
    "varlen_attention": lambda: varlen_attention(Q, Q, Q, BORDERS, max_seqlen=4),
    "vision_attention": lambda: vision_attention(QKV, LAYOUT, window=True),
    "visual_embedding": lambda: visual_embedding(IDS, TABLE, rows(2, 8), INDEX),
    "with sparse gradients": lambda: visual_embedding(
        IDS, TABLE, rows(2, 8), INDEX, weight_grad="sparse"
    ),
    "scatter_visual": lambda: scatter_visual(rows(), TABLE[:2], INDEX),
    "scatter_visual_": lambda: scatter_visual_(rows(), TABLE[:2], INDEX),
    "add_visual_": lambda: add_visual_(rows(), TABLE[:2], INDEX),
    "linear_cross_entropy": lambda: linear_cross_entropy(rows(), TABLE, IDS),
    "rms_norm": lambda: rms_norm(rows(), WEIGHT, 1e-6),
    "add_rms_norm_": lambda: add_rms_norm_(rows(), rows(), WEIGHT, 1e-6)[1],
    "swiglu_": lambda: swiglu_(rows(), WEIGHT),
    "apply_rotary": lambda: apply_rotary(Q, ANGLES, ANGLES),
    "apply_rotary_qkv": lambda: apply_rotary_qkv(
        Q.view(4, 1, 2, 8).repeat(1, 1, 2, 1), ANGLES, ANGLES
    )[0],
}


@pytest.mark.parametrize("name", CALLS)
def test_inference_mode_learns_nothing_whatever_grad_mode_is(name: str) -> None:
    """As torch's own functions; `with torch.set_grad_enabled(self.tune):` stands in models."""
    with torch.no_grad():
        wanted = CALLS[name]()
    with torch.inference_mode(), torch.enable_grad():
        result = CALLS[name]()
    assert not result.requires_grad and torch.equal(result, wanted)


def test_inference_mode_adds_to_no_main_grad() -> None:
    table: Any = Parameter(torch.randn(10, 8))
    table.main_grad = torch.zeros(10, 8)
    into: dict[str, Any] = {"weight_grad": "main_grad"}
    with torch.inference_mode(), torch.enable_grad():
        linear_cross_entropy(rows(), table, IDS, grad_scale=1.0, **into)
        visual_embedding(IDS, table, rows(2, 8), INDEX, **into)
    assert not table.main_grad.any()


LAYERS: dict[str, Callable[..., Tensor]] = {
    "rms_norm": lambda x, weight: rms_norm(x, weight, 1e-6),
    "add_rms_norm_": lambda x, weight: add_rms_norm_(x * 1, None, weight, 1e-6)[1],
    "swiglu_": lambda x, weight: swiglu_(x * 1, weight),
}


def plain(name: str, x: Tensor, weight: Tensor) -> Tensor:
    if name != "swiglu_":
        return F.rms_norm(x, weight.shape, weight, 1e-6)
    gate, up = (x + weight).chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("way", ["hooks", "module.to"])
def test_what_is_saved_may_come_back_in_another_dtype(name: str, way: str) -> None:
    """Activations kept in bfloat16, or a module that was converted before its backward pass: the
    gradient is that of rounded numbers."""
    x, weight = torch.randn(64, 32, requires_grad=True), Parameter(torch.randn(32))
    if way == "hooks":
        keep = torch.Tensor.bfloat16
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
            out = LAYERS[name](x, weight)
    else:
        out = LAYERS[name](x, weight)
        weight.data = weight.data.bfloat16()
    grad = torch.randn_like(out)
    (dx,) = torch.autograd.grad(out, x, grad)
    leaf, parameter = (t.detach().double().requires_grad_() for t in (x, weight))
    (exact,) = torch.autograd.grad(plain(name, leaf, parameter), leaf, grad.double())
    # All of a row's products with numbers rounded to 8 bits, 2^-9 each, at most three in a factor.
    assert dx.dtype == torch.float32
    assert ((dx - exact).norm() / exact.norm()).item() < 3 * 2**-9


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "scatter_visual_": lambda x: scatter_visual_(x, rows(2, 8), INDEX),
    "add_visual_": lambda x: add_visual_(x, rows(2, 8), INDEX),
    "add_rms_norm_": lambda x: add_rms_norm_(x, rows(), WEIGHT, 1e-6)[1],
    "swiglu_": lambda x: swiglu_(x, WEIGHT),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("recorded", [True, False])
def test_a_view_of_a_parameter_is_refused_before_it_is_written(name: str, recorded: bool) -> None:
    table = Parameter(torch.randn(8, 8))
    before = table.detach().clone()
    with torch.set_grad_enabled(recorded):
        x = table[:4]
    with pytest.raises(RuntimeError, match="view"):  # torch's
        x.add_(1)
    with pytest.raises(ValueError, match=r"is a .*leaf .*, so it can't be written in place"):
        WRITES[name](x)
    assert torch.equal(table, before)
    with torch.no_grad():
        WRITES[name](x)
    assert not torch.equal(table, before)


class Through(torch.autograd.Function):
    """Returns its input, as the reduction of Megatron's row-parallel layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("way", ["chunk", "split", "a function's input"])
def test_views_that_autograd_does_not_follow(name: str, way: str) -> None:
    """Layers give what they write a gradient of their own; the others refuse, as torch does."""
    leaf = torch.randn(8, 8, requires_grad=True)
    views: dict[str, Callable[[Tensor], Tensor]] = {
        "chunk": lambda x: x.chunk(2)[0],
        "split": lambda x: x.split(4)[0],
        "a function's input": lambda x: Through.apply(x[:4]),
    }
    base = leaf * 1
    x = views[way](base)
    if name in ("add_rms_norm_", "swiglu_"):
        grads = [
            torch.autograd.grad(WRITES[name](y).sum(), leaf)[0] for y in (x, (leaf * 1)[:4].clone())
        ]
        assert torch.equal(*grads)
        return
    with pytest.raises(RuntimeError, match="view"):
        x.add_(1)
    with pytest.raises(ValueError, match="is a view .*, so it can't be written in place"):
        WRITES[name](x)
    assert torch.equal(base, leaf)


@pytest.mark.parametrize("name", [*LAYERS, "apply_rotary"])
def test_forward_over_reverse_is_refused(name: str) -> None:
    """Hessian-vector products; torch would take a tangent that is not there for zeros."""
    x = torch.randn(4, 2, 8, requires_grad=True)
    layers = LAYERS | {"apply_rotary": lambda x, _: apply_rotary(x, ANGLES, ANGLES)}
    out = layers[name](x, torch.randn(8))
    with forward_ad.dual_level():
        grad = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            torch.autograd.grad(out, x, grad)


def test_a_loss_keeps_the_tangent_of_its_gradient() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(10, 8)
    loss = linear_cross_entropy(x, weight, IDS)
    (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
    for value in (1.0, 2.0):
        with forward_ad.dual_level():
            grad = forward_ad.make_dual(torch.tensor(value), torch.tensor(3.0))
            (result,) = torch.autograd.grad(loss, x, grad, retain_graph=True)
            primal, tangent = forward_ad.unpack_dual(result)
            torch.testing.assert_close(primal, value * dx)
            torch.testing.assert_close(tangent, 3 * dx)


def test_what_main_grad_got_is_no_other_gradient_s() -> None:
    """Nor a batch of them, nor one with a tangent: it was added in the forward pass."""
    x, weight = torch.randn(4, 8, requires_grad=True), Parameter(torch.randn(10, 8))
    accumulated: Any = weight
    accumulated.main_grad = torch.zeros(10, 8)

    def loss() -> Tensor:
        return linear_cross_entropy(x, weight, IDS, weight_grad="main_grad", grad_scale=1.0)

    with pytest.raises(ValueError, match="the gradient of the loss is not grad_scale"):
        torch.autograd.grad(loss(), x, torch.ones(3), is_grads_batched=True)
    with forward_ad.dual_level():
        torch.autograd.grad(loss(), x)  # what has no tangent is as elsewhere
        grad = forward_ad.make_dual(torch.tensor(1.0), torch.tensor(3.0))
        with pytest.raises(ValueError, match="the gradient of the loss is not grad_scale"):
            torch.autograd.grad(loss(), x, grad)


def test_a_loss_does_not_ask_for_values_that_nobody_knows() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(10, 8, requires_grad=True)
    loss = linear_cross_entropy(x, weight, IDS)
    wanted = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    many = torch.autograd.grad(loss, (x, weight), torch.tensor([1.0, 2.0]), is_grads_batched=True)
    for batch, one in zip(many, wanted, strict=True):
        torch.testing.assert_close(batch, torch.stack([one, 2 * one]))

    def gradients(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(linear_cross_entropy(x, weight, IDS), (x, weight))

    other = torch.randn(4, 8, requires_grad=True)
    recorded = make_fx(gradients)(x, weight)(other, weight)
    for one, two in zip(recorded, gradients(other, weight), strict=True):
        torch.testing.assert_close(one, two)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake: Any = Parameter(torch.randn(10, 8))
        fake.main_grad = torch.zeros(10, 8)
        for into in ("dense", "main_grad"):
            hidden = torch.randn(4, 8, requires_grad=True)
            arguments: dict[str, Any] = {"weight_grad": into, "grad_scale": 2.0}
            (2 * linear_cross_entropy(hidden, fake, IDS, **arguments)).backward()
            assert hidden.grad is not None and hidden.grad.shape == hidden.shape


@pytest.mark.parametrize("grad", [True, False])
def test_an_exported_loss_runs_with_grad_mode_on(grad: bool) -> None:
    """As exported programs are called: their parameters require a gradient."""

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Parameter(torch.randn(10, 8))

        def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
            return linear_cross_entropy(hidden, self.weight, targets)

    loss, arguments = Loss(), (torch.randn(4, 8), IDS)
    with torch.set_grad_enabled(grad):
        program = torch.export.export(loss, arguments)
    torch.testing.assert_close(program.module()(*arguments), loss(*arguments))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("learns", [True, False])
def test_jit_trace_finds_what_it_recorded(learns: bool) -> None:
    """Its own check calls again without gradients."""
    qkv = torch.randn(16, 3, 2, 64, requires_grad=learns)
    traced = torch.jit.trace(lambda x: vision_attention(x, LAYOUT, window=True), qkv)
    assert torch.equal(traced(qkv), vision_attention(qkv, LAYOUT, window=True))


def test_functionalize_leaves_nothing_behind() -> None:
    layout = VisionLayout.from_grid([[1, 4, 4]], window_size=28)
    frames = torch.randint(0, 256, (1, 56, 56, 3), dtype=torch.uint8)
    qkv, std = torch.randn(16, 3, 2, 8), (0.3, 0.4, 0.5)  # of no other test
    attended = torch.func.functionalize(lambda x: vision_attention(x, layout, window=True))(qkv)
    assert torch.equal(vision_attention(qkv, layout, window=True), attended)
    with pytest.raises(RuntimeError):  # torch's: it knows no op of ours that writes
        torch.func.functionalize(lambda x: patchify(x, std=std))(frames)
    assert patchify(frames, std=std).shape == (16, 1176)


def test_an_out_in_the_memory_of_what_is_read_is_refused() -> None:
    memory = torch.randint(0, 256, (1 << 17,), dtype=torch.uint8)
    frames = memory[: 56 * 56 * 3].view(1, 56, 56, 3)
    before = memory.clone()
    shared = memory[: 16 * 1176 * 4].view(torch.float32).view(16, 1176)
    for call in (
        lambda: resize(frames, 56, 40, out=memory[100 : 100 + 56 * 40 * 3].view(1, 56, 40, 3)),
        lambda: patchify(frames, out=shared),
    ):
        with pytest.raises(ValueError, match=r"frames lies in the memory of out.*frames.clone\(\)"):
            call()
    assert torch.equal(memory, before)
    apart = memory[56 * 56 * 3 :][: 56 * 40 * 3].view(1, 56, 40, 3)
    assert torch.equal(resize(frames, 56, 40, out=apart), resize(frames, 56, 40))

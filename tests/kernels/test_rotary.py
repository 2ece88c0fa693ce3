"""apply_rotary and apply_rotary_qkv against their reference and the numbers of transformers."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.numeric import assert_accurate
from vlmkernels.rotary import apply_rotary, apply_rotary_qkv, apply_rotary_reference


def angles(tokens: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.rand(tokens, half) * 100
    return table.cos(), table.sin()


def check_qkv(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """apply_rotary_qkv of [T, Hkv, H / Hkv + 2, D], and the one gradient, against the reference in
    float64 by the same angles, rounded to the type."""
    dtype, group = qkv.dtype, qkv.shape[2] - 2
    upstream = torch.randn_like(qkv).flatten(1, 2)
    angles = cos.to(dtype), sin.to(dtype)

    def plain(qkv: torch.Tensor) -> list[torch.Tensor]:
        q, k, v = (x.flatten(1, 2) for x in qkv.split((group, 1, 1), 2))
        return [*(apply_rotary_reference(x, *angles) for x in (q, k)), v]

    results = []
    for op, kind in (
        (lambda x: apply_rotary_qkv(x, cos, sin), dtype),
        (plain, dtype),
        (plain, torch.float64),
    ):
        leaf = qkv.to(kind, copy=True).requires_grad_()
        out = torch.cat(list(op(leaf)), 1)
        (grad,) = torch.autograd.grad(out, leaf, upstream.to(kind))
        results.append((out.detach(), grad))
    for ours, peer, exact in zip(*results, strict=True):
        assert_accurate("rotation", ours, peer, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_of_a_fused_projection(dtype: torch.dtype) -> None:
    tokens, kv_heads, group, half = (int(n) for n in torch.randint(1, 9, (4,)))
    qkv = torch.randn(tokens, kv_heads, group + 2, 2 * half, dtype=dtype)
    check_qkv(qkv, *angles(tokens, half))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_forward_and_backward(dtype: torch.dtype) -> None:
    tokens, heads, half = (int(n) for n in torch.randint(1, 20, (3,)))
    # a slice of a fused projection, as Megatron hands queries over
    base = torch.randn(tokens, heads, 6 * half, dtype=dtype)
    cos, sin = angles(tokens, half)
    upstream = torch.randn(tokens, heads, 2 * half, dtype=dtype)
    results = []
    for op, kind in (
        (apply_rotary, dtype),
        (apply_rotary_reference, dtype),
        (apply_rotary_reference, torch.float64),
    ):
        x = base.detach().to(kind, copy=True).requires_grad_()
        out = op(x[..., 2 * half : 4 * half], cos, sin)
        out.backward(upstream.to(kind))
        assert x.grad is not None
        results.append((out.detach(), x.grad))
    for ours, plain, exact in zip(*results, strict=True):
        assert_accurate("rotation", ours, plain, exact)


def test_equals_transformers() -> None:
    from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision

    x, (cos, sin) = torch.randn(9, 3, 20), angles(9, 10)
    want, _ = apply_rotary_pos_emb_vision(
        x, x, torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    )
    torch.testing.assert_close(apply_rotary(x, cos, sin), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_for_several_lengths(backend: str) -> None:
    """Into one graph, whose shapes torch makes dynamic at the second length."""

    def function(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = apply_rotary_qkv(qkv, cos, sin)
        return torch.cat([q, k, v, apply_rotary(qkv[:, :, 0], cos, sin)], 1)

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for tokens in (7, 9, 65):
        qkv, (cos, sin) = torch.randn(tokens, 2, 4, 8, requires_grad=True), angles(tokens, 4)
        out, want = compiled(qkv, cos, sin), function(qkv, cos, sin)
        upstream = torch.randn_like(want)
        (got_grad,) = torch.autograd.grad(out, qkv, upstream)
        (want_grad,) = torch.autograd.grad(want, qkv, upstream)
        assert torch.equal(out, want) and torch.equal(got_grad, want_grad)
    torch._dynamo.reset()


def test_errors() -> None:
    cos, sin = angles(4, 3)
    with pytest.raises(ValueError, match=r"x is int64 \[4, 2, 6\] on cpu; .* floating point"):
        apply_rotary(torch.zeros(4, 2, 6).long(), cos, sin)
    with pytest.raises(ValueError, match=r"qkv is int64 \[4, 1, 3, 6\] on cpu; .* floating point"):
        apply_rotary_qkv(torch.zeros(4, 1, 3, 6).long(), cos, sin)
    with pytest.raises(ValueError, match=r"x has shape \(4, 2, 5\); .* even D"):
        apply_rotary(torch.zeros(4, 2, 5), cos, sin)
    with pytest.raises(ValueError, match=r"sin has shape \(4, 2\) on cpu; x needs \(4, 3\) on cpu"):
        apply_rotary(torch.zeros(4, 2, 6), cos, sin[:, :2])
    with pytest.raises(ValueError, match=r"qkv has shape \(4, 1, 2, 6\); it must be"):
        apply_rotary_qkv(torch.zeros(4, 1, 2, 6), cos, sin)

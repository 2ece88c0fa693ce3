"""rms_norm and swiglu_ against float64, beside plain torch, on every instruction set."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.numeric import ISAS, assert_accurate, assert_bitwise, isa
from vlmkernels.layer import rms_norm, swiglu_

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Results = list[Tensor]


def run(op: Callable[..., Tensor], inputs: list[Tensor], upstream: Tensor) -> Results:
    leaves = [x.detach().to(upstream.dtype, copy=True).requires_grad_() for x in inputs]
    out = op(leaves[0] * 1.0, *leaves[1:])  # the op may write over its first input
    out.backward(upstream)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def check(
    ours: Callable,
    plain: Callable,
    inputs: list[Tensor],
    upstream: Tensor,
    terms: Tensor | None = None,
) -> None:
    """terms [rows, 1, width]: what the second input's gradient adds up; None: that of the first."""
    exact = run(plain, inputs, upstream.double())
    for i, (got, peer, want) in enumerate(
        zip(run(ours, inputs, upstream), run(plain, inputs, upstream), exact, strict=True)
    ):
        noise = None
        if i == 2 and want.numel() < 100:  # of few sums plain torch's error is luck
            terms = exact[1] if terms is None else terms
            noise = terms.double().square().sum((0, 1)).sqrt() * 2**-24
            noise = noise * max(1.0, len(terms) / 2) ** 0.5
        assert_accurate(f"result {i}", got, peer, want, noise)


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def plain_swiglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    gate, up = (x if bias is None else x + bias).chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, width", [(3, 40), (31, 16), (100, 83), (700, 320)])
def test_rms_norm(name: str, dtype: torch.dtype, rows: int, width: int) -> None:
    size = 1.0 if dtype == torch.float16 else 10.0 ** float(torch.randint(-2, 3, ()))
    x, weight = (torch.randn(rows, 1, width) * size).to(dtype), torch.randn(width).to(dtype)
    upstream = torch.randn(rows, 1, width).to(dtype)
    terms = plain_norm(x.double(), torch.ones(width).double()) * upstream
    with isa(name):
        check(lambda x, w: rms_norm(x, w, 1e-6), plain_norm, [x, weight], upstream, terms)


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows, width", [(3, 40), (33, 16), (100, 83), (700, 160)])
def test_swiglu(name: str, dtype: torch.dtype, bias: bool, rows: int, width: int) -> None:
    inputs = [(torch.randn(rows, 1, 2 * width) * 3).to(dtype)]
    if bias:
        inputs.append(torch.randn(2 * width).to(dtype))
    with isa(name):
        check(swiglu_, plain_swiglu, inputs, torch.randn(rows, 1, width).to(dtype))


@pytest.mark.parametrize("name", ISAS)
def test_swiglu_at_the_ends(name: str) -> None:
    gate = torch.tensor([0.0, -0.0, 1e-30, 88.0, 3e4, 3e38, -20.0, -88.0, -150.0, -3e38])
    x = torch.cat([gate, torch.ones(10)])
    with isa(name):
        got = swiglu_(x.clone())
        torch.testing.assert_close(got, F.silu(gate), rtol=1e-6, atol=1e-30)
        nan = swiglu_(torch.tensor([torch.nan, 1.0, 2.0, 2.0]))
    assert nan[0].isnan() and nan[1] == F.silu(torch.tensor(1.0)) * 2


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    x, weight = torch.randn(500, 96).to(dtype), torch.randn(96).to(dtype)
    both, bias = torch.randn(500, 192).to(dtype), torch.randn(192).to(dtype)
    upstream = torch.randn(500, 96).to(dtype)
    first: list[Tensor] = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        norm = run(lambda x, w: rms_norm(x, w, 1e-6), [x, weight], upstream)
        results = [*norm, *run(swiglu_, [both, bias], upstream)]
        first = first or results
        for i, (got, want) in enumerate(zip(results, first, strict=True)):
            assert_bitwise(f"result {i}, {threads} threads", got, want)


def test_strided_rows_empty_ones_and_frozen_weights() -> None:
    x = torch.randn(7, 2, 3, 8)[:, :, 1]
    weight = torch.randn(8)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), plain_norm(x, weight))
    assert rms_norm(torch.empty(0, 8, requires_grad=True), weight, 1e-6).shape == (0, 8)
    empty = torch.empty(0, 8, requires_grad=True)
    swiglu_(empty * 1.0).sum().backward()
    assert empty.grad is not None and empty.grad.shape == (0, 8)
    leaf = torch.randn(3, 8, requires_grad=True)
    rms_norm(leaf, weight, 1e-6).sum().backward()
    assert leaf.grad is not None and weight.grad is None


def test_what_autograd_can_not_know_is_refused() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    y = rms_norm(x, torch.randn(8), 1e-6)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="vlmkernels.rms_norm_backward has no derivative"):
        dx.sum().backward()
    saved = x * 1.0
    square = saved.square()  # keeps it
    swiglu_(saved, torch.ones(8))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


def test_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="weight is a list; it must be a torch.Tensor"):
        rms_norm(torch.zeros(3, 8), [1.0] * 8, 1e-6)  # type: ignore[arg-type]


BAD = [
    (lambda: rms_norm(torch.zeros(3, 8).double(), torch.zeros(8), 1e-6), "x is float64 [3, 8] on"),
    (lambda: rms_norm(torch.zeros(3, 8, device="meta"), torch.zeros(8), 1e-6), "on meta; rms_norm"),
    (lambda: rms_norm(torch.zeros(3, 8), torch.zeros(9), 1e-6), "weight is float32 [9] on cpu;"),
    (
        lambda: rms_norm(torch.zeros(3, 8), torch.zeros(8).bfloat16(), 1e-6),
        "weight is bfloat16 [8] on cpu; rms_norm of x, float32 [3, 8] on cpu, needs [8] of its",
    ),
    (lambda: swiglu_(torch.zeros(3, 7)), "x has shape [3, 7] and strides (7, 1); swiglu_ needs"),
    (lambda: swiglu_(torch.zeros(8, 3).t()), "x has shape [3, 8] and strides (1, 3); swiglu_"),
    (lambda: swiglu_(torch.zeros(3, 8), torch.zeros(4)), "bias is float32 [4] on cpu; swiglu_ of"),
]


@pytest.mark.parametrize("call, message", BAD, ids=[message[:40] for _, message in BAD])
def test_bad_arguments_are_named(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()

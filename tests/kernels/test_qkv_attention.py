"""qkv_attention against a float64 composition, on every instruction set of this machine."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.numeric import ATTENTION_GRID, assert_accurate, assert_bitwise, isa, poisoned
from tests.kernels.test_attention import rounding_noise
from vlmkernels.attention.api import qkv_attention, varlen_attention
from vlmkernels.attention.reference import varlen_attention_reference
from vlmkernels.rotary import apply_rotary_qkv, rotate


def reference(
    qkv: Tensor, table: Tensor, cu: Tensor, *, causal: bool, scale: float | None = None
) -> Tensor:
    q, k, v = qkv[:, :, :-2].flatten(1, 2), qkv[:, :, -2], qkv[:, :, -1]
    return varlen_attention_reference(
        rotate(q, table), rotate(k, table), v, cu, causal=causal, scale=scale
    )


def make(
    lengths: list[int], kv_heads: int, group: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = sum(lengths)
    angles = torch.rand(tokens, dim // 2) * 100
    table = torch.cat([angles.cos(), angles.sin()], -1)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    qkv = torch.randn(tokens, kv_heads, group + 2, dim).to(dtype).requires_grad_()
    return qkv, table, cu, torch.randn(tokens, kv_heads * group, dim).to(dtype)


def outputs(function: Any, qkv: Tensor, dout: Tensor, *args: Any, **kw: Any) -> dict[str, Tensor]:
    out = function(qkv, *args, **kw)
    (dqkv,) = torch.autograd.grad(out, qkv, dout)
    q, k, v = dqkv[:, :, :-2].flatten(1, 2), dqkv[:, :, -2], dqkv[:, :, -1]
    return {"out": out.detach(), "dq": q, "dk": k, "dv": v}


def on_cuda(qkv: Tensor, table: Tensor, cu: Tensor, *, causal: bool) -> Tensor:
    """What PackedSelfAttention does there."""
    q, k, v = apply_rotary_qkv(qkv, *table.chunk(2, -1))
    return varlen_attention(q, k, v, cu, causal=causal)


def check(
    qkv: Tensor, table: Tensor, cu: Tensor, dout: Tensor, function: Any = qkv_attention, **kw: Any
) -> None:
    wide = qkv.detach().double().requires_grad_()
    exact = outputs(reference, wide, dout.double(), table, cu, **kw)
    plain = outputs(reference, qkv, dout, table, cu, **kw)
    ours = outputs(function, qkv, dout, table, cu, **kw)
    q, k, v = wide.detach()[:, :, :-2].flatten(1, 2), wide[:, :, -2], wide[:, :, -1].detach()
    rows = (rotate(q, table), rotate(k.detach(), table), v, dout.double())
    noise = rounding_noise(*rows, cu, kw.get("scale"), kw["causal"])
    for name in exact:
        assert_accurate(name, ours[name], plain[name], exact[name], noise[name])


@pytest.mark.parametrize("name, dtype", ATTENTION_GRID)
@pytest.mark.parametrize("dim", [32, 80, 128])
def test_accuracy(name: str, dtype: torch.dtype, dim: int) -> None:
    with isa(name), poisoned():
        check(*make([70, 1, 0, 200], 2, 3, dim, dtype), causal=True)


def test_the_steps_of_cuda() -> None:
    """In float32, where both round the angles to the same."""
    check(*make([70, 1, 0, 200], 2, 3, 80, torch.float32), on_cuda, causal=True)


@settings(max_examples=30)
@given(
    kernel=st.sampled_from(ATTENTION_GRID),
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=4).filter(any),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    half=st.integers(1, 64),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.3, -0.2]),
    number=st.integers(0, 2**31 - 1),
)
def test_any_shape(kernel, lengths, kv_heads, group, half, causal, scale, number):
    torch.manual_seed(number)
    name, dtype = kernel.values
    with isa(name), poisoned():
        check(*make(lengths, kv_heads, group, 2 * half, dtype), causal=causal, scale=scale)


def test_gradient_lies_as_the_projection_and_any_threads_give_its_bits() -> None:
    qkv, table, cu, dout = make([600, 130], 2, 3, 64, torch.float32)
    wide = torch.randn(730, 2, 5, 70)[..., :64].detach().copy_(qkv).requires_grad_()
    first = outputs(qkv_attention, qkv, dout, table, cu, causal=True)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for x in (qkv, wide):  # dense, and rows of 70 numbers
            for name, got in outputs(qkv_attention, x, dout, table, cu, causal=True).items():
                assert_bitwise(f"{name}, {threads} threads", got, first[name])
    (dqkv,) = torch.autograd.grad(qkv_attention(qkv, table, cu), qkv, dout)
    assert dqkv.is_contiguous()


BAD = [
    ({"qkv": torch.tensor(1.0)}, "qkv is float32 [] on cpu; it must be"),
    ({"qkv": torch.zeros(5, 2, 64)}, "qkv is float32 [5, 2, 64] on cpu; it must be"),
    ({"qkv": torch.zeros(5, 1, 2, 64)}, "qkv is [5, 1, 2, 64]; it must be [T, Hkv, H / Hkv + 2"),
    ({"qkv": torch.zeros(5, 1, 3, 64).double()}, "qkv is float64"),
    ({"qkv": torch.zeros(5, 1, 3, 63)}, "head_dim is 63; it must be even"),
    ({"qkv": torch.zeros(5, 1, 3, 258)}, "head_dim is 258; it must be even and 2 to 256"),
    ({"qkv": torch.zeros(5, 1, 64, 3).transpose(2, 3)}, "its last dimension must be contiguous"),
    ({"qkv": torch.zeros(5, 1, 3, 64, device="meta")}, "qkv is on meta; qkv_attention runs on"),
    ({"table": torch.zeros(4, 64)}, "table is [4, 64] and cu_seqlens [2]; qkv [5, 1, 3, 64] needs"),
    ({"table": torch.zeros(5, 64).double()}, "table is float64 [5, 64] on cpu; it must be float32"),
    ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens is int64 [2] on cpu; it must be int32"),
    ({"cu_seqlens": torch.tensor([0, 4]).int()}, "cu_seqlens ends at 4; it must end at"),
]


@pytest.mark.parametrize("arguments, message", BAD, ids=[message[:40] for _, message in BAD])
def test_bad_arguments_are_named(arguments: dict[str, Tensor], message: str) -> None:
    good = {
        "qkv": torch.zeros(5, 1, 3, 64),
        "table": torch.zeros(5, 64),
        "cu_seqlens": torch.tensor([0, 5]).int(),
    }
    with pytest.raises(ValueError, match=re.escape(message)):
        qkv_attention(**{**good, **arguments})


def test_opcheck() -> None:
    qkv, table, cu, dout = make([9, 4], 2, 2, 24, torch.float32)
    torch.library.opcheck(torch.ops.vlmkernels.qkv_attention.default, (qkv, table, cu, True, 0.2))
    out, stats = torch.ops.vlmkernels.qkv_attention(qkv.detach(), table, cu, True, 0.2)
    torch.library.opcheck(
        torch.ops.vlmkernels.qkv_attention_backward.default,
        (dout, qkv.detach(), table, cu, out, stats, True, 0.2),
    )


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1), (2, 1, 0)])
def test_a_slice_of_permuted_rows_has_the_gradient_of_a_copy(order: tuple[int, ...]) -> None:
    _, table, cu, dout = make([10, 14], 2, 2, 8, torch.float32)
    shape = [(24, 2, 4)[i] for i in order]
    back = [order.index(i) for i in range(3)]
    qkv = torch.randn(*shape, 12).permute(*back, 3)[..., :8]
    sliced, copied = (
        outputs(qkv_attention, x.detach().requires_grad_(), dout, table, cu)
        for x in (qkv, qkv.contiguous())
    )
    for name in copied:
        assert_bitwise(name, sliced[name], copied[name])

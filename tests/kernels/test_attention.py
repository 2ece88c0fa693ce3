"""varlen_attention against a float64 reference, on every instruction set of this machine."""

from __future__ import annotations

import itertools
import os
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.numeric import (
    ATTENTION_GRID,
    ISAS,
    MACHINE_GRID,
    PAST_CACHES_GRID,
    assert_accurate,
    assert_bitwise,
    isa,
    poisoned,
)
from vlmkernels import varlen_attention
from vlmkernels.attention.launch import varlen_op
from vlmkernels.attention.reference import varlen_attention_reference
from vlmkernels.attention.select import kept_floats


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def make(
    lengths: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = sum(lengths)
    shapes = ((tokens, heads, dim), (tokens, kv_heads, dim), (tokens, kv_heads, dim))
    q, k, v = (torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)
    return q, k, v, torch.randn(tokens, heads, dim).to(dtype)


def outputs(function: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *args: Any, **kw: Any):
    """{out, dq, dk, dv} of a function."""
    out = function(q, k, v, *args, **kw)
    grads = torch.autograd.grad(out, (q, k, v), dout, materialize_grads=True)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))


def rounding_noise(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, cu: Tensor, scale: float | None, causal: bool
) -> dict[str, Tensor]:
    """Standard deviation of each result under roundings of random sign: of every step to float32,
    and with a 16-bit dtype of probabilities and dS, operands of products, to it.

    A sum of D products x_i rounds D times by up to eps / 2 of a partial sum, which grows like a
    random walk: the errors add up to eps / sqrt(24) * sqrt(D) * |x|. A probability's relative error
    is its score's error, and a unit each for exp and for the score's own rounding. dS = P (dP -
    delta) has the errors of P and those of dP and delta, which don't cancel where dP - delta does.
    """
    group, eps = q.shape[1] // k.shape[1], torch.finfo(torch.float32).eps
    operand = 0 if q.dtype == torch.float32 else (torch.finfo(q.dtype).eps / eps) ** 2 / 12
    q, k, v, dout = (x.detach().double() for x in (q, k, v, dout))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    walk = q.shape[-1] / 24
    noise = {name: torch.zeros_like(q) for name in ("out", "dq", "dk", "dv")}
    for begin, end in zip(cu.tolist(), cu.tolist()[1:], strict=False):
        a, b, c, g = (x[begin:end].transpose(0, 1) for x in (q, k, v, dout))
        scores = a @ b.mT * scale
        if causal:
            scores = scores + scores.new_full(scores.shape[1:], -torch.inf).triu(1)
        p = scores.softmax(-1)
        relative = scale**2 * walk * (a**2 @ (b**2).mT) + (1 + (a @ b.mT * scale) ** 2) / 3
        relative += operand
        of_p = p**2 * relative
        delta = g * (p @ c)
        of_dp = walk * (g**2 @ (c**2).mT + delta.square().sum(-1, keepdim=True))
        difference = g @ c.mT - delta.sum(-1, keepdim=True)
        of_dp += operand * delta.square().sum(-1, keepdim=True)  # made of the rounded output
        of_ds = scale**2 * (p**2 * of_dp + (of_p + operand * p**2) * difference**2)
        results = {
            "out": of_p @ c**2,
            "dv": of_p.mT @ g**2,
            "dq": of_ds @ b**2,
            "dk": of_ds.mT @ a**2,
        }
        for name, variance in results.items():
            noise[name][begin:end] = eps * variance.sqrt().transpose(0, 1)
    for name in ("dk", "dv"):
        noise[name] = noise[name].unflatten(1, (-1, group)).norm(dim=2)
    return noise


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    cu: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    max_seqlens: tuple[int | None, ...] = (),
) -> None:
    """max_seqlens: what is said of the longest segment; default nothing, then its length."""
    kw: dict[str, Any] = {"scale": scale, "causal": causal}
    exact_inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = outputs(varlen_attention_reference, *exact_inputs, dout.double(), cu, **kw)
    plain = outputs(varlen_attention_reference, q, k, v, dout, cu, **kw)
    noise = rounding_noise(q, k, v, dout, cu, **kw)
    for max_seqlen in max_seqlens or (None, max(cu.diff().tolist(), default=0)):
        ours = outputs(varlen_attention, q, k, v, dout, cu, max_seqlen=max_seqlen, **kw)
        for name in exact:
            assert_accurate(name, ours[name], plain[name], exact[name], noise[name])


CASES = [  # lengths, heads, kv_heads, head_dim, causal
    pytest.param([64, 64, 16, 32, 64], 3, 3, 80, False, id="windows"),
    pytest.param([1, 130, 0, 63, 65], 3, 3, 72, False, id="ragged-72"),
    pytest.param([100, 0, 29, 64], 6, 2, 128, True, id="gqa-causal-128"),
    pytest.param([200], 2, 1, 64, True, id="mqa-causal-64"),
    pytest.param([7, 70], 2, 2, 17, False, id="odd-17"),
    pytest.param([66], 2, 1, 96, False, id="96"),
    pytest.param([90, 3], 1, 1, 256, True, id="256"),
]


@pytest.mark.parametrize("name, dtype", ATTENTION_GRID)
@pytest.mark.parametrize("lengths, heads, kv_heads, dim, causal", CASES)
def test_accuracy(name, dtype, lengths, heads, kv_heads, dim, causal):
    with isa(name), poisoned():
        check(*make(lengths, heads, kv_heads, dim, dtype), offsets(lengths), causal=causal)


@settings(max_examples=60)
@given(
    kernel=st.sampled_from(ATTENTION_GRID),
    lengths=st.lists(st.integers(0, 140), max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    dim=st.one_of(st.integers(1, 256), st.sampled_from([64, 72, 80, 96, 128])),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.3, -0.2, 0.0]),
    number=st.integers(0, 2**31 - 1),
)
def test_any_shape(kernel, lengths, kv_heads, group, dim, causal, scale, number):
    torch.manual_seed(number)
    name, dtype = kernel.values
    inputs = make(lengths, kv_heads * group, kv_heads, dim, dtype)
    with isa(name), poisoned():
        check(*inputs, offsets(lengths), causal=causal, scale=scale)


@pytest.mark.parametrize("name", ISAS)
def test_large_scores_neither_overflow_nor_lose_their_order(name):
    q, k, v, dout = make([150], 2, 2, 64)
    with isa(name):
        check(q, k, v, dout, offsets([150]), scale=30.0)  # scores of some hundreds


def rising(dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of check(): the scores of later keys are larger, by over 200 powers of two."""
    q, k, v, dout = make([200], 2, 2, 64, dtype)
    k = (k.detach() * torch.linspace(0, 120, 200).view(-1, 1, 1)).to(dtype).requires_grad_()
    return {"q": q, "k": k, "v": v, "dout": dout, "cu": offsets([200]), "causal": False}


@pytest.mark.parametrize("name, dtype", ATTENTION_GRID)
def test_scores_that_rise_with_the_keys(name, dtype):
    with isa(name), poisoned():
        check(**rising(dtype))


@pytest.mark.parametrize("name, dtype", ATTENTION_GRID)
def test_exponential(name, dtype):
    """A segment of two keys with scores 0 and -t has the row sum 1 + exp(-t): the exponential and
    two roundings. The polynomials of simd.h are within 1e-7, for fp16 3e-6 and for bf16 8.6e-5
    (Taylor's of these degrees: 3e-6, 6e-5, 8e-4)."""
    t = torch.rand(5000).bfloat16()  # is also an fp16 number, or nearly 0
    q = torch.ones(10000, 1, 1, dtype=dtype)
    k = torch.stack([torch.zeros_like(t), -t], 1).view(-1, 1, 1).to(dtype)
    with isa(name):
        values, cu = torch.ones_like(k), offsets([2] * 5000)
        _, softmax_stats = varlen_op(q, k, values, cu, 2, False, 1.0, "cpu")
    highest, sums = softmax_stats[:, 0, ::2].double()
    exact = 1 + k[1::2, 0, 0].double().exp()
    eps = torch.finfo(torch.float32).eps
    assert not highest.any()
    of_type = {torch.float32: 1e-7, torch.float16: 3e-6, torch.bfloat16: 8.6e-5}
    assert (sums - exact).abs().max() <= of_type[dtype] + 2 * eps


def fused_views(layout: str, tokens: int, heads: int, dim: int) -> tuple[Tensor, list[Tensor]]:
    if layout == "[T, 3, H, D]":
        fused = torch.randn(tokens, 3, heads, dim, requires_grad=True)
        return fused, list(fused.unbind(1))
    if layout == "[T, H, 3 D]":
        fused = torch.randn(tokens, heads, 3 * dim, requires_grad=True)
        return fused, list(fused.split(dim, dim=2))
    fused = torch.randn(3, heads, tokens, dim, requires_grad=True)
    return fused, list(fused.transpose(1, 2).unbind(0))


@pytest.mark.parametrize("layout", ["[T, 3, H, D]", "[T, H, 3 D]", "[3, H, T, D]"])
def test_strided_views_give_the_same_bits(layout):
    lengths = [70, 9, 130]
    fused, views = fused_views(layout, sum(lengths), 3, 20)
    copies = [x.detach().clone(memory_format=torch.contiguous_format) for x in views]
    copies = [x.requires_grad_() for x in copies]
    strided_dout = torch.randn(3, sum(lengths), 20).transpose(0, 1)
    for dout in (strided_dout, torch.ones(()).expand(209, 3, 20)):
        strided = outputs(varlen_attention, *views, dout, offsets(lengths))
        packed = outputs(varlen_attention, *copies, dout.contiguous(), offsets(lengths))
        for name in packed:
            assert_bitwise(name, strided[name], packed[name])
    out = varlen_attention(*views, offsets(lengths))
    (dfused,) = torch.autograd.grad(out, fused, dout, retain_graph=True)
    expected = torch.autograd.grad(views, fused, [strided[n] for n in ("dq", "dk", "dv")])[0]
    assert_bitwise("dfused", dfused, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name, dtype", MACHINE_GRID)
def test_bitwise_repeatable_with_any_number_of_threads(name, dtype, causal):
    lengths = [300, 64, 64, 5, 700]
    q, k, v, dout = make(lengths, 6, 2, 32, dtype)
    expected = None
    for threads in (1, 2, 3, 2, 1):
        torch.set_num_threads(threads)
        with isa(name):
            result = outputs(varlen_attention, q, k, v, dout, offsets(lengths), causal=causal)
        expected = expected or result
        for part in result:
            assert_bitwise(f"{part} with {threads} threads", result[part], expected[part])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name, dtype", MACHINE_GRID)
def test_queries_of_a_head_shared_by_threads_give_the_same_bits(name, dtype, causal):
    """A thread that has no head left takes blocks of the others' queries: likely where there are
    more threads than cores."""
    threads = 2 * min(os.cpu_count() or 1, 4) + 1
    q, k, v, _ = (x.detach() for x in make([640], 4 * threads, 1, 64, dtype))
    with isa(name), poisoned():
        torch.set_num_threads(1)
        alone = varlen_attention(q, k, v, offsets([640]), causal=causal)
        torch.set_num_threads(threads)
        for _ in range(5):
            shared = varlen_attention(q, k, v, offsets([640]), causal=causal)
            assert_bitwise("out", shared, alone)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name, dtype", MACHINE_GRID)
def test_keys_dealt_out_to_threads_give_the_same_bits(name, dtype, causal):
    """With few heads a long segment's keys are several items of the backward that add in order."""
    lengths = [1300, 90, 600]
    q, k, v, dout = make(lengths, 8, 4, 16, dtype)
    torch.set_num_threads(1)  # 4 items a thread are enough: whole segments
    with isa(name):
        whole = outputs(varlen_attention, q, k, v, dout, offsets(lengths), causal=causal)
    few = [x.detach()[:, :heads].clone() for x, heads in ((q, 2), (k, 1), (v, 1), (dout, 2))]
    inputs = [x.requires_grad_() for x in few[:3]]
    for threads in (1, 2, 4, 4, 4):
        torch.set_num_threads(threads)
        with isa(name), poisoned():
            result = outputs(varlen_attention, *inputs, few[3], offsets(lengths), causal=causal)
        for part in result:
            heads = result[part].shape[1]
            assert_bitwise(f"{part}, {threads} threads", result[part], whole[part][:, :heads])


@pytest.mark.parametrize("name, dtype", PAST_CACHES_GRID)
def test_results_past_the_caches_are_the_same(name, dtype):
    """Above 16 MB they are written by other instructions, and rows are fetched ahead."""
    lengths = [64, 17] * (41 if dtype == torch.float32 else 82)  # 3,321 tokens of 5 KB; 6,642
    q, k, v, dout = make(lengths, 16, 16, 80, dtype)
    with isa(name), poisoned():
        large = outputs(varlen_attention, q, k, v, dout, offsets(lengths))
        for begin in (0, 1620):
            rows = slice(begin, begin + 81)
            parts = [x.detach()[rows].requires_grad_() for x in (q, k, v)]
            small = outputs(varlen_attention, *parts, dout[rows], offsets([64, 17]))
            for result in small:
                assert_bitwise(result, large[result][rows], small[result])
    assert all(x.isfinite().all() for x in large.values())


@pytest.mark.parametrize("name, dtype", MACHINE_GRID)
def test_a_segment_alone_has_the_same_bits(name, dtype):
    """On AMX segments of a call in float32 have two kinds of arithmetic, by their lengths."""
    lengths = [64, 200, 17, 128, 129]
    q, k, v, dout = make(lengths, 4, 2, 32, dtype)
    with isa(name):
        together = outputs(varlen_attention, q, k, v, dout, offsets(lengths), causal=True)
        for begin, end in itertools.pairwise(offsets(lengths).tolist()):
            rows = slice(begin, end)
            parts = [x.detach()[rows].requires_grad_() for x in (q, k, v)]
            cu = offsets([end - begin])
            alone = outputs(varlen_attention, *parts, dout[rows], cu, causal=True)
            for result in alone:
                assert_bitwise(result, together[result][rows], alone[result])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name, dtype", ATTENTION_GRID)
def test_kept_probabilities_change_no_bit(name, dtype, causal):
    """Those of segments of at most 64 tokens, where max_seqlen says so; it may be wrong. Kept in
    bf16 they are another rounding."""
    lengths = [64, 1, 0, 63, 64, 17, 40, 64]
    for heads, kv_heads, last in ((3, 3, 64), (4, 2, 64), (2, 2, 150)):
        segments = [*lengths, last]
        q, k, v, dout = make(segments, heads, kv_heads, 80, dtype)
        cu = offsets(segments)
        with isa(name), poisoned():
            expected = outputs(varlen_attention, q, k, v, dout, cu, causal=causal)
            kept = outputs(varlen_attention, q, k, v, dout, cu, causal=causal, max_seqlen=64)
            rounded = kept_floats(dtype) == 32
            if rounded:
                check(q, k, v, dout, cu, causal=causal, max_seqlens=(64,))
        for result in ["out"] if rounded else expected:
            assert_bitwise(result, kept[result], expected[result])


@pytest.mark.parametrize("name, dtype", ATTENTION_GRID)
def test_probabilities_are_kept_for_a_backward_only(name, dtype):
    """Planes of probabilities, then of statistics, the sums among them; else 2 planes."""

    def statistics(x: Tensor, dim: int = 64, **kw: Any) -> Tensor:
        packed: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda y: packed.append(y) or y, lambda y: y):
            varlen_attention(x[..., :dim], x[..., :dim], x[..., :dim], offsets([64, 64]), **kw)
        return packed[-1] if packed else torch.empty(0)

    x = torch.randn(128, 2, 64).to(dtype).requires_grad_()
    with isa(name):
        keeps = kept_floats(dtype)  # none on tiles
        assert keeps or name not in ISAS
        kept = statistics(x, max_seqlen=64)
        assert len(kept) == keeps + 2
        assert len(statistics(x)) == len(statistics(x, max_seqlen=65)) == 2
        assert len(statistics(x, max_seqlen=64, backend="cpu")) == 2
        assert len(statistics(x, dim=40, max_seqlen=64)) == 2
        assert len(statistics(x.detach(), max_seqlen=64)) == 0
        with torch.no_grad():
            assert len(statistics(x, max_seqlen=64)) == 0
    if keeps:
        # [heads, segments, keys, queries]
        probabilities = kept[:-2].reshape(2, 2, 64, keeps).double()
        if keeps == 32:  # [heads, segments, pairs of keys, queries, 2]
            pairs = kept[:-2].reshape(2, 2, 32, 64, 1).view(torch.bfloat16)
            probabilities = pairs.mT.reshape(2, 2, 64, 64).double()
        sums, eps = kept[-1].reshape(2, 2, 64), 2**-9 if keeps == 32 else 1e-5
        torch.testing.assert_close(probabilities.sum(2), sums.double(), rtol=eps, atol=0)
        q = x.detach().double().unflatten(0, (2, 64)).permute(2, 0, 1, 3)
        expected = (q @ q.mT / 8).softmax(-1)
        actual = probabilities.mT / sums[..., None]
        torch.testing.assert_close(actual, expected, rtol=1e-3 + 2 * eps, atol=1e-5)


def test_segments_are_islands():
    lengths = [40, 70, 64]
    q, k, v, dout = make(lengths, 2, 2, 48)
    before = outputs(varlen_attention, q, k, v, dout, offsets(lengths))
    poisoned_inputs = [x.detach().clone() for x in (q, k, v)]
    for x in poisoned_inputs:
        x[40:110] = torch.nan
    after = outputs(
        varlen_attention, *(x.requires_grad_() for x in poisoned_inputs), dout, offsets(lengths)
    )
    for name in before:
        assert after[name][40:110].isnan().all()
        for rows in (slice(0, 40), slice(110, 174)):
            assert_bitwise(name, after[name][rows], before[name][rows])


def test_causal_outputs_ignore_later_tokens():
    q, k, v, _ = make([150], 2, 1, 64)
    before = varlen_attention(q, k, v, offsets([150]), causal=True)
    k2, v2 = k.detach().clone(), v.detach().clone()
    k2[77:] = 1e3
    v2[77:] = -1e3
    after = varlen_attention(q, k2, v2, offsets([150]), causal=True)
    assert_bitwise("out", after[:77], before[:77])
    assert (after[77:] != before[77:]).any()


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_no_tokens(lengths):
    q, k, v, dout = make(lengths, 4, 2, 16)
    result = outputs(varlen_attention, q, k, v, dout, offsets(lengths))
    assert [tuple(x.shape) for x in result.values()] == [(0, 4, 16)] * 2 + [(0, 2, 16)] * 2


@pytest.mark.parametrize("scale", [0.25, -0.25, 0.0])
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_means_the_same(causal: bool, scale: float):
    """It is device-agnostic torch code, and can be asked for."""
    lengths = [30, 0, 41]
    q, k, v, dout = make(lengths, 4, 2, 16)
    cu = offsets(lengths)
    ours = outputs(varlen_attention, q, k, v, dout, cu, causal=causal, scale=scale, backend="sdpa")
    expected = outputs(varlen_attention_reference, q, k, v, dout, cu, causal=causal, scale=scale)
    for name in expected:
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-4, atol=1e-5)


GOOD = {
    "q": torch.zeros(10, 4, 8),
    "k": torch.zeros(10, 2, 8),
    "v": torch.zeros(10, 2, 8),
    "cu_seqlens": torch.tensor([0, 4, 10], dtype=torch.int32),
}
BAD = [
    ({"q": torch.zeros(())}, "q is float32 [] on cpu; it must be float32 or bfloat16 or"),
    ({"q": torch.zeros(10, 4)}, "q is float32 [10, 4] on cpu; it must be float32 or bfloat16 or"),
    ({"q": torch.zeros(10, 4, 8).double()}, "q is float64 [10, 4, 8]"),
    (
        {"scale": torch.tensor(1.0, requires_grad=True)},
        "scale is a tensor that requires a gradient",
    ),
    ({"scale": "a"}, "scale is 'a'; it must be a number"),
    ({"scale": [1.0]}, "scale is [1.0]; it must be a number"),
    ({"max_seqlen": "a"}, "max_seqlen is 'a'; it must be a whole number"),
    ({"max_seqlen": 6.5}, "max_seqlen is 6.5; it must be a whole number"),
    ({"k": torch.zeros(10, 2, 8).half()}, "k is float16 [10, 2, 8] on cpu; it must be float32"),
    ({"v": torch.zeros(9, 2, 8)}, "k is [10, 2, 8] and v is [9, 2, 8]; both must be"),
    ({"q": torch.zeros(10, 3, 8)}, "q has 3 heads and k has 2; q's must be a positive multiple"),
    (
        {name: torch.zeros(10, 2, 257) for name in "qkv"},
        "q's head_dim is 257; it must be 1 to 256",
    ),
    ({name: torch.zeros(10, 2, 0) for name in "qkv"}, "q's head_dim is 0; it must be 1 to 256"),
    ({"cu_seqlens": torch.tensor([0, 10])}, "cu_seqlens is int64 [2] on cpu; it must be int32"),
    ({"cu_seqlens": torch.tensor([]).int()}, "cu_seqlens is empty"),
    ({"cu_seqlens": torch.tensor([1, 10]).int()}, "cu_seqlens starts at 1; it must start at 0"),
    ({"cu_seqlens": torch.tensor([0, 11]).int()}, "cu_seqlens ends at 11; it must end at q's"),
    (
        {"cu_seqlens": torch.tensor([0, 7, 6, 10]).int()},
        "cu_seqlens falls from 7 to 6 at element 2",
    ),
    (
        {"q": torch.zeros(10, 8, 4).transpose(1, 2)},
        "q has strides (32, 1, 4); its last dimension must be contiguous",
    ),
]


@pytest.mark.parametrize("change, message", BAD, ids=[m[:40] for _, m in BAD])
def test_bad_arguments_are_named(change, message):
    arguments: dict[str, Any] = {**GOOD, **change}
    with pytest.raises(ValueError, match=re.escape(message)):
        varlen_attention(**arguments)


@pytest.mark.parametrize("wrong", [[0, 11], [1, 11], [0, 7, 6, 10], [-1, 9]])
def test_sdpa_checks_cu_seqlens_too(wrong):
    cu = torch.tensor(wrong, dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens runs from .* q's number of tokens, 10"):
        varlen_attention(**{**GOOD, "cu_seqlens": cu}, backend="sdpa")


def test_opcheck():
    q, k, v, _ = make([5, 0, 9], 4, 2, 24)
    cu = offsets([5, 0, 9])
    torch.library.opcheck(
        torch.ops.vlmkernels.varlen_attention.default, (q, k, v, cu, 9, True, 0.2, "cpu")
    )
    out, stats = torch.ops.vlmkernels.varlen_attention(q, k, v, cu, None, True, 0.2, "cpu")
    arguments = [x.detach() for x in (torch.randn_like(out), q, k, v, cu, out, stats)]
    torch.library.opcheck(
        torch.ops.vlmkernels.varlen_attention_backward.default, (*arguments, 9, True, 0.2, "cpu")
    )
    q, k, v, _ = make([64, 64], 4, 2, 24)  # all that is kept is written
    options = (64, False, 0.2, "cpu-kept")
    with isa("generic"):
        arguments = (q, k, v, offsets([64, 64]), *options)
        torch.library.opcheck(torch.ops.vlmkernels.varlen_attention.default, arguments)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_into_one_graph(backend):
    lengths = [30, 41]
    q, k, v, dout = make(lengths, 4, 2, 16)

    def function(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        return varlen_attention(q * 2, k, v, cu, causal=True) + 1

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    eager = outputs(function, q, k, v, dout, offsets(lengths))
    result = outputs(compiled, q, k, v, dout, offsets(lengths))
    for name in eager:
        assert_bitwise(name, result[name], eager[name])
    torch._dynamo.reset()

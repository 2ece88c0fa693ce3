"""vision_attention against a float64 reference, on every instruction set of this machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.numeric import (
    ATTENTION_GRID,
    MACHINE_GRID,
    PAST_CACHES_GRID,
    assert_accurate,
    assert_bitwise,
    isa,
    poisoned,
)
from tests.kernels.test_attention import rounding_noise
from vlmkernels import VisionLayout, vision_attention
from vlmkernels.attention.api import _composed, rotated_attention
from vlmkernels.attention.reference import vision_attention_reference
from vlmkernels.rotary import rotate

#: Windows of 64, 48, 32 and 24 patches; an image, a video of 2 frames, one unit.
GRID = [[1, 12, 20], [2, 10, 8], [1, 2, 2]]


def make(
    grid: list[list[int]], heads: int, dim: int, dtype: torch.dtype = torch.float32, **kw: Any
) -> tuple[VisionLayout, Tensor, Tensor]:
    layout = VisionLayout.from_grid(grid, window_size=kw.get("window_size", 112))
    qkv = torch.randn(layout.num_patches, 3, heads, dim).to(dtype)
    return layout, qkv.requires_grad_(), torch.randn(layout.num_patches, heads, dim).to(dtype)


def outputs(
    function: Callable[..., Tensor], qkv: Tensor, dout: Tensor, *args: Any, **kw: Any
) -> dict[str, Tensor]:
    out = function(qkv, *args, **kw)
    (dqkv,) = torch.autograd.grad(out, qkv, dout)
    return {"out": out.detach(), "dq": dqkv[:, 0], "dk": dqkv[:, 1], "dv": dqkv[:, 2]}


def check(layout: VisionLayout, qkv: Tensor, dout: Tensor, **kw: Any) -> None:
    exact_qkv = qkv.detach().double().requires_grad_()
    exact = outputs(vision_attention_reference, exact_qkv, dout.double(), layout, **kw)
    plain = outputs(vision_attention_reference, qkv, dout, layout, **kw)
    ours = outputs(vision_attention, qkv, dout, layout, **kw)
    noise = noise_of(layout, qkv, dout, **kw)
    for name in exact:
        assert_accurate(name, ours[name], plain[name], exact[name], noise[name])


def noise_of(
    layout: VisionLayout, qkv: Tensor, dout: Tensor, window: bool, scale: float | None = None
) -> dict[str, Tensor]:
    """rounding_noise of rotated rows in the segments' order; only sums over whole rows are used,
    which rotation leaves as they are."""
    q, k, v = qkv.detach().double().unbind(1)
    table = layout.rotary_table(qkv.shape[-1])
    cu, permutation, _ = layout.segments(window)
    everything = torch.arange(layout.num_patches, device=qkv.device)
    order = everything if permutation is None else permutation.long()
    rows = (x[order] for x in (rotate(q, table), rotate(k, table), v, dout))
    noise = rounding_noise(*rows, cu, scale, False)
    return {name: torch.empty_like(x).index_copy(0, order, x) for name, x in noise.items()}


@pytest.mark.parametrize("name, dtype", ATTENTION_GRID)
@pytest.mark.parametrize("dim", [64, 72, 80, 20])
@pytest.mark.parametrize("window", [True, False])
def test_accuracy(name, dtype, dim, window):
    with isa(name), poisoned():
        layout, qkv, dout = make(GRID, 2, dim, dtype)
        check(layout, qkv, dout, window=window)


@settings(max_examples=20)
@given(
    kernel=st.sampled_from(ATTENTION_GRID),
    units=st.lists(
        st.tuples(st.integers(1, 2), st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=3
    ),
    side=st.integers(1, 5),
    heads=st.integers(1, 5),
    quarter=st.integers(1, 64),
    window=st.booleans(),
    scale=st.sampled_from([None, 0.3, -0.2]),
    number=st.integers(0, 2**31 - 1),
)
def test_any_shape(kernel, units, side, heads, quarter, window, scale, number):
    torch.manual_seed(number)
    name, dtype = kernel.values
    grid = [[t, 2 * h, 2 * w] for t, h, w in units]
    layout, qkv, dout = make(grid, heads, 4 * quarter, dtype, window_size=28 * side)
    with isa(name), poisoned():
        check(layout, qkv, dout, window=window, scale=scale)


@pytest.mark.parametrize("window", [True, False])
def test_equals_transformers(window):
    """Its rotation, its window order and its masks, in float64."""
    modeling = pytest.importorskip("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
    layout, qkv, _ = make(GRID, 2, 80)
    vision = modeling.Qwen2_5_VLVisionConfig(hidden_size=160, num_heads=2)
    cos, sin = modeling.Qwen2_5_VLVisionRotaryEmbedding(vision)(torch.zeros(1), layout.position_ids)
    exact = qkv.detach().double()
    q, k = modeling.apply_rotary_pos_emb_vision(
        exact[:, 0], exact[:, 1], cos.double(), sin.double()
    )
    segment = torch.empty(layout.num_patches, dtype=torch.int64)
    cu = layout.segments(window)[0].tolist()
    order = torch.arange(layout.num_patches)
    if window:
        order = order.view(-1, 4)[layout.window_index].flatten()
    for i, (begin, end) in enumerate(zip(cu, cu[1:], strict=False)):
        segment[order[begin:end]] = i
    same = segment[:, None] == segment
    scores = torch.einsum("phd,khd->hpk", q, k) * 80**-0.5
    expected = torch.einsum(
        "hpk,khd->phd", scores.masked_fill(~same, -torch.inf).softmax(-1), exact[:, 2]
    )
    ours = vision_attention(qkv.detach(), layout, window=window)
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name, dtype", MACHINE_GRID)
def test_reading_through_the_permutation_changes_no_bit(name, dtype):
    layout, qkv, dout = make(GRID, 3, 80, dtype)
    assert layout.window_order is not None
    order = layout.window_order.long()
    permuted = qkv.detach()[order].requires_grad_()
    ordered = layout.in_window_order()
    with isa(name):
        ours = outputs(vision_attention, qkv, dout, layout, window=True)
        expected = outputs(vision_attention, permuted, dout[order], ordered, window=True)
    for result in expected:
        assert_bitwise(result, ours[result][order], expected[result])


def test_a_layout_in_window_order_has_the_same_angles():
    layout = make(GRID, 1, 80)[0]
    ordered = layout.in_window_order()
    assert ordered.window_order is None and layout.window_order is not None
    table = layout.rotary_table(80)
    assert_bitwise("table", ordered.rotary_table(80), table[layout.window_order.long()])
    angles = layout.rotary(80, windowed=True)
    assert_bitwise("angles", ordered.rotary(80, windowed=True), angles)
    assert_bitwise("cosines", ordered.rotary_table(80)[:, :40], angles.cos())
    assert_bitwise("sines", ordered.rotary_table(80)[:, 40:], angles.sin())
    plain = VisionLayout.from_grid(GRID)
    assert plain.in_window_order() is plain


@pytest.mark.parametrize("name, dtype", ATTENTION_GRID)
def test_megatrons_projection_is_read_in_place(name, dtype):
    """[P, H, 3, D]: the same bits, and a gradient in the same order."""
    layout, qkv, dout = make(GRID, 4, 80, dtype)
    fused = qkv.detach().transpose(1, 2).contiguous().requires_grad_()  # [P, H, 3, D]
    with isa(name):
        for window in (True, False):
            expected = outputs(vision_attention, qkv, dout, layout, window=window)
            out = vision_attention(fused.transpose(1, 2), layout, window=window)
            (dfused,) = torch.autograd.grad(out, fused, dout)
            assert dfused.is_contiguous()
            assert_bitwise("out", out, expected["out"])
            for i, part in enumerate(("dq", "dk", "dv")):
                assert_bitwise(part, dfused[:, :, i], expected[part])
    (op,) = (out.grad_fn,)
    view = fused.detach().transpose(1, 2)
    stats = torch.ops.vlmkernels.vision_attention(
        view, layout.rotary_table(80), layout.cu_seqlens, None, layout.max_seqlen, 0.1, "cpu"
    )[1]
    dqkv = torch.ops.vlmkernels.vision_attention_backward(
        *(dout, view, layout.rotary_table(80), layout.cu_seqlens, None, out.detach(), stats),
        *(layout.max_seqlen, 0.1, "cpu"),
    )
    assert op is not None and dqkv.stride() == view.stride()


@pytest.mark.parametrize("name, dtype", PAST_CACHES_GRID)
@pytest.mark.parametrize("interleaved", [False, True])
def test_results_past_the_caches_are_the_same(name, dtype, interleaved):
    """Above 16 MB they are written by other instructions, and rows are fetched ahead."""
    images = 1 if dtype == torch.float32 else 2  # of 3,360 patches of 5 KB; of 2.5 KB
    layout, qkv, dout = make([[1, 60, 56]] * images, 16, 80, dtype)
    if interleaved:
        qkv = qkv.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    with isa(name), poisoned():
        large = outputs(vision_attention, qkv, dout, layout, window=True)
        few = qkv.detach()[:, :, 4:6].clone().requires_grad_()
        small = outputs(vision_attention, few, dout[:, 4:6], layout, window=True)
    for result in small:
        assert_bitwise(result, large[result][:, 4:6], small[result])


@pytest.mark.parametrize("name, dtype", [g for g in MACHINE_GRID if g.values[1] == torch.bfloat16])
@pytest.mark.parametrize("window", [True, False])
def test_bitwise_repeatable_with_any_number_of_threads(name, dtype, window):
    """With one head the keys of the longer frames are dealt out to several items."""
    layout, qkv, dout = make([[1, 24, 26], [3, 8, 8]], 8, 80, dtype)
    one, one_dout = qkv.detach()[:, :, 3:4].clone().requires_grad_(), dout[:, 3:4]
    with isa(name):
        torch.set_num_threads(1)
        whole = outputs(vision_attention, qkv, dout, layout, window=window)
        for threads in (1, 2, 3, 2, 1):
            torch.set_num_threads(threads)
            parts = outputs(vision_attention, one, one_dout, layout, window=window)
            for part in parts:
                assert_bitwise(f"{part}, {threads} threads", parts[part], whole[part][:, 3:4])


@pytest.mark.parametrize("window", [True, False])
def test_the_composition_for_cuda_means_the_same(window):
    """It is device-agnostic torch code, so that a machine without a GPU can run it."""
    layout, qkv, dout = make(GRID, 2, 80)

    def composed(qkv: Tensor) -> Tensor:
        return _composed(qkv, layout.rotary_table(80), *layout.segments(window), 80**-0.5)

    ours = outputs(composed, qkv, dout)
    expected = outputs(vision_attention, qkv, dout, layout, window=window)
    for name in expected:
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-4, atol=1e-5)


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    layout = VisionLayout.from_grid([[1, 6, 6]])
    table = layout.rotary_table(80)
    q, k = torch.randn(1, 1, 80).double(), torch.randn(1, 1, 80).double()
    a, b = rotate(q.expand(36, 1, 80), table), rotate(k.expand(36, 1, 80), table)
    torch.testing.assert_close(a.norm(dim=-1), q.norm(dim=-1).expand(36, 1), rtol=1e-6, atol=0)
    scores = (a[:, 0] @ b[:, 0].T).flatten()
    distance = (layout.position_ids[:, None] - layout.position_ids).flatten(0, 1)
    for offset in distance.unique(dim=0):
        same = scores[(distance == offset).all(1)]
        torch.testing.assert_close(same, same[:1].expand_as(same), rtol=0, atol=1e-4)


def test_no_patches():
    layout, qkv, dout = make([], 2, 80)
    for window in (True, False):
        result = outputs(vision_attention, qkv, dout, layout, window=window)
        assert [tuple(x.shape) for x in result.values()] == [(0, 2, 80)] * 4


def test_padding_is_an_island():
    layout, qkv, dout = make(GRID, 2, 80)
    padded = layout.padded(2)
    assert padded.num_patches == layout.num_patches + 8
    more = torch.cat([qkv.detach(), torch.randn(8, 3, 2, 80)]).requires_grad_()
    more_dout = torch.cat([dout, torch.randn(8, 2, 80)])
    for window in (True, False):
        ours = outputs(vision_attention, more, more_dout, padded, window=window)
        expected = outputs(vision_attention, qkv, dout, layout, window=window)
        tail = VisionLayout.from_grid([[1, 2, 4]])
        tail = replace(tail, position_ids=torch.zeros(8, 2, dtype=torch.int64))
        last = outputs(
            vision_attention,
            more.detach()[-8:].requires_grad_(),
            more_dout[-8:],
            tail,
            window=False,
        )
        for name in expected:
            assert_bitwise(name, ours[name][:-8], expected[name])
            assert_bitwise(f"{name} of the padding", ours[name][-8:], last[name])
    assert layout.padded(0) is layout


def change(**changes: Any) -> Callable[[VisionLayout], VisionLayout]:
    return lambda layout: replace(layout, **changes)


BAD = [
    ({"qkv": torch.tensor(1.0)}, None, "qkv is float32 [] on cpu; it must be"),
    ({"qkv": torch.zeros(352, 3, 80)}, None, "qkv is float32 [352, 3, 80] on cpu; it must be"),
    ({"qkv": torch.zeros(352, 2, 3, 80)}, None, "qkv is [352, 2, 3, 80]; it must be [P, 3, H, D]"),
    ({"qkv": torch.zeros(352, 3, 2, 80).double()}, None, "qkv is float64"),
    ({"qkv": torch.zeros(352, 3, 2, 82)}, None, "head_dim is 82; it must be a positive multiple"),
    ({"qkv": torch.zeros(352, 3, 2, 260)}, None, "head_dim is 260; it must be a multiple of 4 up"),
    (
        {"qkv": torch.zeros(352, 3, 80, 2).transpose(2, 3)},
        None,
        "qkv has strides (480, 160, 1, 2); its last dimension must be contiguous",
    ),
    (
        {"qkv": torch.zeros(351, 3, 2, 80)},
        None,
        "rotary table is float32 [352, 80] on cpu; qkv [351, 3, 2, 80] on cpu needs float32 [351",
    ),
    ({}, change(cu_window_seqlens=None), "window is True, but the layout was made without a"),
    (
        {},
        change(window_order=torch.arange(352).int() - 1),
        "window_order has -1 at element 0; it must be a permutation of 352 patches",
    ),
    (
        {},
        change(window_order=torch.arange(352).int() // 2),
        "window_order has 0 at element 1; it must be a permutation of 352 patches",
    ),
    (
        {},
        change(cu_window_seqlens=torch.empty(0).int()),
        "cu_seqlens is int32 [0] on cpu; qkv [352, 3, 2, 80] on cpu needs int32 [n + 1] there",
    ),
    (
        {},
        change(cu_window_seqlens=torch.tensor([[0, 352]]).int()),
        "cu_seqlens is int32 [1, 2] on cpu; qkv [352, 3, 2, 80] on cpu needs int32 [n + 1] there",
    ),
    (
        {},
        change(window_order=torch.arange(352)),
        "window_order is int64 [352] on cpu; qkv [352, 3, 2, 80] on cpu needs int32 [352] there",
    ),
    (
        {},
        change(cu_window_seqlens=torch.tensor([0, 351]).int()),
        "cu_seqlens ends at 351; it must end at",
    ),
]


@pytest.mark.parametrize("arguments, changed, message", BAD, ids=[m[:40] for *_, m in BAD])
def test_bad_arguments_are_named(arguments, changed, message):
    layout = VisionLayout.from_grid([[1, 12, 16], [2, 10, 8]], window_size=112)
    layout = changed(layout) if changed else layout
    with pytest.raises(ValueError, match=re.escape(message)):
        vision_attention(
            **{"qkv": torch.zeros(352, 3, 2, 80), "layout": layout, "window": True, **arguments}
        )


@pytest.mark.parametrize("name", ["qkv", "table", "cu_seqlens", "order"])
def test_rotated_attention_takes_tensors(name):
    arguments: dict[str, Any] = {
        "qkv": torch.zeros(4, 3, 2, 8),
        "table": torch.zeros(4, 8),
        "cu_seqlens": torch.tensor([0, 4], dtype=torch.int32),
        "order": torch.arange(4, dtype=torch.int32),
    }
    for wrong in (None, [0, 4], arguments[name].numpy()):
        if name == "order" and wrong is None:  # as they stand
            continue
        with pytest.raises(TypeError, match=f"^{name} is a .*; it must be a torch.Tensor"):
            rotated_attention(**{**arguments, name: wrong})


def test_opcheck():
    layout, qkv, dout = make([[1, 4, 6]], 2, 24)
    tensors = (layout.rotary_table(24), layout.cu_window_seqlens, layout.window_order)
    options = (64, 0.2, "cpu")
    stats = torch.ops.vlmkernels.vision_attention(qkv, *tensors, 64, 0.2, "cpu-kept")[1]
    assert stats.shape == (66, 2, 24)
    for view in (qkv, qkv.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()):
        arguments = (view, *tensors, *options)
        torch.library.opcheck(torch.ops.vlmkernels.vision_attention.default, arguments)
        out, stats = torch.ops.vlmkernels.vision_attention(*arguments)
        torch.library.opcheck(
            torch.ops.vlmkernels.vision_attention_backward.default,
            (dout, view.detach(), *tensors, out.detach(), stats, *options),
        )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_into_one_graph(backend):
    layout, qkv, dout = make([[1, 12, 8]], 2, 24)

    def function(qkv: Tensor, layout: VisionLayout) -> Tensor:
        full = vision_attention(qkv * 2, layout, window=False)
        return full + vision_attention(qkv, layout, window=True)

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    result = outputs(compiled, qkv, dout, layout)
    eager = outputs(function, qkv, dout, layout)
    for name in eager:
        assert_bitwise(name, result[name], eager[name])
    torch._dynamo.reset()


def test_recomputes_to_the_same_bits():
    layout, qkv, dout = make(GRID, 2, 80)
    expected = outputs(vision_attention, qkv, dout, layout, window=True)

    def recomputed(qkv: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(
            lambda x: vision_attention(x, layout, window=True), qkv, use_reentrant=False
        )

    ours = outputs(recomputed, qkv, dout)
    for name in expected:
        assert_bitwise(name, ours[name], expected[name])


def test_heads_that_share_memory_have_the_gradient_of_a_copy():
    layout = VisionLayout.from_grid([[1, 4, 4]], window_size=28)
    qkv = torch.randn(4000).as_strided((16, 3, 2, 8), (64, 32, 1, 1))
    dout = torch.randn(16, 2, 8)
    shared, copied = (
        outputs(vision_attention, x.detach().requires_grad_(), dout, layout, window=True)
        for x in (qkv, qkv.clone(memory_format=torch.contiguous_format))
    )
    for name in copied:
        assert_bitwise(name, shared[name], copied[name])

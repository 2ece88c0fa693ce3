"""The Python side of attention on CUDA, as far as a machine without a GPU can run it."""

from __future__ import annotations

import importlib
import re

import pytest
import torch

from vlmkernels import VisionLayout, _native, attention

# The package's attribute of this name is the function.
vision_attention = importlib.import_module("vlmkernels.vision_attention")


@pytest.mark.skipif(not _native.has_cuda_kernels(), reason="built without CUDA kernels")
@pytest.mark.parametrize(
    ("dtype", "head_dim", "longest", "expected"),
    [
        (torch.bfloat16, 80, 64, "window"),
        (torch.float16, 128, 64, "window"),
        (torch.bfloat16, 128, 65, "tiled"),  # the window's backward would not fit an A100
        (torch.float16, 96, 128, "window"),
        (torch.bfloat16, 80, 129, "tiled"),
        (torch.bfloat16, 72, 64, "tiled"),
        (torch.bfloat16, 88, 64, "sdpa"),
        (torch.float32, 80, 64, "sdpa"),
    ],
)
def test_backend_is_chosen_by_shape(dtype, head_dim, longest, expected, monkeypatch):
    monkeypatch.setattr(attention, "_flash_attn", lambda: None)
    assert attention.choose_backend("cuda", dtype, head_dim, longest) == expected
    assert attention.choose_backend("cpu", dtype, head_dim, longest) == "cpu"
    monkeypatch.setattr(attention, "_flash_attn", lambda: print)
    installed = "flash-attn" if expected != "window" and dtype != torch.float32 else expected
    assert attention.choose_backend("cuda", dtype, head_dim, longest) == installed
    assert attention.choose_backend("cuda", dtype, head_dim, longest, "sdpa") == "sdpa"
    if expected in ("window", "tiled"):
        assert attention.choose_backend("cuda", dtype, head_dim, longest, "tiled") == "tiled"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cpu", torch.bfloat16, 80, 64, "window"), "'window' can't be used: it runs on CUDA"),
        (("cuda", torch.bfloat16, 80, 64, "cpu"), "'cpu' can't be used: it runs on the CPU"),
        (("cuda", torch.float32, 80, 64, "flash-attn"), "it takes bfloat16 and float16"),
        (("cuda", torch.bfloat16, 80, 64, "best"), "backend is 'best'; it must be one of cpu, "),
    ],
)
def test_a_forced_backend_that_cannot_serve_says_why(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        attention.choose_backend(*arguments)


@pytest.mark.skipif(not _native.has_cuda_kernels(), reason="built without CUDA kernels")
@pytest.mark.parametrize(
    ("kernel", "dtype", "head_dim", "longest", "message"),
    [
        ("window", torch.float32, 80, 64, "it takes bfloat16 and float16"),
        ("window", torch.bfloat16, 72, 64, "head_dim is 72, it has 64, 80, 96, 128"),
        (
            "window",
            torch.bfloat16,
            80,
            129,
            "the longest segment has 129 tokens, it takes 128 at head_dim 80",
        ),
        ("tiled", torch.float32, 80, 200, "it takes bfloat16 and float16"),
        ("tiled", torch.bfloat16, 88, 200, "head_dim is 88, it has 64, 72, 80, 96, 128"),
    ],
)
def test_a_kernel_that_cannot_serve_says_why(kernel, dtype, head_dim, longest, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        attention.choose_backend("cuda", dtype, head_dim, longest, kernel)


@pytest.mark.skipif(not _native.has_cuda_kernels(), reason="built without CUDA kernels")
@pytest.mark.skipif(torch.cuda.is_available(), reason="would run on host memory")
@pytest.mark.parametrize("longest", [6, 200], ids=["window", "tiled"])
def test_arguments_reach_the_runtime(longest, monkeypatch):
    """The binding takes what the launchers pass: without a GPU the runtime is what refuses."""
    monkeypatch.setattr(attention, "cuda_stream", lambda tensor: 0)
    q, k, v = (torch.randn(10, 2, 80).bfloat16() for _ in range(3))
    cu = torch.tensor([0, 4, 10], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="^CUDA: "):
        attention._forward_cuda(q, k, v, cu, longest, False, 0.1)
    with pytest.raises(RuntimeError, match="^CUDA: "):
        attention.tiled_forward(attention._C.flash_mma_forward_cuda, q, k, v, cu, 6, False, 0.1)
    stats = torch.empty(2, 2, 10)
    with pytest.raises(RuntimeError, match="^CUDA: "):
        attention._backward_cuda(q, q, k, v, q, stats, cu, longest, False, 0.1)
    mma = attention._C.flash_mma_backward_cuda
    with pytest.raises(RuntimeError, match="^CUDA: "):
        attention.tiled_backward(mma, q, q, k, v, q, stats, cu, 6, False, 0.1)


def test_rows_are_aligned_or_copied(monkeypatch):
    """The kernel copies 16 bytes at a time."""
    seen: list[tuple[int, ...]] = []

    class Recorder:
        def window_attention_forward_cuda(self, dtype, q, k, v, *rest):
            seen.extend((q, k, v))

    monkeypatch.setattr(attention, "_C", Recorder())
    monkeypatch.setattr(attention, "cuda_stream", lambda tensor: 0)
    base = torch.randn(10 * 2 * 80 + 1).bfloat16()
    q = base[1:].view(10, 2, 80)  # 2 bytes off
    fused = torch.randn(10, 3, 2, 80).bfloat16()  # aligned, though strided
    cu = torch.tensor([0, 10], dtype=torch.int32)
    attention._forward_cuda(q, fused[:, 1], fused[:, 2], cu, 10, False, 0.1)
    (q_address, *q_strides), k_view, v_view = seen
    assert q_address % 16 == 0 and q_address != q.data_ptr() and q_strides == [160, 80]
    assert k_view == (fused[:, 1].data_ptr(), 480, 80) and v_view[0] == fused[:, 2].data_ptr()


@pytest.mark.skipif(not _native.has_cuda_kernels(), reason="built without CUDA kernels")
@pytest.mark.parametrize(
    ("head_dim", "longest", "backend", "expected"),
    [
        (80, 100, None, "window"),
        (80, 100, "tiled", "flash_attention"),
        (72, 100, None, "flash_attention"),
        (80, 300, None, "flash_attention"),
    ],
)
def test_the_chosen_kernel_is_called_both_ways(head_dim, longest, backend, expected, monkeypatch):
    """With the promise about the longest segment, and workspace of the size that it wants."""
    called: list[tuple[str, tuple]] = []
    sizes: list[tuple[int, ...]] = []

    class Recorder:
        def __getattr__(self, name):
            return lambda *arguments: called.append((name, arguments))

    empty = torch.empty

    def recorded(*size, **kw):
        sizes.append(tuple(size[0]) if isinstance(size[0], tuple) else size)
        return empty(*size, **kw)

    monkeypatch.setattr(attention, "_C", Recorder())
    monkeypatch.setattr(attention, "_flash_attn", lambda: None)
    monkeypatch.setattr(attention, "cuda_stream", lambda tensor: 77)
    chosen = attention.choose_backend("cuda", torch.bfloat16, head_dim, longest, backend)
    q = torch.randn(430, 2, head_dim).bfloat16()
    cu = torch.tensor([0, 130, 430], dtype=torch.int32)
    promise = attention.promised(chosen, longest)
    assert promise >= longest
    monkeypatch.setattr(torch, "empty", recorded)
    out, stats = attention._forward_cuda(q, q, q, cu, promise, False, 0.1)
    attention._backward_cuda(q, q, q, q, out, stats, cu, promise, False, 0.1)
    for (name, arguments), way in zip(called, ("forward", "backward"), strict=True):
        assert name.startswith(expected) and name.endswith(f"{way}_cuda")
        assert promise in arguments[12:] and arguments[-1] == 77
    lists = [(1, 5, 4), (2, 5, 4)]  # 430 // 128 whole tiles and one more a segment
    assert [s for s in sizes if len(s) == 3 and s[-1] == 4] == (
        lists if expected == "flash_attention" else []
    )


# ---- vision_attention ----------------------------------------------------------------------------


def _vision(dtype: torch.dtype = torch.bfloat16, dim: int = 80) -> tuple:
    layout = VisionLayout.from_grid([[1, 12, 10]], window_size=112)
    return layout, torch.randn(120, 3, 2, dim).to(dtype)


@pytest.mark.skipif(not _native.has_cuda_kernels(), reason="built without CUDA kernels")
@pytest.mark.skipif(torch.cuda.is_available(), reason="would run on host memory")
def test_vision_arguments_reach_the_runtime(monkeypatch):
    monkeypatch.setattr(vision_attention, "cuda_stream", lambda tensor: 0)
    layout, qkv = _vision()
    rest = (layout.rotary_table(80), layout.cu_window_seqlens, layout.window_order, 64, 0.1)
    with pytest.raises(RuntimeError, match="^CUDA: "):
        vision_attention._forward_cuda(qkv, *rest)
    out, stats = torch.zeros(120, 2, 80).bfloat16(), torch.empty(2, 2, 120)
    with pytest.raises(RuntimeError, match="^CUDA: "):
        vision_attention._backward_cuda(out, qkv, out, stats, *rest)


@pytest.mark.skipif(not _native.has_cuda_kernels(), reason="built without CUDA kernels")
@pytest.mark.parametrize(
    ("dtype", "head_dim", "longest", "permuted", "expected"),
    [
        (torch.bfloat16, 80, 128, True, "window"),
        (torch.float16, 80, 129, False, "tiled"),
        (torch.float16, 80, 129, True, "composed"),
        (torch.bfloat16, 72, 64, False, "tiled"),
        (torch.bfloat16, 72, 64, True, "composed"),
        (torch.bfloat16, 128, 65, False, "tiled"),
        (torch.bfloat16, 88, 64, False, "composed"),
        (torch.float32, 80, 64, False, "composed"),
        (torch.bfloat16, 80, None, False, "composed"),
    ],
)
def test_vision_kernel_is_chosen_by_shape(
    dtype, head_dim, longest, permuted, expected, monkeypatch
):
    """Whether flash-attn is installed or not."""
    for flash_attn in (lambda: None, lambda: print):
        monkeypatch.setattr(attention, "_flash_attn", flash_attn)
        arguments = (dtype, head_dim, longest, permuted)
        assert vision_attention.choose_kernel("cuda", *arguments) == expected
        assert vision_attention.choose_kernel("cpu", *arguments) == "cpu"


@pytest.mark.skipif(not _native.has_cuda_kernels(), reason="built without CUDA kernels")
@pytest.mark.skipif(torch.cuda.is_available(), reason="would run on host memory")
def test_tiled_vision_arguments_reach_the_runtime(monkeypatch):
    monkeypatch.setattr(vision_attention, "cuda_stream", lambda tensor: 0)
    monkeypatch.setattr(vision_attention, "_capability", lambda device: (8, 0))
    layout, qkv = _vision()
    rest = (layout.rotary_table(80), layout.cu_seqlens, None, 200, 0.1)
    with pytest.raises(RuntimeError, match="^CUDA: "):
        vision_attention._forward_cuda(qkv, *rest)
    out, stats = torch.zeros(120, 2, 80).bfloat16(), torch.empty(2, 2, 120)
    with pytest.raises(RuntimeError, match="^CUDA: "):
        vision_attention._backward_cuda(out, qkv, out, stats, *rest)


def test_tiled_vision_gets_views_and_workspace(monkeypatch):
    """qkv as it lies, Megatron's order too; lists of tiles, rows' numbers and turned rows of the
    sizes that the kernels want. An order is refused."""
    seen: list[tuple] = []
    made: dict[int, torch.Tensor] = {}

    class Recorder:
        def __getattr__(self, name):
            return lambda *arguments: seen.append((name, *arguments))

    def recorded(make):
        def function(*arguments, **kw):
            x = make(*arguments, **kw)
            made[x.data_ptr()] = x
            return x

        return function

    monkeypatch.setattr(vision_attention, "_C", Recorder())
    monkeypatch.setattr(vision_attention, "cuda_stream", lambda tensor: 7)
    layout, qkv = _vision()
    table = layout.rotary_table(80)
    rest = (table, layout.cu_seqlens, None, 200, 0.1)
    megatron = qkv.transpose(1, 2).contiguous().transpose(1, 2)
    for x, strides, gpu in ((qkv, (480, 80), (8, 0)), (megatron, (480, 240), (9, 0))):
        monkeypatch.setattr(vision_attention, "_capability", lambda device, gpu=gpu: gpu)
        monkeypatch.setattr(torch, "empty", recorded(torch.empty))
        monkeypatch.setattr(torch, "empty_like", recorded(torch.empty_like))
        out, stats = vision_attention._forward_cuda(x, *rest)
        name, _, q, k, v, out_view, *tail = seen[-1]
        assert name == "flash_vision_forward_cuda"
        assert q[1:] == k[1:] == v[1:] == strides
        assert (q[0], k[0], v[0]) == tuple(part.data_ptr() for part in x.unbind(1))
        assert out_view == (out.data_ptr(), 160, 80) and tail[0] == stats.data_ptr()
        assert tail[2:7] == [1, 120, 2, 80, 0.1] and tail[7:10] == [0, table.data_ptr(), 200]
        tiles, turned, queries, stream = tail[10:]
        assert (made[tiles].dtype, made[tiles].shape) == (torch.int32, (1, 1, 4))
        assert (made[turned].dtype, made[turned].shape) == (x.dtype, (2, 120, 80)) and stream == 7
        if gpu == (9, 0):  # q is turned beforehand there
            assert (made[queries].dtype, made[queries].shape) == (x.dtype, (2, 120, 80))
            assert queries != turned
        else:
            assert queries == 0
        dqkv = vision_attention._backward_cuda(out, x, out, stats, *rest)
        assert dqkv.stride() == x.stride() and seen[-1][0] == "flash_vision_backward_cuda"
        dout, dq, dk, dv, longest, tiles, rows, turned, queries, stream = seen[-1][15:]
        assert (dq[0], dk[0], dv[0]) == tuple(part.data_ptr() for part in dqkv.unbind(1))
        assert dq[1:] == strides and dout[0] == out.data_ptr() and (longest, stream) == (200, 7)
        assert made[tiles].shape == (2, 1, 4) and made[turned].shape == (2, 120, 80)
        assert (made[rows].dtype, made[rows].shape) == (torch.float32, (2, 2, 120))
        assert len({tiles, rows, turned, queries}) == 4
        assert queries == 0 if gpu != (9, 0) else made[queries].shape == (2, 120, 80)
        monkeypatch.undo()
        monkeypatch.setattr(vision_attention, "_C", Recorder())
        monkeypatch.setattr(vision_attention, "cuda_stream", lambda tensor: 7)
    order = torch.arange(120, dtype=torch.int32)
    with pytest.raises(ValueError, match="window_order is given and longest is 200; the kernel"):
        vision_attention._forward_cuda(qkv, table, layout.cu_seqlens, order, 200, 0.1)


def test_vision_views_reach_the_kernel(monkeypatch):
    """qkv and its gradient as they lie, Megatron's order too; copied only where rows are off 16
    bytes. The order and the length of the longest window come last."""
    seen: list[tuple] = []

    class Recorder:
        def vision_window_forward_cuda(self, *arguments):
            seen.append(arguments)

        def vision_window_backward_cuda(self, *arguments):
            seen.append(arguments)

    monkeypatch.setattr(vision_attention, "_C", Recorder())
    monkeypatch.setattr(vision_attention, "cuda_stream", lambda tensor: 7)
    layout, qkv = _vision()
    table, order = layout.rotary_table(80), layout.window_order
    rest = (table, layout.cu_window_seqlens, order, 64, 0.1)
    megatron = qkv.transpose(1, 2).contiguous().transpose(1, 2)
    off = torch.randn(qkv.numel() + 1).bfloat16()[1:].view(qkv.shape)
    for x, strides in ((qkv, (480, 80)), (megatron, (480, 240)), (off, (480, 80))):
        out, stats = vision_attention._forward_cuda(x, *rest)
        dtype, q, k, v, out_view, *tail = seen[-1]
        assert q[1:] == k[1:] == v[1:] == strides and q[0] % 16 == 0
        assert (q[0] == x.data_ptr()) == (x is not off)
        assert (k[0] - q[0], v[0] - k[0]) == (2 * x.stride(1) if x is not off else 320,) * 2
        assert out_view == (out.data_ptr(), 160, 80)
        sizes = [layout.cu_window_seqlens.numel() - 1, 120, 2, 80, 0.1]
        assert tail[0] == stats.data_ptr() and tail[2:7] == sizes
        assert tail[7:] == [order.data_ptr(), table.data_ptr(), 64, 7]
        dqkv = vision_attention._backward_cuda(out, x, out, stats, *rest)
        assert dqkv.stride() == x.stride()
        dout, dq, dk, dv, longest, stream = seen[-1][14:]
        assert (dq[0], dk[0], dv[0]) == tuple(part.data_ptr() for part in dqkv.unbind(1))
        assert dq[1:] == strides and dout[0] == out.data_ptr() and (longest, stream) == (64, 7)

"""The Python side of attention on CUDA, as far as a machine without a GPU can run it."""

from __future__ import annotations

import re

import pytest
import torch

from vlmkernels import _native, attention


@pytest.mark.skipif(not _native.has_cuda_kernels(), reason="built without CUDA kernels")
@pytest.mark.parametrize(
    ("dtype", "head_dim", "longest", "expected"),
    [
        (torch.bfloat16, 80, 64, "window"),
        (torch.float16, 128, 128, "window"),
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
        ("window", torch.bfloat16, 80, 129, "the longest segment has 129 tokens, it takes 128"),
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
    stats = torch.empty(2, 2, 10)
    with pytest.raises(RuntimeError, match="^CUDA: "):
        attention._backward_cuda(q, q, k, v, q, stats, cu, longest, False, 0.1)


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

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
        (torch.bfloat16, 80, 129, "sdpa"),
        (torch.bfloat16, 72, 64, "sdpa"),
        (torch.float32, 80, 64, "sdpa"),
    ],
)
def test_backend_is_chosen_by_shape(dtype, head_dim, longest, expected, monkeypatch):
    monkeypatch.setattr(attention, "_flash_attn", lambda: None)
    assert attention.choose_backend("cuda", dtype, head_dim, longest) == expected
    assert attention.choose_backend("cpu", dtype, head_dim, longest) == "cpu"
    monkeypatch.setattr(attention, "_flash_attn", lambda: print)
    installed = "flash-attn" if expected == "sdpa" and dtype != torch.float32 else expected
    assert attention.choose_backend("cuda", dtype, head_dim, longest) == installed
    assert attention.choose_backend("cuda", dtype, head_dim, longest, "sdpa") == "sdpa"


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
    ("dtype", "head_dim", "longest", "message"),
    [
        (torch.float32, 80, 64, "it takes bfloat16 and float16"),
        (torch.bfloat16, 72, 64, "head_dim is 72, it has 64, 80, 96, 128"),
        (torch.bfloat16, 80, 129, "the longest segment has 129 tokens, it takes 128"),
    ],
)
def test_a_window_kernel_that_cannot_serve_says_why(dtype, head_dim, longest, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        attention.choose_backend("cuda", dtype, head_dim, longest, "window")


@pytest.mark.skipif(not _native.has_cuda_kernels(), reason="built without CUDA kernels")
@pytest.mark.skipif(torch.cuda.is_available(), reason="would run on host memory")
def test_arguments_reach_the_runtime(monkeypatch):
    """The binding takes what the launchers pass: without a GPU the runtime is what refuses."""
    monkeypatch.setattr(attention, "cuda_stream", lambda tensor: 0)
    q, k, v = (torch.randn(10, 2, 80).bfloat16() for _ in range(3))
    cu = torch.tensor([0, 4, 10], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="^CUDA: "):
        attention._forward_cuda(q, k, v, cu, 6, False, 0.1)
    stats = torch.empty(2, 2, 10)
    with pytest.raises(RuntimeError, match="^CUDA: "):
        attention._backward_cuda(q, q, k, v, q, stats, cu, 6, False, 0.1)


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

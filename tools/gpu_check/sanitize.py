"""Every CUDA kernel of ours once, small: what run.sh runs under compute-sanitizer."""

from __future__ import annotations

import torch

from vlmkernels import (
    VisionLayout,
    scatter_visual,
    varlen_attention,
    vision_attention,
    visual_embedding,
    visual_index,
)


def vision_windows(dtype: torch.dtype) -> None:
    """Ragged windows, rotated and read through the permutation."""
    layout = VisionLayout.from_grid([[1, 12, 10]], window_size=112).to("cuda")
    qkv = torch.randn(120, 3, 2, 80).to(dtype).cuda().requires_grad_()
    vision_attention(qkv, layout, window=True).float().square().sum().backward()
    assert qkv.grad is not None and bool(qkv.grad.isfinite().all())


def vision_frames(dtype: torch.dtype) -> None:
    """Whole frames of two tiles and of one."""
    for dim in (72, 80):
        layout = VisionLayout.from_grid([[1, 14, 10], [2, 4, 6]]).to("cuda")
        qkv = torch.randn(188, 3, 5, dim).to(dtype).cuda().requires_grad_()
        vision_attention(qkv, layout, window=False).float().square().sum().backward()
        assert qkv.grad is not None and bool(qkv.grad.isfinite().all())


def main() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        vision_windows(dtype)
        vision_frames(dtype)
    for dtype, hidden in ((torch.bfloat16, 264), (torch.float32, 7)):
        ids = torch.randint(0, 100, (96,))
        ids[10:50] = 100
        index = visual_index(ids, 100).cuda()
        weight = torch.randn(101, hidden).to(dtype).cuda().requires_grad_()
        visual = torch.randn(40, hidden).to(dtype).cuda().requires_grad_()
        out = visual_embedding(ids.cuda(), weight, visual, index)
        scatter_visual(out, visual, index).float().square().sum().backward()
        assert weight.grad is not None and visual.grad is not None
        assert bool(weight.grad.isfinite().all()) and bool(visual.grad.isfinite().all())
    for kernel, lengths in (("window", (64, 21, 0)), ("tiled", (150, 1, 0))):
        q, k, v = (
            torch.randn(sum(lengths), heads, 80, dtype=torch.bfloat16, device="cuda")
            for heads in (4, 2, 2)
        )
        inputs = (q, k, v)
        for x in inputs:
            x.requires_grad_()
        borders = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        attended = varlen_attention(q, k, v, borders, causal=True, backend=kernel)
        attended.float().square().sum().backward()
        assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in inputs)
    torch.cuda.synchronize()
    print("all kernels ran")


if __name__ == "__main__":
    main()

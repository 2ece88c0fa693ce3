"""python -m benchmarks.vision_window: what a tower does around attention, in processor time.

Milliseconds of one thread's processor time, medians of interleaved repetitions, so that a shared
machine gives usable figures: the waiting is not counted, the memory that others use is.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmkernels import VisionLayout, varlen_attention, vision_attention
from vlmkernels.attention.api import _composed
from vlmkernels.rotary import rotate

HEADS, HEAD_DIM, WINDOW, REPEATS = 16, 80, 64, 8


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.softmax(q @ k.mT * HEAD_DIM**-0.5, -1, dtype=torch.float32)
    return weights.to(q.dtype) @ v


def stock(attend: Callable[..., Tensor], table: Tensor, qkv: Tensor) -> Tensor:
    """Rotation in float32, then all windows as one batch [n, H, 64, D]."""
    q, k, v = qkv.unbind(1)
    batch = (
        x.reshape(-1, WINDOW, HEADS, HEAD_DIM).transpose(1, 2)
        for x in (rotate(q, table), rotate(k, table), v)
    )
    return attend(*batch).transpose(1, 2).reshape(q.shape)


def measure(dtype: torch.dtype, backward: bool) -> dict[str, float]:
    layout = VisionLayout.from_grid([[1, 64, 64]] * 2, window_size=112)
    ordered = layout.in_window_order()
    table, patches = ordered.rotary_table(HEAD_DIM), layout.num_patches
    assert ordered.cu_window_seqlens is not None
    cu_seqlens = ordered.cu_window_seqlens
    qkv = torch.randn(patches, 3, HEADS, HEAD_DIM).to(dtype).requires_grad_(backward)
    fused = torch.randn(patches, HEADS, 3, HEAD_DIM).to(dtype).requires_grad_(backward)
    separate = [x.detach().contiguous().requires_grad_(backward) for x in qkv.unbind(1)]
    dout = torch.randn(patches, HEADS, HEAD_DIM).to(dtype)
    scale = HEAD_DIM**-0.5
    functions: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {
        "stock, eager": (lambda: stock(eager, table, qkv), [qkv]),
        "stock, SDPA": (lambda: stock(F.scaled_dot_product_attention, table, qkv), [qkv]),
        "composed": (lambda: _composed(qkv, table, cu_seqlens, None, WINDOW, scale), [qkv]),
        "vision_attention": (lambda: vision_attention(qkv, ordered, window=True), [qkv]),
        "permuted": (lambda: vision_attention(qkv, layout, window=True), [qkv]),
        "[P, H, 3, D]": (
            lambda: vision_attention(fused.transpose(1, 2), ordered, window=True),
            [fused],
        ),
        "attention alone": (
            lambda: varlen_attention(separate[0], separate[1], separate[2], cu_seqlens),
            separate,
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(REPEATS):
        for name in random.sample(list(functions), len(functions)):
            run, inputs = functions[name]
            start = time.thread_time()
            out = run()
            if backward:
                torch.autograd.grad(out, inputs, dout)
            times[name].append(time.thread_time() - start)
    return {name: 1e3 * statistics.median(seconds[1:]) for name, seconds in times.items()}


def main() -> None:
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        for backward in (False, True):
            kind = f"{str(dtype)[6:]}, forward{' + backward' if backward else ''}"
            found = measure(dtype, backward)
            row = ", ".join(f"{name} {ms:.1f}" for name, ms in found.items())
            sys.stdout.write(f"{kind}: {row}\n")


if __name__ == "__main__":
    main()

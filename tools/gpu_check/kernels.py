"""python -m tools.gpu_check.kernels NAME [--alone]: one CUDA kernel, small, against plain torch.

Errors are against the same on the GPU, in float32 of 16-bit types (most GPUs are slow at float64)
and in float64 of float32. --alone leaves the comparison out: for compute-sanitizer. --list prints
the names for this GPU, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.kernels.numeric import assert_accurate, assert_bitwise
from vlmkernels import (
    HybridDeviceOptimizer,
    VisionLayout,
    add_visual_,
    linear_cross_entropy,
    visual_embedding,
    visual_index,
)
from vlmkernels.attention.launch import varlen_op, vision_op
from vlmkernels.attention.reference import varlen_attention_reference, vision_attention_reference
from vlmkernels.embedding.add import add_visual_reference
from vlmkernels.embedding.lookup import visual_embedding_reference
from vlmkernels.layer import add_rms_norm_, swiglu_
from vlmkernels.rotary import apply_rotary_qkv, apply_rotary_reference

Function = Callable[..., Tensor]
DEVICE = "cuda"
#: Segments, by kernel: ragged, empty, of one token, of several tiles.
LENGTHS = {"window 64": [64, 21, 0, 1], "window 128": [128, 65, 0, 100]}
TILED_LENGTHS = [300, 129, 0, 1, 64, 513]


def results_of(function: Function, inputs: list[Tensor], backward: bool) -> list[Tensor]:
    """The function's value and, for a gradient of ones and twos, its derivatives."""
    leaves = [x.detach().requires_grad_(backward) for x in inputs]
    out = function(*leaves)
    dout = 1 + torch.arange(out.numel(), device=out.device).view(out.shape) % 2
    grads = torch.autograd.grad(out, leaves, dout.to(out.dtype)) if backward else ()
    return [out.detach(), *grads]


def check(
    ours: Function, plain: Function, inputs: list[Tensor], backward: bool, alone: bool
) -> None:
    """Every result at most twice as far from the exact one as plain torch's at the same dtype."""
    found = results_of(ours, inputs, backward)
    torch.cuda.synchronize()
    assert all(bool(x.isfinite().all()) for x in found), "a result is not finite"
    if not alone:
        wide = torch.float64 if inputs[0].dtype == torch.float32 else torch.float32
        exact = results_of(plain, [x.to(wide) for x in inputs], backward)
        expected = results_of(plain, inputs, backward)
        for i, (a, b, c) in enumerate(zip(found, expected, exact, strict=True)):
            assert_accurate(f"result {i}", a, b, c)


def types_of(kernel: str) -> list[torch.dtype]:
    return [torch.bfloat16] if kernel == "sm90-fused" else [torch.bfloat16, torch.float16]


def segments(kernel: str, backward: bool, alone: bool) -> None:
    """varlen_attention, grouped heads, its types, causal or not."""
    lengths = LENGTHS.get(kernel, TILED_LENGTHS)
    cu = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    for dtype, causal in zip((torch.bfloat16, types_of(kernel)[-1]), (False, True), strict=True):
        inputs = [
            torch.randn(sum(lengths), heads, 80, device=DEVICE).to(dtype) for heads in (4, 2, 2)
        ]
        options = (max(lengths), causal, 80**-0.5, kernel.split()[0])
        check(
            lambda q, k, v, options=options: varlen_op(q, k, v, cu, *options)[0],
            partial(varlen_attention_reference, cu_seqlens=cu, causal=causal),
            inputs,
            backward,
            alone,
        )


def vision(kernel: str, backward: bool, alone: bool) -> None:
    """vision_attention: ragged windows read through the permutation; whole frames."""
    window = kernel == "window"
    grid = [[1, 12, 10]] if window else [[1, 14, 20], [2, 4, 6]]
    layout = VisionLayout.from_grid(grid, window_size=112).to(DEVICE)
    cu, order, longest = layout.segments(window)
    order = None if order is None else order.int()
    for dtype in types_of(kernel):
        qkv = torch.randn(layout.num_patches, 3, 4, 80, device=DEVICE).to(dtype)
        options = (layout.rotary_table(80), cu, order, longest, 80**-0.5, kernel)
        check(
            lambda qkv, options=options: vision_op(qkv, *options)[0],
            lambda qkv: vision_attention_reference(qkv, layout, window=window),
            [qkv],
            backward,
            alone,
        )


def embedding(long_runs: bool, backward: bool, alone: bool) -> None:
    """Rows moved in 16 bytes and in 4 or 2; the table's gradient with and without long runs."""
    for dtype, hidden in ((torch.bfloat16, 264), (torch.float32, 7), (torch.bfloat16, 7)):
        ids = torch.randint(0, 2 if long_runs else 100, (400,))
        ids[10:50] = 100
        index = visual_index(ids, 100).to(DEVICE)
        ids = ids.to(DEVICE)
        weight, visual = (torch.randn(n, hidden, device=DEVICE).to(dtype) for n in (101, 40))
        inputs = [weight, visual]
        check(
            lambda w, v, ids=ids, index=index: visual_embedding(ids, w, v, index),
            lambda w, v, ids=ids, index=index: visual_embedding_reference(ids, w, v, index),
            inputs,
            backward,
            alone,
        )


def added(backward: bool, alone: bool) -> None:
    """Visual rows added in place, four elements at a time and one."""
    for dtype, hidden in ((torch.bfloat16, 264), (torch.float32, 7), (torch.bfloat16, 7)):
        index = visual_index(torch.arange(400) % 3, 2).to(DEVICE)
        inputs = [torch.randn(n, hidden, device=DEVICE).to(dtype) for n in (400, 133)]
        check(
            lambda x, v, index=index: add_visual_(x.clone(), v, index),
            lambda x, v, index=index: add_visual_reference(x, v, index),
            inputs,
            backward,
            alone,
        )


def loss(alone: bool) -> None:
    """The last layer in chunks: rows of all classes, and columns of all rows."""
    targets = torch.arange(600, device=DEVICE) * 7 % 9001
    for dtype, smoothing in ((torch.bfloat16, 0.0), (torch.float32, 0.1)):
        inputs = [torch.randn(n, 64, device=DEVICE).to(dtype) / 8 for n in (600, 9001)]
        options = {"reduction": "none", "label_smoothing": smoothing}
        check(
            lambda h, w, o=options: linear_cross_entropy(h, w, targets, **o).to(h.dtype),
            lambda h, w, o=options: F.cross_entropy(F.linear(h, w), targets, **o),
            inputs,
            True,
            alone,
        )


def norm(alone: bool) -> None:
    """RMSNorm of a sum, of several parts of rows."""
    for dtype in (torch.bfloat16, torch.float32):
        inputs = [torch.randn(*n, 640, device=DEVICE).to(dtype) for n in ((50,), (50,), ())]

        def plain(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
            return F.rms_norm(x + residual, weight.shape, weight, 1e-6)

        check(lambda x, r, w: add_rms_norm_(x * 1.0, r, w, 1e-6)[1], plain, inputs, True, alone)


def swiglu(alone: bool) -> None:
    """In units of 16 bytes and of 8."""
    for dtype, width in ((torch.bfloat16, 640), (torch.bfloat16, 340), (torch.float32, 64)):
        inputs = [torch.randn(*n, 2 * width, device=DEVICE).to(dtype) for n in ((50,), ())]

        def plain(x: Tensor, bias: Tensor) -> Tensor:
            gate, up = (x + bias).chunk(2, -1)
            return F.silu(gate) * up

        check(lambda x, b: swiglu_(x * 1.0, b), plain, inputs, True, alone)


def rotary(alone: bool) -> None:
    """Queries and keys of a fused projection, there and back."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        qkv = torch.randn(50, 2, 5, 64, device=DEVICE).to(dtype)
        angles = torch.rand(50, 32, device=DEVICE) * 100
        cos, sin = torch.cat([angles.cos(), angles.sin()], -1).chunk(2, -1)

        angles_of_type = cos.to(dtype), sin.to(dtype)

        def plain(x: Tensor, angles: tuple[Tensor, Tensor] = angles_of_type) -> Tensor:
            q, k, v = (part.flatten(1, 2) for part in x.split((3, 1, 1), 2))
            return torch.cat([*(apply_rotary_reference(part, *angles) for part in (q, k)), v], 1)

        def ours(x: Tensor, cos: Tensor = cos, sin: Tensor = sin) -> Tensor:
            return torch.cat(apply_rotary_qkv(x, cos, sin), 1)

        check(ours, plain, [qkv], True, alone)


def optimizer(alone: bool) -> None:
    """Two, each dropped right after a step: the same bits with and without overlap."""
    start = torch.randn(100_000, device=DEVICE).bfloat16()
    grads = [torch.randn(100_000, device=DEVICE).bfloat16() for _ in range(3)]
    found = []
    for in_backward in (False, True):
        param = nn.Parameter(start.clone())
        hybrid = HybridDeviceOptimizer(
            [param], lr=1e-2, in_backward=in_backward, bucket_bytes=1 << 14
        )
        for grad in grads:
            (param * grad).sum().backward()
            hybrid.step()
            hybrid.zero_grad()
        del hybrid
        found.append(param.detach())
    assert_bitwise("weights", found[1], found[0])
    assert not torch.equal(found[0], start)


def kernels(capability: tuple[int, int]) -> dict[str, Callable[..., None]]:
    """Name -> check, of a GPU's kernels; those of which more depends come first."""
    tiled = ["sm80", "sm90"] if capability == (9, 0) else ["sm80"]
    found: dict[str, Callable[..., None]] = {}
    if "sm90" in tiled:
        found["sm90-fused backward"] = partial(segments, "sm90-fused", True)
        found["vision sm90-fused backward"] = partial(vision, "sm90-fused", True)
    for backward in (False, True):
        way = "backward" if backward else "forward"
        for kernel in ("window 64", *tiled, "window 128"):
            found[f"{kernel} {way}"] = partial(segments, kernel, backward)
        for kernel in ("window", *tiled):
            found[f"vision {kernel} {way}"] = partial(vision, kernel, backward)
        found[f"embedding {way}"] = partial(embedding, False, backward)
        found[f"embedding {way}, added rows"] = partial(added, backward)
    found["loss"] = loss
    found["norm"] = norm
    found["swiglu"] = swiglu
    found["rotary"] = rotary
    found["embedding backward, long runs"] = partial(embedding, True, True)
    found["optimizer"] = optimizer
    return found


def main(arguments: list[str]) -> None:
    found = kernels(torch.cuda.get_device_capability())
    if arguments[0] == "--list":
        print(json.dumps(list(found)))
        return
    torch.manual_seed(0)
    found[arguments[0]](alone="--alone" in arguments)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])

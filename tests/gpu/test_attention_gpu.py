"""Window and tiled attention on a real GPU, for `make gpu-check`."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

from tests.kernels import test_vision_attention as vision
from tests.kernels.numeric import assert_accurate, assert_bitwise
from tests.kernels.test_attention import make, offsets, outputs, rounding_noise
from vlmkernels import _native, varlen_attention, vision_attention
from vlmkernels.attention.launch import varlen_op
from vlmkernels.attention.reference import varlen_attention_reference, vision_attention_reference
from vlmkernels.attention.select import (
    TILED,
    TILED_HEAD_DIMS,
    WINDOW_LENGTHS,
    machine_of,
    obstacle,
    select,
)

if not torch.cuda.is_available():
    pytest.skip("no GPU: torch.cuda.is_available() is False", allow_module_level=True)
if not _native.has_cuda_kernels():
    pytest.skip("vlmkernels was built without CUDA kernels", allow_module_level=True)


CASES = [
    ("window", [64, 64, 17, 0, 1, 48], 16, 16),
    ("window", [128, 127, 65, 3], 6, 2),
    ("tiled", [300, 129, 0, 1, 64, 513], 4, 4),
    ("tiled", [1000, 33, 257], 6, 2),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("dim", TILED_HEAD_DIMS)
@pytest.mark.parametrize(
    ("kernel", "lengths", "heads", "kv_heads"),
    CASES,
    ids=["windows", "128-keys-gqa", "tiled", "tiled-gqa"],
)
def test_accuracy(kernel, lengths, heads, kv_heads, dim, dtype, causal):
    if kernel == "window" and max(lengths) > WINDOW_LENGTHS.get(dim, 0):
        pytest.skip(f"the window kernel has no head_dim {dim} for {max(lengths)} tokens")
    q, k, v, dout = (x.detach().cuda() for x in make(lengths, heads, kv_heads, dim, dtype))
    cu = offsets(lengths).cuda()
    exact, plain = (
        outputs(
            varlen_attention_reference,
            *(x.to(kind).requires_grad_() for x in (q, k, v)),
            dout.to(kind),
            cu,
            causal=causal,
        )
        for kind in (torch.float64, dtype)
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    ours = outputs(varlen_attention, *inputs, dout, cu, causal=causal, backend=kernel)
    noise = rounding_noise(q, k, v, dout, cu, None, causal)
    for name in exact:
        assert_accurate(name, ours[name], plain[name], exact[name], noise[name])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("dim", TILED_HEAD_DIMS)
def test_both_tiled_kernels(dim, dtype, causal):
    """By mma.sync and, on compute capability 9.0, by wgmma, the backward by two kernels and by one:
    results, and what the backward needs.
    Many tiles a block, inputs that are parts of one tensor, a negative scale, and segments of NaN
    beside others."""
    lengths = [2000, 129, 0, 1, 64, 513, 300, 128, 1000]
    heads, kv_heads, scale = 6, 2, -0.7 / dim**0.5
    cu = offsets(lengths).cuda()
    q, k, v, dout = (x.detach().cuda() for x in make(lengths, heads, kv_heads, dim, dtype))
    kw = {"causal": causal, "scale": scale}
    exact = outputs(
        varlen_attention_reference, *(x.double().requires_grad_() for x in (q, k, v)),
        dout.double(), cu, **kw,
    )  # fmt: skip
    fused = torch.cat((q, k, v, dout), 1)
    sizes = (heads, kv_heads, kv_heads, heads)
    *parts, gradient = fused.split(sizes, 1)
    leaves = [x.detach().requires_grad_() for x in parts]
    plain = outputs(varlen_attention_reference, *leaves, gradient, cu, **kw)
    noise = rounding_noise(q, k, v, dout, cu, scale, causal)
    ops, options = torch.ops.vlmkernels, (max(lengths), causal, scale)
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    kernels = ["sm80", "sm90"] if is_hopper else ["sm80"]
    if is_hopper and dtype == torch.bfloat16:
        kernels.append("sm90-fused")

    def run(kernel, *inputs):
        *qkv, dout = inputs
        tensors = (*qkv, cu)
        out, stats = ops.varlen_attention(*tensors, *options, kernel)
        grads = ops.varlen_attention_backward(dout, *tensors, out, stats, *options, kernel)
        return dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True)), stats

    results = [run(kernel, *parts, gradient) for kernel in kernels]
    for ours, stats in results:
        for name, expected in exact.items():
            assert_accurate(name, ours[name], plain[name], expected, noise[name])
        torch.testing.assert_close(stats, results[0][1], rtol=1e-4, atol=1e-4)
    broken = fused.clone()
    for i in (1, 6):  # each has whole segments before and behind it
        broken[cu[i] : cu[i + 1]] = float("nan")
    whole = [slice(cu[i], cu[i + 1]) for i in range(len(lengths)) if i not in (1, 6)]
    for kernel, (expected, _) in zip(kernels, results, strict=True):
        ours, _ = run(kernel, *broken.split(sizes, 1))
        for name, rows in itertools.product(expected, whole):
            assert_bitwise(name, ours[name][rows], expected[name][rows])


@pytest.mark.parametrize(
    ("kernel", "lengths", "heads", "kv_heads"),
    [
        ("window", [64] * 300, 16, 16),
        ("tiled", [256] * 40 + [4000, 1300], 16, 4),
        ("sm90-fused", [256] * 40 + [4000, 1300], 16, 4),
    ],
)
def test_bitwise_repeatable(kernel, lengths, heads, kv_heads):
    if kernel == "sm90-fused" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this GPU's compute capability is not 9.0")
    q, k, v, dout = (x.detach().cuda() for x in make(lengths, heads, kv_heads, 80, torch.bfloat16))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    kw = {"max_seqlen": max(lengths), "backend": kernel}
    cu = offsets(lengths).cuda()
    expected = outputs(varlen_attention, *inputs, dout, cu, **kw)
    for _ in range(30):
        again = outputs(varlen_attention, *inputs, dout, cu, **kw)
        for name in expected:
            assert_bitwise(name, again[name], expected[name])


def test_a_captured_graph_counts_tiles_from_0():
    """At each replay: it writes its own lists of tiles."""
    lengths = [256] * 40 + [4000]
    q, k, v, _ = (x.detach().cuda() for x in make(lengths, 4, 4, 80, torch.bfloat16))
    cu = offsets(lengths).cuda()
    expected = varlen_attention(q, k, v, cu, max_seqlen=4000, backend="tiled")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = varlen_attention(q, k, v, cu, max_seqlen=4000, backend="tiled")
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert_bitwise("out", out, expected)


@pytest.mark.parametrize("kernel", ["window", "tiled"])
@pytest.mark.parametrize("compiled", [False, True])
def test_no_synchronisation_with_max_seqlen(compiled, kernel):
    q, k, v, _ = (x.detach().cuda() for x in make([64] * 4, 2, 2, 80, torch.bfloat16))
    cu = offsets([64] * 4).cuda()

    def run():
        return varlen_attention(q, k, v, cu, max_seqlen=64, backend=kernel)

    function = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    expected = function()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = function()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_bitwise("out", out, expected)


@pytest.mark.parametrize(
    ("begin", "length", "limit"),
    [(0, 80, 64), (0, 300, 200), (3, 80, 128), (3, 300, 300)],
    ids=["window", "tiled", "gap, window", "gap, tiled"],
)
def test_a_bad_segment_ends_the_kernel(begin, length, limit):
    """In a process of its own: the error is sticky."""
    backend = "window" if limit <= WINDOW_LENGTHS[80] else "tiled"
    code = (
        "import torch; from vlmkernels import varlen_attention\n"
        f"q = torch.zeros({length}, 2, 80, dtype=torch.bfloat16, device='cuda')\n"
        f"cu = torch.tensor([{begin}, {length}], dtype=torch.int32, device='cuda')\n"
        f"varlen_attention(q, q, q, cu, max_seqlen={limit}, backend='{backend}')\n"
        "torch.cuda.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    said = f"segment 0 is tokens {begin} to {length} of {length}, and max_seqlen is {limit}"
    assert said in done.stdout


# ---- vision_attention: the fused kernels -------------------------------------------------------


def check_vision(layout, qkv, dout, order, window):
    """Against float64; from Megatron's [P, H, 3, D] where `order` says so."""
    qkv, dout, layout = qkv.detach().cuda(), dout.cuda(), layout.to("cuda")
    exact = vision.outputs(
        vision_attention_reference,
        qkv.double().requires_grad_(),
        dout.double(),
        layout,
        window=window,
    )
    if order == "megatron":
        qkv = qkv.transpose(1, 2).contiguous().transpose(1, 2)
    qkv.requires_grad_()
    plain = vision.outputs(vision_attention_reference, qkv, dout, layout, window=window)
    ours = vision.outputs(vision_attention, qkv, dout, layout, window=window)
    noise = vision.noise_of(layout, qkv, dout, window=window)
    for name in exact:
        assert_accurate(name, ours[name], plain[name], exact[name], noise[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("dim", list(WINDOW_LENGTHS))
@pytest.mark.parametrize("order", ["patches", "windows", "megatron"])
def test_vision_accuracy(order, dim, dtype):
    """Windows of 64, 48, 32 and 24 patches, through the permutation, in window order, and from
    Megatron's [P, H, 3, D]."""
    layout, qkv, dout = vision.make(vision.GRID, 4, dim, dtype)
    if order == "windows":
        layout = layout.in_window_order()
    check_vision(layout, qkv, dout, order, window=True)


@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_sums_of_long_rows_do_not_drift(kernel):
    """Where the largest score comes first, 1,024 blocks of keys leave it: corrections off 1 by 2e-6
    would change the sum by 2e-3."""
    tokens, dim = 1 << 16, 80
    if obstacle(kernel, machine_of(torch.device("cuda", 0)), torch.bfloat16, dim, tokens):
        pytest.skip(f"{kernel} does not run on this GPU")
    q, k = torch.zeros(2, tokens, 1, dim, device="cuda", dtype=torch.bfloat16)
    q[..., 0], k[..., 0], k[0, 0, 0] = 7.28125, 56.0, 60.25
    cu = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    _, stats = varlen_op(q, k, k, cu, tokens, False, 0.25, kernel)
    below = torch.tensor(0.25 * 7.28125 * (56.0 - 60.25), dtype=torch.float64).exp()
    exact = 1 + (tokens - 1) * below
    torch.testing.assert_close(
        stats[1].double(), exact.cuda().expand(1, tokens), rtol=5e-5, atol=0.0
    )


#: Frames of 2,016, 252, 140 and 4 patches.
FRAMES = [[1, 42, 48], [2, 14, 18], [1, 10, 14], [1, 2, 2]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("dim", TILED_HEAD_DIMS)
@pytest.mark.parametrize("order", ["patches", "megatron"])
def test_vision_frames_accuracy(order, dim, dtype):
    layout, qkv, dout = vision.make(FRAMES, 5, dim, dtype)
    kernel = select(machine_of(torch.device("cuda", 0)), dtype, dim, 2016, vision=True)
    assert kernel in TILED
    check_vision(layout, qkv, dout, order, window=False)


@pytest.mark.parametrize("window", [True, False])
def test_vision_is_repeatable_and_does_not_synchronise(window):
    layout, qkv, dout = vision.make([[1, 64, 64]], 16, 80, torch.bfloat16)
    layout, dout = layout.to("cuda"), dout.cuda()
    qkv = qkv.detach().cuda().requires_grad_()
    expected = vision.outputs(vision_attention, qkv, dout, layout, window=window)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(30):
            again = vision.outputs(vision_attention, qkv, dout, layout, window=window)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name in expected:
        assert_bitwise(name, again[name], expected[name])


def test_vision_frames_in_fp32_are_composed():
    """What has no kernel means the same."""
    layout, qkv, dout = vision.make([[1, 16, 16]], 2, 80, torch.float32)
    gpu = qkv.detach().cuda().requires_grad_()
    ours = vision.outputs(vision_attention, gpu, dout.cuda(), layout.to("cuda"), window=False)
    expected = vision.outputs(vision_attention, qkv, dout, layout, window=False)
    for name in expected:
        torch.testing.assert_close(ours[name].cpu(), expected[name], rtol=1e-3, atol=1e-3)

"""visual_embedding on a real GPU: the same bits as the CPU kernels, for `make gpu-check`."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.numeric import assert_bitwise
from tests.kernels.test_embedding import (
    DTYPES,
    SETTINGS,
    VOCABULARY,
    gradients,
    make,
    with_long_runs,
)
from vlmkernels import (
    _native,
    add_visual_,
    scatter_visual,
    scatter_visual_,
    visual_embedding,
    visual_index,
)

if not torch.cuda.is_available():
    pytest.skip("no GPU: torch.cuda.is_available() is False", allow_module_level=True)
if not _native.has_cuda_kernels():
    pytest.skip("vlmkernels was built without CUDA kernels", allow_module_level=True)


def to_gpu(*tensors: Tensor) -> Any:
    return tuple(t.cuda() for t in tensors)


@pytest.mark.parametrize("kw", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("hidden", [1, 7, 100, 1536, 3584])
def test_same_bits_as_the_cpu(hidden: int, dtype: torch.dtype, kw: Any) -> None:
    """Forward, dvisual and dweight: fp32 sums are in one order on both."""
    ids, weight, visual, index = make(600, hidden, dtype)
    weight = weight[slice(*kw.get("vocab_range", (0, VOCABULARY)))]
    dout = torch.randn(600 // kw.get("shard", (0, 1))[1], hidden).to(dtype)
    inputs = to_gpu(ids, weight, visual, index)
    out = visual_embedding(*inputs, **kw)
    assert_bitwise("out", out.cpu(), visual_embedding(ids, weight, visual, index, **kw))
    got = gradients(visual_embedding, *to_gpu(ids, weight, visual, index, dout), **kw)
    want = gradients(visual_embedding, ids, weight, visual, index, dout, **kw)
    assert_bitwise("dweight", got[0].cpu(), want[0])
    assert_bitwise("dvisual", got[1].cpu(), want[1])
    again = gradients(visual_embedding, *to_gpu(ids, weight, visual, index, dout), **kw)
    assert_bitwise("dweight, a second time", again[0], got[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("hidden", [7, 1536])
def test_long_runs_have_the_bits_of_the_cpu(hidden: int, dtype: torch.dtype) -> None:
    inputs = with_long_runs(hidden, dtype)
    got = gradients(visual_embedding, *to_gpu(*inputs))
    want = gradients(visual_embedding, *inputs)
    assert_bitwise("dweight", got[0].cpu(), want[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_scatter(dtype: torch.dtype) -> None:
    ids, _, visual, index = make(600, 264, dtype)
    embeddings = torch.randn(600, 264).to(dtype)
    assert visual_index(ids.cuda(), 3, counts=len(visual)).cpu().tolist() == index.tolist()
    for size in (1, 3):
        rows = slice(0, 600 // size)
        got = scatter_visual(*to_gpu(embeddings[rows], visual, index), shard=(0, size))
        want = scatter_visual(embeddings[rows], visual, index, shard=(0, size))
        assert_bitwise("scatter", got.cpu(), want)


@pytest.mark.parametrize("hidden", [7, 100, 1536])
@pytest.mark.parametrize("out", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_other_dtypes(dtype: torch.dtype, out: torch.dtype, hidden: int) -> None:
    """Conversions, sparse gradients and gradients added to main_grad: the bits of the CPU."""
    ids, weight, visual, index = make(600, hidden, dtype)
    visual = visual.to(DTYPES[(DTYPES.index(dtype) + 1) % 3])
    dout = torch.randn(600, hidden).to(out)
    inputs = to_gpu(ids, weight, visual, index, dout)
    for mode in ("dense", "sparse"):
        kw: Any = {"dtype": out, "weight_grad": mode}
        got = gradients(visual_embedding, *inputs, **kw)
        want = gradients(visual_embedding, ids, weight, visual, index, dout, **kw)
        for name, a, b in zip(("dweight", "dvisual"), got, want, strict=True):
            a, b = (x.to_dense() if x.is_sparse else x for x in (a, b))
            assert_bitwise(f"{name}, {mode}", a.cpu(), b)
    start = torch.randn(weight.shape)
    sums = []
    for device in ("cpu", "cuda"):
        table = weight.detach().to(device).requires_grad_()
        table.main_grad = start.to(device, copy=True)  # type: ignore[attr-defined]
        rest = (t.to(device) for t in (visual, index))
        done = visual_embedding(
            ids.to(device), table, *rest, dtype=out, weight_grad="main_grad", padding_idx=0
        )
        done.backward(dout.to(device))
        sums.append(table.main_grad.cpu())  # type: ignore[attr-defined]
    assert_bitwise("main_grad", sums[1], sums[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_scatter_in_place(dtype: torch.dtype) -> None:
    ids, _, visual, index = make(600, 264, dtype)
    embeddings = torch.randn(600, 264).to(dtype)
    for size in (1, 3):
        rows = slice(600 // size * (size - 1), 600)
        ours = embeddings[rows].cuda()
        scatter_visual_(ours, *to_gpu(visual, index), shard=(size - 1, size))
        want = scatter_visual(embeddings[rows], visual, index, shard=(size - 1, size))
        assert_bitwise("in place", ours.cpu(), want)


@pytest.mark.parametrize("hidden", [7, 264, 2048])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_add(dtype: torch.dtype, hidden: int) -> None:
    """The sums and the gradients of the CPU, whole and in a part."""
    _, _, visual, index = make(600, hidden, dtype)
    before, dout = (torch.randn(600, hidden).to(dtype) for _ in range(2))
    for size in (1, 3):
        rows = slice(600 // size * (size - 1), 600)
        results = []
        for device in ("cuda", "cpu"):
            added = visual.detach().to(device).requires_grad_()
            out = before[rows].to(device, copy=True)
            add_visual_(out, added, index.to(device), shard=(size - 1, size))
            out.backward(dout[rows].to(device))
            results.append((out.detach().cpu(), added.grad.cpu()))  # type: ignore[union-attr]
        for name, a, b in zip(("sum", "dvisual"), *results, strict=True):
            assert_bitwise(name, a, b)


def test_views_that_are_not_aligned() -> None:
    """Pointers off by one element take the narrow path."""
    ids, weight, visual, index = make(64, 128, torch.bfloat16)
    expected = visual_embedding(ids, weight, visual, index)
    ids, index = ids.cuda(), index.cuda()
    for shift in (1, 2, 8):
        off = [
            torch.empty(t.numel() + shift, dtype=t.dtype, device="cuda") for t in (weight, visual)
        ]
        table = off[0][shift:].view_as(weight).copy_(weight)
        rows = off[1][shift:].view_as(visual).copy_(visual)
        got = visual_embedding(ids, table, rows, index)
        assert_bitwise(f"shift {shift}", got.cpu(), expected)


def test_table_beyond_four_gigabytes() -> None:
    rows, hidden = 2_300_000, 1024  # 4.7 GB
    weight = torch.empty(rows, hidden, dtype=torch.bfloat16, device="cuda")
    weight[-2:] = torch.randn(2, hidden, device="cuda")
    weight[:1] = torch.randn(1, hidden, device="cuda")
    ids = torch.tensor([rows - 1, 0, rows - 2], device="cuda")
    index = torch.full((3,), -1, dtype=torch.int32, device="cuda")
    out = visual_embedding(ids, weight, None, index)
    assert_bitwise("rows", out, weight[ids])


def test_other_stream_and_compile() -> None:
    ids, weight, visual, index = make(256, 512, torch.bfloat16)
    expected = visual_embedding(ids, weight, visual, index)
    inputs = to_gpu(ids, weight, visual, index)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = visual_embedding(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    assert_bitwise("other stream", out.cpu(), expected)
    compiled = torch.compile(visual_embedding, fullgraph=True, backend="aot_eager")
    assert_bitwise("compiled", compiled(*inputs).cpu(), expected)


def test_opcheck() -> None:
    ids, weight, visual, index = to_gpu(*make(12, 6, torch.float32))
    args = (
        ids,
        weight.requires_grad_(),
        visual.requires_grad_(),
        index,
        0,
        False,
        6,
        6,
        -1,
        torch.bfloat16,
        True,
    )
    torch.library.opcheck(torch.ops.vlmkernels.visual_embedding.default, args)


TRAPPED = """
import torch, vlmkernels
ids = torch.zeros(8, dtype=torch.int64, device="cuda")
index = torch.full((8,), -1, dtype=torch.int32, device="cuda")
weight = torch.ones(4, 16, device="cuda")
{change}
vlmkernels.visual_embedding(ids, weight, weight, index)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("ids[5] = 4", "input_ids[5] is 4, but weight has 4 rows"),
        ("index[3] = 7", "visual_index[3] is 7, but visual has 4 rows"),
    ],
)
def test_out_of_range_traps_with_a_message(change: str, message: str) -> None:
    """In a process of its own: after a trap the CUDA context is gone."""
    done = subprocess.run(
        [sys.executable, "-c", TRAPPED.format(change=change)], capture_output=True, text=True
    )
    assert done.returncode != 0, "the process ended well"
    assert message in done.stdout + done.stderr

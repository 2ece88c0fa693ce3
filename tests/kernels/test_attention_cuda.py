"""The Python side of attention on CUDA, as far as a machine without a GPU can run it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.test_attention_select import AMPERE, BF16, FP32, HOPPER
from vlmkernels import VisionLayout, _native, varlen_attention, vision_attention
from vlmkernels.attention import api, launch
from vlmkernels.attention.reference import varlen_attention_reference

needs_cuda_kernels = pytest.mark.skipif(
    not _native.has_cuda_kernels(), reason="built without CUDA kernels"
)
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="would run on host memory")


# ---- launch --------------------------------------------------------------------------------------


SIZES = ("segments", "tokens", "heads", "kv_heads", "head_dim", "scale", "causal")


class Native:
    """Stands for the native module, without a GPU: records the calls, or makes them with stream 0,
    where the CUDA runtime refuses. `lists` are the calls of list_tiles, `calls` all others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, record: bool) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.lists: list[dict[str, Any]] = []
        self.record = record
        self.stream: int | None = 0
        monkeypatch.setattr(launch, "_stream", lambda q: self.stream)
        monkeypatch.setattr(launch, "launch", self.launch)
        monkeypatch.setattr(launch, "check_device", lambda kernel, q: None)

    def launch(self, name: str, tensor: torch.Tensor, **named: Any) -> None:
        def call() -> None:
            getattr(_native._C, f"{name}_cuda")(**named, stream=0)

        if name == "list_tiles":
            self.lists.append(named)
            if not self.record:
                with pytest.raises(RuntimeError, match="^CUDA: "):
                    call()
            return
        self.calls.append((name, named))
        if not self.record:
            call()


varlen = torch.ops.vlmkernels.varlen_attention
varlen_backward = torch.ops.vlmkernels.varlen_attention_backward
vision = torch.ops.vlmkernels.vision_attention
vision_backward = torch.ops.vlmkernels.vision_attention_backward


def _vision(dtype: torch.dtype = BF16, dim: int = 80) -> tuple:
    layout = VisionLayout.from_grid([[1, 12, 10]], window_size=112)
    return layout, torch.randn(120, 3, 2, dim).to(dtype)


@needs_cuda_kernels
@needs_no_gpu
@pytest.mark.parametrize("kernel", ["window", "sm80", "sm90", "sm90-fused"])
def test_arguments_reach_the_runtime(kernel, monkeypatch):
    """The binding takes what the launchers pass: without a GPU the runtime is what refuses."""
    native = Native(monkeypatch, record=False)
    q, k, v = (torch.randn(10, 2, 80).bfloat16() for _ in range(3))
    cu = torch.tensor([0, 4, 10], dtype=torch.int32)
    options = (6, False, 0.1, kernel)
    with pytest.raises(RuntimeError, match="^CUDA: "):
        varlen(q, k, v, cu, *options)
    with pytest.raises(RuntimeError, match="^CUDA: "):
        varlen_backward(q, q, k, v, cu, q, torch.empty(2, 2, 10), *options)
    layout, qkv = _vision()
    cu, order, max_seqlen = layout.segments(kernel == "window")
    tensors = (qkv, layout.rotary_table(80), cu, order)
    with pytest.raises(RuntimeError, match="^CUDA: "):
        vision(*tensors, max_seqlen, 0.1, kernel)
    out, stats = torch.zeros(120, 2, 80).bfloat16(), torch.empty(2, 2, 120)
    with pytest.raises(RuntimeError, match="^CUDA: "):
        vision_backward(out, *tensors, out, stats, max_seqlen, 0.1, kernel)
    assert len(native.calls) == 4


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "parts"),
    [
        (4096, 16, 2, 8),  # 64 tiles of keys for 132 processors
        (8192, 16, 2, 4),
        (8192, 28, 4, 2),
        (32768, 16, 2, 1),  # 512 tiles
        (8192, 16, 16, 1),
        (100, 6, 2, 3),
    ],
)
def test_heads_that_share_a_key_are_dealt_out(tokens, heads, kv_heads, parts):
    actual = launch.group_parts(132, tokens, heads, kv_heads)
    assert actual == parts
    most = -(-heads // kv_heads // actual)
    assert (actual - 1) * most < heads // kv_heads, "a part has no head"


def test_parts_of_a_group_get_their_workspace(monkeypatch):
    native, made, real = Native(monkeypatch, record=True), {}, launch._workspace
    monkeypatch.setattr(launch, "_workspace", lambda *a: made.update(real(*a)) or dict(made))
    q, k = (torch.randn(430, heads, 80).bfloat16() for heads in (6, 2))
    cu = torch.tensor([0, 130, 430], dtype=torch.int32)
    varlen_backward(q, q, k, k, cu, q, torch.empty(2, 6, 430), 300, False, 0.1, "sm90")
    assert made["dkv_parts"].shape == (3, 2, 430, 2, 80)
    named = native.calls[-1][1]
    assert named["group_parts"] == 3 and named["dkv_parts"] == made["dkv_parts"].data_ptr()


def test_one_backward_kernel_gets_its_workspace(monkeypatch):
    """Room for parts of 64 rows of each segment, and counts that are 0."""
    native, made, real = Native(monkeypatch, record=True), {}, launch._workspace
    monkeypatch.setattr(launch, "_workspace", lambda *a: made.update(real(*a)) or dict(made))
    q, cu = torch.randn(430, 2, 80).bfloat16(), torch.tensor([0, 130, 430], dtype=torch.int32)
    options = (cu, q, torch.empty(2, 2, 430), 300, False, 0.1)
    for kernel, name in (("sm90", "sm90_backward"), ("sm90-fused", "sm90_fused_backward")):
        assert not made.keys() & {"dq_sum", "done"}
        varlen_backward(q, q, q, q, *options, kernel)
        assert native.calls[-1][0] == name
    parts = 2 * (430 // 64 + 2)
    assert made["dq_sum"].shape == (parts, 64, 80) and made["dq_sum"].dtype == torch.float32
    assert made["done"].dtype == torch.int32 and made["done"].tolist() == [0] * parts
    named = native.calls[-1][1]
    assert all(named[x] == made[x].data_ptr() for x in ("dq_sum", "done"))


def test_a_kernel_of_another_device_is_refused():
    q, cu = torch.randn(10, 2, 80), torch.tensor([0, 10], dtype=torch.int32)
    for kernel in ("window", "sm80", "sm90", "sm90-fused", "sdpa"):
        with pytest.raises(
            ValueError, match=f"kernel is '{kernel}', which takes no tensors on cpu"
        ):
            varlen(q, q, q, cu, 10, False, 0.1, kernel)


def test_rows_are_aligned_or_copied(monkeypatch):
    """Kernels on CUDA copy 16 bytes at a time."""
    native = Native(monkeypatch, record=True)
    base = torch.randn(10 * 2 * 80 + 1).bfloat16()
    q = base[1:].view(10, 2, 80)  # 2 bytes off
    fused = torch.randn(10, 3, 2, 80).bfloat16()  # aligned, though strided
    cu = torch.tensor([0, 10], dtype=torch.int32)
    varlen(q, fused[:, 1], fused[:, 2], cu, 10, False, 0.1, "window")
    ((name, named),) = native.calls
    q_address, *q_strides = named["q"]
    assert name == "window_forward"
    assert q_address % 16 == 0 and q_address != q.data_ptr() and q_strides == [160, 80]
    assert named["k"] == (fused[:, 1].data_ptr(), 480, 80)
    assert named["v"][0] == fused[:, 2].data_ptr()
    wide = torch.randn(10, 3, 84).bfloat16()
    for x in (
        wide[:, :2, :80],  # heads 168 bytes from each other
        torch.randn(10, 164).bfloat16()[:, :160].view(10, 2, 80),  # tokens 328 bytes
        torch.randn(10, 2, 160).bfloat16()[..., ::2],  # elements
    ):
        copy = launch.aligned(x)
        assert copy is not x and copy.is_contiguous() and torch.equal(copy, x)
    assert launch.aligned(fused) is fused


@pytest.mark.parametrize(("kernel", "copied"), [("window", False), ("sm80", False), ("sm90", True)])
def test_an_expanded_dout_is_copied_for_tma(kernel, copied, monkeypatch):
    native = Native(monkeypatch, record=True)
    q, cu = torch.randn(10, 2, 80).bfloat16(), torch.tensor([0, 10], dtype=torch.int32)
    dout = torch.randn(1, 2, 80).bfloat16().expand(10, 2, 80)
    varlen_backward(dout, q, q, q, cu, q, torch.empty(2, 2, 10), 10, False, 0.1, kernel)
    assert native.calls[0][1]["dout"][1:] == ((160, 80) if copied else (0, 80))
    varlen_backward(  # as sum().backward() gives it
        *(torch.ones((), dtype=BF16).expand(10, 2, 80), q, q, q, cu, q, torch.empty(2, 2, 10)),
        *(10, False, 0.1, kernel),
    )
    assert native.calls[1][1]["dout"][1:] == (160, 80)


@pytest.mark.parametrize(
    ("head_dim", "max_seqlen", "machine", "backend", "expected"),
    [
        (80, 100, AMPERE, None, "window"),
        (80, 100, AMPERE, "tiled", "sm80"),
        (72, 100, AMPERE, None, "sm80"),
        (80, 300, AMPERE, None, "sm80"),
        (80, 100, HOPPER, None, "window"),
        (80, 100, HOPPER, "tiled", "sm90"),
        (80, 300, HOPPER, None, "sm90"),
        (80, 300, HOPPER, "sm80", "sm80"),
    ],
)
def test_the_selected_kernel_runs_both_ways(
    head_dim, max_seqlen, machine, backend, expected, monkeypatch
):
    """With the length that was given, and workspace of the size that the kernel wants."""
    native = Native(monkeypatch, record=True)
    monkeypatch.setattr(api, "machine_of", lambda device: machine)
    sizes: list[tuple[int, ...]] = []
    empty = torch.empty

    def recorded(*size, **kw):
        sizes.append(tuple(size[0]) if isinstance(size[0], tuple) else size)
        return empty(*size, **kw)

    q, k, v = (torch.randn(430, 2, head_dim).bfloat16().requires_grad_() for _ in range(3))
    cu = torch.tensor([0, 130, 430], dtype=torch.int32)
    monkeypatch.setattr(torch, "empty", recorded)
    out = varlen_attention(q, k, v, cu, max_seqlen=max_seqlen, backend=backend)
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    for (name, named), way in zip(native.calls, ("forward", "backward"), strict=True):
        assert name == f"{expected}_{way}"
        assert named["max_seqlen"] == max_seqlen
    # Twice, 430 // 128 whole tiles and one more a segment, and their counts; for both ways.
    tiles = [(11, 4)]
    wanted = [] if expected == "window" else tiles
    assert [s for s in sizes if s[1:] == (4,)] == wanted


@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_tiles_are_listed_once_for_each_cu_seqlens(kernel, monkeypatch):
    """For all layers and both ways; again after any change of cu_seqlens that torch counts, for
    other options, on another stream, and at each call where nothing can be kept."""
    native = Native(monkeypatch, record=True)
    q = torch.randn(430, 2, 80).bfloat16().requires_grad_()
    cu = torch.tensor([0, 130, 430], dtype=torch.int32)

    def lists(cu=cu, causal=False, length=300, layers=2):
        """How many were made for some layers, forward and backward."""
        before = len(native.lists)
        for _ in range(layers):
            out, _ = varlen(q, q, q, cu, length, causal, 0.1, kernel)
            if out.requires_grad:
                torch.autograd.grad(out, q, torch.ones_like(out))
        assert native.calls[-1][1]["tiles"] == native.lists[-1]["tiles"]
        return len(native.lists) - before

    assert [lists(), lists()] == [1, 0]
    names = ("cu_seqlens", "segments", "tokens", "max_seqlen", "causal", "vision")
    wanted = (cu.data_ptr(), 2, 430, 300, False, False)
    assert tuple(native.lists[0][name] for name in names) == wanted
    cu[1] = 131
    assert [lists(), lists()] == [1, 0]
    cu.view(-1)[1:].copy_(torch.tensor([140, 430]))
    assert [lists(), lists()] == [1, 0]
    cu.data = torch.tensor([0, 150, 430], dtype=torch.int32)
    assert [lists(), lists()] == [1, 0]
    assert [lists(cu.clone()), lists(causal=True), lists(length=301), lists()] == [1, 1, 1, 1]
    assert lists(torch.stack([cu, cu], 1)[:, 0]) == 1  # made dense, and known as it was given
    native.stream = 7
    assert [lists(), lists()] == [1, 0]
    native.stream = None
    assert lists() == 4
    native.stream = 7
    with torch.inference_mode():
        assert lists(cu.clone()) == 2
    assert cu in launch._LISTS
    kept, lists.__defaults__ = len(launch._LISTS), ()
    del cu
    assert len(launch._LISTS) == kept - 1


@pytest.mark.parametrize("kernel", ["window", "sm80", "sm90"])
def test_rows_of_no_segment_are_refused(kernel, monkeypatch):
    Native(monkeypatch, record=True)
    q, cu = torch.randn(10, 2, 80).bfloat16(), torch.tensor([0], dtype=torch.int32)
    with pytest.raises(ValueError, match="names no segment; it must end at 10, the number of tok"):
        varlen(q, q, q, cu, 10, False, 0.1, kernel)
    varlen(q[:0], q[:0], q[:0], cu, 10, False, 0.1, kernel)


def test_compiled_calls_select_by_a_length_that_varies(monkeypatch):
    """In one graph, and not in a new one for each length: the first and one each kernel."""
    native = Native(monkeypatch, record=True)
    machine = torch.compiler.assume_constant_result(lambda device: HOPPER)
    monkeypatch.setattr(api, "machine_of", machine)
    q, cu = torch.randn(300, 2, 80).bfloat16(), torch.tensor([0, 100, 300], dtype=torch.int32)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, backend=backend)
    def attend(q, cu, max_seqlen):
        return varlen_attention(q * 2, q, q, cu, max_seqlen=max_seqlen) + 1

    for length in (100, 90, 80, 200, 210, 220):
        attend(q, cu, length)
    kernels = [name.removesuffix("_forward") for name, _ in native.calls]
    assert kernels == ["window"] * 3 + ["sm90"] * 3
    assert len(graphs) == 3
    torch._dynamo.reset()


# ---- flash-attn ----------------------------------------------------------------------------------


def flash(q, k, v, begins, ends, longest, longest_key, softmax_scale, causal):
    """Stands for flash-attn's function: it masks before it scales, loads 16 bytes at a time, and
    leaves rows of its empty output unwritten that are in no segment of `longest` tokens."""
    assert begins.is_contiguous() and begins is ends and longest == longest_key > 1
    assert all(x.data_ptr() % 16 == 0 for x in (q, k, v))
    out = torch.full_like(q, float("nan"), memory_format=torch.contiguous_format)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    for begin, end in itertools.pairwise(begins.tolist()):
        rows = slice(begin, min(end, begin + longest))
        scores = torch.einsum("ihd,jhd->hij", q[rows].float(), k[rows].float())
        if causal:
            later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        if scores.numel():
            top = scores.max(-1, keepdim=True).values
            p = torch.exp(scores * softmax_scale - top * softmax_scale)
            p = p / p.sum(-1, keepdim=True)
            out[rows] = torch.einsum("hij,jhd->ihd", p, v[rows].float()).to(q.dtype)
    return out


@pytest.fixture
def with_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "machine_of", lambda device: replace(AMPERE, flash_attn=True))
    monkeypatch.setattr(api, "flash_attn", lambda: flash)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.2, -0.2, 0.0])
def test_flash_attn_gets_what_it_takes(scale, causal, with_flash):
    buffer = torch.randn(7 * 4 * 72 + 4).half()
    q, (k, v) = buffer[4:].view(7, 4, 72), torch.randn(2, 7, 2, 72).half()
    assert q.data_ptr() % 16  # as a view into a larger tensor may lie
    cu = torch.tensor([[0, 9], [4, 9], [4, 9], [7, 9]], dtype=torch.int32)[:, 0]
    actual = varlen_attention(q, k, v, cu, max_seqlen=4, causal=causal, scale=scale)
    exact = varlen_attention_reference(
        *(x.double() for x in (q, k, v)), cu, causal=causal, scale=scale
    )
    torch.testing.assert_close(actual.double(), exact, rtol=1e-3, atol=1e-3)
    alone = torch.arange(8, dtype=torch.int32)
    assert varlen_attention(q, k, v, alone, max_seqlen=1).isfinite().all()
    empty = varlen_attention(q[:0], k[:0], v[:0], torch.zeros(1, dtype=torch.int32), max_seqlen=0)
    assert empty.shape == (0, 4, 72)


@pytest.mark.parametrize("ends", [[0, 3, 7], [1, 4, 7], [0, 3, 6], [0, 4, 3, 7], [0]])
def test_rows_that_flash_attn_would_not_write_are_an_error(ends, with_flash):
    q = torch.randn(7, 2, 72).half()
    cu = torch.tensor(ends, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="cu_seqlens must start at 0, never decrease, end at"):
        varlen_attention(q, q, q, cu, max_seqlen=3)


# ---- vision_attention ----------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
@pytest.mark.parametrize("megatron", [False, True])
def test_tiled_vision_gets_views_and_workspace(kernel, megatron, monkeypatch):
    """qkv as it lies, Megatron's order too; lists of tiles, lse and delta, and rotated rows of the
    sizes that the kernels want. An order is refused."""
    native = Native(monkeypatch, record=True)
    made: dict[int, torch.Tensor] = {}

    def recorded(make):
        def function(*arguments, **kw):
            x = make(*arguments, **kw)
            made[x.data_ptr()] = x
            return x

        return function

    layout, x = _vision()
    strides = (480, 240) if megatron else (480, 80)
    if megatron:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    table = layout.rotary_table(80)
    tensors, options = (x, table, layout.cu_seqlens, None), (200, 0.1, kernel)
    monkeypatch.setattr(torch, "empty", recorded(torch.empty))
    monkeypatch.setattr(torch, "empty_like", recorded(torch.empty_like))
    out, stats = vision(*tensors, *options)
    name, named = native.calls[-1]
    q, k, v = (named[x] for x in "qkv")
    prefix = f"{kernel}_vision"
    assert name == f"{prefix}_forward"
    assert q[1:] == k[1:] == v[1:] == strides
    assert (q[0], k[0], v[0]) == tuple(part.data_ptr() for part in x.unbind(1))
    assert named["out"] == (out.data_ptr(), 160, 80) and named["row_stats"] == stats.data_ptr()
    assert [named[x] for x in SIZES] == [1, 120, 2, 2, 80, 0.1, False]
    assert (named["order"], named["rotary"]) == (0, table.data_ptr())
    assert named["max_seqlen"] == 200
    tiles, rotated, queries = named["tiles"], named["rotated_k"], named.get("rotated_q", 0)
    assert (made[tiles].dtype, made[tiles].shape) == (torch.int32, (3, 4))
    assert (made[rotated].dtype, made[rotated].shape) == (x.dtype, (2, 120, 80))
    if kernel == "sm90":  # q is rotated beforehand there
        assert (made[queries].dtype, made[queries].shape) == (x.dtype, (2, 120, 80))
        assert queries != rotated
    else:
        assert queries == 0
    dqkv = vision_backward(out, *tensors, out, stats, *options)
    assert dqkv.stride() == x.stride() and native.calls[-1][0] == f"{prefix}_backward"
    named = native.calls[-1][1]
    dout, dq, dk, dv, length = (named[x] for x in ("dout", "dq", "dk", "dv", "max_seqlen"))
    assert named["tiles"] == tiles
    lse_delta = named["lse_delta"]
    rotated, queries = named["rotated_k"], named.get("rotated_q", 0)
    assert (dq[0], dk[0], dv[0]) == tuple(part.data_ptr() for part in dqkv.unbind(1))
    assert dq[1:] == strides and dout[0] == out.data_ptr() and length == 200
    assert made[rotated].shape == (2, 120, 80)
    assert (made[lse_delta].dtype, made[lse_delta].shape) == (torch.float32, (2, 2, 120))
    assert len({tiles, lse_delta, rotated, queries}) == 4
    assert made[queries].shape == (2, 120, 80) if kernel == "sm90" else queries == 0
    order = torch.arange(120, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"window_order is given; {kernel} takes no order"):
        vision(x, table, layout.cu_seqlens, order, *options)


def test_vision_views_reach_the_kernel(monkeypatch):
    """qkv and its gradient as they lie, Megatron's order too; copied only where rows are off 16
    bytes. The order and the length of the longest window come last."""
    native = Native(monkeypatch, record=True)
    layout, qkv = _vision()
    table, order = layout.rotary_table(80), layout.window_order
    tensors, options = (table, layout.cu_window_seqlens, order), (64, 0.1, "window")
    megatron = qkv.transpose(1, 2).contiguous().transpose(1, 2)
    off = torch.randn(qkv.numel() + 1).bfloat16()[1:].view(qkv.shape)
    for x, strides in ((qkv, (480, 80)), (megatron, (480, 240)), (off, (480, 80))):
        out, stats = vision(x, *tensors, *options)
        name, named = native.calls[-1]
        q, k, v = (named[x] for x in "qkv")
        assert name == "window_vision_forward"
        assert q[1:] == k[1:] == v[1:] == strides and q[0] % 16 == 0
        assert (q[0] == x.data_ptr()) == (x is not off)
        assert (k[0] - q[0], v[0] - k[0]) == (2 * x.stride(1) if x is not off else 320,) * 2
        assert named["out"] == (out.data_ptr(), 160, 80)
        sizes = [layout.cu_window_seqlens.numel() - 1, 120, 2, 2, 80, 0.1, False]
        assert named["row_stats"] == stats.data_ptr() and [named[x] for x in SIZES] == sizes
        assert (named["order"], named["rotary"]) == (order.data_ptr(), table.data_ptr())
        assert named["max_seqlen"] == 64
        dqkv = vision_backward(out, x, *tensors, out, stats, *options)
        assert dqkv.stride() == x.stride()
        named = native.calls[-1][1]
        dout, dq, dk, dv, length = (named[x] for x in ("dout", "dq", "dk", "dv", "max_seqlen"))
        assert (dq[0], dk[0], dv[0]) == tuple(part.data_ptr() for part in dqkv.unbind(1))
        assert dq[1:] == strides and dout[0] == out.data_ptr() and length == 64


@pytest.mark.parametrize("window", [True, False])
def test_vision_selects_by_the_layout(window, monkeypatch):
    """Windows through the order, frames on the kernel of the GPU; composed, the same values."""
    layout, qkv = _vision()
    for machine, kernel in ((AMPERE, "sm80_vision"), (HOPPER, "sm90_vision")):
        with monkeypatch.context() as patch:
            native = Native(patch, record=True)
            patch.setattr(api, "machine_of", lambda device, machine=machine: machine)
            vision_attention(qkv, replace(layout, max_seqlen=200), window=window)
            assert native.calls[0][0] == ("window_vision" if window else kernel) + "_forward"
    exact = qkv.float()
    expected = vision_attention(exact, layout, window=window)
    asked: list[Any] = []

    def answer(machine, *arguments, **options):
        asked.append((arguments, options))
        return "composed" if options.get("vision") else "cpu"

    monkeypatch.setattr(api, "select", answer)
    ours = vision_attention(exact, layout, window=window)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    length = layout.max_window_seqlen if window else layout.max_seqlen
    assert asked[0][0] == (FP32, 80, length) and asked[0][1]["permuted"] == window


# ---- the device ----------------------------------------------------------------------------------


@pytest.mark.parametrize("current", [0, 1])
def test_a_launch_is_on_the_device_and_stream_of_the_tensor(current, monkeypatch):
    events: list[Any] = []

    class Recorder:
        def some_kernel_cuda(self, *arguments, stream):
            events.append((*arguments, stream))

    class OnGpu:
        is_cuda, device = True, torch.device("cuda", 1)

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            events.append(("enter", self.device.index))

        def __exit__(self, *_):
            events.append("exit")

    monkeypatch.setattr(_native, "_C", Recorder())
    monkeypatch.setattr(_native, "has_cuda_kernels", lambda: True)
    streams = {1: 77}
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", streams.get, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    _native.launch("some_kernel", OnGpu(), 1, 2)  # type: ignore[arg-type]
    assert events == ([(1, 2, 77)] if current == 1 else [("enter", 1), (1, 2, 77), "exit"])
    monkeypatch.setattr(_native, "has_cuda_kernels", lambda: False)
    with pytest.raises(RuntimeError, match="was built without CUDA kernels: rebuild it where nvcc"):
        _native.launch("some_kernel", OnGpu(), 1, 2)  # type: ignore[arg-type]

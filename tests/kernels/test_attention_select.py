"""Which kernel serves a call of attention."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from vlmkernels.attention import select as select_module
from vlmkernels.attention.api import have_short
from vlmkernels.attention.select import (
    BACKENDS,
    SHARED_OF_BLOCK,
    SM80_SHARED,
    SM90,
    WINDOW_SHARED,
    Machine,
    machine_of,
    select,
    table,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ARCHS = ("80", "90a")


def gpu_of(
    major: int, minor: int, archs: tuple[str, ...] = ARCHS, flash_attn: bool = False
) -> Machine:
    shared = SHARED_OF_BLOCK.get((major, minor), 227 << 10)
    return Machine("cuda", (major, minor), shared, archs, flash_attn)


AMPERE, HOPPER = gpu_of(8, 0), gpu_of(9, 0)
#: Less shared memory: 99 KB a thread block.
SMALL = [(8, 6), (8, 9), (12, 0)]
STATIC = Path(__file__).resolve().parents[2] / "benchmarks" / "static.json"


def tiled(gpu: tuple[int, int], dtype: torch.dtype, head_dim: int) -> str:
    """The kernel of long segments: at head_dim 72 the one that an H200 was faster with."""
    if gpu != (9, 0):
        return "sm80"
    return "sm90-fused" if head_dim == 72 and dtype == BF16 else "sm90"


@pytest.mark.parametrize(
    ("dtype", "head_dim", "max_seqlen", "expected"),
    [
        (BF16, 80, 64, "window"),
        (FP16, 128, 64, "window"),
        (BF16, 128, 65, "tiled"),  # the window's backward would not fit an A100
        (FP16, 96, 128, "window"),
        (BF16, 80, 129, "tiled"),
        (BF16, 72, 64, "tiled"),
        (BF16, 88, 64, "sdpa"),
        (FP32, 80, 64, "sdpa"),
    ],
)
def test_kernel_is_selected_by_shape(dtype, head_dim, max_seqlen, expected):
    arguments = (dtype, head_dim, max_seqlen)
    for gpu in ((8, 0), (9, 0), (10, 0), (10, 3)):
        kernel = expected
        if expected == "tiled":
            kernel = tiled(gpu, dtype, head_dim)
            assert select(gpu_of(*gpu), *arguments, backend="tiled") == kernel
        assert select(gpu_of(*gpu), *arguments) == kernel
        theirs = kernel == "sm80" or kernel == "sdpa" and dtype != FP32
        with_package = "flash-attn" if theirs else kernel
        assert select(gpu_of(*gpu, flash_attn=True), *arguments) == with_package
        assert select(gpu_of(*gpu), *arguments, backend="sdpa") == "sdpa"
        if kernel in SM90:
            assert select(gpu_of(*gpu), *arguments, backend="sm80") == "sm80"
    assert select(gpu_of(7, 5), *arguments) == "sdpa"
    assert select(gpu_of(8, 0, archs=()), *arguments) == "sdpa"
    for device in ("cpu", "meta"):
        assert select(Machine(device), *arguments) == "cpu"
    assert select(Machine("cpu"), dtype, head_dim, None) == "cpu"
    assert select(Machine("mps"), *arguments) == "sdpa"


@pytest.mark.parametrize(
    ("dtype", "head_dim", "max_seqlen", "permuted", "expected"),
    [
        (BF16, 80, 128, True, "window"),
        (FP16, 80, 129, False, "tiled"),
        (FP16, 80, 129, True, "composed"),
        (BF16, 72, 64, False, "tiled"),
        (BF16, 72, 64, True, "composed"),
        (BF16, 128, 65, False, "tiled"),
        (BF16, 88, 64, False, "composed"),
        (FP32, 80, 64, False, "composed"),
        (BF16, 80, None, False, "composed"),
    ],
)
def test_vision_kernel_is_selected_by_shape(dtype, head_dim, max_seqlen, permuted, expected):
    """Whether flash-attn is installed or not."""
    arguments: Any = (dtype, head_dim, max_seqlen)
    options = {"vision": True, "permuted": permuted}
    for gpu in ((8, 0), (9, 0), (10, 0)):
        kernel = expected
        if expected == "tiled":
            kernel = tiled(gpu, *arguments[:2])
        for flash_attn in (False, True):
            machine = gpu_of(*gpu, flash_attn=flash_attn)
            assert select(machine, *arguments, **options) == kernel
    assert select(gpu_of(7, 0), *arguments, **options) == "composed"
    assert select(Machine("cpu"), *arguments, **options) == "cpu"


@pytest.mark.parametrize(
    ("stride", "expected"),
    [(0, "sm80"), (8, "sm90"), ((1 << 39) - 8, "sm90"), (1 << 39, "sm80")],
)
@pytest.mark.parametrize("which", range(6))
def test_sm90_reads_what_a_tensor_map_can_describe(which, stride, expected):
    """No expanded tensor; strides of less than 2^40 bytes."""
    strides = [160, 80] * 3
    strides[which] = stride
    assert select(HOPPER, BF16, 80, 300, strides=tuple(strides)) == expected
    assert select(HOPPER, BF16, 80, 300, strides=tuple(strides), vision=True) == expected
    assert select(HOPPER, BF16, 80, 100, strides=tuple(strides)) == "window"


@pytest.mark.parametrize(
    ("arguments", "backend", "message"),
    [
        ((Machine("cpu"), BF16, 80, 64), "window", "'window' can't be used: it runs on CUDA"),
        ((AMPERE, BF16, 80, 64), "cpu", "'cpu' can't be used: it runs on the CPU"),
        ((AMPERE, FP32, 80, 64), "flash-attn", "it takes bfloat16 and float16"),
        ((AMPERE, BF16, 80, 64), "flash-attn", "flash-attn is not installed or fails to import"),
        (
            (gpu_of(7, 5, flash_attn=True), FP16, 64, 64),
            "flash-attn",
            "it needs compute capability 8.0, this is 7.5",
        ),
        ((AMPERE, BF16, 80, 64), "best", "backend is 'best'; it must be one of cpu, "),
        ((AMPERE, BF16, 80, 64), "composed", "backend is 'composed'; it must be one of cpu, "),
        ((AMPERE, FP32, 80, 64), "window", "it takes bfloat16 and float16"),
        ((AMPERE, BF16, 72, 64), "window", "head_dim is 72, it has 64, 80, 96, 128"),
        (
            (AMPERE, BF16, 80, 129),
            "window",
            "the longest segment has 129 tokens, it takes 128 at head_dim 80",
        ),
        ((AMPERE, FP32, 80, 200), "tiled", "it takes bfloat16 and float16"),
        ((AMPERE, BF16, 88, 200), "tiled", "head_dim is 88, it has 64, 72, 80, 96, 128"),
        ((AMPERE, BF16, 80, 200), "sm90", "it needs compute capability 9.0, this is 8.0"),
        ((gpu_of(7, 5), BF16, 80, 64), "tiled", "compute capability 8.0, this is 7.5"),
        ((gpu_of(8, 0, archs=()), BF16, 80, 64), "sm80", "built without CUDA kernels"),
        ((gpu_of(8, 9), BF16, 80, 65), "window", "it takes 64 at head_dim 80 on this GPU"),
        (
            (gpu_of(8, 6), BF16, 128, 65),
            "sm80",
            "at head_dim 128 it needs 104960 bytes of shared memory a thread block, this GPU has "
            "101376",
        ),
        ((gpu_of(9, 0, archs=("80",)), BF16, 80, 200), "sm90", "was built for 80, this is 9.0"),
        ((gpu_of(8, 0, archs=("90a",)), BF16, 80, 64), "window", "built for 90a, this is 8.0"),
    ],
)
def test_a_backend_that_cannot_serve_says_why(arguments, backend, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        select(*arguments, backend=backend)


@pytest.mark.parametrize("capability", SMALL)
@pytest.mark.parametrize(
    ("head_dim", "max_seqlen", "expected"),
    [
        (80, 64, "window"),
        (80, 65, "sm80"),
        (64, 128, "sm80"),
        (96, 2000, "sm80"),
        (128, 64, "window"),
        (128, 65, "others"),
    ],
)
def test_gpus_with_less_shared_memory(capability, head_dim, max_seqlen, expected):
    """A launch that asks for more than there is fails with "invalid argument"."""
    others = {False: "sdpa", True: "composed"}
    for vision, other in others.items():
        actual = select(gpu_of(*capability), FP16, head_dim, max_seqlen, vision=vision)
        assert actual == (other if expected == "others" else expected)


def test_shared_memory_is_what_the_launchers_ask_for():
    """By benchmarks/static.json, which a fake CUDA runtime is asked for."""
    asked: dict[tuple[str, int, int], int] = {}
    for kernels in json.loads(STATIC.read_text())["kernels"].values():
        for name, figures in kernels.items():
            if actual := re.match(r"(window|sm80|sm90)_\w+<\w+, (\d+)(?:, (\d+))?", name):
                key = (actual[1], int(actual[2]), int(actual[3] or 0))
                shared = figures["static shared bytes"] + figures["dynamic shared bytes"]
                asked[key] = max(asked.get(key, 0), shared)
    largest = max(asked.pop(key) for key in list(asked) if key[0] == "sm90")
    assert largest <= SHARED_OF_BLOCK[9, 0]
    expected = {("sm80", dim, 0): shared for dim, shared in SM80_SHARED.items()}
    for dim, of_lengths in WINDOW_SHARED.items():
        expected |= {("window", dim, n): shared for n, shared in of_lengths.items()}
    assert asked == expected


@pytest.mark.parametrize(
    ("archs", "serves"),
    [
        ("80,90a", "8.0 8.6 8.9 9.0 10.0 12.1"),  # later ones by PTX
        ("80", "8.0 8.6 8.9 9.0 10.0 12.1"),
        ("86,90a", "8.6 8.9 9.0 10.0 12.1"),
        ("90a", "9.0"),
        ("100f", "10.0"),
        ("120,90a", "9.0 12.1"),
    ],
)
def test_a_build_serves_the_gpus_it_has_code_for(archs, serves):
    for gpu in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 1)):
        machine = gpu_of(*gpu, archs=tuple(archs.split(",")))
        expected = "window" if "{}.{}".format(*gpu) in serves.split() else "sdpa"
        assert select(machine, BF16, 80, 64) == expected, gpu
        if gpu == (9, 0) and expected == "window":  # plain sm_90 code of these kernels traps
            kernel = "sm90" if "90a" in archs else "sm80"
            assert select(machine, BF16, 80, 200) == kernel


def test_short_segments_are_not_for_one_backward_kernel():
    """Its workspace would be 28 GB for 100,000 segments of a token, 16 heads."""
    assert select(HOPPER, BF16, 72, 300) == "sm90-fused"
    assert select(HOPPER, BF16, 72, 300, short=True) == "sm90"
    assert select(HOPPER, BF16, 72, 300, short=True, backend="sm90-fused") == "sm90-fused"
    offsets = torch.tensor([0, 64, 127], dtype=torch.int32)
    assert [have_short(offsets, torch.empty(n)) for n in (127, 128)] == [True, False]


@pytest.mark.parametrize("backend", [None, "tiled", "sm90"])
def test_a_choice_on_hopper_can_be_compiled(backend, monkeypatch):
    """Of a machine that is looked up: torch 2.11 can't compare such a one's capability."""
    monkeypatch.setattr(select_module, "_machine", lambda device: HOPPER)

    @torch.compile(fullgraph=True, backend="eager")
    def number(x):
        kernel = select(machine_of(x.device), BF16, 80, 200, strides=(160, 80), backend=backend)
        return x + len(kernel)

    assert int(number(torch.zeros(()))) == len("sm90")


def test_the_choice_can_be_compiled():
    @torch.compile(fullgraph=True, backend="eager", dynamic=True)
    def number(x, max_seqlen):
        return x + ["window", "sm80", "sdpa"].index(select(small, BF16, 128, max_seqlen))

    small = gpu_of(8, 6)
    assert [int(number(torch.zeros(()), n)) for n in (64, 65)] == [0, 2]


def test_table_says_what_is_off():
    rows = list(table(AMPERE))
    assert "varlen_attention, bfloat16, head_dim 72: sm80" in rows
    assert "varlen_attention, float32: sdpa" in rows
    assert "sm90: off, it needs compute capability 9.0" in rows
    assert "vision_attention, bfloat16, head_dim 128: window up to 64, sm90 above" in table(HOPPER)
    assert all(backend in BACKENDS for backend in ("cpu", "window", "tiled", "flash-attn", "sdpa"))


def test_the_machine_of_the_cpu():
    machine = machine_of(torch.device("cpu"))
    assert machine is machine_of(torch.device("cpu")) and machine.device == "cpu"

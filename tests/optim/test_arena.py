"""PinnedArena: tensors back to back in slabs, memory returned, sizes as stated."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kernels.numeric import assert_bitwise
from vlmkernels.optim import HybridDeviceOptimizer, PinnedArena
from vlmkernels.optim.transfer import HostTransfers


def test_a_shape_that_is_none_is_refused():
    arena = PinnedArena(slab_bytes=1 << 16)
    with pytest.raises(ValueError, match="shape is .-2, 40.; no size may be negative"):
        arena.empty((-2, 40), torch.float32)
    with pytest.raises(TypeError, match="integer"):
        arena.empty((2, 2.5), torch.float32)  # type: ignore[arg-type]
    assert arena.used_bytes == 0
    tensor = arena.zeros(8, torch.float32)
    assert arena.used_bytes == 64 and not tensor.any()


def test_tensors_do_not_overlap_and_return_their_memory():
    arena = PinnedArena(slab_bytes=1 << 16)
    held: dict[int, tuple[torch.Tensor, int]] = {}
    for number in range(400):
        if held and random.random() < 0.45:
            del held[random.choice(list(held))]
        else:
            size = random.choice([1, 15, 16, 17, 1000, 5000, 30_000])
            tensor = arena.empty((size,), random.choice([torch.float32, torch.bfloat16]))
            assert tensor.data_ptr() % 64 == 0 and tensor.is_contiguous()
            held[number] = (tensor.fill_(number % 251), number % 251)
    for tensor, value in held.values():
        assert (tensor == value).all()
    rounded = sum(-(-t.numel() * t.element_size() // 64) * 64 for t, _ in held.values())
    assert arena.used_bytes == rounded <= arena.reserved_bytes <= arena.peak_bytes
    tensor = None
    held.clear()
    assert arena.used_bytes == arena.reserved_bytes == 0


def test_trim_gives_back_what_nothing_uses():
    arena = PinnedArena(slab_bytes=1 << 16)
    first, second = (arena.zeros(1 << 16, torch.uint8) for _ in range(2))
    slab = weakref.ref(arena._slabs[0])
    del first
    arena.trim()
    assert slab() is None and arena.reserved_bytes == 1 << 16 and not second.any()


def test_what_goes_back_to_the_device_leaves_no_slab():
    param = torch.nn.Parameter(torch.randn(1000))
    optimizer = HybridDeviceOptimizer([param])
    param.grad = torch.randn(1000)
    optimizer.step()
    slab = weakref.ref(optimizer._host.arena._slabs[0])
    optimizer.zero_grad()
    optimizer.set_offload_fraction(0.0)
    assert slab() is None


def test_no_rounding_to_powers_of_two():
    arena = PinnedArena()
    big = arena.empty((129_500_000,), torch.uint8)
    assert 129_500_000 <= arena.reserved_bytes < 129_500_000 + 4096
    small = [arena.empty((100_000,), torch.float32) for _ in range(300)]
    assert arena.reserved_bytes < 129_500_000 + 4096 + 2 * (64 << 20)
    assert arena.used_bytes < 129_500_000 + 64 + 300 * 400_064
    del big, small
    assert arena.peak_bytes > 129_500_000 + 120_000_000 and arena.reserved_bytes == 0


def test_a_view_keeps_its_memory_and_a_file_holds_only_it():
    arena = PinnedArena(slab_bytes=1 << 20)
    tensor = arena.zeros((4, 25), torch.float32)
    view = tensor[1:3]
    view.fill_(3.0)
    del tensor
    other = arena.empty((100,), torch.float32).fill_(9.0)
    assert (view == 3).all() and (other == 9).all()
    assert view.untyped_storage().nbytes() == 400
    file = io.BytesIO()
    torch.save(view, file)
    assert file.getbuffer().nbytes < 4096


def test_shapes_without_elements():
    arena = PinnedArena()
    assert arena.empty((0, 3), torch.bfloat16).shape == (0, 3)
    assert arena.empty((), torch.float32).shape == ()
    assert arena.empty(7, torch.float32).shape == (7,)


def test_many_threads():
    arena = PinnedArena(slab_bytes=1 << 16)
    wrong = []

    def work(value: int) -> None:
        for _ in range(100):
            tensor = arena.empty((777,), torch.float32).fill_(value)
            if not (tensor == value).all():
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and arena.used_bytes == 0


def test_a_bad_size_is_named():
    with pytest.raises(ValueError, match="slab_bytes is 100; it must be at least 4096"):
        PinnedArena(slab_bytes=100)


# ---- page-locked memory, on a fake CUDA runtime --------------------------------------------------

GPU = torch.device("cuda", 1)


class FakeCuda:
    """Takes ranges as the CUDA runtime does: one that overlaps a registered one is error 712."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, budget: int = 1 << 40) -> None:
        self.registered: dict[int, int] = {}
        self.calls: list[str] = []
        self.device: Any = None
        self.budget = budget
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "device", self.on)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.call("synchronize"))

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before

    def call(self, name: str) -> None:
        assert self.device == GPU, f"{name} on {self.device}"
        self.calls.append(name)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.call("register")
        assert address % 4096 == size % 4096 == 0, "whole pages: no two ranges share one"
        if any(a < address + size and address < a + s for a, s in self.registered.items()):
            return 712
        if sum(self.registered.values()) + size > self.budget:
            return 2
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.call("unregister")
        return 0 if self.registered.pop(address, 0) else 713


@pytest.mark.parametrize("survivor", ["nothing", "a tensor", "a cycle", "the arena"])
def test_every_range_is_unregistered_before_it_is_freed(
    survivor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And after the copies under way are done: whatever dies last."""
    cuda = FakeCuda(monkeypatch)
    arena = PinnedArena(slab_bytes=(1 << 20) - 1, device=GPU)
    tensors = [arena.empty(size, torch.uint8) for size in (100, 1000, 3 << 20)]
    for slab in arena._slabs:
        weakref.finalize(slab.memory.untyped_storage(), cuda.calls.append, "freed")
    slab = None
    assert len(cuda.registered) == 2
    cuda.calls.clear()
    if survivor == "a tensor":
        last = tensors.pop()
        del arena
        tensors.clear()
        assert any(a <= last.data_ptr() < a + size for a, size in cuda.registered.items())
        assert not last.fill_(1).eq(0).any()
        del last
    elif survivor == "a cycle":
        tensors.append(arena)
        tensors.append(tensors)
        del arena, tensors
        gc.collect()
    elif survivor == "the arena":
        tensors.clear()
        assert arena.reserved_bytes == 0
    else:
        tensors.clear()
        del arena
    assert not cuda.registered
    order = [call for call in cuda.calls if call != "freed"]
    assert order == ["synchronize", "unregister"] * 2
    for i in range(1, 3):  # a range's end follows its own unregistering
        freed = [n for n, call in enumerate(cuda.calls) if call == "freed"][i - 1]
        assert cuda.calls[:freed].count("unregister") >= i


def test_a_second_optimizer_can_page_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large blocks are mapped anew: the next arena gets the address of the last."""
    cuda = FakeCuda(monkeypatch)
    for _ in range(5):
        PinnedArena(slab_bytes=64 << 20, device=GPU).empty(8, torch.uint8)
    assert cuda.calls.count("register") == cuda.calls.count("unregister") == 5
    assert not cuda.registered


def test_a_refused_range_is_named_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA reports the error once more at the next launch: that must not be the model's."""
    cuda = FakeCuda(monkeypatch, budget=1 << 20)
    arena = PinnedArena(slab_bytes=1 << 20, device=GPU)
    tensor = arena.empty(8, torch.uint8)
    launched = []
    monkeypatch.setattr(torch, "ones", lambda n, device: launched.append(device))
    with pytest.raises(RuntimeError, match="2097152 bytes .* can't be page-locked .CUDA error 2"):
        arena.empty(2 << 20, torch.uint8)
    assert launched == [GPU] and len(cuda.registered) == 1
    del arena, tensor
    assert not cuda.registered and cuda.calls.count("unregister") == 1


class LateUploads(HostTransfers):
    """New values are on their way to the device until it is waited for."""

    def __init__(self) -> None:
        self.pending: list[tuple[torch.Tensor, int]] = []

    def h2d(self, source: Any, target: Any, unread: bool = False) -> None:
        sources, targets = (x if isinstance(x, list) else [x] for x in (source, target))
        self.pending += [(t, s.data_ptr()) for s, t in zip(sources, targets, strict=True)]

    def finish(self) -> None:
        for target, address in self.pending:
            ctypes.memmove(target.data_ptr(), address, target.nbytes)
        self.pending.clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_optimizer_dropped_right_after_a_step_has_made_it(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, late = FakeCuda(monkeypatch), LateUploads()
    monkeypatch.setattr(torch.cuda, "synchronize", late.finish)
    start, grad = (torch.randn(100_000).to(dtype) for _ in range(2))
    actual = []
    for transfers in (HostTransfers(), late):
        param = torch.nn.Parameter(start.clone())
        param.grad = grad
        optimizer = HybridDeviceOptimizer(
            [param], lr=0.1, transfers=transfers, bucket_bytes=1 << 16
        )
        optimizer._host._arena = PinnedArena(device=GPU)
        optimizer.step()
        assert transfers is not late or late.pending
        del optimizer
        assert not cuda.registered and not late.pending
        actual.append(param.detach())
    assert_bitwise("param", actual[1], actual[0])


AT_THE_END = """
import os, sys, torch
from contextlib import nullcontext
class Fake:
    def cudaHostRegister(self, address, size, flags): print("register", address); return 0
    def cudaHostUnregister(self, address): print("unregister", address, flush=True); return 0
torch.cuda.cudart, torch.cuda.device = Fake, nullcontext
torch.cuda.synchronize = lambda: print("synchronize", flush=True)
from vlmkernels.optim import PinnedArena
arena = PinnedArena(slab_bytes=1 << 20, device=torch.device("cuda", 0))
kept = [arena.empty(size, torch.uint8) for size in (8, 3 << 20)]
sys.stdout.flush()
if os.fork() == 0:
    kept.clear()
    arena.reserved_bytes
    sys.exit()
os.wait()
print("the child has ended", flush=True)
"""


def test_the_end_of_python_and_of_a_forked_child() -> None:
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    lines = done.stdout.splitlines()
    registered = [line.split()[1] for line in lines[:2]]
    assert lines[:3] == [*(f"register {a}" for a in registered), "the child has ended"]
    assert [x.split()[0] for x in lines[3:]] == ["synchronize", "unregister"] * 2
    assert {line.split()[1] for line in lines[4::2]} == set(registered)

"""PinnedArena: tensors back to back in slabs, memory returned, sizes as stated."""

from __future__ import annotations

import io
import random
import threading

import pytest
import torch

from vlmkernels.optim import PinnedArena


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

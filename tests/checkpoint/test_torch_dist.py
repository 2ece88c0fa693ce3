"""megatron-core's checkpoint format beside torch's own reader and writer of it."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from vlmtrain.checkpoint.megatron.torch_dist import (
    COMMON,
    Chunk,
    ChunkFile,
    ChunkReader,
    is_checkpoint,
    read_common,
    write_metadata,
)
from vlmtrain.core.files import CheckpointError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)
Box = tuple[tuple[int, int], ...]


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).mul(8).to(dtype)


def cut(box: Box, times: int) -> Iterator[Box]:
    """A box as up to 2 ** times boxes, cut at random places."""
    wide = [i for i, (first, stop) in enumerate(box) if stop - first > 1]
    if not times or not wide:
        yield box
        return
    i = random.choice(wide)
    first, stop = box[i]
    at = random.randrange(first + 1, stop)
    for part in ((first, at), (at, stop)):
        yield from cut((*box[:i], part, *box[i + 1 :]), times - 1)


def part_of(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(*side) for side in box)]


def written(folder: Path, tensors: dict[str, Tensor]) -> list[Chunk]:
    """Every tensor in up to eight chunks, dealt over three files in random order."""
    pieces = [
        (key, box)
        for key, tensor in tensors.items()
        for box in cut(tuple((0, n) for n in tensor.shape), 3)
    ]
    random.shuffle(pieces)
    files = [ChunkFile(folder / f"__{i}_0.distcp") for i in range(3)]
    for key, box in pieces:
        tensor = tensors[key]
        offsets = tuple(first for first, _ in box)
        random.choice(files).add(key, tuple(tensor.shape), offsets, part_of(tensor, box))
    for file in files:
        entry = file.close()
        assert entry["bytes"] == file.path.stat().st_size
    return [chunk for file in files for chunk in file.chunks]


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    shapes = ((7,), (5, 9), (3, 4, 6), (2, 3, 1, 5), (1, 1, 8), (1, 1), ())
    return {
        f"{dtype}.{len(shape)}.{i}": drawn(shape, dtype)
        for dtype in DTYPES
        for i, shape in enumerate(shapes)
    }


def test_torch_reads_what_is_written(tensors, tmp_path) -> None:
    write_metadata(tmp_path, written(tmp_path, tensors))
    assert is_checkpoint(tmp_path) and not is_checkpoint(tmp_path / "__0_0.distcp")
    found = {key: torch.empty_like(tensor) for key, tensor in tensors.items()}
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    for key, tensor in tensors.items():
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("writer", ["ours", "torch"])
def test_any_box_of_a_tensor(writer: str, tensors, tmp_path) -> None:
    if writer == "ours":
        write_metadata(tmp_path, written(tmp_path, tensors))
    else:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    reader = ChunkReader(tmp_path)
    assert reader.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert reader.shape(key) == tuple(tensor.shape) and reader.dtype(key) == tensor.dtype
        for _ in range(6):
            box = tuple(tuple(sorted(random.choices(range(n + 1), k=2))) for n in tensor.shape)
            want = part_of(tensor, box)
            assert torch.equal(reader.read(key, box), want), (key, box)
            # Into memory whose rows are not dense, and of another type.
            wide = torch.full((*want.shape[:-1], (want.shape or (1,))[-1] + 2), 0, dtype=want.dtype)
            into = wide[..., 1:-1] if want.dim() else wide[1]
            reader.read(key, box, into=into)
            assert torch.equal(into, want), (key, box)
            double = torch.zeros(want.shape, dtype=torch.float64)
            reader.read(key, box, into=double)
            assert torch.equal(double, want.double()), (key, box)


def test_what_is_missing_is_no_memory_of_another(tmp_path) -> None:
    """A chunk that `.metadata` does not name is an error only to who asks for it."""
    tensor = torch.randn(6, 4)
    file = ChunkFile(tmp_path / "__0_0.distcp")
    for row in range(6):
        file.add("x", (6, 4), (row, 0), tensor[row : row + 1])
    file.close()
    write_metadata(tmp_path, file.chunks)
    path = tmp_path / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    del metadata.state_dict_metadata["x"].chunks[3]
    path.write_bytes(pickle.dumps(metadata))
    reader = ChunkReader(tmp_path)
    assert torch.equal(reader.read("x", ((4, 6), (0, 4))), tensor[4:])
    with pytest.raises(CheckpointError, match=r"damaged: of x only 6 of 9 elements of \[\(2, 5\)"):
        reader.read("x", ((2, 5), (1, 4)))


def test_what_ranks_do_not_agree_on_is_not_written(tmp_path) -> None:
    def chunk(shape, dtype, offset, rows) -> Chunk:
        return Chunk("x", shape, dtype, (offset, 0), (rows, 4), "__0_0.distcp", 0, 0)

    first = chunk((6, 4), torch.float32, 0, 3)
    for other, words in (
        (chunk((6, 4), torch.float32, 3, 2), "20 of 24 elements of x"),
        (chunk((6, 4), torch.float32, 2, 4), "28 of 24 elements of x"),
        (chunk((6, 4), torch.bfloat16, 3, 3), r"torch.float32 \[6, 4\] on one rank and torch.bf"),
        (chunk((7, 4), torch.float32, 3, 3), r"\[6, 4\] on one rank and torch.float32 \[7, 4\]"),
    ):
        with pytest.raises(CheckpointError, match=words):
            write_metadata(tmp_path, [first, other])
        assert not is_checkpoint(tmp_path)


class Call:
    """Pickled as a call, which happens where it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def test_reading_a_checkpoint_runs_no_code_of_it(tmp_path) -> None:
    mark = tmp_path / "mark"
    for call in (
        Call(os.mkdir, str(mark)),
        Call(Path.mkdir, mark),
        Call(torch.set_default_dtype, torch.float32),
        Call(getattr, Path, "cwd"),
        Call(getattr, str, "upper"),
    ):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(call))
        with pytest.raises(CheckpointError, match=".metadata is damaged .* has no place in a"):
            ChunkReader(tmp_path)
    for data in (b"", b"no pickle", pickle.dumps({"a": 1}), pickle.dumps(None)):
        (tmp_path / ".metadata").write_bytes(data)
        with pytest.raises(CheckpointError, match=".metadata is damaged"):
            ChunkReader(tmp_path)
    torch.save({"iteration": Call(os.mkdir, str(mark))}, tmp_path / COMMON)
    with pytest.raises(CheckpointError, match="common.pt can't be read"):
        read_common(tmp_path)
    assert not mark.exists()


def test_what_is_no_tensor_is_left_out(tmp_path) -> None:
    writer = dcp.FileSystemWriter(tmp_path)
    dcp.save({"x": torch.arange(3), "y": {"z": {1, 2}}}, storage_writer=writer, no_dist=True)
    assert ChunkReader(tmp_path).keys() == {"x"}


def test_files_that_are_damaged(tmp_path) -> None:
    tensor = torch.randn(50, 4)
    file = ChunkFile(tmp_path / "__0_0.distcp")
    file.add("x", (50, 4), (0, 0), tensor)
    file.close()
    write_metadata(tmp_path, file.chunks)
    whole = file.path.read_bytes()
    box = ((0, 50), (0, 4))
    stored = whole.replace(b"/data/0", b"/data/1")  # a tensor that is not there
    for data in (whole[:-40], whole[: len(whole) // 2], b"", b"\0" * len(whole), stored):
        file.path.write_bytes(data)
        with pytest.raises(CheckpointError, match="__0_0.distcp can't be read"):
            ChunkReader(tmp_path).read("x", box)
    file.path.unlink()
    with pytest.raises(CheckpointError, match="__0_0.distcp can't be read: .*No such file"):
        ChunkReader(tmp_path).read("x", box)
    file.path.write_bytes(whole)
    assert torch.equal(ChunkReader(tmp_path).read("x", box), tensor)

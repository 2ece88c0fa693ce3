"""Megatron's format of checkpoints: what torch and megatron-core read of it, and damage."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import random
import zipfile
from dataclasses import replace
from pathlib import Path, PosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, maybe_load_config
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from vlmtrain.checkpoint.megatron.torch_dist import (
    COMMON,
    Chunk,
    ChunkFile,
    ChunkReader,
    _Unpickler,
    read_common,
    write_metadata,
)
from vlmtrain.core.files import CheckpointError

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def cut(shape: tuple[int, ...]) -> list[list[tuple[int, int]]]:
    """A tensor into boxes along random lines."""
    lines = [sorted({0, n, *random.sample(range(n), min(n, 2))}) for n in shape]
    return [list(box) for box in itertools.product(*(itertools.pairwise(line) for line in lines))]


def slices(box: list[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(*bounds) for bounds in box)


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> list[Chunk]:
    """Two files with the boxes of every tensor, in any order."""
    files = [ChunkFile(folder / f"__{rank}_0.distcp") for rank in range(2)]
    jobs = [(key, box) for key, tensor in tensors.items() for box in cut(tuple(tensor.shape))]
    random.shuffle(jobs)
    for key, box in jobs:
        tensor = tensors[key]
        random.choice(files).add(key, tensor.shape, [a for a, _ in box], tensor[slices(box)])
    for file in files:
        file.close()
    return [chunk for file in files for chunk in file.chunks]


def drawn() -> dict[str, torch.Tensor]:
    shapes = [(), (1,), (7,), (1, 1, 1), (1, 4, 3), (5, 1, 6), (3, 4, 5), (2, 3, 2, 3)]
    return {f"t{i}": torch.randn(n).to(random.choice(TYPES)) for i, n in enumerate(shapes)}


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    """And megatron-core knows the format by its file."""
    want = drawn()
    write_metadata(tmp_path, write(tmp_path, want))
    got = {key: torch.full_like(tensor, torch.nan) for key, tensor in want.items()}
    dcp.load(got, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    for key, tensor in want.items():
        assert torch.equal(got[key], tensor), key
    assert maybe_load_config(str(tmp_path)) == CheckpointingConfig("torch_dist", 1, "torch", 1)


@pytest.mark.parametrize("ours", [True, False])
def test_any_box_is_read(ours: bool, tmp_path: Path) -> None:
    """Of our files and of torch's, which hold more than tensors, into any memory."""
    want = drawn()
    if ours:
        write_metadata(tmp_path, write(tmp_path, want))
    else:
        state = {**want, "step": 7, "words": ["a", "b"]}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    reader = ChunkReader(tmp_path)
    assert reader.keys() == want.keys()
    for key, tensor in want.items():
        assert reader.shape(key) == tensor.shape and reader.dtype(key) == tensor.dtype
        for _ in range(10):
            pairs = [sorted(random.sample(range(n + 1), 2)) for n in tensor.shape]
            box = tuple((first, stop) for first, stop in pairs)
            part = tensor[slices(list(box))]
            assert torch.equal(reader.read(key, box), part), (key, box)
            for kind in (tensor.dtype, torch.float64):
                whole = torch.full([n + 2 for n in part.shape], torch.nan, dtype=kind)
                inside = whole[tuple(slice(1, n + 1) for n in part.shape)]
                reader.read(key, box, into=inside)
                assert torch.equal(inside, part.to(kind)), (key, box, kind)
                assert whole.isnan().sum() == whole.numel() - part.numel()


def test_a_place_without_offsets(tmp_path: Path) -> None:
    """A tensor that is one chunk may be listed by its name alone."""
    file = ChunkFile(tmp_path / "__0_0.distcp")
    tensor = torch.randn(3, 2)
    file.add("x", (3, 2), (0, 0), tensor)
    file.close()
    chunk = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((3, 2)))
    entry = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size((3, 2)), [chunk])
    place = _StorageInfo("__0_0.distcp", 0, file.chunks[0].length)
    with open(tmp_path / ".metadata", "wb") as handle:
        pickle.dump(Metadata({"x": entry}, storage_data={MetadataIndex("x"): place}), handle)
    assert torch.equal(ChunkReader(tmp_path).read("x", ((0, 3), (0, 2))), tensor)


def test_what_is_missing_is_no_memory_of_another(tmp_path: Path) -> None:
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


def test_chunks_that_are_no_whole_tensor_are_not_written(tmp_path: Path) -> None:
    x = torch.randn(4, 3)
    whole = ((4, 3), (0, 0), x)
    for other, words in (
        (((4, 4), (0, 0), x), r"x is torch.float32 \[4, 3\] on one rank .* \[4, 4\] on another"),
        (((4, 3), (0, 0), x.bfloat16()), "x is torch.float32 .*torch.bfloat16 .* on another"),
        (((4, 3), (3, 0), x[3:]), "15 of 12 elements of x were written once"),
    ):
        file = ChunkFile(tmp_path / "a.distcp")
        file.add("x", *whole)
        file.add("x", *other)
        file.close()
        with pytest.raises(CheckpointError, match=words):
            write_metadata(tmp_path, file.chunks)
    file = ChunkFile(tmp_path / "a.distcp")
    file.add("x", (4, 3), (0, 0), x[:3])
    file.close()
    with pytest.raises(CheckpointError, match="9 of 12 elements of x were written once"):
        write_metadata(tmp_path, file.chunks)
    assert not (tmp_path / ".metadata").exists()


def test_files_that_can_not_be_read_are_named(tmp_path: Path) -> None:
    file = tmp_path / "a.distcp"
    chunks = ChunkFile(file)
    chunks.add("x", (600,), (0,), torch.randn(600))
    chunks.close()
    write_metadata(tmp_path, chunks.chunks)
    (chunk,) = chunks.chunks
    good, packed = file.read_bytes(), io.BytesIO()
    assert ChunkReader(tmp_path).read("x", ((0, 600),)).shape == (600,)
    with (  # compressed, as nothing writes it
        zipfile.ZipFile(io.BytesIO(good)) as plain,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as other,
    ):
        for name in plain.namelist():
            other.writestr(name, plain.read(name))
    for content, length, words in (
        (good[:-5], chunk.length, "not a zip file"),
        (b"", chunk.length, "not a zip file"),
        (good.replace(b"/data/0", b"/data/1"), chunk.length, "no plain tensor data"),
        (packed.getvalue(), len(packed.getvalue()), "no plain tensor data"),
    ):
        file.write_bytes(content)
        write_metadata(tmp_path, [replace(chunk, length=length)])
        with pytest.raises(CheckpointError, match=f"a.distcp can't be read: .*{words}"):
            ChunkReader(tmp_path).read("x", ((0, 600),))
    file.unlink()
    with pytest.raises(CheckpointError, match="a.distcp can't be read: .*No such file"):
        ChunkReader(tmp_path).read("x", ((0, 600),))


class _Call:
    """Pickled as a call."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> object:
        return self.call


def test_folders_that_are_none_are_named(tmp_path: Path) -> None:
    """And what a pickle asks for is not done."""
    made = tmp_path / "made"
    with pytest.raises(CheckpointError, match="is no Megatron checkpoint: no .metadata"):
        ChunkReader(tmp_path)
    module = b"torch.distributed.checkpoint.filesystem"
    words = [module, b"os.mkdir", os.fsencode(made)]
    texts = [b"\x8c" + bytes([len(word)]) + word for word in words]
    through_torch = b"\x80\x04" + texts[0] + texts[1] + b"\x93" + texts[2] + b"\x85R."
    pickle.loads(through_torch)  # it is one that works
    made.rmdir()
    calls = (
        _Call(os.mkdir, str(made)),
        _Call(Path.mkdir, made),
        _Call(torch.set_default_dtype, torch.float32),
    )
    for content in (b"", b"{}", pickle.dumps({"a": 1}), through_torch, *map(pickle.dumps, calls)):
        (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"\.metadata is damaged"):
            ChunkReader(tmp_path)
    torch.save({"step": _Call(os.mkdir, str(made))}, tmp_path / COMMON)
    with pytest.raises(CheckpointError, match="common.pt can't be read"):
        read_common(tmp_path)
    assert not made.exists()


def test_an_enum_is_read_as_any_python_writes_it() -> None:
    """Early releases of 3.11 pickle a member as getattr, which may give members alone."""

    def loaded(x: object) -> object:
        return _Unpickler(io.BytesIO(pickle.dumps(x))).load()

    member = _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    assert loaded(member) is member
    assert loaded(_Call(getattr, _MEM_FORMAT_ENCODING, member.name)) is member
    for owner, name in ((PosixPath, "unlink"), (_MEM_FORMAT_ENCODING, "__class__")):
        with pytest.raises((pickle.UnpicklingError, KeyError)):
            loaded(_Call(getattr, owner, name))

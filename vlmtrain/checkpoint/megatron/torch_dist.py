"""megatron-core's distributed checkpoint format (`torch_dist`), read and written by the piece.

A checkpoint is a folder of `*.distcp` files, each a row of small `torch.save` archives (one a
chunk of a tensor), and `.metadata`, a pickle of torch.distributed.checkpoint's classes that says
which chunk of which tensor lies where. megatron-core's own reader loads what is written here and
the other way round (a test does both). Why not its writer: it starts two processes a save (8 s on
a slow machine, and forked from a process full of threads), holds Python's lock while it writes,
and loses the reason when a disk is full. Here a thread can write while training goes on, and an
offline tool can convert a model that is larger than memory.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import struct
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmtrain.checkpoint.mapping import Box
from vlmtrain.checkpoint.tensors import as_bytes, read_box
from vlmtrain.core.files import CheckpointError, SummedFile, is_file

COMMON = "common.pt"


@dataclass(frozen=True)
class Chunk:
    """A piece of a tensor and the place where it is stored."""

    key: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    position: int
    length: int


class ChunkFile:
    """One `.distcp` file being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.chunks: list[Chunk] = []
        self._file = SummedFile(path)

    def add(self, key: str, shape: Sequence[int], offsets: Sequence[int], tensor: Tensor) -> None:
        """Append a CPU tensor as the chunk of `key` (whole shape `shape`) at `offsets`."""
        start = self._file.bytes
        _save(tensor, self._file)
        self.chunks.append(
            Chunk(
                key,
                tuple(shape),
                tensor.dtype,
                tuple(offsets),
                tuple(tensor.shape),
                self.path.name,
                start,
                self._file.bytes - start,
            )
        )

    def close(self) -> dict[str, int]:
        """Flush to disk; returns the file's entry in a manifest."""
        return self._file.close()

    def abandon(self) -> None:
        self._file.abandon()


# --- one archive ---------------------------------------------------------------------------------
class _Target:
    """What `torch.save` writes to: a SummedFile whose errors do not have to pass through C++."""

    def __init__(self, file: SummedFile) -> None:
        self._file = file
        self.error: Exception | None = None

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except Exception as error:
                self.error = error
        return memoryview(data).nbytes

    def flush(self) -> None:
        return None


def _save(tensor: Tensor, file: SummedFile) -> None:
    """Append `torch.save` of a tensor: it lets other threads run while it works on the numbers.

    Raises:
        OSError: a write failed.
    """
    tensor = tensor.detach().contiguous()
    if tensor.numel():  # with memory of exactly its size: all of a view's would be written
        exact = torch.frombuffer(as_bytes(tensor), dtype=tensor.dtype)
        tensor = exact.view(tensor.shape)
    target = _Target(file)
    torch.save(tensor, target)  # type: ignore[arg-type]
    if target.error is not None:
        raise target.error


class _Window(io.RawIOBase):
    """A range of a file as a file of its own."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        rest = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        data = self._file.read(rest if size is None or size < 0 else min(size, rest))
        self._at += len(data)
        return data


def _data_position(file: Any, chunk: Chunk) -> int:
    """Byte of the file where the tensor's data begins."""
    archive = zipfile.ZipFile(_Window(file, chunk.position, chunk.length))  # type: ignore[arg-type]
    entries = [i for i in archive.infolist() if i.filename.endswith("/data/0")]
    if len(entries) != 1 or entries[0].compress_type != zipfile.ZIP_STORED:
        raise ValueError("no plain tensor data")
    local = chunk.position + entries[0].header_offset
    file.seek(local + 26)
    name, extra = struct.unpack("<HH", file.read(4))
    return local + 30 + name + extra


# --- the folder ----------------------------------------------------------------------------------
def write_metadata(folder: Path, chunks: Iterable[Chunk]) -> None:
    """Write `.metadata` and `metadata.json` over all files' chunks.

    Raises:
        CheckpointError: the chunks of a tensor leave a part of it unwritten or disagree.
    """
    # Slow to import, and readers of Hugging Face folders do not need it.
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors: dict[str, Any] = {}
    storage = {}
    for c in chunks:
        tensor = tensors.setdefault(
            c.key,
            TensorStorageMetadata(TensorProperties(dtype=c.dtype), torch.Size(c.shape), []),
        )
        if tuple(tensor.size) != c.shape or tensor.properties.dtype != c.dtype:
            raise CheckpointError(
                f"{c.key} is {tensor.properties.dtype} {list(tensor.size)} on one rank and "
                f"{c.dtype} {list(c.shape)} on another"
            )
        offsets = torch.Size(c.offsets)
        tensor.chunks.append(ChunkStorageMetadata(offsets, torch.Size(c.sizes)))
        storage[MetadataIndex(c.key, offsets, len(tensor.chunks) - 1)] = _StorageInfo(
            c.file, c.position, c.length
        )
    for key, tensor in tensors.items():
        have = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        if have != math.prod(tensor.size):
            raise CheckpointError(
                f"{have} of {math.prod(tensor.size)} elements of {key} were written once"
            )
    metadata = Metadata(state_dict_metadata=tensors, storage_data=storage)
    with open(folder / ".metadata", "wb") as file:
        pickle.dump(metadata, file)
    config = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    (folder / "metadata.json").write_text(json.dumps(config))


def _enum_member(kind: Any, name: str) -> Any:
    """An enum's member, which early releases of Python 3.11, Debian 12's for one, pickle as
    getattr(kind, name). Nothing else may be looked up."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"builtins.getattr of {kind!r} has no place in a checkpoint")
    return kind[name]


_TORCH = "torch.distributed.checkpoint."


class _Unpickler(pickle.Unpickler):
    """Loads torch's metadata classes and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if module.startswith(_TORCH):  # whose modules lead to all that they import
            found = super().find_class(module, name)
            plain = isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum))
            if plain and found.__module__.startswith(_TORCH):
                return found
        known = (
            (module, name) in (("torch", "Size"), ("torch.serialization", "_get_layout"))
            or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
            or (module, name) in (("pathlib", "PosixPath"), ("collections", "OrderedDict"))
        )
        if not known:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")
        return super().find_class(module, name)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds a distributed checkpoint."""
    return is_file(folder / ".metadata")


class ChunkReader:
    """The tensors of a distributed checkpoint; files are read when asked.

    Raises:
        CheckpointError: `.metadata` is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / ".metadata"
        try:
            with open(path, "rb") as file:
                metadata = _Unpickler(file).load()
            self._chunks = self._index(metadata)
        except FileNotFoundError as error:
            raise CheckpointError(f"{folder} is no Megatron checkpoint: no .metadata") from error
        except Exception as error:  # a damaged pickle fails in any way
            raise CheckpointError(f"{path} is damaged ({error!r})") from error

    def _index(self, metadata: Any) -> dict[str, list[Chunk]]:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        places = {(i.fqn, i.offset): info for i, info in metadata.storage_data.items()}
        table: dict[str, list[Chunk]] = {}
        for key, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                continue
            for chunk in entry.chunks:
                info = places.get((key, chunk.offsets)) or places[key, None]
                table.setdefault(key, []).append(
                    Chunk(
                        key,
                        tuple(entry.size),
                        entry.properties.dtype,
                        tuple(chunk.offsets),
                        tuple(chunk.sizes),
                        info.relative_path,
                        info.offset,
                        info.length,
                    )
                )
        return table

    def keys(self) -> set[str]:
        return set(self._chunks)

    def shape(self, key: str) -> tuple[int, ...]:
        return self._chunks[key][0].shape

    def dtype(self, key: str) -> torch.dtype:
        return self._chunks[key][0].dtype

    def read(self, key: str, box: Box, into: Tensor | None = None) -> Tensor:
        """A box of a tensor, only its bytes read; `into` (of the box's shape) receives it.

        Raises:
            CheckpointError: a file is missing, cut short or not readable, or no chunk holds a part
                of the box.
        """
        sizes = [stop - first for first, stop in box]
        found = 0
        out = torch.empty(sizes, dtype=self.dtype(key)) if into is None else into
        for chunk in self._chunks[key]:
            inside, outside = [], []
            for (first, stop), offset, size in zip(box, chunk.offsets, chunk.sizes, strict=True):
                low, high = max(first, offset), min(stop, offset + size)
                if low >= high:
                    break
                inside.append((low - offset, high - offset))
                outside.append(slice(low - first, high - first))
            else:
                self._read_part(chunk, tuple(inside), out[tuple(outside)])
                found += math.prod(high - low for low, high in inside)
        if found < math.prod(sizes):
            raise CheckpointError(
                f"{self.folder} is damaged: of {key} only {found} of {math.prod(sizes)} elements "
                f"of {list(box)} are there"
            )
        return out

    def _read_part(self, chunk: Chunk, box: Box, out: Tensor) -> None:
        path = self.folder / chunk.file
        try:
            with open(path, "rb", buffering=0) as file:
                start = _data_position(file, chunk)
                # One chunk of a layer's tensor is [1, ...]: cut it as [...].
                shape, cut = chunk.sizes, box
                while len(shape) > 1 and shape[0] == 1:
                    shape, cut = shape[1:], cut[1:]
                direct = out.is_contiguous() and out.dtype == chunk.dtype and not out.is_cuda
                if direct and shape:
                    sizes = [stop - first for first, stop in cut]
                    read_box(file, start, shape, chunk.dtype, cut, out=out.view(sizes))
                else:
                    out.copy_(read_box(file, start, shape, chunk.dtype, cut).view(out.shape))
        except (OSError, ValueError, zipfile.BadZipFile, struct.error) as error:
            raise CheckpointError(f"{path} can't be read: {error}") from error


def write_common(folder: Path, state: dict[str, Any]) -> None:
    """Write what is no tensor: plain values (numbers, texts, lists, dictionaries, tensors)."""
    torch.save(state, folder / COMMON)


def read_common(folder: Path) -> dict[str, Any]:
    """
    Raises:
        CheckpointError: the file is missing or damaged, or holds more than plain values.
    """
    path = folder / COMMON
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error

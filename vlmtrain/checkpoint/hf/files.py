"""Hugging Face folders on disk: safetensors read by slices and written as a stream.

Files are read with plain reads into the tensor that is returned, not through a memory map: the
resident memory of a process is then what it holds, not what it has touched. Layout of the format:
https://huggingface.co/docs/safetensors (8 bytes length, JSON header, data).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vlmtrain.checkpoint.mapping import Box, WeightError, canonical_name, rows
from vlmtrain.checkpoint.tensors import as_bytes, read_box
from vlmtrain.core.files import MANIFEST, PIECE_BYTES, SummedFile, is_file
from vlmtrain.core.spec import ModelSpec

# Buffers that old releases stored and every release recomputes.
_IGNORED = re.compile(r".*rotary_emb\.inv_freq$")
_PROCESSOR = (
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("chat_template.jinja", "chat_template.json"),
)
# Everything in a model folder but its weights travels along.
_CARRIED = (".json", ".txt", ".jinja", ".model", ".md")
_NOT_CARRIED = (
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "metadata.json",  # of a Megatron checkpoint
    MANIFEST,
)
SHARD_BYTES = 5 * 10**9
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class HFWeights:
    """The tensors of a Hugging Face folder, under whichever of their names; files are read when
    asked."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._headers: dict[Path, dict[str, Any]] = {}
        self._starts: dict[Path, int] = {}
        self._where: dict[str, tuple[Path, str]] = {}
        for path, names in self._files().items():
            for name in names:
                _, other = self._where.setdefault(canonical_name(name), (path, name))
                if other != name:
                    raise WeightError(
                        f"{self.folder} holds {other} and {name}, which are one weight of the "
                        "model; take one of them out"
                    )

    def _files(self) -> dict[Path, list[str]]:
        index = self.folder / "model.safetensors.index.json"
        single = self.folder / "model.safetensors"
        if is_file(index) and is_file(single):  # transformers reads the latter
            raise WeightError(
                f"{self.folder} has {single.name} and {index.name}, two sets of weights; take one "
                "of them out"
            )
        if is_file(index):
            try:
                given = json.loads(index.read_text())["weight_map"]
                weight_map: dict[str, str] = {name: str(file) for name, file in given.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise WeightError(f"{index} is not a valid safetensors index: {error!r}") from error
            files: dict[Path, list[str]] = {}
            for name, file in weight_map.items():
                files.setdefault(self.folder / file, []).append(name)
            missing = sorted(p.name for p in files if not is_file(p))
            if missing:
                raise WeightError(
                    f"{self.folder}: {len(missing)} of {len(files)} weight files that "
                    f"{index.name} lists are missing, the first is {missing[0]}; download the "
                    "folder again"
                )
            for path, names in files.items():
                header = self._header(path)
                absent = [n for n in names if n not in header]
                if absent:
                    raise WeightError(f"{path} does not hold {absent[0]}, which {index.name} lists")
            return files
        if is_file(single):
            return {single: list(self._header(single))}
        raise WeightError(
            f"{self.folder} has neither model.safetensors nor model.safetensors.index.json; "
            "weights are read from safetensors files only"
        )

    def _header(self, path: Path) -> dict[str, Any]:
        if path not in self._headers:
            try:
                with open(path, "rb"):  # safetensors says of any file that it is not there
                    pass
            except OSError as error:
                raise WeightError(f"{path} can't be read: {error.strerror}") from error
            try:
                with safe_open(str(path), framework="pt"):  # checks lengths, offsets and types
                    pass
                with open(path, "rb") as file:
                    length = int.from_bytes(file.read(8), "little")
                    header = json.loads(file.read(length))
            except (SafetensorError, OSError, ValueError) as error:
                raise WeightError(
                    f"{path} is damaged or cut short ({error}); download it again"
                ) from error
            header.pop("__metadata__", None)
            self._headers[path], self._starts[path] = header, 8 + length
        return self._headers[path]

    def names(self) -> set[str]:
        return {n for n in self._where if not _IGNORED.match(n)}

    def shape(self, name: str) -> list[int]:
        return list(self._entry(name)["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """
        Raises:
            WeightError: not a float type of 16 bits or more.
        """
        kind = self._entry(name)["dtype"]
        if kind not in DTYPES:
            raise WeightError(
                f"{self.folder}: {name} is of type {kind}; weights must be one of "
                f"{', '.join(DTYPES)}"
            )
        return DTYPES[kind]

    def _entry(self, name: str) -> dict[str, Any]:
        path, stored = self._stored(name)
        return self._header(path)[stored]

    def _stored(self, name: str) -> tuple[Path, str]:
        """The file of a tensor and its name there."""
        if canonical_name(name) not in self._where:
            raise WeightError(f"{self.folder} has no tensor {name}")
        return self._where[canonical_name(name)]

    def read(self, name: str, box: Box | None = None, *, rows: int | None = None) -> Tensor:
        """A tensor, or a box of it, in a copy of its own; not one byte more is kept.

        `rows` makes the result that long, with zeros behind what was read.

        Raises:
            WeightError: the file ended early or the tensor's type is no weight's.
        """
        shape, dtype = self.shape(name), self.dtype(name)
        path, _ = self._stored(name)
        start = self._starts[path] + self._entry(name)["data_offsets"][0]
        box = tuple((0, n) for n in shape) if box is None else box
        with open(path, "rb", buffering=0) as file:
            return read_box(file, start, shape, dtype, box, rows)


def check_names(weights: HFWeights, spec: ModelSpec) -> None:
    """Raise WeightError unless the folder holds exactly the tensors that the config asks for."""
    expected = {canonical_name(name) for row in rows(spec) for name in row.hf}
    present = weights.names()
    if spec.tie_word_embeddings and "lm_head.weight" in present:
        if not _same(weights, "lm_head.weight", "model.embed_tokens.weight"):
            raise WeightError(
                f"{weights.folder}: config.json says tie_word_embeddings but lm_head.weight "
                "differs from model.embed_tokens.weight; set tie_word_embeddings to false"
            )
        present.discard("lm_head.weight")
    missing, unexpected = sorted(expected - present), sorted(present - expected)
    if missing:
        raise WeightError(
            f"{weights.folder}: {len(missing)} tensors that config.json asks for are missing, "
            f"the first is {missing[0]}"
        )
    if unexpected:
        raise WeightError(
            f"{weights.folder}: {len(unexpected)} tensors have no place in the model that "
            f"config.json describes, the first is {unexpected[0]}"
        )


def _same(weights: HFWeights, one: str, other: str) -> bool:
    """Whether two matrices are equal, compared by blocks of rows."""
    shape = weights.shape(one)
    if shape != weights.shape(other):
        return False
    step = max(1, PIECE_BYTES // (2 * shape[1]))
    for row in range(0, shape[0], step):
        box = ((row, min(row + step, shape[0])), (0, shape[1]))
        if not torch.equal(weights.read(one, box), weights.read(other, box)):
            return False
    return True


class SafetensorsWriter:
    """One safetensors file, its tensors appended in the order they were announced."""

    def __init__(
        self, path: Path, tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]
    ) -> None:
        self.path = path
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._waiting: list[str] = []
        end = 0
        for name, dtype, shape in tensors:
            size = math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [end, end + size],
            }
            self._waiting.append(name)
            end += size
        self._header = header
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = SummedFile(path)
        try:
            self._file.write(len(text).to_bytes(8, "little") + text)
        except OSError:
            self._file.abandon()
            raise

    def add(self, name: str, tensor: Tensor) -> None:
        """Append the next announced tensor."""
        want = self._header[name]
        assert self._waiting and self._waiting[0] == name, f"{name} out of order"
        assert list(tensor.shape) == want["shape"] and _NAMES[tensor.dtype] == want["dtype"], name
        self._waiting.pop(0)
        self._file.write(as_bytes(tensor.contiguous()))

    def close(self) -> dict[str, int]:
        """Returns the file's length and checksum."""
        assert not self._waiting, f"{self._waiting[0]} was not written"
        return self._file.close()

    def abandon(self) -> None:
        """Leave the file as it is, closed: where files are open, NFS keeps their folder."""
        self._file.abandon()


class ModelFiles:
    """What a model folder holds beside its weights, read at once: a run may outlast the folder.

    Raises:
        WeightError: a file can't be read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self._content = {
                path.name: path.read_bytes()
                for path in sorted(self.folder.iterdir())
                if is_file(path) and path.suffix in _CARRIED and path.name not in _NOT_CARRIED
            }
        except OSError as error:
            raise WeightError(f"{error.filename} can't be read: {error.strerror}") from error

    def write_processor(self, target: Path) -> None:
        """Write what says how a model is asked: processor files and chat template."""
        self._write(target, [name for name in _PROCESSOR if name in self._content])

    def write(
        self,
        target: Path,
        dtype: torch.dtype | None,
        adapt: Callable[[Path], None] | None = None,
    ) -> None:
        """Write config, tokenizer, processor and generation files; the config names `dtype`.

        `adapt` changes in the result what a run did in another way than the files say.
        """
        self._write(target, self._content)
        if adapt is not None:
            adapt(target)
        if dtype is None:
            return
        path = target / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        name = str(dtype).removeprefix("torch.")
        for section in (config, config.get("text_config"), config.get("vision_config")):
            for key in ("torch_dtype", "dtype"):
                if section and section.get(key):
                    section[key] = name
        config.setdefault("dtype" if "dtype" in config else "torch_dtype", name)
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def _write(self, target: Path, names: Iterable[str]) -> None:
        for name in names:
            (target / name).write_bytes(self._content[name])


def finish_hf_folder(work: Path, files: Sequence[tuple[str, dict[str, int]]]) -> None:
    """Final names for weight files, (name, {tensor: bytes}) each, and the index over them."""
    weight_map: dict[str, str] = {}
    total = 0
    for number, (old, tensors) in enumerate(files, 1):
        new = (
            "model.safetensors"
            if len(files) == 1
            else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        )
        os.rename(work / old, work / new)
        weight_map.update(dict.fromkeys(tensors, new))
        total += sum(tensors.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (work / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))

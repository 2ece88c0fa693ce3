"""Weights wherever they lie: a Hugging Face folder or a Megatron checkpoint, read by the piece.

Both kinds of source answer the same two questions: what is one tensor-parallel rank's piece of a
Megatron tensor, and what are the Hugging Face tensors of a row of the table. Training and the
offline converter ask them alike, so a run starts from either kind of folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from vlmtrain.checkpoint.hf.files import HFWeights, check_names
from vlmtrain.checkpoint.mapping import (
    Box,
    Row,
    Transform,
    WeightError,
    checkpoint_key,
    pad_rows,
    pieces,
    rows,
    transforms,
)
from vlmtrain.checkpoint.megatron.torch_dist import ChunkReader, is_checkpoint
from vlmtrain.core.files import MANIFEST, CheckpointError, verify_manifest
from vlmtrain.core.spec import ModelSpec, padded_vocab_size

_FINITE_STEP = 1 << 24


def check_finite(tensor: Tensor, what: str) -> None:
    """Raise WeightError where a tensor holds NaN or infinite values."""
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), _FINITE_STEP):  # the mask of a whole table is large
        if not torch.isfinite(flat[start : start + _FINITE_STEP]).all():
            raise WeightError(f"{what} holds NaN or infinite values")


class HFSource:
    """A Hugging Face folder, by pieces of Megatron tensors."""

    kind = "Hugging Face"

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self.folder, self.spec = folder, spec
        self.weights = HFWeights(folder)
        self._transforms = transforms(spec)

    def check(self) -> None:
        """Raise WeightError unless every tensor is there, none is unknown, all have one type a
        row."""
        check_names(self.weights, self.spec)

    check_names = check

    def dtype(self, row: Row) -> torch.dtype:
        kinds = {self.weights.dtype(name) for name in row.hf}
        if len(kinds) > 1:
            raise WeightError(
                f"{self.folder}: {', '.join(row.hf)} are of different types "
                f"{sorted(str(k) for k in kinds)}; they become one Megatron tensor"
            )
        return kinds.pop()

    def piece(self, row: Row, dim: int | None, rank: int, size: int) -> Tensor:
        """The piece of `row`'s Megatron tensor that tensor-parallel `rank` of `size` holds.

        Raises:
            WeightError: misshapen, NaN or infinite values, or sizes that `size` can't divide.
        """
        transform = self._transforms[row.transform]
        if row.transform == "vocab":
            return self._vocab(row, dim, rank, size)
        tensors = []
        for name in row.hf:
            shape = self.weights.shape(name)
            # Biases that row-parallel layers share have one dimension and are not split.
            boxes = pieces(shape, dim, transform.blocks, rank, size)
            parts = [self.weights.read(name, box) for box in boxes]
            tensors.append(parts[0] if len(parts) == 1 else torch.cat(parts))
            check_finite(tensors[-1], f"{self.folder}: {name}")
        try:
            return transform.to_megatron(tensors)
        except RuntimeError as error:
            raise self._misfit(row, str(error)) from error

    def _vocab(self, row: Row, dim: int | None, rank: int, size: int) -> Tensor:
        (name,) = row.hf
        shape = self.weights.shape(name)
        if len(shape) != 2 or shape[0] != self.spec.vocab_size:
            raise self._misfit(row, f"vocab_size is {self.spec.vocab_size}")
        padded = padded_vocab_size(self.spec.vocab_size, size)
        ((first, stop), columns) = pieces([padded, shape[1]], dim, 1, rank, size)[0]
        box = ((min(first, shape[0]), min(stop, shape[0])), columns)
        table = self.weights.read(name, box, rows=stop - first)
        check_finite(table, f"{self.folder}: {name}")
        return table

    def _misfit(self, row: Row, why: str) -> WeightError:
        shapes = ", ".join(f"{n} {self.weights.shape(n)}" for n in row.hf)
        return WeightError(f"{self.folder}: {shapes} does not fit the sizes in config.json ({why})")

    def hf(self, row: Row) -> list[Tensor]:
        """The Hugging Face tensors of a row, whole, as they are stored."""
        return [self.weights.read(name) for name in row.hf]

    def hf_shapes(self, row: Row) -> list[list[int]]:
        return [self.weights.shape(name) for name in row.hf]


class MegatronSource:
    """A Megatron checkpoint (a training checkpoint or a converted folder)."""

    kind = "Megatron"

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self.folder, self.spec = folder, spec
        self.reader = ChunkReader(folder)
        self.merging = False  # whether somebody adds the adapters that lie in it (merge.py)
        self._transforms = transforms(spec)

    @property
    def has_adapters(self) -> bool:
        """Whether it was written while LoRA adapters were trained: its weights are the base's."""
        return any(".adapters." in key for key in self.reader.keys())

    def check(self) -> None:
        """Raise WeightError unless the checkpoint holds the model that config.json describes."""
        self.check_names()
        if (self.folder / MANIFEST).is_file():
            verify_manifest(self.folder)

    def check_names(self) -> None:
        """The same without reading the files for their checksums."""
        if self.has_adapters and not self.merging:
            raise WeightError(
                f"{self.folder} holds LoRA adapters beside the weights; merge them first with "
                f"'vlmtrain convert megatron-to-hf --source {self.folder} --target FOLDER'"
            )
        layers = {"language_model": self.spec.num_layers, "vision": self.spec.vision.depth}
        for row in rows(self.spec):
            key, layer = checkpoint_key(row.megatron)
            if key not in self.reader.keys():
                raise WeightError(f"{self.folder}: {key} is missing")
            shape = self.reader.shape(key)
            want = layers[key.split(".")[0]]
            if layer is not None and shape[0] != want:
                raise WeightError(
                    f"{self.folder}: {key} holds {shape[0]} layers, config.json says {want}"
                )

    def dtype(self, row: Row) -> torch.dtype:
        return self.reader.dtype(checkpoint_key(row.megatron)[0])

    def state(self, prefix: str, row: Row) -> bool:
        """Whether the checkpoint holds an optimizer's state for a row."""
        return prefix + checkpoint_key(row.megatron)[0] in self.reader.keys()

    def piece(self, row: Row, dim: int | None, rank: int, size: int, prefix: str = "") -> Tensor:
        """As `HFSource.piece`; with `prefix` the optimizer's state of the same shape."""
        key, layer = checkpoint_key(row.megatron)
        key = prefix + key
        shape = list(self.reader.shape(key)[0 if layer is None else 1 :])
        if row.transform == "vocab":
            stored, shape[0] = shape[0], padded_vocab_size(self.spec.vocab_size, size)
        boxes = pieces(shape, dim, self._transforms[row.transform].parts, rank, size)
        out = []
        for box in boxes:
            if row.transform == "vocab":  # the padding may differ, and it is zeros
                (first, stop), columns = box
                have = ((min(first, stored), min(stop, stored)), columns)
                out.append(pad_rows(self._read(key, layer, have), stop - first))
            else:
                out.append(self._read(key, layer, box))
            check_finite(out[-1], f"{self.folder}: {key}")
        return out[0] if len(out) == 1 else torch.cat(out)

    def _read(self, key: str, layer: int | None, box: Box) -> Tensor:
        if layer is None:
            return self.reader.read(key, box)
        return self.reader.read(key, ((layer, layer + 1), *box))[0]

    def hf(self, row: Row) -> list[Tensor]:
        """The Hugging Face tensors of a row, whole."""
        key, layer = checkpoint_key(row.megatron)
        shape = list(self.reader.shape(key)[0 if layer is None else 1 :])
        if row.transform == "vocab":
            shape[0] = min(shape[0], self.spec.vocab_size)
        box = tuple((0, n) for n in shape)
        try:
            return self._transforms[row.transform].to_hf(self._read(key, layer, box))
        except RuntimeError as error:
            raise WeightError(
                f"{self.folder}: {key} {shape} does not fit the sizes in config.json ({error})"
            ) from error

    def hf_shapes(self, row: Row) -> list[list[int]]:
        key, layer = checkpoint_key(row.megatron)
        shape = list(self.reader.shape(key)[0 if layer is None else 1 :])
        if row.transform == "vocab":
            shape[0] = min(shape[0], self.spec.vocab_size)
        return hf_shapes(self._transforms[row.transform], shape)


Source = HFSource | MegatronSource


def hf_shapes(transform: Transform, megatron: Sequence[int]) -> list[list[int]]:
    """Shapes of a row's Hugging Face tensors, from that of its whole Megatron tensor."""
    return [list(t.shape) for t in transform.to_hf(torch.empty(list(megatron), device="meta"))]


def open_weights(folder: str | Path, spec: ModelSpec) -> Source:
    """The weights in a folder, whichever kind it is; not checked yet (`check`)."""
    folder = Path(folder)
    return MegatronSource(folder, spec) if is_checkpoint(folder) else HFSource(folder, spec)


def check_weights(folder: str | Path, spec: ModelSpec) -> None:
    """Raise WeightError unless a folder holds exactly the weights that its config asks for."""
    try:
        open_weights(folder, spec).check()
    except CheckpointError as error:
        raise WeightError(str(error)) from error

"""A Megatron checkpoint as a source of weights."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from vlmtrain.checkpoint.mapping import (
    Box,
    Row,
    WeightError,
    checkpoint_key,
    pad_rows,
    pieces,
    rows,
    transforms,
)
from vlmtrain.checkpoint.megatron.torch_dist import ChunkReader
from vlmtrain.checkpoint.tensors import check_finite, hf_shapes
from vlmtrain.core.files import MANIFEST, is_file, verify_manifest
from vlmtrain.core.spec import ModelSpec, padded_vocab_size

# What a training checkpoint holds beside a weight, under these and the weight's key, in float32.
STATES = ("param", "exp_avg", "exp_avg_sq")


def state_prefix(name: str) -> str:
    return f"optimizer.state.{name}."


STATE_PREFIXES = tuple(state_prefix(name) for name in STATES)


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
        if is_file(self.folder / MANIFEST):
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
            elements = sum(first * others for first, others in row.sizes)
            one = shape if layer is None else shape[1:]
            more = math.prod(one) - elements
            if more < 0 or (more > 0 and row.transform != "vocab"):  # that one is padded
                raise WeightError(
                    f"{self.folder}: {key} {list(one)} does not fit the sizes in config.json (need "
                    f"{elements} elements)"
                )

    def dtypes(self, row: Row) -> list[torch.dtype]:
        return [self.reader.dtype(checkpoint_key(row.megatron)[0])] * len(row.hf)

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

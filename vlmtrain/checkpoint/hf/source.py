"""A Hugging Face folder as a source of weights."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from vlmtrain.checkpoint.hf.files import HFWeights, check_names
from vlmtrain.checkpoint.mapping import (
    Row,
    WeightError,
    fits_experts,
    pieces,
    rows,
    transforms,
)
from vlmtrain.checkpoint.tensors import check_finite
from vlmtrain.core.spec import ModelSpec, padded_vocab_size


class HFSource:
    """A Hugging Face folder, by pieces of Megatron tensors."""

    kind = "Hugging Face"

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self.folder, self.spec = folder, spec
        self.weights = HFWeights(folder)
        self._transforms = transforms(spec)

    def check(self) -> None:
        """Raise WeightError unless every tensor is there, of the sizes that config.json says, and
        none is unknown."""
        check_names(self.weights, self.spec)
        for row in rows(self.spec):
            for name, (first, others) in zip(row.hf, row.sizes, strict=True):
                shape = self.weights.shape(name)
                fits = len(shape) == (1 if others == 1 else 2)
                if row.experts:
                    fits = fits_experts(self.spec, shape)
                elif name.endswith("patch_embed.proj.weight"):  # a convolution's or a product's
                    fits = len(shape) in (2, 5)
                if not fits or (shape[0], math.prod(shape[1:])) != (first, others):
                    raise WeightError(
                        f"{self.folder}: {name} {shape} does not fit the sizes in config.json "
                        f"(need {first}{f' rows of {others} elements' if others > 1 else ''})"
                    )

    check_names = check

    def dtypes(self, row: Row) -> list[torch.dtype]:
        return [self.weights.dtype(name) for name in row.hf]

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
        """The Hugging Face tensors of a row, whole, as they are stored; experts as released."""
        return self._released(row, [self.weights.read(name) for name in row.hf])

    def hf_shapes(self, row: Row) -> list[list[int]]:
        shapes = [self.weights.shape(name) for name in row.hf]
        if not row.experts:
            return shapes
        tensors = [torch.empty(shape, device="meta") for shape in shapes]
        return [list(tensor.shape) for tensor in self._released(row, tensors)]

    def _released(self, row: Row, tensors: list[Tensor]) -> list[Tensor]:
        if not row.experts:
            return tensors
        transform = self._transforms[row.transform]
        return transform.to_hf(transform.to_megatron(tensors))

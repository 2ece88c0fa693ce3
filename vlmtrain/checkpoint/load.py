"""Weights from disk into the stages that a rank holds: each reads its own slices, no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vlmtrain.checkpoint.mapping import Row, WeightError, parameter_split_dim, rows
from vlmtrain.checkpoint.parameters import split_group, stage_parameters
from vlmtrain.checkpoint.weights import open_weights
from vlmtrain.core.spec import ModelSpec


def load_weights(stages: list[Any], spec: ModelSpec, folder: str | Path) -> None:
    """Fill every parameter of this rank's stages from a Hugging Face or Megatron folder.

    Beside the parameters it holds one piece of one tensor at a time. NaN is looked for in what
    is read.

    Raises:
        WeightError: a tensor or file is missing, misshapen or holds NaN or Inf.
    """
    source = open_weights(folder, spec)
    source.check_names()
    table = {row.megatron: row for row in rows(spec)}
    for stage in stages:
        for name, parameter in stage_parameters(stage).items():
            row = table.get(name) or _tied_head(name, spec, table)
            if row is None:
                raise WeightError(f"no Hugging Face tensor is known for the parameter {name}")
            dim = parameter_split_dim(parameter)
            group = split_group(parameter)
            piece = source.piece(row, dim, group.rank(), group.size())
            if piece.shape != parameter.shape:
                shapes = ", ".join(
                    f"{n} {s}" for n, s in zip(row.hf, source.hf_shapes(row), strict=True)
                )
                raise WeightError(
                    f"{folder}: {shapes} does not fit the sizes in config.json (gives "
                    f"{list(piece.shape)}, need {list(parameter.shape)})"
                )
            with torch.no_grad():
                parameter.copy_(piece)


def _tied_head(name: str, spec: ModelSpec, table: dict[str, Row]) -> Row | None:
    """The last stage of a pipeline keeps a copy of the tied embedding."""
    if spec.tie_word_embeddings and name == "language_model.output_layer.weight":
        return table["language_model.embedding.word_embeddings.weight"]
    return None

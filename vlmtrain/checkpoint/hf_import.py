"""Hugging Face weights into the stages that a rank holds, read tensor by tensor from disk."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vlmtrain.checkpoint.mapping import (
    Row,
    WeightError,
    canonical_name,
    rows,
    split,
    transforms,
)
from vlmtrain.models.spec import ModelSpec
from vlmtrain.models.stage import QwenVLStage, padded_vocab_size

# Buffers that old releases stored and every release recomputes.
_IGNORED = re.compile(r".*rotary_emb\.inv_freq$")


class HFWeights:
    """The tensors of a Hugging Face folder, by canonical name; files stay closed until read."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._open: dict[Path, Any] = {}
        self._where: dict[str, tuple[Path, str]] = {}
        for path, names in self._files().items():
            for name in names:
                self._where[canonical_name(name)] = (path, name)

    def _files(self) -> dict[Path, list[str]]:
        index = self.folder / "model.safetensors.index.json"
        single = self.folder / "model.safetensors"
        if index.is_file():
            try:
                weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            except (ValueError, KeyError, TypeError) as error:
                raise WeightError(f"{index} is not a valid safetensors index: {error!r}") from error
            files: dict[Path, list[str]] = {}
            for name, file in weight_map.items():
                files.setdefault(self.folder / file, []).append(name)
            missing = sorted(p.name for p in files if not p.is_file())
            if missing:
                raise WeightError(
                    f"{self.folder}: {len(missing)} of {len(files)} weight files that "
                    f"{index.name} lists are missing, the first is {missing[0]}; download the "
                    "folder again"
                )
            for path, names in files.items():
                present = set(self._handle(path).keys())
                absent = [n for n in names if n not in present]
                if absent:
                    raise WeightError(f"{path} does not hold {absent[0]}, which {index.name} lists")
            return files
        if single.is_file():
            return {single: list(self._handle(single).keys())}
        raise WeightError(
            f"{self.folder} has neither model.safetensors nor model.safetensors.index.json; "
            "--model takes a folder with safetensors weights"
        )

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise WeightError(
                    f"{path} is damaged or cut short ({error}); download it again"
                ) from error
        return self._open[path]

    def names(self) -> set[str]:
        return set(self._where)

    def read(self, name: str) -> Tensor:
        path, stored = self._where[name]
        return self._handle(path).get_tensor(stored)

    def shape(self, name: str) -> list[int]:
        path, stored = self._where[name]
        return list(self._handle(path).get_slice(stored).get_shape())


def check_names(weights: HFWeights, spec: ModelSpec) -> None:
    """Raise WeightError unless the folder holds exactly the tensors that the config asks for."""
    expected = {name for row in rows(spec) for name in row.hf}
    present = {n for n in weights.names() if not _IGNORED.match(n)}
    if spec.tie_word_embeddings and "lm_head.weight" in present:
        head, table = weights.read("lm_head.weight"), weights.read("model.embed_tokens.weight")
        if not torch.equal(head, table):
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


def load_weights(stages: list[QwenVLStage], spec: ModelSpec, folder: str | Path) -> None:
    """Fill every parameter of this rank's stages from a Hugging Face folder.

    Raises:
        WeightError: a tensor or file is missing, unexpected, misshapen or holds NaN or Inf.
    """
    weights = HFWeights(folder)
    check_names(weights, spec)
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    named = transforms(spec, padded_vocab_size(spec.vocab_size, size))
    table = {row.megatron: row for row in rows(spec)}
    for stage in stages:
        for name, parameter in stage_parameters(stage).items():
            row = table.get(name) or _tied_head(name, spec, table)
            if row is None:
                raise WeightError(f"no Hugging Face tensor is known for the parameter {name}")
            transform = named[row.transform]
            tensors = [weights.read(n) for n in row.hf]
            for hf_name, tensor in zip(row.hf, tensors, strict=True):
                if not torch.isfinite(tensor).all():
                    raise WeightError(f"{folder}: {hf_name} holds NaN or infinite values")
            try:
                whole = transform.to_megatron(tensors)
                piece = split(whole, parameter, transform.parts, rank, size)
                if piece.shape != parameter.shape:
                    raise WeightError(f"gives {list(piece.shape)}, need {list(parameter.shape)}")
            except (RuntimeError, WeightError) as error:
                shapes = ", ".join(f"{n} {weights.shape(n)}" for n in row.hf)
                raise WeightError(
                    f"{folder}: {shapes} does not fit the sizes in config.json ({error})"
                ) from error
            with torch.no_grad():
                parameter.copy_(piece)


def stage_parameters(stage: QwenVLStage) -> dict[str, Tensor]:
    """This stage's parameters by global name: layer numbers count over the whole model."""
    offsets = {}
    if stage.vision is not None:
        for i, layer in enumerate(stage.vision.blocks.layers):
            offsets[f"vision.blocks.layers.{i}."] = (
                f"vision.blocks.layers.{layer.layer_number - 1}."
            )
    if stage.language_model is not None:
        for i, layer in enumerate(stage.language_model.decoder.layers):
            offsets[f"language_model.decoder.layers.{i}."] = (
                f"language_model.decoder.layers.{layer.layer_number - 1}."
            )
    named = {}
    for name, parameter in stage.named_parameters():
        match = re.match(r"(.*?\.layers\.\d+\.)(.*)", name)
        if match:
            name = offsets[match[1]] + match[2]
        named[name] = parameter
    return named


def _tied_head(name: str, spec: ModelSpec, table: dict[str, Row]) -> Row | None:
    """The last stage of a pipeline keeps a copy of the tied embedding."""
    if spec.tie_word_embeddings and name == "language_model.output_layer.weight":
        return table["language_model.embedding.word_embeddings.weight"]
    return None

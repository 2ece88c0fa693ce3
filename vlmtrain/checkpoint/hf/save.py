"""The trained stages back into a Hugging Face folder that `from_pretrained` loads."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from vlmtrain.checkpoint.hf.files import (
    SHARD_BYTES,
    ModelFiles,
    SafetensorsWriter,
    finish_hf_folder,
)
from vlmtrain.checkpoint.mapping import Row, join, parameter_split_dim, rows, transforms
from vlmtrain.checkpoint.parameters import split_group, stage_parameters
from vlmtrain.checkpoint.tensors import hf_shapes
from vlmtrain.core.collectives import on_every_rank, on_first_rank
from vlmtrain.core.files import fsync_tree, replace_folder, replacing, start_folder
from vlmtrain.core.spec import ModelSpec


def save_weights(
    stages: list[Any],
    spec: ModelSpec,
    source: ModelFiles,
    target: str | Path,
    adapt: Callable[[Path], None] | None = None,
    value: Callable[[Tensor], Tensor] = Tensor.detach,
) -> None:
    """Write all stages' weights to `target`, with config and tokenizer from `source`, changed by
    `adapt`. `value`: as of `gathered`.

    Collective: every rank calls it. Each pipeline stage's first rank writes its own safetensors
    files, tensor by tensor; the folder gets its name only when all of it is on disk.

    Raises:
        CheckpointError: the disk is full or fails, on all ranks.
    """
    target = Path(target)
    work = Path(on_first_rank(replacing(target)(lambda: str(start_folder(target)))))
    try:
        _fill(stages, spec, source, work, target, adapt, value)
    except Exception:
        if dist.get_rank() == 0:
            shutil.rmtree(work, ignore_errors=True)
        raise


def _fill(
    stages: list[Any],
    spec: ModelSpec,
    source: ModelFiles,
    work: Path,
    target: Path,
    adapt: Callable[[Path], None] | None,
    value: Callable[[Tensor], Tensor],
) -> None:
    files = on_every_rank(lambda: _write(stages, spec, work, target, value))
    by_rank: list[list[tuple[str, dict[str, int]]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(by_rank, files)

    def finish() -> None:
        written = [file for files in by_rank for file in files]
        present = {name for _, tensors in written for name in tensors}
        missing = {name for row in rows(spec) for name in row.hf} - present
        assert not missing, f"no rank wrote {sorted(missing)[0]}"
        finish_hf_folder(work, written)
        source.write(work, stages[0].config.params_dtype, adapt)
        fsync_tree(work)
        replace_folder(work, target)

    on_first_rank(replacing(target)(finish))


def _write(
    stages: list[Any],
    spec: ModelSpec,
    work: Path,
    target: Path,
    value: Callable[[Tensor], Tensor],
) -> list[tuple[str, dict[str, int]]]:
    """This rank's files: names, and their tensors with sizes in bytes."""
    writer = (
        parallel_state.get_data_parallel_rank() == 0
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )
    plan = _plan(stages, spec) if writer else []
    stage = parallel_state.get_pipeline_model_parallel_rank()
    files: list[tuple[str, dict[str, int]]] = []
    open_file: SafetensorsWriter | None = None
    failed: Exception | None = None
    waiting: list[str] = []
    for name, tensor in gathered(stages, spec, value):
        # After a failure the gathering goes on: the other ranks take part in it.
        if not writer or failed is not None:
            continue
        try:
            with replacing(target):
                if not waiting:
                    if open_file is not None:
                        open_file.close()
                    tensors = plan.pop(0)
                    waiting = [n for n, _, _ in tensors]
                    path = work / f"part-{stage:05d}-{len(files):05d}.safetensors"
                    open_file = SafetensorsWriter(path, tensors)
                    files.append((path.name, {}))
                assert open_file is not None
                open_file.add(name, tensor)
            waiting.remove(name)
            files[-1][1][name] = tensor.numel() * tensor.element_size()
        except Exception as error:
            failed = error
    if failed is not None:
        if open_file is not None:
            open_file.abandon()
        raise failed
    if open_file is not None:
        with replacing(target):
            open_file.close()
    return files


def _plan(stages: list[Any], spec: ModelSpec) -> list[list[tuple[str, torch.dtype, list[int]]]]:
    """Names, types and shapes of this rank's files, in the order that `gathered` yields."""
    named = transforms(spec)
    files: list[list[tuple[str, torch.dtype, list[int]]]] = []
    filled = 0
    for row, parameter in _known_parameters(stages, spec):
        shape = list(parameter.shape)
        dim = parameter_split_dim(parameter)
        if dim is not None:
            shape[dim] *= split_group(parameter).size()
        shapes = hf_shapes(named[row.transform], shape)
        for name, sizes in zip(row.hf, shapes, strict=True):
            count = math.prod(sizes) * parameter.element_size()
            if not files or filled + count > SHARD_BYTES:
                files.append([])
                filled = 0
            files[-1].append((name, parameter.dtype, sizes))
            filled += count
    return files


def _known_parameters(stages: list[Any], spec: ModelSpec) -> Iterator[tuple[Row, Tensor]]:
    table = {row.megatron: row for row in rows(spec)}
    for stage in stages:
        for name, parameter in stage_parameters(stage).items():
            row = table.get(name)
            if row is not None:  # None: the pipeline's second copy of a tied embedding
                yield row, parameter


def gathered(
    stages: list[Any], spec: ModelSpec, value: Callable[[Tensor], Tensor] = Tensor.detach
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole CPU tensor) of each parameter here, joined over the TP group, or of
    experts over the EP group.

    `value` picks what is gathered of a parameter: its weights, or a tensor shaped like them.
    """
    named = transforms(spec)
    for row, parameter in _known_parameters(stages, spec):
        transform = named[row.transform]
        dim = parameter_split_dim(parameter)
        shards, group = [value(parameter)], split_group(parameter)
        if group.size() > 1 and dim is not None:
            shard = shards[0].contiguous()
            shards = [torch.empty_like(shard) for _ in range(group.size())]
            dist.all_gather(shards, shard, group=group)
        whole = join(shards, dim, transform.parts)
        for hf_name, tensor in zip(row.hf, transform.to_hf(whole), strict=True):
            yield hf_name, tensor.detach().to("cpu", copy=True).contiguous()

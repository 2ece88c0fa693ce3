"""Offline conversion between Hugging Face folders and Megatron checkpoints, by the tensor.

No model is built and no process group is made: rows of the mapping table are read, transformed
and appended to their files one after the other, so memory is a small multiple of the largest
tensor. The target gets its name only when all of it is on disk.
"""

from __future__ import annotations

import math
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from vlmtrain.checkpoint.hf.files import (
    SHARD_BYTES,
    ModelFiles,
    SafetensorsWriter,
    finish_hf_folder,
)
from vlmtrain.checkpoint.hf.source import HFSource
from vlmtrain.checkpoint.mapping import (
    Row,
    WeightError,
    checkpoint_key,
    pieces,
    rows,
    transforms,
)
from vlmtrain.checkpoint.megatron.source import STATE_PREFIXES, MegatronSource
from vlmtrain.checkpoint.megatron.torch_dist import COMMON, ChunkFile, write_common, write_metadata
from vlmtrain.checkpoint.merge import from_checkpoint
from vlmtrain.checkpoint.tensors import check_finite
from vlmtrain.checkpoint.weights import Source, open_weights
from vlmtrain.core.config import ParallelSection
from vlmtrain.core.files import (
    MANIFEST,
    CheckpointError,
    exists,
    fsync_tree,
    is_file,
    manifest_of,
    replace_folder,
    replacing,
    start_folder,
    write_json,
)
from vlmtrain.core.layout import Layout
from vlmtrain.core.spec import ModelSpec
from vlmtrain.models.family import read_spec
from vlmtrain.parallel.layout import section_layout

DTYPES = {"keep": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Done:
    """What a conversion did."""

    target: Path
    tensors: int
    bytes: int
    seconds: float

    def describe(self) -> str:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = peak if sys.platform == "darwin" else peak * 1024
        return (
            f"{self.target}: {self.tensors} tensors, {self.bytes / 1e9:.2f} GB in "
            f"{self.seconds:.1f} s ({self.bytes / 1e6 / max(self.seconds, 1e-9):.0f} MB/s), peak "
            f"memory {peak / 1e9:.2f} GB"
        )


Progress = Callable[[int], None]  # called with bytes done


class Weights(Protocol):
    """What a Hugging Face folder is written from."""

    folder: Path
    spec: ModelSpec

    def check(self) -> None: ...

    def dtypes(self, row: Row) -> list[torch.dtype]: ...

    def hf_shapes(self, row: Row) -> list[list[int]]: ...

    def hf(self, row: Row) -> list[Tensor]: ...


def to_megatron(
    source: Path,
    target: Path,
    layout: Layout,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    progress: Callable[[int], Progress] | None = None,
) -> Done:
    """Write `source` (either kind of folder) as a Megatron checkpoint, one file a rank of
    `layout`. The optimizer's state of a training checkpoint comes along, in float32.

    Raises:
        WeightError: the source's tensors are not what its config asks for.
        CheckpointError: the target exists or can't be written.
    """
    start = time.perf_counter()
    spec = read_spec(source)
    weights = open_weights(source, spec)
    with _folder(source, target, weights, overwrite) as work:
        if dtype is None:
            _check_types(weights)
        jobs = [(row, prefix) for row in rows(spec) for prefix in _prefixes(weights, row)]
        total = sum(_job_bytes(weights, row, prefix, dtype) for row, prefix in jobs)
        _need_space(work, total)
        report = progress(total) if progress else _ignore
        files: dict[int, ChunkFile] = {}
        done = 0
        try:
            for row, prefix in jobs:
                stage = stage_of(row.megatron, layout)
                for rank in range(layout.tensor):
                    number = stage % layout.pipeline * layout.tensor + rank
                    if _holds(row, layout, rank):
                        if number not in files:
                            files[number] = ChunkFile(work / f"__{number}_0.distcp")
                        done += _add(files[number], weights, row, prefix, layout, rank, dtype)
                        report(done)
            known = {file.path.name: file.close() for file in files.values()}
        except BaseException:
            for file in files.values():
                file.abandon()
            raise
        write_metadata(work, [chunk for file in files.values() for chunk in file.chunks])
        if isinstance(weights, MegatronSource) and is_file(weights.folder / COMMON):
            shutil.copyfile(weights.folder / COMMON, work / COMMON)
        else:
            write_common(work, {"weights_only": True})
        ModelFiles(weights.folder).write(work, dtype)
        write_json(work / MANIFEST, manifest_of(work, known))
        return Done(target, len(jobs), done, time.perf_counter() - start)


def _add(
    file: ChunkFile,
    source: Source,
    row: Row,
    prefix: str,
    layout: Layout,
    rank: int,
    dtype: torch.dtype | None,
) -> int:
    """Append one rank's piece of a tensor; returns its bytes."""
    dim, size = _split(row, layout), layout.tensor
    key, layer = checkpoint_key(row.megatron)
    if prefix:
        assert isinstance(source, MegatronSource)
        piece = source.piece(row, dim, rank, size, prefix)
    else:
        piece = _cast(source.piece(row, dim, rank, size), dtype, f"{source.folder}: {key}")
    whole = list(piece.shape)
    if dim is not None:
        whole[dim] *= size
    parts = transforms(source.spec)[row.transform].parts
    boxes = pieces(whole, dim, parts, rank, size)
    layers = layer_count(row.megatron, source.spec)
    at = 0
    for box in boxes:
        length = box[0][1] - box[0][0]
        chunk = piece[at : at + length] if len(boxes) > 1 else piece
        at += length
        offsets = [first for first, _ in box]
        if layer is None:
            file.add(prefix + key, whole, offsets, chunk)
        else:
            file.add(prefix + key, [layers, *whole], [layer, *offsets], chunk[None])
    return piece.numel() * piece.element_size()


def _split(row: Row, layout: Layout) -> int | None:
    """A multiplexed vision tower is not split: every rank holds it whole. Nor are experts here: any
    rank reads those it needs."""
    if (
        layout.tensor == 1
        or row.experts
        or (layout.multiplexed and row.megatron.startswith("vision."))
    ):
        return None
    return row.split


def _holds(row: Row, layout: Layout, rank: int) -> bool:
    """Whether a tensor-parallel rank writes a piece: what all hold, the first one writes."""
    return rank == 0 or _split(row, layout) is not None


def _prefixes(source: Source, row: Row) -> list[str]:
    if isinstance(source, HFSource):
        return [""]
    return ["", *(p for p in STATE_PREFIXES if source.state(p, row))]


def _check_types(source: Source) -> None:
    """Of what becomes one tensor of a checkpoint, all layers together."""
    known: dict[str, tuple[str, torch.dtype]] = {}
    for row in rows(source.spec):
        key, _ = checkpoint_key(row.megatron)
        for name, dtype in zip(row.hf, source.dtypes(row), strict=True):
            first, kind = known.setdefault(key, (name, dtype))
            if dtype != kind:
                raise WeightError(
                    f"{source.folder}: {first} is {str(kind)[6:]} and {name} {str(dtype)[6:]}; "
                    "they become one Megatron tensor: give its type with --dtype"
                )


def _job_bytes(source: Source, row: Row, prefix: str, dtype: torch.dtype | None) -> int:
    kind = torch.float32 if prefix else dtype or source.dtypes(row)[0]
    return sum(math.prod(shape) for shape in source.hf_shapes(row)) * kind.itemsize


def stage_of(megatron: str, layout: Layout) -> int:
    """The stage of a layout that holds a Megatron tensor."""
    _, layer = checkpoint_key(megatron)
    vision = megatron.startswith("vision.")
    if layer is not None:
        return layout.stage_of(layer, vision=vision)
    if vision:
        if megatron.startswith("vision.deepstack_mergers."):  # behind a layer, which names it
            return layout.stage_of(int(megatron.split(".")[2]), vision=True)
        return layout.merger_stage if megatron.startswith("vision.merger.") else 0
    return layout.embedding_stage if ".embedding." in megatron else layout.stages - 1


def layer_count(megatron: str, spec: ModelSpec) -> int:
    return spec.vision.depth if megatron.startswith("vision.") else spec.num_layers


def to_hf(
    source: Path | Weights,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], Progress] | None = None,
) -> Done:
    """Write `source` (either kind of folder, or weights that are open) as a Hugging Face folder. Of
    a checkpoint with LoRA adapters it is the merged weights.

    Raises:
        As `to_megatron`.
    """
    start = time.perf_counter()
    weights: Weights = (
        open_weights(source, read_spec(source)) if isinstance(source, Path) else source
    )
    if isinstance(weights, MegatronSource) and weights.has_adapters:
        weights = from_checkpoint(weights)
    with _folder(weights.folder, target, weights, overwrite) as work:
        plan: list[list[tuple[Row, list[tuple[str, torch.dtype, list[int]]]]]] = []
        filled = total = 0
        for row in rows(weights.spec):
            kinds = weights.dtypes(row) if dtype is None else [dtype] * len(row.hf)
            tensors = list(zip(row.hf, kinds, weights.hf_shapes(row), strict=True))
            size = sum(math.prod(shape) * kind.itemsize for _, kind, shape in tensors)
            if not plan or filled + size > shard_bytes:
                plan.append([])
                filled = 0
            plan[-1].append((row, tensors))
            filled += size
            total += size
        _need_space(work, total)
        report = progress(total) if progress else _ignore
        files: list[tuple[str, dict[str, int]]] = []
        done = count = 0
        for number, jobs in enumerate(plan):
            name = f"part-{number:05d}.safetensors"
            writer = SafetensorsWriter(work / name, [t for _, tensors in jobs for t in tensors])
            sizes: dict[str, int] = {}
            try:
                for row, _ in jobs:
                    values = weights.hf(row)
                    for i, tensor_name in enumerate(row.hf):
                        tensor = _cast(values[i], dtype, f"{weights.folder}: {tensor_name}")
                        writer.add(tensor_name, tensor)
                        sizes[tensor_name] = tensor.numel() * tensor.element_size()
                        done += sizes[tensor_name]
                        count += 1
                    report(done)
                writer.close()
            except BaseException:
                writer.abandon()
                raise
            files.append((name, sizes))
        finish_hf_folder(work, files)
        all_kinds = {kind for row in rows(weights.spec) for kind in weights.dtypes(row)}
        only = all_kinds.pop() if len(all_kinds) == 1 else None
        ModelFiles(weights.folder).write(work, dtype or only)
        return Done(target, count, done, time.perf_counter() - start)


def _cast(tensor: Tensor, dtype: torch.dtype | None, what: str) -> Tensor:
    if dtype is None or tensor.dtype == dtype:
        return tensor
    cast = tensor.to(dtype)
    if dtype == torch.float16:  # the one type with a smaller range
        check_finite(cast, f"{what} does not fit float16: cast to it, it")
    return cast


@contextmanager
def _folder(source: Path, target: Path, weights: Weights, overwrite: bool) -> Iterator[Path]:
    """Check the source, then a folder to work in that becomes `target` in the end."""
    if exists(target) and not overwrite:
        raise CheckpointError(
            f"--target {target} exists; name another folder, or pass --overwrite to replace it"
        )
    if target.resolve() == source.resolve():
        raise CheckpointError(
            f"--source and --target are the same folder, {source}; name another --target"
        )
    if source.resolve().is_relative_to(target.resolve()):
        raise CheckpointError(
            f"--target {target} holds the weights to convert, {source}, and would be replaced; "
            "name another folder"
        )
    weights.check()
    with replacing(target):
        work = start_folder(target)
    try:
        with replacing(target):
            yield work
            fsync_tree(work)
            replace_folder(work, target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _need_space(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise CheckpointError(
            f"{folder.parent} has {free / 1e9:.1f} GB left, the result takes {size / 1e9:.1f} GB; "
            "free some, or name a --target on another disk"
        )


def _ignore(_: int) -> None:
    return None


def layout_for(spec: ModelSpec, section: ParallelSection) -> Layout:
    """The layout that --parallel options describe, without data parallelism, whose ranks would
    share the experts.

    Raises:
        LayoutError: it can't run this model.
    """
    alone = replace(section, expert=1)
    return section_layout(spec, alone, section.tensor * section.pipeline)

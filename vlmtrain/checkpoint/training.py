"""Resumable training checkpoints: model, optimizer, random state, loader position.

OUTPUT/checkpoints/step-00000100/   megatron-core's distributed checkpoint + manifest.json
OUTPUT/checkpoints/latest           the name of the newest complete one

A checkpoint is written beside (`*.incomplete`), synced, described by a manifest of sizes and
checksums, and only then given its name, so a process killed at any moment leaves the previous
checkpoint whole.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer import MegatronOptimizer

from vlmtrain.checkpoint.files import fsync_tree, replace_folder, write_json, write_text
from vlmtrain.errors import UserError
from vlmtrain.models.stage import QwenVLStage
from vlmtrain.optimizer import load_state


class CheckpointError(UserError):
    """A training checkpoint that can't be found or used; the message names it."""


_NAME = re.compile(r"step-(\d{8})$")


def save(
    folder: Path,
    step: int,
    stages: list[QwenVLStage],
    optimizer: MegatronOptimizer,
    extra: dict[str, Any],
    keep: int,
) -> Path:
    """Write checkpoint `step` under `folder` and drop all but the newest `keep`. Collective."""
    target = folder / f"step-{step:08d}"
    work = target.with_name(target.name + ".incomplete")
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    dist.barrier()
    state = _sharded_state(stages, optimizer, loading=False)
    state["extra"] = {**extra, "step": step, "random": _gather_random_state()}
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    dist_checkpointing.save(state, str(work), strategy)
    dist.barrier()
    if first:
        write_json(work / "manifest.json", _manifest(work))
        fsync_tree(work)
        replace_folder(work, target)
        write_text(folder / "latest", target.name + "\n")
        for old in complete(folder)[:-keep]:
            shutil.rmtree(folder / f"step-{old:08d}")
    dist.barrier()
    return target


def complete(folder: Path) -> list[int]:
    """Steps of the checkpoints that have their final name, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(m[1]) for p in folder.iterdir() if (m := _NAME.match(p.name)))


def find(folder: Path, resume: str) -> Path | None:
    """The checkpoint that `--checkpoint.resume` asks for, verified; None for a fresh start.

    `latest` without any checkpoint is a fresh start, so that a job script can always pass it.

    Raises:
        CheckpointError: no such step, or a file is missing, cut short or changed.
    """
    if resume == "none":
        return None
    steps = complete(folder)
    if resume == "latest":
        if not steps:
            return None
        path = folder / f"step-{steps[-1]:08d}"
    else:
        path = folder / f"step-{int(resume):08d}"
        if not path.is_dir():
            have = f"there are steps {steps}" if steps else "there is none"
            raise CheckpointError(f"{path} does not exist; {have}")
    _verify(path, [s for s in steps if f"step-{s:08d}" != path.name])
    return path


def load(path: Path, stages: list[QwenVLStage], optimizer: MegatronOptimizer) -> dict[str, Any]:
    """Restore model and optimizer in place; returns what `save` got as `extra`. Collective."""
    state = _sharded_state(stages, optimizer, loading=True)
    try:
        loaded = dist_checkpointing.load(state, str(path))
    except Exception as error:
        raise CheckpointError(f"{path} can't be loaded into this model: {error}") from error
    for i, stage in enumerate(stages):
        result = stage.load_state_dict(loaded[f"model{i}"], strict=False)
        missing = [k for k in result.missing_keys if not k.endswith("_extra_state")]
        if missing:
            raise CheckpointError(f"{path} does not hold the parameter {missing[0]}")
    load_state(optimizer, loaded["optimizer"])
    extra = loaded["extra"]
    _set_random_state(extra.pop("random"))
    return extra


def _sharded_state(
    stages: list[QwenVLStage], optimizer: MegatronOptimizer, loading: bool
) -> dict[str, Any]:
    metadata = {
        # The only kind that restores exactly, also on another data-parallel size.
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state: dict[str, Any] = {
        f"model{i}": stage.sharded_state_dict(metadata=metadata) for i, stage in enumerate(stages)
    }
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
    return state


def _gather_random_state() -> list[dict[str, Any]]:
    mine = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        mine["cuda"] = torch.cuda.get_rng_state()
    every: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def _set_random_state(every: list[dict[str, Any]]) -> None:
    if len(every) != dist.get_world_size():
        return  # another layout: the seeds of this start stay; nothing in the model draws from them
    mine = every[dist.get_rank()]
    torch.set_rng_state(mine["torch"])
    np.random.set_state(mine["numpy"])
    random.setstate(mine["python"])
    tensor_parallel.get_cuda_rng_tracker().set_states(mine["megatron"])
    if "cuda" in mine and torch.cuda.is_available():
        torch.cuda.set_rng_state(mine["cuda"])


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "manifest.json")


def _checksum(path: Path) -> int:
    value = 0
    with open(path, "rb") as handle:
        while block := handle.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _manifest(folder: Path) -> dict[str, Any]:
    return {
        str(p.relative_to(folder)): {"bytes": p.stat().st_size, "crc32": _checksum(p)}
        for p in _files(folder)
    }


def _verify(path: Path, others: list[int]) -> None:
    manifest = path / "manifest.json"
    instead = (
        f"resume from another with --checkpoint.resume {others[-1]}"
        if others
        else "there is no other checkpoint to resume from"
    )
    try:
        entries = json.loads(manifest.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{manifest} is missing or damaged; {instead}") from error
    for name, want in entries.items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size != want["bytes"]:
            got = "missing" if size is None else f"{size} bytes"
            raise CheckpointError(
                f"{file} is {got}, {want['bytes']} bytes were written; the checkpoint is "
                f"damaged, {instead}"
            )
        if _checksum(file) != want["crc32"]:
            raise CheckpointError(
                f"{file} has changed since it was written (checksum); the checkpoint is "
                f"damaged, {instead}"
            )

"""The trained stages back into a Hugging Face folder that `from_pretrained` loads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file
from torch import Tensor

from vlmtrain.checkpoint.files import fsync_tree, replace_folder
from vlmtrain.checkpoint.hf_import import stage_parameters
from vlmtrain.checkpoint.mapping import join, rows, transforms
from vlmtrain.models.spec import ModelSpec
from vlmtrain.models.stage import QwenVLStage, padded_vocab_size

# Everything in a model folder but its weights travels along.
_CARRIED = (".json", ".txt", ".jinja", ".model", ".md")
_WEIGHTS = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SHARD_BYTES = 5 * 10**9


def save_weights(
    stages: list[QwenVLStage], spec: ModelSpec, source: str | Path, target: str | Path
) -> None:
    """Write all stages' weights to `target`, with config and tokenizer from `source`.

    Collective: every rank calls it. Each pipeline stage's first rank writes its own
    safetensors files; the folder gets its name only when all of it is on disk.
    """
    target = Path(target)
    work = target.with_name(target.name + ".incomplete")
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    dist.barrier()

    writer = (
        parallel_state.get_data_parallel_rank() == 0
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )
    mine: dict[str, int] = {}
    shards: list[tuple[str, list[str]]] = []
    batch: dict[str, Tensor] = {}
    batch_bytes = 0

    def flush() -> None:
        nonlocal batch, batch_bytes
        if batch:
            rank = parallel_state.get_pipeline_model_parallel_rank()
            name = f"part-{rank:05d}-{len(shards):05d}.safetensors"
            save_file(batch, str(work / name), metadata={"format": "pt"})
            shards.append((name, list(batch)))
            batch, batch_bytes = {}, 0

    for name, tensor in gathered(stages, spec):
        if not writer:
            continue
        size = tensor.numel() * tensor.element_size()
        if batch_bytes and batch_bytes + size > _SHARD_BYTES:
            flush()
        batch[name] = tensor
        batch_bytes += size
        mine[name] = size
    flush()

    everything: list[tuple[list[tuple[str, list[str]]], dict[str, int]]] = [([], {})] * (
        dist.get_world_size()
    )
    dist.all_gather_object(everything, (shards, mine))
    if first:
        _finish(work, everything, spec, source, stages[0].config.params_dtype)
        replace_folder(work, target)
    dist.barrier()


def gathered(
    stages: list[QwenVLStage], spec: ModelSpec, value: Callable[[Tensor], Tensor] = Tensor.detach
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole CPU tensor) of each parameter here, joined over the TP group.

    `value` picks what is gathered of a parameter: its weights, or a tensor shaped like them.
    """
    size = parallel_state.get_tensor_model_parallel_world_size()
    group = parallel_state.get_tensor_model_parallel_group()
    named = transforms(spec, padded_vocab_size(spec.vocab_size, size))
    table = {row.megatron: row for row in rows(spec)}
    for stage in stages:
        for name, parameter in stage_parameters(stage).items():
            row = table.get(name)
            if row is None:  # the pipeline's second copy of a tied embedding
                continue
            transform = named[row.transform]
            pieces = [value(parameter)]
            if size > 1 and getattr(parameter, "tensor_model_parallel", False):
                mine = pieces[0].contiguous()
                pieces = [torch.empty_like(mine) for _ in range(size)]
                dist.all_gather(pieces, mine, group=group)
            whole = join(pieces, parameter, transform.parts)
            for hf_name, tensor in zip(row.hf, transform.to_hf(whole), strict=True):
                # A copy of its own: safetensors refuses tensors that share memory.
                yield hf_name, tensor.detach().to("cpu", copy=True).contiguous()


def _finish(
    work: Path,
    everything: list[tuple[list[tuple[str, list[str]]], dict[str, int]]],
    spec: ModelSpec,
    source: str | Path,
    dtype: torch.dtype,
) -> None:
    """Rank 0: final file names, the index, the carried files."""
    files = [shard for shards, _ in everything for shard in shards]
    sizes = {name: size for _, mine in everything for name, size in mine.items()}
    missing = {name for row in rows(spec) for name in row.hf} - set(sizes)
    assert not missing, f"no rank wrote {sorted(missing)[0]}"
    weight_map: dict[str, str] = {}
    for number, (old, names) in enumerate(files, 1):
        new = (
            "model.safetensors"
            if len(files) == 1
            else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        )
        os.rename(work / old, work / new)
        weight_map.update(dict.fromkeys(names, new))
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (work / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    for path in sorted(Path(source).iterdir()):
        if path.is_file() and path.suffix in _CARRIED and path.name not in _WEIGHTS:
            shutil.copyfile(path, work / path.name)
    config = json.loads((work / "config.json").read_text(encoding="utf-8"))
    name = str(dtype).removeprefix("torch.")
    for section in (config, config.get("text_config"), config.get("vision_config")):
        for key in ("torch_dtype", "dtype"):
            if section and section.get(key):
                section[key] = name
    config.setdefault("dtype" if "dtype" in config else "torch_dtype", name)
    (work / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    fsync_tree(work)

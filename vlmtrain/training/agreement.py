"""What all ranks must have alike, compared before step 1: the program, its settings, the data files
and the plan of the next epoch. A rank that has another would send other messages than the others
wait for, and the run would hang; so it is named instead.

After that each step's packs and deal are compared in the loader's all-reduce of every step
(`data/collective_errors.py`).
"""

from __future__ import annotations

import os
import time
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import megatron.core
import numpy as np
import torch
import torch.distributed as dist

import vlmkernels
import vlmtrain
from vlmtrain.checkpoint.megatron.torch_dist import read_common
from vlmtrain.core.batch import padded_length
from vlmtrain.core.collectives import check_same, on_every_rank, on_first_rank
from vlmtrain.core.config import LoraSection, TrainConfig, to_dict
from vlmtrain.core.errors import UserError
from vlmtrain.core.files import CheckpointError, writing
from vlmtrain.core.layout import Layout
from vlmtrain.core.spec import ModelSpec, first_difference
from vlmtrain.data.errors import DataError
from vlmtrain.data.index import SampleIndex
from vlmtrain.data.loader import PackedLoader
from vlmtrain.data.packing.sampler import Position, Sampler
from vlmtrain.models.family import read_spec
from vlmtrain.parallel.step_inputs import StepInputs

# Options that say where things are on a machine; what is there is compared.
_PLACES = ("model", "data", "output", "nproc", "loader.media_root", "loader.template")
_SAMPLES = 64  # read on every rank
_PACKS = 1024  # whose messages are compared
_FILE_SYSTEM = 70.0  # seconds until a file of another machine must be seen: NFS looks once a minute
_MARK = ".seen-by-all-"
_REMEDY = "start all ranks with the same program, options and files"


def check_program(config: TrainConfig, spec: ModelSpec) -> None:
    """Collective; first of all, because the layout follows from the options.

    Raises:
        UserError: a rank with another version, option or model, on all ranks.
    """
    options = {
        f"--{name}": str(value) for name, value in _flat(to_dict(config), "") if name not in _PLACES
    }
    facts = {
        "the version of torch": torch.__version__,
        "the version of megatron-core": megatron.core.__version__,
        "the version of numpy": np.__version__,
        "the source of vlmtrain": _sources(vlmtrain),
        "the source of vlmkernels": _sources(vlmkernels),
        "the model's config.json": str(asdict(spec)),
    }
    check_same(options | facts, _REMEDY)


def check_shared(output: Path) -> None:
    """Collective: every rank writes its part of a checkpoint to the folder, which is there.

    Raises:
        UserError: a rank that does not see what rank 0 writes there, on all ranks.
    """
    if dist.get_world_size() == 1:
        return
    mark = on_first_rank(lambda: _mark(output))
    try:
        on_every_rank(lambda: _find(mark))
    finally:
        if dist.get_rank() == 0:
            mark.unlink(missing_ok=True)


def _mark(output: Path) -> Path:
    mark = output / f"{_MARK}{uuid.uuid4().hex}"
    with writing(f"--output {output}"):
        for left in output.glob(f"{_MARK}*"):  # by a start that was killed
            left.unlink(missing_ok=True)
        mark.touch()
    return mark


def _find(mark: Path) -> None:
    end = time.monotonic() + _FILE_SYSTEM
    while not os.path.exists(mark):
        if time.monotonic() > end:
            raise UserError(
                f"what rank 0 wrote to --output {mark.parent} is not there; name a folder that all "
                "machines share"
            )
        time.sleep(0.2)


def check_plan(loader: PackedLoader, layout: Layout) -> None:
    """Collective; before the first step of a start or a resumption.

    Raises:
        UserError: a rank with other data files or another plan, on all ranks.
    """
    state = {f"the loader's {name}": str(value) for name, value in loader.state_dict().items()}
    state["the tokenizer or the image settings"] = loader.builder.processor.fingerprint()
    plan = _plan(loader.sampler, loader.position, layout)
    check_same(state | _data(loader.index) | plan, _REMEDY)


def _flat(value: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _flat(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, inner


def _sources(package: Any) -> str:
    """Its version and a checksum of its Python files."""
    value, folder = 0, Path(package.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        value = zlib.crc32(path.read_bytes(), zlib.crc32(name.encode(), value))
    return f"{vlmkernels.__version__}, checksum {value:08x}"


def _data(index: SampleIndex) -> dict[str, str]:
    """The data as this rank's file system shows it: the size of each source, and some samples, read
    and compared with their checksums, with the sizes of their media."""
    facts = {}
    for number, source in enumerate(index.sources):
        facts[f"data source {number + 1}"] = _size(source.path)
    for place in np.unique(np.linspace(0, len(index) - 1, _SAMPLES).astype(int)).tolist():
        try:
            parts = [part for medium in index.load(place).media for part in medium.parts]
            said = ", ".join(_size(part.path) for part in parts if part.data is None)
        except DataError as error:
            said = f"unreadable ({error})"
        facts[f"sample {index.ids[place]!r}"] = f"as scanned, media of {said or 'no file'}"
    return facts


def _size(path: str) -> str:
    try:
        return "a folder" if os.path.isdir(path) else f"{os.path.getsize(path):,} bytes"
    except OSError as error:
        return str(error.strerror)


def _plan(sampler: Sampler, position: Position, layout: Layout) -> dict[str, str]:
    """The packs of the next epoch; of the first _PACKS of them who decodes what and the shape of
    every message between stages. The rest of these follows from packs, program and settings."""
    packs, inputs, count = 0, 0, 0
    for step in sampler.steps(position, position.step + sampler.steps_per_epoch):
        packs = zlib.crc32(step.digest().to_bytes(4, "little"), packs)
        if count >= _PACKS:
            continue
        for share in step.dealt:
            count += len(share)
            grids = [sampler.index.pack_grids(pack) for pack in share]
            lengths = [
                padded_length(sampler.index.pack_tokens(pack), layout.tensor) for pack in share
            ]
            one = StepInputs(sampler.spec, layout, grids, lengths)
            stages = range(layout.stages - 1)
            messages = [[one.message(stage, i) for stage in stages] for i in range(len(share))]
            inputs = zlib.crc32(repr((one.owners, messages)).encode(), inputs)
    return {
        "the digest of the packs of the next epoch": f"{packs:08x}",
        "the digest of their messages": f"{inputs:08x}",
    }


def check_resumed(checkpoint: Path, spec: ModelSpec, lora: LoraSection) -> None:
    """A run goes on with the model and the adapters that its checkpoint was trained with; the
    weight of the router's auxiliary loss may be another.

    Raises:
        CheckpointError: the first thing that differs.
    """
    saved = read_spec(checkpoint)
    # What no number depends on, or is the run's to choose.
    free = ["router_aux_loss_coef", "max_position_embeddings"]
    free += ["intermediate_size"] if spec.num_experts else []
    now = replace(spec, **{name: getattr(saved, name) for name in free})
    if difference := first_difference(saved, now):
        raise CheckpointError(
            f"{checkpoint} is of another model than --model: {difference}; resume with the one it "
            f"was trained with, or start a new run with another --output"
        )
    before = read_common(checkpoint).get("config", {}).get("lora", {})
    if before.get("rank", lora.rank) == lora.rank == 0:
        return
    for name in ("rank", "alpha", "targets", "vision"):
        then, value = before.get(name, getattr(lora, name)), getattr(lora, name)
        if name == "targets":
            then, value = " ".join(sorted({*then})), " ".join(sorted({*value}))
        if then != value:
            raise CheckpointError(
                f"{checkpoint} was trained with --lora.{name} {then}; it is now {value}: restore it"
            )

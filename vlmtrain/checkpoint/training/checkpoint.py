"""Resumable training checkpoints: model, optimizer, random state, loader position.

OUTPUT/checkpoints/step-00000100/   a Megatron checkpoint (torch_dist.py) + config and tokenizer
                                    files + manifest.json with sizes and checksums
OUTPUT/checkpoints/latest           the name of the newest complete one
OUTPUT/checkpoints/history          the names of those of the run so far, it last
OUTPUT/checkpoints/best             that of the one with the lowest held-out loss, if it is kept

A save copies the state to host memory (training waits for that only), then a thread of each rank
writes its file while training goes on. At the first step after the last rank is done, rank 0
writes the metadata, syncs, gives the folder its name and moves `latest`. A process killed, or a
disk full, at any moment leaves the previous checkpoint whole.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from vlmtrain.checkpoint.hf.files import ModelFiles
from vlmtrain.checkpoint.megatron.source import STATE_PREFIXES
from vlmtrain.checkpoint.megatron.torch_dist import (
    Chunk,
    ChunkFile,
    ChunkReader,
    read_common,
    write_common,
    write_metadata,
)
from vlmtrain.checkpoint.training import optimizer_state
from vlmtrain.checkpoint.training.sharding import Piece, ShardedLocation, locations
from vlmtrain.core.collectives import on_first_rank, shared_error
from vlmtrain.core.files import (
    MANIFEST,
    CheckpointError,
    fsync_path,
    is_dir,
    manifest_of,
    remove,
    replace_folder,
    replacing,
    start_folder,
    verify_manifest,
    write_json,
    write_text,
)
from vlmtrain.core.run_folder import complete, history_in, name_of, newest_in, pointed_at

_LEFTOVER = re.compile(r"step-\d{8}\.(incomplete|(incomplete\.)?vlmtrain-removed\d+)$")


class Saver:
    """Writes checkpoints under one folder, one at a time. Every method is collective.

    Args:
        folder: OUTPUT/checkpoints.
        source: config and tokenizer files, which go into each checkpoint.
        keep: newest checkpoints to keep.
        keep_every: steps whose multiples are kept for good; 0: none.
        resume: the checkpoint in `folder` that the run goes on from.
        adapt: changes in the copies what the run does in another way than they say.
    """

    def __init__(
        self,
        folder: Path,
        source: ModelFiles,
        *,
        keep: int,
        keep_every: int = 0,
        resume: Path | None = None,
        adapt: Callable[[Path], None] | None = None,
    ) -> None:
        self.folder, self.source, self.adapt = folder, source, adapt
        self.keep, self.keep_every = keep, keep_every
        self._writer: _Writer | None = None
        if dist.get_rank() == 0 and is_dir(folder):
            for path in folder.iterdir():  # of a run that was killed
                if _LEFTOVER.match(path.name):
                    shutil.rmtree(path, ignore_errors=True)
        self._history: list[int] = []  # steps of the run's checkpoints so far
        if resume is not None:
            self._history = on_first_rank(partial(go_on_from, resume))

    def start(
        self,
        step: int,
        parts: list[Any],
        optimizer: MegatronOptimizer,
        extra: dict[str, Any],
        export: Callable[[Path], None] | None = None,
    ) -> None:
        """Copy the state to host memory and begin to write it as checkpoint `step`.

        `extra["best"]`, where it is not None, names in "step" the checkpoint to keep as the best;
        `export` writes more into its folder, while training waits, on all ranks together.

        Raises:
            CheckpointError: the previous save failed, or this one can't begin; on all ranks.
        """
        self.finish()
        target = self.folder / name_of(step)
        work = Path(on_first_rank(replacing(target)(lambda: str(start_folder(target)))))
        if export is not None:
            export(work)
        common = {
            **extra,
            "step": step,
            "optimizer_steps": optimizer_state.steps_taken(optimizer),
            "random": _gather_random_state(),
        }
        dtype = parts[0].config.params_dtype
        self._writer = _Writer(work, target, _staged(parts, optimizer), common, dtype)

    def poll(self, stop: bool = False) -> bool:
        """Complete a checkpoint that all ranks have written; whether any rank says `stop`.

        One small all-reduce in host memory: call it once a step.

        Raises:
            CheckpointError: a rank could not write, e.g. the disk is full; on all ranks.
        """
        busy = self._writer is not None and self._writer.busy()
        flags = torch.tensor([stop, busy], dtype=torch.int32)
        dist.all_reduce(flags)
        if self._writer is not None and not flags[1]:
            self._complete()
        return bool(flags[0])

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete.

        Raises:
            CheckpointError: as `poll`.
        """
        if self._writer is not None:
            self._writer.wait()
            self._complete()

    def _complete(self) -> None:
        writer, self._writer = self._writer, None
        assert writer is not None
        first = dist.get_rank() == 0
        results: list[Any] | None = [None] * dist.get_world_size() if first else None
        dist.gather_object(writer.result(), results, dst=0)

        def complete() -> None:
            assert results is not None
            for _, _, message in results:
                if message is not None:
                    raise CheckpointError(message)
            with replacing(writer.target):
                self._name(writer, results)

        try:
            on_first_rank(complete)
        except Exception:
            if first:
                shutil.rmtree(writer.work, ignore_errors=True)
            raise

    def _name(self, writer: _Writer, results: list[Any]) -> None:
        """Rank 0, last: what makes a folder of files a checkpoint."""
        work, target = writer.work, writer.target
        known = {name: entry for _, files, _ in results for name, entry in files.items()}
        write_metadata(work, [chunk for chunks, _, _ in results for chunk in chunks])
        history = [step for step in self._history if is_dir(self.folder / name_of(step))]
        history.append(writer.common["step"])
        write_common(work, {**writer.common, "history": history})
        self.source.write(work, writer.dtype, self.adapt)
        write_json(work / MANIFEST, manifest_of(work, known))
        for path in work.iterdir():
            if path.name not in known:
                fsync_path(path)
        fsync_path(work)
        replace_folder(work, target)
        self._history = history
        _point(self.folder, history)
        best = (writer.common.get("best") or {}).get("step")
        if best is not None:
            write_text(self.folder / "best", name_of(best) + "\n")
        # Those of later steps were left by a run that went on from before them: not its to judge.
        steps = [step for step in complete(self.folder) if step <= history[-1]]
        steps.sort(key=history.__contains__)  # those of a run gone back from go first
        source = self.source.folder.resolve()  # may be one of them: the next start reads it
        for step in droppable(steps, self.keep, self.keep_every, best):
            if (self.folder / name_of(step)).resolve() in (source, *source.parents):
                continue
            remove(self.folder / name_of(step))


def droppable(steps: list[int], keep: int, keep_every: int, best: int | None = None) -> list[int]:
    """Which of the complete checkpoints `steps` may go, the first ones first."""
    return [s for s in steps[:-keep] if s != best and (not keep_every or s % keep_every)]


class _Writer:
    """One rank's share of one save, written by a thread."""

    def __init__(
        self,
        work: Path,
        target: Path,
        pieces: list[Piece],
        common: dict[str, Any],
        dtype: torch.dtype,
    ) -> None:
        self.work, self.target, self.common, self.dtype = work, target, common, dtype
        self._pieces = pieces
        self._chunks: list[Chunk] = []
        self._files: dict[str, dict[str, int]] = {}
        self._error: str | None = None
        self._path = work / f"__{dist.get_rank()}_0.distcp"
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with replacing(self.target):
                self._write()
        except CheckpointError as error:
            self._error = str(error)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            self._error = f"{self.target} can't be written: {error!r}"
        self._pieces = []

    def _write(self) -> None:
        if not self._pieces:
            return
        file = ChunkFile(self._path)
        try:
            while self._pieces:
                piece = self._pieces.pop(0)  # memory is free again as it is written
                file.add(piece.key, piece.shape, piece.offsets, piece.data)
        except BaseException:
            file.abandon()
            raise
        self._files[self._path.name] = file.close()
        self._chunks = file.chunks

    def busy(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()

    def result(self) -> tuple[list[Chunk], dict[str, dict[str, int]], str | None]:
        return self._chunks, self._files, self._error


def _staged(parts: list[Any], optimizer: MegatronOptimizer) -> list[Piece]:
    """What this rank writes, in host memory that training does not touch."""
    table = locations(parts)
    shared = optimizer_state.parameters(optimizer)
    staged = list(optimizer_state.pieces(optimizer, table))
    for tensor, location in table.items():
        if location.is_first and tensor not in shared:  # frozen: the first data-parallel rank's
            staged += location.pieces(tensor.detach().to("cpu", copy=True).view(-1))
    return staged


def find(folder: Path, resume: str) -> Path | None:
    """The checkpoint that `--checkpoint.resume` asks for, verified; None for a fresh start.

    `latest` is the one that was completed, or gone on from, last, whatever others have higher
    numbers. Without any checkpoint it is a fresh start, so that a job script can always pass it.
    `best` is the one that `--checkpoint.keep_best` has kept.

    Raises:
        CheckpointError: no such step, or a file is missing, cut short or changed.
    """
    if resume == "none":
        return None
    steps, history = complete(folder), history_in(folder)
    if resume == "latest":
        path = newest_in(folder)
        if path is None and steps:
            raise CheckpointError(
                f"{folder} holds no checkpoint of the run since it went back to an earlier step; "
                f"name one of steps {steps} with --checkpoint.resume"
            )
        if path is None:
            return None
    else:
        path = folder / resume
        if resume != "best":
            path = folder / name_of(int(resume))
        elif (named := pointed_at(path)) is not None:
            path = named
        if not is_dir(path):
            have = f"there are steps {steps}" if steps else "there is none"
            raise CheckpointError(f"{path} does not exist; {have}")
    step = int(path.name[-8:])
    others = [s for s in history if s < step] or [s for s in history if s > step]
    before = [s for s in steps if s not in history and s != step]  # of a run gone back from
    hint = "there is no other checkpoint to resume from"
    if others or before:
        hint = f"resume from another with --checkpoint.resume {(others or before)[-1]}"
    verify_manifest(path, f"; {hint}")
    return path


def go_on_from(path: Path) -> list[int]:
    """From here on `path` is what `latest` means, and `best` what it was there, though its folder
    may hold later steps; returns the steps of its run's checkpoints up to it."""
    folder, step, common = path.parent, int(path.name[-8:]), read_common(path)
    known = common.get("history", complete(folder))
    history = [*(s for s in known if s < step), step]
    best = (common.get("best") or {}).get("step")
    with replacing(folder / "latest"):
        _point(folder, history)
        if best is None:
            (folder / "best").unlink(missing_ok=True)
        else:
            write_text(folder / "best", name_of(best) + "\n")
    return history


def _point(folder: Path, history: list[int]) -> None:
    """Make the last of `history` the latest."""
    write_text(folder / "history", "".join(name_of(step) + "\n" for step in history))
    write_text(folder / "latest", name_of(history[-1]) + "\n")


def _master_prefix(tensor: Tensor, location: ShardedLocation, saved: set[str]) -> str:
    """Of what is frozen now: a run in float32 takes the master weights of one that trained it."""
    prefix = optimizer_state.state_prefix("param")
    has = {prefix + key for key in location.keys()} <= saved
    return prefix if has and tensor.dtype == torch.float32 else ""


def loader_state(path: Path) -> dict[str, Any] | None:
    """What `Saver.start` got as `extra["loader"]`; None: a checkpoint that holds weights only."""
    return read_common(path).get("loader")


def load(
    path: Path, parts: list[Any], optimizer: MegatronOptimizer, base: Path | None = None
) -> dict[str, Any]:
    """Restore model and optimizer in place; returns what `Saver.start` got as `extra`.

    Collective. Any layout reads what any other wrote; a part that was frozen when the checkpoint
    was written has no optimizer state and must stay frozen. With LoRA `base` is the folder that
    the frozen weights were read from: those of the checkpoint must be the same, or the adapters
    would be written as ones to that folder.

    Raises:
        CheckpointError: the checkpoint does not hold what this run needs, or holds weights that it
            has no place for; the same on all ranks.
    """
    message = None
    saved: set[str] = set()
    known: set[str] = set()
    try:
        reader = ChunkReader(path)
        common = read_common(path)
        if "optimizer_steps" not in common:
            raise CheckpointError(
                f"{path} holds weights only; start a new run from it with --model {path}"
            )
        table = locations(parts)
        saved = reader.keys()
        known = {key for location in table.values() for key in location.keys()}
        fill = partial(_fill, reader)
        for tensor, location in table.items():
            compared = base is not None and not tensor.requires_grad
            frozen = base is None and not tensor.requires_grad
            prefix = _master_prefix(tensor, location, saved) if frozen else ""
            for piece in location.pieces(tensor.detach().view(-1), prefix=prefix):
                before = _rounded(piece) if compared else None
                fill(piece)
                if before is not None and not torch.equal(before, _rounded(piece)):
                    raise CheckpointError(
                        f"{path} was trained on other base weights than --model {base} holds, the "
                        f"first is {piece.key}; resume with the --model it was trained with"
                    )
        optimizer_state.load(optimizer, table, fill, common.pop("optimizer_steps"))
    except CheckpointError as error:
        message = str(error)
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, (message, known))
    for text, _ in reports:
        if text is not None:
            raise shared_error(text)
    unused = saved.difference(*(keys for _, keys in reports))
    unused = {key for key in unused if not key.startswith("optimizer.")}
    if unused:
        raise shared_error(
            f"{path} holds {min(unused)}, for which this run has no place; resume with the --model "
            "and the --lora options it was trained with"
        )
    optimizer_state.finish_load(optimizer)
    states = common.pop("random")
    # On another layout the seeds of this start stay, since tensor-parallel ranks must draw alike;
    # only LoRA's dropout does.
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, _position())
    if [state.get("position") for state in states] == ranks:
        set_random_state(states[dist.get_rank()])
    return common


def _rounded(piece: Piece) -> Tensor:
    """A copy in host memory, in bfloat16: the precision may have changed since."""
    return piece.data.to("cpu", torch.bfloat16, copy=True)


def _fill(reader: ChunkReader, piece: Piece) -> None:
    """Read a box of the checkpoint into its memory."""
    key = piece.key
    if key not in reader.keys():
        if key.startswith(STATE_PREFIXES):
            name = key.split(".", 3)[3]
            raise CheckpointError(
                f"{reader.folder} holds no optimizer state of {name}, which was frozen when it was "
                "written; freeze the same parts to go on, or start a new run from its weights "
                f"with --model {reader.folder}"
            )
        raise CheckpointError(
            f"{reader.folder} does not hold the parameter {key}; resume with the --model and the "
            "--lora options it was trained with"
        )
    out, stored = piece.data, reader.shape(key)
    box = [(o, o + n) for o, n in zip(piece.offsets, out.shape, strict=True)]
    if stored != piece.shape:
        if not piece.padded or stored[1:] != piece.shape[1:]:
            raise CheckpointError(
                f"{reader.folder}: {key} is {list(stored)}, this model needs {list(piece.shape)}; "
                "resume with the --model and the --lora options it was trained with"
            )
        # A table of words padded for another tensor-parallel size: the padding is zeros.
        out.zero_()
        (first, stop) = box[0]
        box[0] = (min(first, stored[0]), min(stop, stored[0]))
        out = out[: box[0][1] - box[0][0]]
    reader.read(key, tuple(box), into=out)


def _gather_random_state() -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(states, {"position": _position(), **random_state()})
    return states


def _position() -> list[int]:
    """Of this rank in the layout."""
    return [
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    ]


def random_state() -> dict[str, Any]:
    """Of every generator of this rank."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "python": random.getstate(),
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Take up what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    random.setstate(state["python"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


class StopRequest:
    """SIGTERM, as clusters send before they take a machine away, noted instead of obeyed."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> StopRequest:
        self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _note(self, *_: object) -> None:
        self.asked = True

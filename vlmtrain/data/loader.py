"""Hands out packed microbatches: deterministic, resumable anywhere, decoding ahead of the compute.

The packs of epoch 0, 1, 2, ... form one endless stream. Optimizer step k takes the next
`global_batch` packs of it, and data-parallel rank r every dp_size-th of these. The position in
the stream is all the state there is, so a run resumes exactly, on another dp_size too.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vlmtrain.data.batch import PackedBatch, collate
from vlmtrain.data.errors import DataError
from vlmtrain.data.index import SampleIndex
from vlmtrain.data.packing import PLAN_VERSION, plan_epoch
from vlmtrain.data.processor import Processor
from vlmtrain.data.sample import Media, Sample
from vlmtrain.models.spec import ModelSpec

# What must be unchanged for a saved position to mean the same samples.
_IDENTITY = {
    "version": "another version of this program, which packs differently",
    "seed": "another seed",
    "pack_length": "another pack length",
    "index_hash": "other data or other image settings",
}


@dataclass(frozen=True)
class _Position:
    """A place in the stream of packs."""

    step: int = 0  # optimizer steps handed out
    epoch: int = 0
    pack: int = 0  # packs of this epoch already handed out


class PackedLoader:
    """The microbatches of one data-parallel rank.

    Args:
        index: `scan_sources`' result; the same on every rank.
        processor: the model's tokenizer and image settings.
        spec: the model's shape.
        pack_length: tokens of every batch.
        global_batch: packs in an optimizer step, over all ranks.
        dp_rank, dp_size: this rank's place among the data-parallel ranks.
        seed: of the shuffle.
        need_pixels: False on ranks without the vision tower: nothing is decoded.
        prefetch: build the next step's batches in the background.
        workers: threads that decode images.
        cache_bytes: bound of the memory that keeps decoded, resized images (uint8).

    Raises:
        DataError: global_batch is no multiple of dp_size, or a sample is longer than a pack.
    """

    def __init__(
        self,
        index: SampleIndex,
        processor: Processor,
        spec: ModelSpec,
        *,
        pack_length: int,
        global_batch: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        need_pixels: bool = True,
        prefetch: bool = True,
        workers: int = 2,
        cache_bytes: int = 512 << 20,
    ) -> None:
        if not 0 <= dp_rank < dp_size:
            raise ValueError(
                f"dp_rank is {dp_rank}; it must be from 0 to dp_size - 1 = {dp_size - 1}"
            )
        if global_batch < 1 or global_batch % dp_size:
            raise DataError(
                f"global_batch is {global_batch}; it must be a multiple of the {dp_size} "
                f"data-parallel ranks, for example {max(-(-global_batch // dp_size), 1) * dp_size}"
            )
        longest = int(index.lengths.argmax())
        if index.lengths[longest] > pack_length:
            raise DataError(
                f"sample {index.ids[longest]!r} has {index.lengths[longest]} tokens and a pack "
                f"holds {pack_length}; raise --train.pack_length"
            )
        self.index, self.processor, self.spec = index, processor, spec
        self.pack_length, self.global_batch, self.seed = pack_length, global_batch, seed
        self.dp_rank, self.dp_size, self.need_pixels = dp_rank, dp_size, need_pixels
        self._position = _Position()
        self._plans: OrderedDict[int, list[np.ndarray]] = OrderedDict()
        self._plan_lock = threading.Lock()
        self._frames = _FrameCache(cache_bytes)
        self._decoders = ThreadPoolExecutor(max(workers, 1), thread_name_prefix="decode")
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="prefetch") if prefetch else None
        self._pending: tuple[_Position, Future[list[PackedBatch]]] | None = None

    @property
    def step(self) -> int:
        """Optimizer steps handed out since the start of the run."""
        return self._position.step

    @property
    def epoch(self) -> float:
        """Epochs handed out, with the fraction of the current one."""
        position = self._position
        return position.epoch + position.pack / len(self._plan(position.epoch))

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps that see every sample of the first epoch."""
        return self.steps_for_epochs(1)

    def steps_for_epochs(self, epochs: float) -> int:
        """The least number of steps from the start of the run that covers `epochs` epochs."""
        whole = int(epochs)
        packs = float(sum(len(self._plan(epoch)) for epoch in range(whole)))
        if epochs > whole:
            packs += (epochs - whole) * len(self._plan(whole))
        return math.ceil(packs / self.global_batch - 1e-9)

    def next_step(self) -> list[PackedBatch]:
        """This rank's global_batch / dp_size microbatches of the next optimizer step.

        Raises:
            DataError: a file has gone or changed since the scan. The position stays, so the call
                can be repeated.
        """
        start = self._position
        pending, self._pending = self._pending, None
        if pending is not None and pending[0] == start:
            batches = pending[1].result()
        else:
            batches = self._build(start)
        _, after = self._take(start)
        self._position = after
        if self._ahead is not None:
            self._pending = (after, self._ahead.submit(self._build, after))
        return batches

    def state_dict(self) -> dict[str, int | str]:
        """The position after the last step handed out; the same on every rank, plain values."""
        return {
            "version": PLAN_VERSION,
            "step": self._position.step,
            "epoch": self._position.epoch,
            "pack": self._position.pack,
            "seed": self.seed,
            "pack_length": self.pack_length,
            "global_batch": self.global_batch,
            "index_hash": self.index.content_hash,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. dp_size and global_batch may differ from the saved run's.

        Raises:
            DataError: the data, the seed or the pack length differ, so that the position would
                mean other samples.
        """
        mine = self.state_dict()
        for key, meaning in _IDENTITY.items():
            if state.get(key) != mine[key]:
                raise DataError(
                    f"the checkpoint was made with {meaning} ({key} was {state.get(key)} and is "
                    f"{mine[key]}); restore it, or start again with --checkpoint.resume none"
                )
        self._position = _Position(int(state["step"]), int(state["epoch"]), int(state["pack"]))
        self._pending = None

    def close(self) -> None:
        """Stop the background threads."""
        self._pending = None
        for pool in (self._ahead, self._decoders):
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> PackedLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _plan(self, epoch: int) -> list[np.ndarray]:
        with self._plan_lock:
            if epoch not in self._plans:
                self._plans[epoch] = plan_epoch(
                    self.index.lengths, self.pack_length, self.seed, epoch, self.index.content_hash
                )
                while len(self._plans) > 4:
                    self._plans.popitem(last=False)
            return self._plans[epoch]

    def _take(self, position: _Position) -> tuple[list[np.ndarray], _Position]:
        """This rank's packs of the step at `position`, and the position after it."""
        chosen: list[np.ndarray] = []
        epoch, pack = position.epoch, position.pack
        for number in range(self.global_batch):
            plan = self._plan(epoch)
            if number % self.dp_size == self.dp_rank:
                chosen.append(plan[pack])
            pack += 1
            if pack == len(plan):
                epoch, pack = epoch + 1, 0
        return chosen, _Position(position.step + 1, epoch, pack)

    def _build(self, position: _Position) -> list[PackedBatch]:
        packs, _ = self._take(position)
        return [self._batch(pack.tolist()) for pack in packs]

    def _batch(self, pack: list[int]) -> PackedBatch:
        samples = [self.index.load(position) for position in pack]
        layouts = [self.index.layouts(position) for position in pack]
        encoded = []
        for position, sample, layout in zip(pack, samples, layouts, strict=True):
            encoded.append(self.processor.encode(sample, layout))
            if len(encoded[-1].input_ids) != self.index.lengths[position]:
                raise sample.fail("it has changed since it was scanned; start the run again")
        grids = torch.tensor(
            [layout.grid for group in layouts for layout in group], dtype=torch.int64
        ).reshape(-1, 3)
        media = [(item, sample) for sample in samples for item in sample.media]
        rows = int(grids.prod(1).sum()) if self.need_pixels else 0
        pixels = torch.empty(rows, self.spec.vision.patch_dim)
        if self.need_pixels:
            out = pixels.numpy()
            jobs, start = [], 0
            for (item, sample), count in zip(media, grids.prod(1).tolist(), strict=True):
                part = out[start : start + count]
                jobs.append(self._decoders.submit(self._pixels, item, sample, part))
                start += count
            for job in jobs:
                job.result()
        return collate(encoded, grids, pixels, self.pack_length, self.processor.pad_token_id)

    def _pixels(self, media: Media, sample: Sample, out: np.ndarray) -> None:
        key = (media.kind, media.parts, media.fps)
        frames = self._frames.get(key)
        if frames is None:
            frames = self.processor.frames(media, sample)
            self._frames.put(key, frames)
        try:
            self.processor.pixels(media, frames, out)
        except ValueError:
            raise sample.fail(
                f"{media.name} has another size than when it was scanned; start the run again"
            ) from None


class _FrameCache:
    """Least recently used frames, within a bound in bytes; safe to share between threads."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._entries: OrderedDict[object, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: object) -> np.ndarray | None:
        with self._lock:
            frames = self._entries.get(key)
            if frames is not None:
                self._entries.move_to_end(key)
            return frames

    def put(self, key: object, frames: np.ndarray) -> None:
        with self._lock:
            if key in self._entries or frames.nbytes > self.max_bytes:
                return
            self._entries[key] = frames
            self.bytes += frames.nbytes
            while self.bytes > self.max_bytes:
                _, dropped = self._entries.popitem(last=False)
                self.bytes -= dropped.nbytes

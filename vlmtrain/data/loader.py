"""Hands out packed microbatches: deterministic, resumable anywhere, decoding ahead of the compute.

Which packs a step takes is the sampler's to say (packing/sampler.py). The position in its stream is
all the state there is, so a run resumes exactly, on another dp_size too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vlmtrain.core.batch import PackedBatch
from vlmtrain.core.collectives import shared_error
from vlmtrain.core.config import LoaderSection
from vlmtrain.core.errors import UserError
from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.builder import PackBuilder
from vlmtrain.data.collective_errors import Agree, Failure, Report
from vlmtrain.data.errors import DataError
from vlmtrain.data.index import SampleIndex
from vlmtrain.data.packing.costs import COST_VERSION
from vlmtrain.data.packing.plan import PLAN_VERSION
from vlmtrain.data.packing.sampler import PlannedStep, Position, Sampler
from vlmtrain.data.processor import Processor

# What must be unchanged for a saved position to mean the same samples.
_IDENTITY = {
    "version": "another version of this program, which packs differently",
    "seed": "another seed",
    "pack_length": "another pack length",
    "packing": "another way of packing",
    "index_hash": "other data, another share of it held out, or other image settings",
}


def _identity(
    index: SampleIndex, section: LoaderSection, pack_length: int, seed: int
) -> dict[str, int | str]:
    packing: str = section.packing
    return {
        "version": PLAN_VERSION,
        "seed": seed,
        "pack_length": pack_length,
        # where the policy uses them the costs too
        "packing": f"{packing}/{COST_VERSION}" if packing == "balanced" else packing,
        "index_hash": index.content_hash,
    }


def check_position(
    state: dict[str, Any], index: SampleIndex, section: LoaderSection, pack_length: int, seed: int
) -> None:
    """Raise DataError where the data, the seed or the pack length differ from those that a position
    was saved with, so that it would mean other samples."""
    for key, value in _identity(index, section, pack_length, seed).items():
        if state.get(key) != value:
            raise DataError(
                f"the checkpoint was made with {_IDENTITY[key]} ({key} was {state.get(key)} and is "
                f"{value}); restore it, or start a new run from its weights: --model CHECKPOINT "
                "and another --output"
            )


@dataclass(frozen=True)
class LoaderRank:
    """What one rank wants of the loader."""

    dp_rank: int = 0
    dp_size: int = 1
    # Given the grids of each of a step's packs, int64 [m, 3]: which media to decode. None: all.
    decodes: Callable[[Sequence[np.ndarray]], list[tuple[bool, ...]]] | None = None
    pixel_dtype: torch.dtype = torch.float32  # or bfloat16, where the model casts to it anyway
    pin_memory: bool = False  # page-locked tensors, for copies to a GPU
    token_multiple: int = 1  # what the tokens of a pack are padded to a multiple of


def _one_thread(pins: bool) -> ThreadPoolExecutor:
    """To read ahead in. One that pins memory has this thread's GPU: a new thread has the first,
    where it would take a context."""
    if not pins:
        return ThreadPoolExecutor(1, "prefetch")
    return ThreadPoolExecutor(1, "prefetch", torch.cuda.set_device, (torch.cuda.current_device(),))


class PackedLoader:
    """The microbatches of one data-parallel rank.

    Args:
        index: `scan_sources`' result; the same on every rank.
        processor: the model's tokenizer and image settings.
        spec: the model's shape; its sizes are the prices of the cost model.
        section: how samples are packed, decoded, and what one means that can't be read any more:
            with "skip" it stays in its pack but counts for nothing.
        rank: of the data-parallel ranks this one, and what it decodes.
        pack_length: tokens that a batch holds at most.
        global_batch: packs in an optimizer step, over all ranks.
        seed: of the shuffle.
        once: hand out one epoch, each sample once (weights do not count); the last step is filled
            with empty packs. For evaluation.
        prefetch: build the next step's batches in the background.
        threads: that decode, where `section.workers` is 0.
        cache_bytes: bound of the memory that keeps decoded, resized images (uint8).
        agree: how the ranks hear of each other's failures; see `collective_errors.across_ranks`.
        log: called with a line for each sample skipped, and where a step is more than an epoch.

    Raises:
        DataError: global_batch is no multiple of dp_size, or a sample is longer than a pack.
    """

    def __init__(
        self,
        index: SampleIndex,
        processor: Processor,
        spec: ModelSpec,
        section: LoaderSection,
        rank: LoaderRank,
        *,
        pack_length: int,
        global_batch: int,
        seed: int = 0,
        once: bool = False,
        prefetch: bool = True,
        threads: int = 2,
        cache_bytes: int = 512 << 20,
        agree: Agree | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        dp_rank, dp_size = rank.dp_rank, rank.dp_size
        if not 0 <= dp_rank < dp_size:
            raise ValueError(
                f"dp_rank is {dp_rank}; it must be from 0 to dp_size - 1 = {dp_size - 1}"
            )
        if global_batch < 1 or global_batch % dp_size:
            raise DataError(
                f"global_batch is {global_batch}; it must be a multiple of the {dp_size} "
                f"data-parallel ranks, for example {max(-(-global_batch // dp_size), 1) * dp_size}"
            )
        number = int(index.lengths.argmax())
        if index.lengths[number] > pack_length:
            raise DataError(
                f"sample {index.ids[number]!r} has {index.lengths[number]} tokens and a pack "
                f"holds {pack_length}; raise --train.pack_length"
            )
        self.index, self.section, self.rank, self.seed = index, section, rank, seed
        self.pack_length, self.global_batch = pack_length, global_batch
        self.decoded = 0  # images and videos whose pixels this rank has handed out
        self.skipped = 0  # samples skipped since the start of the run, on all ranks
        self.reading = 0.0  # seconds that the last step's packs were waited for, others' not
        self.metrics: dict[str, float] = {}
        self._agree, self._log = agree, log
        self.sampler = Sampler(
            index,
            spec,
            section.packing,
            pack_length=pack_length,
            global_batch=global_batch,
            seed=seed,
            ranks=dp_size,
            once=once,
        )
        self.position = Position()
        self.builder = PackBuilder(
            index,
            processor,
            spec,
            section,
            pack_length=pack_length,
            multiple=rank.token_multiple,
            pixel_dtype=rank.pixel_dtype,
            threads=threads,
            cache_bytes=cache_bytes,
        )
        packs = len(self.sampler.epoch_plan(0))
        if log is not None and not once and packs < global_batch:
            if (seen := self._samples_of_a_step() / len(index)) > 1:
                log(self._too_few_packs(packs, seen))
        self._prefetch = _one_thread(rank.pin_memory) if prefetch else None
        self._pending: tuple[Position, Future[tuple[list[PackedBatch], Report]]] | None = None

    @property
    def step(self) -> int:
        """Optimizer steps handed out since the start of the run."""
        return self.position.step

    @property
    def next(self) -> PlannedStep:
        """The step that `next_step` hands out."""
        return self.sampler.take(self.position)

    @property
    def epoch(self) -> float:
        """Epochs handed out, with the fraction of the current one."""
        return self.sampler.epochs_done(self.position)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps that see every sample of the first epoch."""
        return self.sampler.steps_per_epoch

    @property
    def samples_per_step(self) -> float:
        """Samples of a mean step of the first epoch; if that has none, of the first step."""
        packs = self.sampler.epoch_plan(0)
        if not len(packs):
            return self._samples_of_a_step()
        return self.global_batch * sum(map(len, packs)) / len(packs)

    def _samples_of_a_step(self) -> int:
        packs = self.sampler.take(Position()).dealt
        return sum(len(pack) for rank in packs for pack in rank)

    def steps_for_epochs(self, epochs: float) -> int:
        """See `Sampler.steps_for_epochs`."""
        return self.sampler.steps_for_epochs(epochs, self.position)

    def next_step(self) -> list[PackedBatch]:
        """This rank's global_batch / dp_size microbatches of the next optimizer step.

        `metrics` then tells of the whole global batch: `fill`, its tokens as a share of full
        packs; `rank_balance` and `microbatch_balance`, the largest cost of a rank and of a
        microbatch over the mean; `skipped`, the samples skipped so far in this run.

        Raises:
            DataError: a file has gone or changed since the scan. The position stays, so the call
                can be repeated. With `agree` every rank raises what one has met.
        """
        start, before = self.position, time.perf_counter()
        pending, self._pending = self._pending, None
        batches: list[PackedBatch] = []
        report, error = Report(), None
        try:
            if pending is not None and pending[0] == start:
                batches, report = pending[1].result()
            else:
                batches, report = self._build(start)
        except Exception as caught:
            error = caught
        self.reading = time.perf_counter() - before
        step = self.sampler.take(start)
        report.digest = step.digest()
        failures = self._agreed(report, error)
        self.position = step.after
        if self._prefetch is not None:
            self._pending = (step.after, self._prefetch.submit(self._build, step.after))
        batches = self._blanked(batches, failures)
        self.decoded += sum(sum(batch.decoded) for batch in batches)
        self.metrics = {**step.metrics, "skipped": float(self.skipped)}
        return batches

    def build(self, step: PlannedStep) -> list[PackedBatch]:
        """This rank's microbatches of a step to come, which the ranks need not share; the position
        and what is counted stay. Collective."""
        batches: list[PackedBatch] = []
        report, error = Report(), None
        before, log = self.skipped, self._log
        try:
            batches, report = self._build(step.at)
        except Exception as caught:
            error = caught
        try:
            self._log = None
            failures = self._agreed(report, error)
        finally:
            self.skipped, self._log = before, log
        return self._blanked(batches, failures)

    def _blanked(self, batches: list[PackedBatch], failures: list[Failure]) -> list[PackedBatch]:
        for failure in failures:
            if failure.dp_rank == self.rank.dp_rank:
                place = failure.microbatch
                batches[place] = batches[place].without(failure.segment)
        return batches

    def _agreed(self, report: Report, error: Exception | None) -> list[Failure]:
        """The failures of all ranks, each once; raises on all where one has an error."""
        if self._agree is None:
            if error is not None:
                raise error
            reports = [report]
        else:
            if error is not None:
                known = isinstance(error, UserError)
                report.error = str(error) if known else f"{type(error).__name__}: {error}"
            reports = self._agree(report)
            message = next((one.error for one in reports if one.error is not None), None)
            if message is not None:
                if error is not None and not isinstance(error, UserError):
                    raise error  # a fault of the program: its traceback must be seen
                raise shared_error(message)
        unique = {(f.dp_rank, f.microbatch, f.segment): f for one in reports for f in one.failures}
        failures = [unique[place] for place in sorted(unique)]
        self.skipped += len(failures)
        for failure in failures:
            if self._log is not None:
                self._log(f"skipped: {failure.message}")
        if self.skipped > self.section.skip_limit:
            message = (
                f"{self.skipped} samples could not be read, more than the "
                f"{self.section.skip_limit} that --loader.skip_limit allows; the last: "
                f"{failures[-1].message}"
            )
            raise DataError(message) if self._agree is None else shared_error(message)
        return failures

    def state_dict(self) -> dict[str, int | str]:
        """The position after the last step handed out; the same on every rank, plain values."""
        return {
            **_identity(self.index, self.section, self.pack_length, self.seed),
            "step": self.position.step,
            "epoch": self.position.epoch,
            "pack": self.position.pack,
            "global_batch": self.global_batch,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. dp_size and global_batch may differ from the saved run's.

        Raises:
            DataError: as `check_position`.
        """
        check_position(state, self.index, self.section, self.pack_length, self.seed)
        self.position = Position(int(state["step"]), int(state["epoch"]), int(state["pack"]))
        self.skipped = int(state.get("skipped", 0))
        self._pending = None

    def close(self) -> None:
        """Stop the background threads."""
        self._pending = None
        if self._prefetch is not None:
            self._prefetch.shutdown(wait=True, cancel_futures=True)
        self.builder.close()

    def __enter__(self) -> PackedLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _too_few_packs(self, packs: int, seen: float) -> str:
        ranks = self.rank.dp_size
        fitting = packs // ranks * ranks
        advice = f"--train.global_batch_packs {fitting} fits"
        if not fitting:
            length = max(int(self.index.lengths.max()), int(self.index.lengths.sum()) // ranks)
            advice = f"use fewer ranks, or --train.pack_length of about {length}"
        return (
            f"warning: a step takes {self.global_batch} packs (--train.global_batch_packs) and an "
            f"epoch of this data has {packs}, so each step sees every sample about "
            f"{seen:.3g} times; {advice}"
        )

    def ids(self, step: PlannedStep) -> list[list[str]]:
        """The sample ids of each pack of this rank's share of a step."""
        packs = step.dealt[self.rank.dp_rank]
        return [[self.index.ids[i] for i in pack.tolist()] for pack in packs]

    def _build(self, position: Position) -> tuple[list[PackedBatch], Report]:
        report = Report()
        batches = []
        packs = self.sampler.take(position).dealt[self.rank.dp_rank]
        shares: list[tuple[bool, ...] | None] = [None] * len(packs)
        if self.rank.decodes is not None:
            shares = [*self.rank.decodes([self.index.pack_grids(pack) for pack in packs])]
        for number, (pack, share) in enumerate(zip(packs, shares, strict=True)):
            batch, bad = self.builder.build(pack.tolist(), share)
            batches.append(batch.pin_memory() if self.rank.pin_memory else batch)
            report.failures += [
                Failure(self.rank.dp_rank, number, segment, str(error))
                for segment, error in sorted(bad.items())
            ]
        return batches, report

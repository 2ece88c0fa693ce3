"""The heaviest steps of the whole run, made once before step 1: a run that gets through them gets
through.

The packs of a run follow from data and seed, so each replica knows the steps in which one of its
ranks is fullest. Replicas rehearse each its own at the same time, forward, backward and optimizer;
nothing is changed (`Engine.rehearse`).
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from vlmtrain.core.collectives import on_first_rank, shared_error
from vlmtrain.core.config import TrainConfig
from vlmtrain.core.device import Backend
from vlmtrain.core.errors import UserError, shown
from vlmtrain.data.loader import PackedLoader
from vlmtrain.plan.heaviest import Loads, Patches, heaviest, lengths, peak_models
from vlmtrain.training.engine import Engine
from vlmtrain.training.spikes import examine

_LINES = 16  # ranks that get a line; of more the fullest of each stage
ADVICE = (
    "take --train.fit auto, more of --recompute.vision, --recompute.language, --parallel.tensor or "
    "--parallel.pipeline, or a shorter --train.pack_length"
)


@dataclass(frozen=True)
class RankPeak:
    """One rank's peak; bytes."""

    rank: int
    stage: int  # pipeline rank
    states: float  # before the model was built, and of its states
    planned: float
    measured: float
    capacity: float
    step: int  # from 1: the step that was fullest
    samples: list[str]  # of the packs between forward and backward at its planned peak


def rehearse(
    config: TrainConfig,
    engine: Engine,
    loader: PackedLoader,
    loads: Loads,
    before: int,
    factor: float = 1.0,
) -> list[RankPeak]:
    """Make the heaviest steps of a run. Collective.

    Args:
        loads: of the steps to come.
        before: bytes in use before the model was built; on a CPU the program itself.
        factor: by which a step needs more than planned (`PeakModel`), as far as is known.

    Returns:
        The peak of every rank.

    Raises:
        UserError: a loss that is not finite, or a rank without room for its peak; on all ranks.
    """
    backend = engine.backend
    models = peak_models(config, engine.spec, engine.layout, cuda=backend.is_cuda, factor=factor)
    places = heaviest(loads, models)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model, patches = models[stage], Patches(loader.index)
    best: RankPeak | None = None
    capacity = capacity_here(backend)
    own = places[engine.data_rank]
    for number in range(max(map(len, places))):
        step = loader.sampler.take(own[number % len(own)])  # one with fewer begins again
        engine.clock.place.begin(0, loader.ids(step))
        packs = loader.build(step)
        measures = backend.reset_peak_memory()
        try:
            result = engine.rehearse(packs)
        except torch.cuda.OutOfMemoryError as error:
            raise UserError(
                f"rank {dist.get_rank()} has no room for step {step.at.step + 1} of this run: "
                f"{str(error).splitlines()[0]} Its packs hold "
                f"{shown([name for pack in loader.ids(step) for name in pack])}; {ADVICE}"
            ) from error
        if engine.guard.withheld or not np.isfinite(result.loss):
            cause = engine.guard.withheld or f"the loss is {result.loss}"
            spike = examine(engine, packs, step.at.step + 1, cause)
            raise shared_error(
                f"{spike.describe()}; nothing is learnt yet, so look at the weights in --model, or "
                "at these samples"
            )
        measured = backend.peak_memory_bytes()
        del packs
        if measures and (best is None or measured > best.measured):
            share = step.dealt[engine.data_rank]
            counts = patches.of(share)
            tokens = lengths(loader.index, share)
            largest = np.array([patches.largest(share)])
            planned = model.peaks(tokens[None], counts[None], largest)[0]
            window = [loader.ids(step)[i] for i in model.window(tokens, counts)]
            best = RankPeak(
                dist.get_rank(),
                stage,
                before + model.states(),
                before + planned,
                measured,
                capacity,
                step.at.step + 1,
                [name for pack in window for name in pack],
            )
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, best)
    return [] if None in peaks else peaks


def capacity_here(backend: Backend) -> int:
    """Bytes that this rank may use. Collective."""
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return backend.capacity_bytes(Counter(hosts)[socket.gethostname()])


def correction(peaks: list[RankPeak]) -> float:
    """Measured over planned, of what a step needs beside the model's states; on the worst rank. A
    tenth at least: less can't be told from the states."""
    return max(
        0.1, *((peak.measured - peak.states) / (peak.planned - peak.states) for peak in peaks)
    )


def check_fits(peaks: list[RankPeak], advice: Callable[[], str]) -> None:
    """Raises UserError, on all ranks, where one has measured more than it has; advice: what would
    make it fit, asked for on the first rank."""
    worst = max(peaks, key=lambda peak: peak.measured / peak.capacity)
    if worst.measured > worst.capacity:
        raise shared_error(
            f"rank {worst.rank} needs {worst.measured / 1e9:.1f} GB in step {worst.step} of this "
            f"run and has {worst.capacity / 1e9:.1f}; the packs at its peak hold "
            f"{shown(worst.samples)}; {on_first_rank(advice)}"
        )


def describe(peaks: list[RankPeak]) -> list[str]:
    """A line for each rank."""
    chosen = peaks
    if len(peaks) > _LINES:
        fullest = {p.stage: p for p in sorted(peaks, key=lambda p: p.measured)}
        chosen = [fullest[stage] for stage in sorted(fullest)]
    lines = []
    for p in chosen:
        lines.append(
            f"  rank {p.rank}: peak {p.planned / 1e9:.2f} GB planned, {p.measured / 1e9:.2f} GB "
            f"measured of {p.capacity / 1e9:.1f}, in step {p.step} by {shown(p.samples)}"
        )
    return lines

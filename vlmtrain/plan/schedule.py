"""A pipeline step played out event by event: 1F1B, and interleaved with virtual stages.

The order in which a rank works is megatron-core's own (`forward_backward_pipelining_*`); a piece
of work starts when its rank is free and its input has arrived. Stages may differ, microbatches
may differ, and each boundary may take time. Nothing is random: one set of times, one timeline.

Stages are numbered as a microbatch visits them: stage = chunk * pipeline + rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

FORWARD, BACKWARD, VISION_FORWARD, VISION_BACKWARD = 0, 1, 2, 3
NAMES = ("forward", "backward", "vision forward", "vision backward")

Step = tuple[int, int, int]  # FORWARD or BACKWARD, chunk, microbatch


@lru_cache(maxsize=4096)
def order(pipeline: int, virtual: int, microbatches: int, rank: int) -> tuple[Step, ...]:
    """What `rank` does, in megatron-core's order.

    Raises:
        ValueError: interleaving with a number of microbatches that `pipeline` doesn't divide.
    """
    if virtual > 1 and microbatches % pipeline:
        raise ValueError(
            f"microbatches is {microbatches}; interleaving needs a multiple of pipeline {pipeline}"
        )
    total = microbatches * virtual
    if virtual == 1:
        warmup = min(pipeline - rank - 1, total)
    else:
        warmup = min((pipeline - rank - 1) * 2 + (virtual - 1) * pipeline, total)
    # Groups of `pipeline` microbatches go through chunk 0, then through chunk 1, ...
    table = [
        (chunk, first + i)
        for first in range(0, microbatches, pipeline)
        for chunk in range(virtual)
        for i in range(min(pipeline, microbatches - first))
    ]
    steps: list[Step] = [(FORWARD, *table[i]) for i in range(warmup)]
    for i in range(total):
        if i + warmup < total:
            steps.append((FORWARD, *table[i + warmup]))
        chunk, microbatch = table[i]
        steps.append((BACKWARD, virtual - 1 - chunk, microbatch))
    return tuple(steps)


@lru_cache(maxsize=1024)
def _outstanding(pipeline: int, virtual: int, microbatches: int, rank: int) -> np.ndarray:
    """int64 [moments, virtual]: forwards of each chunk whose backward has not ended yet."""
    # The pattern repeats every `pipeline` microbatches once the warm-up is over.
    microbatches = min(microbatches, (virtual + 3) * pipeline)
    count = [0] * virtual
    seen = set()
    for kind, chunk, _ in order(pipeline, virtual, microbatches, rank):
        count[chunk] += 1 if kind == FORWARD else -1
        if kind == FORWARD:
            seen.add(tuple(count))
    return np.array(sorted(seen), dtype=np.int64)


def peak_kept(
    pipeline: int, virtual: int, microbatches: int, rank: int, kept: Sequence[float]
) -> float:
    """Largest sum over a rank's unfinished microbatches of what each keeps.

    Args:
        kept: per chunk, what one microbatch keeps there between forward and backward.
    """
    if virtual == 1:
        return min(microbatches, pipeline - rank) * kept[0]
    return float((_outstanding(pipeline, virtual, microbatches, rank) @ np.asarray(kept)).max())


@dataclass(frozen=True)
class Event:
    """One piece of work on a rank; seconds."""

    rank: int
    kind: int
    stage: int
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step of one pipeline."""

    seconds: float
    busy: tuple[float, ...]  # per rank
    events: list[Event]  # empty unless asked for

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which they wait."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0


Times = Sequence[Sequence[float]] | np.ndarray


def simulate(
    forward: Times,
    backward: Times,
    pipeline: int,
    *,
    transfer: Sequence[float] | None = None,
    vision_forward: float = 0.0,
    vision_backward: float = 0.0,
    events: bool = False,
) -> Timeline:
    """Play one step.

    Args:
        forward, backward: [stages, microbatches] seconds.
        pipeline: ranks; stages must be a multiple of it.
        transfer: [stages - 1] seconds from the end of work on a stage until its result is there
            on the next one (the gradient's way back takes as long).
        vision_forward, vision_backward: multiplexed vision: seconds that every rank spends on its
            share of the images before and after the pipeline.
        events: keep every piece of work, for pictures.

    Raises:
        ValueError: sizes that don't fit together.
    """
    ahead = np.asarray(forward, dtype=float).tolist()
    back = np.asarray(backward, dtype=float).tolist()
    stages, microbatches = len(ahead), len(ahead[0]) if ahead else 0
    if not stages or stages % pipeline or len(back) != stages or not microbatches:
        raise ValueError(
            f"forward is [{stages}, {microbatches}] and backward has {len(back)} rows; both need "
            f"a multiple of pipeline {pipeline} rows and at least one microbatch"
        )
    virtual = stages // pipeline
    lag = [0.0] * stages if transfer is None else [*transfer, 0.0]
    if len(lag) != stages:
        raise ValueError(f"transfer has {len(lag) - 1} entries; it needs {stages - 1}")
    orders = [order(pipeline, virtual, microbatches, rank) for rank in range(pipeline)]
    seconds = {FORWARD: ahead, BACKWARD: back}
    ends = {kind: [[-1.0] * microbatches for _ in range(stages)] for kind in seconds}
    # What a microbatch on a stage waits for: the ends of another work, -1 where that is to come,
    # and the transfer of its result.
    last = stages - 1
    waits_for = {
        FORWARD: [([0.0] * microbatches, 0.0)]
        + [(ends[FORWARD][stage - 1], lag[stage - 1]) for stage in range(1, stages)],
        BACKWARD: [(ends[BACKWARD][stage + 1], lag[stage]) for stage in range(last)]
        + [(ends[FORWARD][last], 0.0)],
    }
    clock = [vision_forward] * pipeline
    place = [0] * pipeline
    log: list[Event] = []
    unfinished = sum(len(o) for o in orders)
    while unfinished:
        before = unfinished
        for rank in range(pipeline):
            steps, i, now = orders[rank], place[rank], clock[rank]
            while i < len(steps):
                kind, chunk, m = steps[i]
                stage = chunk * pipeline + rank
                done, transferred = waits_for[kind][stage]
                if done[m] < 0:
                    break
                start = max(now, done[m] + transferred)
                ends[kind][stage][m] = now = start + seconds[kind][stage][m]
                if events:
                    log.append(Event(rank, kind, stage, m, start, now))
                i += 1
                unfinished -= 1
            place[rank], clock[rank] = i, now
        if unfinished == before:
            raise RuntimeError("the schedule waits for itself")  # no order() can do this
    end = max(clock)
    if events and vision_forward + vision_backward > 0:
        for rank in range(pipeline):
            log.append(Event(rank, VISION_FORWARD, 0, -1, 0.0, vision_forward))
            log.append(Event(rank, VISION_BACKWARD, 0, -1, end, end + vision_backward))
    both = vision_forward + vision_backward
    busy = tuple(
        both + sum(sum(ahead[stage]) + sum(back[stage]) for stage in range(rank, stages, pipeline))
        for rank in range(pipeline)
    )
    return Timeline(end + vision_backward, busy, log)


def estimate(times: np.ndarray, pipeline: int, microbatches: int) -> float:
    """A quick estimate of a step from mean times, to sort candidates before they are simulated.

    Args:
        times: [stages] forward plus backward seconds of a mean microbatch.

    1F1B: the closed form of a bottleneck at each stage, exact for uniform stages, and never less
    than that stage's own work plus the way to it and back. Interleaved: the busiest rank's work
    plus the ramp (within about 12%).
    """
    if len(times) == pipeline:
        before = np.cumsum(times) - times
        after = times.sum() - before - times
        place = np.arange(pipeline)
        filled = (microbatches - pipeline + place + 1) * times + 2 * after
        return float((before + np.maximum(filled, microbatches * times)).max())
    load = times.reshape(-1, pipeline).sum(0)
    virtual = len(times) // pipeline
    return float(microbatches * load.max() + (pipeline - 1) / virtual * load.mean())

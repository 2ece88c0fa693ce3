"""Layers per stage: a contiguous partition of vision layers, language layers and head, improved
by playing the pipeline with one layer moved.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import numpy as np

Split = tuple[tuple[int, ...], tuple[int, ...]]  # vision and text layers per stage


def contiguous(
    vision: Sequence[float], text: float, layers: int, head: float, stages: int
) -> Split | None:
    """The split whose slowest stage is as fast as it can be.

    Args:
        vision: seconds of each vision layer, in order; the first may carry the patch embedding,
            the last the merger. Empty: no vision layers anywhere.
        text: seconds of a language layer.
        layers: language layers.
        head: seconds of the head, on the last stage.
        stages: how many.

    Returns:
        Layers per stage, or None where there are more stages than layers for them. The first stage
        has a vision layer; every stage after the merger's has a language layer.
    """
    depth = len(vision)
    units = [*vision, *([text] * layers)]
    if stages > len(units) or layers < 1:
        return None
    sums = list(accumulate(units, initial=0.0))
    total = sums[-1] + head

    def fill(limit: float) -> list[int] | None:
        """Ends of the stages if none may take longer than `limit`."""
        ends, end = [], 0
        for stage in range(stages):
            rest = stages - 1 - stage  # each of these needs a unit
            if stage == stages - 1:
                start, end = end, len(units)
                if sums[end] - sums[start] + head > limit or end - start < 1:
                    return None
            else:
                start = end
                end = bisect_right(sums, sums[start] + limit * (1 + 1e-12)) - 1
                end = min(end, len(units) - rest)
                if end <= start:
                    return None
            ends.append(end)
        return ends

    low, high = total / stages, total
    best = fill(high)
    for _ in range(40):
        middle = (low + high) / 2
        found = fill(middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
        if high - low < 1e-4 * total / stages:
            break
    if best is None:
        return None
    starts = [0, *best[:-1]]
    pieces = list(zip(starts, best, strict=True))
    vision_layers = tuple(min(b, depth) - min(a, depth) for a, b in pieces)
    text_layers = tuple(max(b, depth) - max(a, depth) for a, b in pieces)
    if text_layers[-1] == 0:
        return None
    return vision_layers, text_layers


def improve(
    split: Split,
    seconds: Callable[[Split], float],
    load: Callable[[Split], np.ndarray],
    budget: int,
) -> tuple[Split, float]:
    """Move single layers while that makes the step shorter.

    Args:
        split: where to start.
        seconds: the step's time for a split; called at most `budget` times.
        load: seconds of work of each stage for a split; layers leave long stages first.
        budget: evaluations.
    """
    best, time = split, seconds(split)
    budget -= 1
    moved = True
    while moved and budget > 0:
        moved = False
        for candidate in _moves(best, load(best)):
            if budget <= 0:
                break
            budget -= 1
            other = seconds(candidate)
            if other < time * (1 - 1e-9):
                best, time, moved = candidate, other, True
                break
    return best, time


def _moves(split: Split, load: np.ndarray) -> Iterator[Split]:
    vision, text = split
    stages = len(text)
    merger = max((i for i, n in enumerate(vision) if n), default=0)
    gain = np.argsort(-load, kind="stable")
    for source in gain.tolist():
        for target in gain[::-1].tolist():
            if source == target or target < merger or text[source] == 0:
                continue
            if text[source] == 1 and (source != merger or source == stages - 1 or not vision):
                continue  # a stage after the merger, and the last one, keeps one layer
            moved = list(text)
            moved[source] -= 1
            moved[target] += 1
            yield vision, tuple(moved)
    for stage in range(min(merger + 1, stages - 1) if vision else 0):
        for source, target in ((stage, stage + 1), (stage + 1, stage)):
            if vision[source] == 0 or (source == 0 and vision[0] == 1):
                continue
            if target > merger and any(text[merger:target]):
                continue  # language layers may not stand before the merger
            moved = list(vision)
            moved[source] -= 1
            moved[target] += 1
            if moved[merger] == 0 and text[merger] == 0:
                continue  # an empty stage
            yield tuple(moved), text

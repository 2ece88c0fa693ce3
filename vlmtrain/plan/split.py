"""Layers per stage, improved by playing the pipeline with one layer moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from vlmtrain.core.stage_split import Split


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

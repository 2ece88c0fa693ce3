"""Layers per stage: the contiguous partition whose slowest stage is as fast as it can be."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

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
        ends_within = fill(middle)
        if ends_within is None:
            low = middle
        else:
            best, high = ends_within, middle
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

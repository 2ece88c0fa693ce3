"""What a sample costs to train on, so that work can be dealt out evenly before any is done.

The cost is the forward FLOPs of the language model and of the vision tower (backward is twice
that in both), each divided by the share of the machine's peak that it usually reaches, in
language-token equivalents: 1.0 is what one token costs without its attention.
"""

from __future__ import annotations

import numpy as np

from vlmtrain.core.spec import ModelSpec
from vlmtrain.models.flops import Work, prices, window_pairs_of_frame

# Shares of peak: the language model's large GEMMs, the tower's narrower ones and its attention.
LANGUAGE_EFFICIENCY = 0.50
VISION_EFFICIENCY = 0.38
# In the saved position of runs with `balanced` packing: raise it when a sample's cost changes.
COST_VERSION = 3


def sample_costs(
    lengths: np.ndarray,
    target_tokens: np.ndarray,
    media_start: np.ndarray,
    grids: np.ndarray,
    spec: ModelSpec,
) -> np.ndarray:
    """The cost of each sample.

    Args:
        lengths: int64 [n] tokens.
        target_tokens: int64 [n], those that the head sees.
        media_start: int64 [n + 1]: rows of `grids` that belong to each sample.
        grids: int64 [m, 3] (t, h, w) in patches of every image and video.
        spec: the model, whose sizes are the prices.

    Returns:
        float64 [n, 2]: language and vision; a sample's cost is the sum of its row.
    """
    language, vision = Work(), Work()
    for name, price in prices(spec).items():
        if name in ("language", "head"):
            language += price.total
        else:
            vision += price.total
    unit = language.tokens / LANGUAGE_EFFICIENCY
    lengths = lengths.astype(np.float64)
    costs = np.empty((len(lengths), 2))
    pairs = lengths * (lengths + 1) / 2
    costs[:, 0] = language.tokens * lengths + language.causal_pairs * pairs
    costs[:, 0] += language.targets * target_tokens
    costs[:, 0] /= LANGUAGE_EFFICIENCY * unit
    t, h, w = grids.astype(np.float64).reshape(-1, 3).T
    # A video's grid appears once for all its frames, and a data set has few different grids.
    shapes, which = np.unique(grids.reshape(-1, 3)[:, 1:], axis=0, return_inverse=True)
    windows = np.array(
        [window_pairs_of_frame(int(a), int(b), spec.vision) for a, b in shapes], dtype=np.float64
    )
    media = vision.patches * t * h * w + vision.frame_pairs * t * (h * w) ** 2
    if len(media):
        media += vision.window_pairs * t * windows[which.reshape(-1)]
    media /= VISION_EFFICIENCY * unit
    total = np.concatenate(([0.0], np.cumsum(media)))
    costs[:, 1] = total[media_start[1:]] - total[media_start[:-1]]
    return costs

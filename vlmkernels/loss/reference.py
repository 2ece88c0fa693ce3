"""`linear_cross_entropy` in plain torch: the documented meaning."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Reduction = Literal["mean", "sum", "none"]


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """All logits at once, softmax in float32 (float64 where hidden is)."""
    logits = F.linear(hidden, weight)
    logits = logits.double() if logits.dtype.itemsize == 8 else logits.float()
    losses = F.cross_entropy(
        logits,
        targets,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    counted = targets != ignore_index
    if z_loss:
        losses = losses + z_loss * logits.logsumexp(-1).square() * counted
    if reduction == "none":
        return losses
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()

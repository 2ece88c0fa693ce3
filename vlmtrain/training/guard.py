"""A step whose gradients are not finite, or far above those before, makes no update."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

_FACTOR = 100  # above the median of the last steps; nothing that training does by itself
_WINDOW, _LEAST = 50, 20  # steps looked back at, and needed to judge


class SpikeGuard:
    """Between the norm of the gradients and the update, in Megatron's own step."""

    def __init__(self, optimizer: Any) -> None:
        """optimizer: a ChainedOptimizer."""
        self.withheld = ""  # why the last step made no update
        self._norm = 0.0
        self.recent: deque[float] = deque(maxlen=_WINDOW)  # norms, saved with a checkpoint
        norm, step = optimizer.get_grad_norm, optimizer.step_with_ready_grads

        def noted() -> float:
            self._norm = norm()
            return self._norm

        def guarded() -> bool:
            self.withheld = self._judge(float(self._norm))
            return not self.withheld and step()

        optimizer.get_grad_norm, optimizer.step_with_ready_grads = noted, guarded

    def forget(self) -> None:
        """Begin without a history."""
        self.recent.clear()

    def _judge(self, norm: float) -> str:
        if not math.isfinite(norm):
            return f"the gradient norm is {norm}"
        if len(self.recent) >= _LEAST:
            usual = statistics.median(self.recent)
            if norm > _FACTOR * usual > 0:
                return f"the gradient norm is {norm:.3g}, {norm / usual:,.0f} times the usual"
        self.recent.append(norm)
        return ""

"""The rank that the others wait for, and in what, over the last steps.

Only time that a rank spends by itself tells: building its packs, and computing forward and
backward. All else of a step contains waiting for others. What the others wait is the slowest rank's
time less their mean; in a pipeline that is also what an uneven split of the layers costs.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

WINDOW = 50  # steps
PHASES = ("reading", "compute")
_SHARE = 0.05  # of the steps' time; less is nobody's fault


class Stragglers:
    """Sums over the last WINDOW steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, np.ndarray]] = deque(maxlen=WINDOW)

    def step(self, reading: np.ndarray, compute: np.ndarray, seconds: float) -> dict[str, Any]:
        """Take note of a step and each rank's seconds in it; what its row says: rank, phase and
        mean seconds a step that the others waited for it, or nothing where no rank stands out."""
        table = np.array([reading, compute])  # [phases, ranks]
        world = table.shape[1]
        if world == 1:
            return {}
        slowest = table.argmax(1)
        late = np.zeros_like(table)
        for phase, rank in enumerate(slowest):
            others = (table[phase].sum() - table[phase, rank]) / (world - 1)
            late[phase, rank] = table[phase, rank] - others
        self._steps.append((seconds, late))
        total = np.sum([late for _, late in self._steps], axis=0)
        phase, rank = divmod(int(total.argmax()), world)
        if total[phase, rank] < _SHARE * sum(seconds for seconds, _ in self._steps):
            return {}
        return {
            "straggler_rank": rank,
            "straggler_phase": PHASES[phase],
            "straggler_seconds": float(total[phase, rank]) / len(self._steps),
        }


def describe(row: dict[str, Any]) -> str:
    """A line for people; empty: nobody."""
    if "straggler_rank" not in row:
        return ""
    what = {"reading": "building its packs", "compute": "computing"}[row["straggler_phase"]]
    return (
        f"over the last {WINDOW} steps the others waited for rank {row['straggler_rank']} {what}, "
        f"{row['straggler_seconds']:.3g} s a step"
    )

"""Optimizers."""

from __future__ import annotations

from .arena import PinnedArena
from .cpu_adam import CPUAdam
from .hybrid import HybridDeviceOptimizer

__all__ = ["CPUAdam", "HybridDeviceOptimizer", "PinnedArena"]

"""Optimizers."""

from __future__ import annotations

from .cpu_adam import CPUAdam

__all__ = ["CPUAdam"]

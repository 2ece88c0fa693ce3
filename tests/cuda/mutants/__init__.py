"""Every mutant of the CUDA kernels."""

from __future__ import annotations

from . import (
    embedding,
    layer,
    loss,
    sm80,
    sm90_backward,
    sm90_forward,
    sm90_fused,
    sm90_vision,
    window,
)
from .mutant import Mutant

__all__ = ["CATALOGUE", "ON_FIBERS", "Mutant", "canary_cases"]

CATALOGUE: list[Mutant] = [
    *window.MUTANTS,
    *sm80.MUTANTS,
    *sm90_forward.MUTANTS,
    *sm90_backward.MUTANTS,
    *sm90_fused.MUTANTS,
    *sm90_vision.MUTANTS,
    *embedding.MUTANTS,
    *loss.MUTANTS,
    *layer.MUTANTS,
]
#: In the order of their numbers in a build, from 1 on.
ON_FIBERS = [m for m in CATALOGUE if m.engine == "fibers"]


def canary_cases(family: str) -> set[str]:
    """Those that the interpreter must also pass without a mutant."""
    return {m.case for m in CATALOGUE if m.canary and m.family == family}

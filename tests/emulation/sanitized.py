"""Runs the checks on a library built with AddressSanitizer: python -m tests.emulation.sanitized.

A process of its own, because the sanitizer's runtime must be loaded before everything else
(test_sanitized.py starts it so). Arguments: the library, a seed, the number of a mutant or 0.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from tests.ptxsim import attention_cases, embedding_cases, flash_cases, vision_cases

from .build import Library
from .device import EmbeddingKernels, WindowKernels


def main() -> None:
    path, seed, mutant = sys.argv[1:]
    library = Library(Path(path), "sanitized")
    rng = np.random.default_rng(int(seed))
    kernels = WindowKernels(library, rng, int(mutant), "window_attention")
    for check in attention_cases.small_suite().values():
        check(kernels, rng)
    vision = WindowKernels(library, rng, 0, "vision_window")
    for check in vision_cases.small_suite().values():
        check(vision, rng)
    tiled = WindowKernels(library, rng, 0, "flash_mma")
    for check in flash_cases.small_suite().values():
        check(tiled, rng)
    hopper = WindowKernels(library, rng, 0, "flash_hopper", capability=90)
    for check in flash_cases.hopper_suite().values():
        check(hopper, rng)
    flash_cases.hopper_grad_suite()["causal, negative scale, groups"](hopper, rng)
    tiled_vision = WindowKernels(library, rng, 0, "flash_vision_mma")
    for check in vision_cases.tiled_suite().values():
        check(tiled_vision, rng)
    for check in embedding_cases.small_suite().values():
        check(EmbeddingKernels(library, rng, 0, "embedding"), rng)
    sys.stdout.write("clean\n")


if __name__ == "__main__":
    main()

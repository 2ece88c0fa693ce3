"""Runs the checks on a library built with AddressSanitizer: python -m tests.cuda.sanitized.

A process of its own, because the sanitizer's runtime must be loaded before everything else
(test_sanitized.py starts it so). Arguments: the library, a seed, the number of a mutant or 0.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from tools.cudasim.fibers.build import Library

from .cases import embedding, layer, loss, tiled, vision, window
from .emulated import kernels_of


def main() -> None:
    path, seed, mutant = sys.argv[1:]
    library = Library(Path(path), "sanitized")
    rng = np.random.default_rng(int(seed))
    for family, suite in (
        ("window", window.small_suite()),
        ("window-vision", vision.small_suite()),
        ("sm80", tiled.small_suite()),
        ("sm90-forward", tiled.sm90_suite()),
        ("sm80-vision", vision.tiled_suite()),
        ("embedding", embedding.small_suite()),
        ("loss", loss.small_suite()),
        ("layer", layer.small_suite()),
    ):
        kernels = kernels_of(library, rng, family, int(mutant) if family == "window" else 0)
        for check in suite.values():
            check(kernels, rng)
    backward = kernels_of(library, rng, "sm90-backward")
    tiled.sm90_grad_suite()["causal, negative scale, groups"](backward, rng)
    sys.stdout.write("clean\n")


if __name__ == "__main__":
    main()

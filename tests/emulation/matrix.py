"""Every instance of the kernels under many schedules: python -m tests.emulation.matrix [SCHEDULES].

Minutes, for a change in a kernel; `make test` runs few instances (instances.py) and few schedules.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.ptxsim import attention_cases, embedding_cases, flash_cases, vision_cases
from tests.ptxsim.attention_cases import Case, check_window
from tests.ptxsim.vision_cases import VisionCase, check_vision

from .build import CSRC, build
from .device import EmbeddingKernels, WindowKernels
from .instances import SOURCES


def main(schedules: int) -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    sys.stdout.write(f"seed {seed}\n")
    rng = np.random.default_rng(seed)
    sources = [CSRC / "cuda" / name for name in SOURCES]
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder) / "all", sources)
        embedding = EmbeddingKernels(library, rng, 0, "embedding")
        window = WindowKernels(library, rng, 0, "window_attention")
        vision = WindowKernels(library, rng, 0, "vision_window")
        tiled = WindowKernels(library, rng, 0, "flash_mma")
        hopper = WindowKernels(library, rng, 0, "flash_hopper", capability=90)
        tiled_vision = WindowKernels(library, rng, 0, "flash_vision_mma")
        hopper_vision = WindowKernels(library, rng, 0, "flash_vision_hopper", capability=90)
        for schedule in range(schedules):
            for check in embedding_cases.small_suite().values():
                check(embedding, rng)
            for check in attention_cases.small_suite().values():
                check(window, rng)
            for check in vision_cases.small_suite().values():
                check(vision, rng)
            for dim in (64, 72, 80, 96, 128):
                for check in flash_cases.small_suite(dim).values():
                    check(tiled, rng)
                for check in flash_cases.hopper_suite(dim).values():
                    check(hopper, rng)
                for check in flash_cases.hopper_grad_suite(dim).values():
                    check(hopper, rng)
                for check in vision_cases.tiled_suite(dim).values():
                    check(tiled_vision, rng)
                for check in vision_cases.tiled_suite(dim, queries=True).values():
                    check(hopper_vision, rng)
            for dim in (64, 80, 96, 128):
                for dtype in ("bfloat16", "float16"):
                    for longest in (64, 128) if dim < 128 else (64,):
                        kv_heads = int(rng.integers(1, 3))
                        lengths = rng.integers(0, longest + 1, 3).tolist()
                        case = Case(rng, lengths, 2 * kv_heads, kv_heads, dim, dtype,
                                    bool(rng.random() < 0.5), max_length=longest)  # fmt: skip
                        sys.stdout.write(f"{dim} {dtype} {lengths} {kv_heads} {case.causal}\n")
                        check_window(window, case)
                        turned = VisionCase(rng, lengths, 2, dim, dtype, max_length=longest)
                        check_vision(vision, turned)
            sys.stdout.write(f"schedule {schedule + 1} of {schedules}: clean\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)

"""Every instance of the kernels under many schedules, for a change in a kernel.

`python -m tests.cuda.fibers_matrix [SCHEDULES]` takes minutes; `make test` runs few instances
(instances.py) and few schedules.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from tools.cudasim import CSRC
from tools.cudasim.fibers.build import build

from .cases import embedding, layer, loss, tiled, vision, window
from .cases.vision import VisionCase, check_vision
from .cases.window import Case, check_window
from .emulated import kernels_of


def main(schedules: int) -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    sys.stdout.write(f"seed {seed}\n")
    rng = np.random.default_rng(seed)
    sources = sorted((CSRC / "cuda").rglob("*.cu"))
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder) / "all", sources)
        for schedule in range(schedules):
            suites = [
                ("embedding", embedding.small_suite()),
                ("loss", loss.small_suite()),
                ("layer", layer.small_suite()),
                ("window", window.small_suite()),
                ("window-vision", vision.small_suite()),
            ]
            for dim in (64, 72, 80, 96, 128):
                suites += [
                    ("sm80", tiled.small_suite(dim)),
                    ("sm90-forward", tiled.sm90_suite(dim)),
                    ("sm90-backward", tiled.sm90_grad_suite(dim)),
                    ("sm90-fused", tiled.sm90_grad_suite(dim, fused=True)),
                    ("sm80-vision", vision.tiled_suite(dim)),
                    ("sm90-vision", vision.tiled_suite(dim, queries=True)),
                ]
            for family, suite in suites:
                for check in suite.values():
                    check(kernels_of(library, rng, family), rng)
            for dim in (64, 80, 96, 128):
                for dtype in ("bfloat16", "float16"):
                    for max_seqlen in (64, 128) if dim < 128 else (64,):
                        kv_heads = int(rng.integers(1, 3))
                        lengths = rng.integers(0, max_seqlen + 1, 3).tolist()
                        case = Case(rng, lengths, 2 * kv_heads, kv_heads, dim, dtype,
                                    bool(rng.random() < 0.5), max_seqlen=max_seqlen)  # fmt: skip
                        sys.stdout.write(f"{dim} {dtype} {lengths} {kv_heads} {case.causal}\n")
                        check_window(kernels_of(library, rng, "window"), case)
                        of_vision = VisionCase(rng, [*lengths, 40], 2, dim, dtype,
                                               max_seqlen=max_seqlen)  # fmt: skip
                        check_vision(kernels_of(library, rng, "window-vision"), of_vision)
            sys.stdout.write(f"schedule {schedule + 1} of {schedules}: clean\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)

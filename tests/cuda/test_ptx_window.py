"""Window attention as nvcc compiled it, against float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tools.cudasim.ptx.ptxtypes import SimError

from .cases.vision import VisionCase, check_vision
from .cases.window import Case, check_window
from .checks import CASES
from .interpreted import Interpreted, copy_csrc, single


@pytest.fixture(scope="session")
def window(fake_runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Interpreted:
    folder = tmp_path_factory.mktemp("window")
    return single("window", copy_csrc(folder), folder, fake_runtime)


@pytest.fixture(scope="session")
def vision(fake_runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Interpreted:
    folder = tmp_path_factory.mktemp("vision")
    return single("window-vision", copy_csrc(folder), folder, fake_runtime)


@pytest.mark.parametrize("name", CASES["window-vision"])
def test_vision_accuracy(name: str, vision: Interpreted, rng: np.random.Generator) -> None:
    CASES["window-vision"][name](vision, rng)


def test_a_bad_order_is_trapped(vision: Interpreted, rng: np.random.Generator) -> None:
    case = VisionCase(rng, [3, 4], 1, 80)
    case.order[5] = -1
    with pytest.raises(SimError, match=r"window_order.5. is -1, but there are 7 rows"):
        check_vision(vision, case)


@pytest.mark.parametrize("name", CASES["window"])
def test_accuracy(name: str, window: Interpreted, rng: np.random.Generator) -> None:
    CASES["window"][name](window, rng)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_attention_of_nothing(
    lengths: list[int], window: Interpreted, vision: Interpreted, rng: np.random.Generator
) -> None:
    check_window(window, Case(rng, lengths, 2, 1, 80, max_seqlen=0))
    check_vision(vision, VisionCase(rng, lengths, 1, 80, max_seqlen=0))


@pytest.mark.slow
def test_128_keys(fake_runtime: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    """The larger instance, as built for sm_90a."""
    csrc = copy_csrc(tmp_path, window=(64, 128))
    kernels = single("window", csrc, tmp_path, fake_runtime, "90a")
    check_window(kernels, Case(rng, [100], 1, 1, 64, "float16", causal=True))


def test_random_shapes(window: Interpreted, rng: np.random.Generator) -> None:
    for _ in range(2):
        kv_heads = int(rng.integers(1, 3))
        case = Case(
            rng,
            rng.integers(0, 65, int(rng.integers(1, 4))).tolist(),
            kv_heads * int(rng.integers(1, 3)),
            kv_heads,
            80,
            str(rng.choice(["bfloat16", "float16"])),
            bool(rng.random() < 0.5),
            float(rng.choice([0.1, 0.3, -0.2])),
        )
        print(case.lengths, case.heads, case.kv_heads, case.dim, case.dtype, case.causal)
        check_window(window, case)


def test_a_too_long_segment_is_trapped(window: Interpreted, rng: np.random.Generator) -> None:
    with pytest.raises(SimError, match="segment 1 is tokens 3 to 13 of 13, and max_seqlen is 5"):
        check_window(window, Case(rng, [3, 10], 1, 1, 80, max_seqlen=5))

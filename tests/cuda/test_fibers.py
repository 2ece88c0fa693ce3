"""The CUDA kernels on fibers against numpy and float64, and every mutant that shows there.

All mutants are planted in one build, each behind a switch.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from tools.cudasim.fibers.build import Library
from tools.cudasim.ptx.ptxtypes import SimError

from .cases import tiled
from .cases.embedding import Pack, check_forward, check_gather, check_reduce
from .cases.vision import VisionCase, check_tiled, check_vision
from .cases.window import Case, check_window
from .checks import CASES
from .emulated import Emulated, kernels_of
from .mutants import ON_FIBERS, Mutant

#: Of the backward of one kernel, whose runs are long.
QUICK = ("one", "causal groups", "stale")


def test_window_attention_128_keys(library: Library, rng: np.random.Generator) -> None:
    check_window(
        kernels_of(library, rng, "window"), Case(rng, [100, 128], 2, 1, 64, "float16", causal=True)
    )


def test_vision_attention_128_keys(library: Library, rng: np.random.Generator) -> None:
    check_vision(
        kernels_of(library, rng, "window-vision"), VisionCase(rng, [100, 7, 128], 2, 64, "float16")
    )


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_attention_of_nothing(
    lengths: list[int], library: Library, rng: np.random.Generator
) -> None:
    check_window(kernels_of(library, rng, "window"), Case(rng, lengths, 2, 1, 80, max_seqlen=0))
    check_vision(
        kernels_of(library, rng, "window-vision"), VisionCase(rng, lengths, 1, 80, max_seqlen=0)
    )


def test_tiled_vision_attention_of_nothing(library: Library, rng: np.random.Generator) -> None:
    kernels = kernels_of(library, rng, "sm80-vision")
    check_tiled(kernels, rng, [], 1, 80, max_seqlen=0)
    check_tiled(kernels, rng, [0, 0], 2, 80)


def test_schedules_on_sm90(library: Library, rng: np.random.Generator) -> None:
    """Ten more, of tiles whose last block of keys is ragged and of idle warpgroups: a thread or a
    warp that lags behind the others may be passed by the phases of a barrier, or ahead of one."""
    for turn in range(10):
        backward = turn % 3 == 0
        lengths = rng.integers(1, 300 if backward else 600, 2).tolist()
        case = Case(rng, lengths, 1, 1, 80, causal=bool(rng.random() < 0.5))
        tiled.check_flash(kernels_of(library, rng, "sm90-backward"), case, backward)


def test_random_shapes(library: Library, rng: np.random.Generator) -> None:
    for _ in range(4):
        dtype = str(rng.choice(["float32", "bfloat16", "float16"]))
        pack = Pack(rng, int(rng.integers(1, 60)), int(rng.choice([1, 3, 8, 100, 264])), dtype, 7)
        kernels = kernels_of(library, rng, "embedding")
        check_forward(kernels, pack, vocab_range=(0, 4) if rng.random() < 0.5 else None)
        check_gather(kernels, pack)
        check_reduce(kernels, pack)
    for _ in range(2):
        kv_heads = int(rng.integers(1, 3))
        lengths = rng.integers(0, 65, int(rng.integers(1, 4))).tolist()
        case = Case(rng, lengths, kv_heads * int(rng.integers(1, 3)), kv_heads, 80,
                    str(rng.choice(["bfloat16", "float16"])), bool(rng.random() < 0.5),
                    float(rng.choice([0.1, 0.3, -0.2])))  # fmt: skip
        print(case.lengths, case.heads, case.kv_heads, case.dtype, case.causal)
        check_window(kernels_of(library, rng, "window"), case)
        permuted, megatron = (bool(rng.random() < 0.5) for _ in range(2))
        vision = VisionCase(rng, [*lengths, 40], case.heads, 80, case.dtype, permuted, megatron,
                            case.scale)  # fmt: skip
        check_vision(kernels_of(library, rng, "window-vision"), vision)
    lengths = [*rng.choice([0, 1, 2, 63, 65, 127, 129, 200], 2).tolist(), 65]
    heads, dtype = int(rng.integers(1, 6)), str(rng.choice(["bfloat16", "float16"]))
    options = {"megatron": bool(rng.random() < 0.5), "scale": float(rng.choice([0.1, -0.2]))}
    print(lengths, heads, dtype, options)
    check_tiled(kernels_of(library, rng, "sm80-vision"), rng, lengths, heads, 80, dtype, **options)


def test_traps(library: Library, rng: np.random.Generator) -> None:
    """Their messages, with what they name."""
    pack = Pack(rng, 20, 16, "bfloat16")
    place = int(np.flatnonzero(pack.index < 0)[0])
    pack.ids[place] = -1
    expected = f"input_ids[{place}] is -1, but weight has 11 rows"
    with pytest.raises(SimError, match="trap after printing .*" + re.escape(expected)):
        check_forward(kernels_of(library, rng, "embedding"), pack)
    place = int(np.flatnonzero(pack.index > 0)[-1])
    pack.index[place] = 0
    with pytest.raises(SimError, match="names row 0 at positions (0 and|.* and 0)"):
        check_gather(kernels_of(library, rng, "embedding"), pack)
    with pytest.raises(SimError, match="segment 1 is tokens 3 to 13 of 13, and max_seqlen is 5"):
        check_window(kernels_of(library, rng, "window"), Case(rng, [3, 10], 1, 1, 80, max_seqlen=5))
    with pytest.raises(SimError, match="vision_attention: segment 1 is tokens 3 to 13 of 13, and"):
        check_tiled(kernels_of(library, rng, "sm80-vision"), rng, [3, 10], 1, 80, max_seqlen=5)
    vision = VisionCase(rng, [3, 10], 1, 80)
    vision.order[7] = 13
    with pytest.raises(SimError, match=r"window_order\[7\] is 13, but there are 13 rows"):
        check_vision(kernels_of(library, rng, "window-vision"), vision)


@pytest.mark.parametrize(
    ("family", "case"),
    [
        pytest.param(f, c, marks=pytest.mark.slow if f == "sm90-fused" and c not in QUICK else ())
        for f, cases in CASES.items()
        for c in cases
        if (f, c) != ("sm80-vision", "dim 72")
    ],
)
def test_case(family: str, case: str, library: Library, rng: np.random.Generator) -> None:
    """Without a mutant it passes."""
    CASES[family][case](kernels_of(library, rng, family), rng)


def planted(mutant: Mutant, library: Library, rng: np.random.Generator) -> Emulated:
    return kernels_of(library, rng, mutant.family, 1 + ON_FIBERS.index(mutant))


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(m, id=str(m), marks=pytest.mark.slow if m.family == "sm90-fused" else ())
        for m in ON_FIBERS
    ],
)
def test_mutant_is_noticed(mutant: Mutant, library: Library, rng: np.random.Generator) -> None:
    """Under one of 10 schedules: a wait that is missing shows where what it waits for is late."""
    kernels = planted(mutant, library, rng)
    with pytest.raises((SimError, AssertionError)) as noticed:
        for _ in range(10):
            CASES[mutant.family][mutant.case](kernels, rng)
    print(noticed.value)


def test_a_mutant_shows_where_its_kernels_run(library: Library, rng: np.random.Generator) -> None:
    """One in the kernels for compute capability 9.0 shows there, and nowhere else."""
    for family, name, of in (("sm90-forward", "half the depth", "out"),
                             ("sm90-backward", "delta left out of dk", "dk")):  # fmt: skip
        mutant = next(m for m in ON_FIBERS if (m.family, m.name) == (family, name))
        check = CASES[family]["one"]
        check(kernels_of(library, rng, "sm80", 1 + ON_FIBERS.index(mutant)), rng)
        with pytest.raises((SimError, AssertionError), match=f"{of}: error"):
            check(planted(mutant, library, rng), rng)

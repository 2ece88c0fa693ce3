"""The CUDA kernels, compiled by a host compiler, against numpy and float64; planted bugs."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.ptxsim import attention_cases, embedding_cases, flash_cases, vision_cases
from tests.ptxsim.attention_cases import Case, check_window
from tests.ptxsim.embedding_cases import Pack, check_forward, check_gather, check_reduce
from tests.ptxsim.ptxtypes import SimError
from tests.ptxsim.vision_cases import VisionCase, check_tiled, check_vision

from .build import Library, Mutant
from .device import EmbeddingKernels, WindowKernels
from .mutants import (
    FLASH_MUTANTS,
    FLASH_VISION_MUTANTS,
    HOPPER_GRAD_MUTANTS,
    HOPPER_MUTANTS,
    MUTANTS,
    TURN_MUTANTS,
    VISION_MUTANTS,
    killed_by,
)


def _embedding(library: Library, rng: np.random.Generator, mutant: int = 0) -> EmbeddingKernels:
    return EmbeddingKernels(library, rng, mutant, "embedding")


def _window(library: Library, rng: np.random.Generator, mutant: int = 0) -> WindowKernels:
    return WindowKernels(library, rng, mutant, "window_attention")


def _vision(library: Library, rng: np.random.Generator, mutant: int = 0) -> WindowKernels:
    return WindowKernels(library, rng, mutant, "vision_window")


def _flash(library: Library, rng: np.random.Generator, mutant: int = 0) -> WindowKernels:
    return WindowKernels(library, rng, mutant, "flash_attention")


def _tiled_vision(library: Library, rng: np.random.Generator, mutant: int = 0) -> WindowKernels:
    return WindowKernels(library, rng, mutant, "flash_vision")


@pytest.mark.parametrize("name", embedding_cases.small_suite())
def test_embedding(name: str, library: Library, rng: np.random.Generator) -> None:
    embedding_cases.small_suite()[name](_embedding(library, rng), rng)


@pytest.mark.parametrize("name", attention_cases.small_suite())
def test_window_attention(name: str, library: Library, rng: np.random.Generator) -> None:
    attention_cases.small_suite()[name](_window(library, rng), rng)


def test_window_attention_128_keys(library: Library, rng: np.random.Generator) -> None:
    check_window(_window(library, rng), Case(rng, [100, 128], 2, 1, 64, "float16", causal=True))


@pytest.mark.parametrize("name", vision_cases.small_suite())
def test_vision_attention(name: str, library: Library, rng: np.random.Generator) -> None:
    vision_cases.small_suite()[name](_vision(library, rng), rng)


def test_vision_attention_128_keys(library: Library, rng: np.random.Generator) -> None:
    check_vision(_vision(library, rng), VisionCase(rng, [100, 7, 128], 2, 64, "float16"))


def _hopper(library: Library, rng: np.random.Generator, mutant: int = 0) -> WindowKernels:
    return WindowKernels(library, rng, mutant, "flash_attention", capability=90)


@pytest.mark.parametrize("name", flash_cases.small_suite())
def test_tiled_attention(name: str, library: Library, rng: np.random.Generator) -> None:
    flash_cases.small_suite()[name](_flash(library, rng), rng)


@pytest.mark.parametrize("name", flash_cases.hopper_suite())
def test_tiled_attention_on_hopper(name: str, library: Library, rng: np.random.Generator) -> None:
    flash_cases.hopper_suite()[name](_hopper(library, rng), rng)


@pytest.mark.parametrize("name", flash_cases.hopper_grad_suite())
def test_gradients_on_hopper(name: str, library: Library, rng: np.random.Generator) -> None:
    flash_cases.hopper_grad_suite()[name](_hopper(library, rng), rng)


@pytest.mark.parametrize("name", vision_cases.tiled_suite())
def test_tiled_vision_attention(name: str, library: Library, rng: np.random.Generator) -> None:
    vision_cases.tiled_suite()[name](_tiled_vision(library, rng), rng)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_attention_of_nothing(
    lengths: list[int], library: Library, rng: np.random.Generator
) -> None:
    check_window(_window(library, rng), Case(rng, lengths, 2, 1, 80, max_length=0))
    check_vision(_vision(library, rng), VisionCase(rng, lengths, 1, 80, max_length=0))


def test_tiled_vision_attention_of_nothing(library: Library, rng: np.random.Generator) -> None:
    kernels = _tiled_vision(library, rng)
    check_tiled(kernels, rng, [], 1, 80, max_length=0)
    check_tiled(kernels, rng, [0, 0], 2, 80)


def test_schedules_on_hopper(library: Library, rng: np.random.Generator) -> None:
    """Ten more, of tiles whose last block of keys is ragged and of idle warpgroups: a thread or a
    warp that lags behind the others may be passed by the phases of a barrier, or ahead of one."""
    for turn in range(10):
        backward = turn % 3 == 0
        lengths = rng.integers(1, 300 if backward else 600, 2).tolist()
        case = Case(rng, lengths, 1, 1, 80, causal=bool(rng.random() < 0.5))
        print(lengths, case.causal, backward)
        flash_cases.run_flash(_hopper(library, rng), case, backward)


def test_random_shapes(library: Library, rng: np.random.Generator) -> None:
    for _ in range(4):
        dtype = str(rng.choice(["float32", "bfloat16", "float16"]))
        pack = Pack(rng, int(rng.integers(1, 60)), int(rng.choice([1, 3, 8, 100, 264])), dtype, 7)
        kernels = _embedding(library, rng)
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
        check_window(_window(library, rng), case)
        vision = VisionCase(rng, lengths, case.heads, 80, case.dtype, bool(rng.random() < 0.5),
                            bool(rng.random() < 0.5), case.scale)  # fmt: skip
        check_vision(_vision(library, rng), vision)
    lengths = rng.choice([0, 1, 2, 63, 65, 127, 129, 200], 3).tolist()
    heads, dtype = int(rng.integers(1, 6)), str(rng.choice(["bfloat16", "float16"]))
    options = {"megatron": bool(rng.random() < 0.5), "scale": float(rng.choice([0.1, -0.2]))}
    print(lengths, heads, dtype, options)
    check_tiled(_tiled_vision(library, rng), rng, lengths, heads, 80, dtype, **options)


def test_traps(library: Library, rng: np.random.Generator) -> None:
    """Their messages, with what they name."""
    pack = Pack(rng, 20, 16, "bfloat16")
    place = int(np.flatnonzero(pack.index < 0)[0])
    pack.ids[place] = -1
    expected = f"input_ids[{place}] is -1, but weight has 11 rows"
    with pytest.raises(SimError, match="trap after printing .*" + re.escape(expected)):
        check_forward(_embedding(library, rng), pack)
    place = int(np.flatnonzero(pack.index > 0)[-1])
    pack.index[place] = 0
    with pytest.raises(SimError, match="names row 0 at positions (0 and|.* and 0)"):
        check_gather(_embedding(library, rng), pack)
    with pytest.raises(SimError, match="segment 1 is tokens 3 to 13 of 13, and max_seqlen is 5"):
        check_window(_window(library, rng), Case(rng, [3, 10], 1, 1, 80, max_length=5))
    with pytest.raises(SimError, match="vision_attention: segment 1 is tokens 3 to 13 of 13, and"):
        check_tiled(_tiled_vision(library, rng), rng, [3, 10], 1, 80, max_length=5)
    vision = VisionCase(rng, [3, 10], 1, 80)
    vision.order[7] = 13
    with pytest.raises(SimError, match=r"window_order\[7\] is 13, but there are 13 rows"):
        check_vision(_vision(library, rng), vision)


@pytest.mark.parametrize("number", [pytest.param(n, id=m.name) for n, m in enumerate(MUTANTS, 1)])
def test_mutant_is_killed(number: int, library: Library, rng: np.random.Generator) -> None:
    if MUTANTS[number - 1] in VISION_MUTANTS:
        suite, kernels = vision_cases.small_suite(), _vision(library, rng, number)
    elif MUTANTS[number - 1] in FLASH_VISION_MUTANTS:
        suite, kernels = vision_cases.tiled_suite(), _tiled_vision(library, rng, number)
    elif MUTANTS[number - 1] in FLASH_MUTANTS:
        suite, kernels = flash_cases.small_suite(), _flash(library, rng, number)
    elif MUTANTS[number - 1] in HOPPER_GRAD_MUTANTS:
        suite, kernels = flash_cases.hopper_grad_suite(), _hopper(library, rng, number)
    elif MUTANTS[number - 1] in HOPPER_MUTANTS:
        suite, kernels = flash_cases.hopper_suite(), _hopper(library, rng, number)
    elif MUTANTS[number - 1].file == "embedding.cu":
        suite, kernels = embedding_cases.small_suite(), _embedding(library, rng, number)
    else:
        suite, kernels = attention_cases.small_suite(), _window(library, rng, number)
    killed = killed_by(suite, kernels, rng)
    print(killed)
    assert killed, "the mutant passes every check"


@pytest.mark.parametrize("mutant", TURN_MUTANTS, ids=lambda m: m.name)
def test_turn_mutant_is_killed_in_tiles(
    mutant: Mutant, library: Library, rng: np.random.Generator
) -> None:
    kernels = _tiled_vision(library, rng, MUTANTS.index(mutant) + 1)
    killed = killed_by(vision_cases.tiled_suite(), kernels, rng)
    print(killed)
    assert killed, "the mutant passes every check"

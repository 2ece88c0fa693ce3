"""When tiled attention's kernels for compute capability 9.0 are chosen."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.ptxsim.attention_cases import Case
from tests.ptxsim.flash_cases import check_flash
from tests.ptxsim.ptxtypes import SimError
from tests.ptxsim.toolchain import params_struct
from tests.ptxsim.vision_cases import check_tiled, tiled_suite

from .build import Library
from .device import Device, WindowKernels
from .mutants import MUTANTS
from .mutants_hopper import CHOICE_MUTANTS, TURN_MUTANTS

DIM = 80


def _kernels(library: Library, rng: np.random.Generator, number: int, gpu: int) -> WindowKernels:
    return WindowKernels(library, rng, number, "flash_attention", capability=gpu)


def check_choice(kernels: WindowKernels, rng: np.random.Generator) -> None:
    """What hopper_takes says of a GPU and of tensors that a tensor map can or can't describe."""
    functions = [kernels.library.function(f"hopper_takes{of}") for of in ("", "_gradients")]
    row = 4 * DIM

    def answer(gpu: int = 90, tokens: int = 50, kv_heads: int = 2, **views: tuple) -> bool:
        few = kv_heads * DIM
        dout = views.pop("dout", None)
        named = {"q": (256, row, DIM), "k": (512, few, DIM), "v": (1024, few, DIM)} | views
        params = params_struct("AttentionParams")(**named)  # the rest is not looked at
        params.tokens, params.heads, params.kv_heads = tokens, 4, kv_heads
        grads = params_struct("AttentionGradParams")(params, dout or (2048, row, DIM))
        device = Device(kernels.library, int(rng.integers(1 << 62)), kernels.mutant)
        answers = []
        for takes, of in zip(functions, (params, grads), strict=True):
            takes.restype = ctypes.c_bool
            answers.append(bool(device.call(takes, ctypes.byref(of), ctypes.c_int(gpu))))
        # Of the two only the backward's looks at dout.
        assert answers[0] or dout is None, "the forward looks at dout"
        assert answers[1] == answers[0] or dout is not None, "the backward looks at something else"
        return answers[1]

    assert answer()
    assert answer(q=(256, 3 * row, DIM), k=(512, 3 * row, DIM))
    for gpu in (80, 86, 89, 100, 103, 120):
        assert not answer(gpu), f"compute capability {gpu / 10}"
    for name, heads in (("q", 4), ("k", 2), ("v", 2), ("dout", 4)):
        for address, token, head, why in (
            (256, 0, DIM, "the same row for every token"),
            (256, heads * DIM, 0, "the same row for every head"),
            (256, heads * DIM + 4, DIM, "rows 8 bytes off"),
            (256, heads * DIM, DIM + 4, "heads 8 bytes off"),
            (256, 1 << 39, DIM, "rows too far apart"),
            (264, heads * DIM, DIM, "an address 8 bytes off"),
        ):
            assert not answer(**{name: (address, token, head)}), f"{name}: {why}"
    assert answer(kv_heads=1, k=(512, DIM, 0), v=(1024, DIM, 3)), "strides of one head"
    one = {"q": (256, 0, DIM), "k": (512, 5, DIM), "dout": (2048, 1, DIM)}
    assert answer(tokens=1, **one), "strides of one token"


def test_choice(library: Library, rng: np.random.Generator) -> None:
    check_choice(_kernels(library, rng, 0, 90), rng)


def test_the_chosen_one_runs(library: Library, rng: np.random.Generator) -> None:
    """A bug in the kernels for 9.0 shows there, and nowhere else."""
    case = Case(rng, [70, 9], 2, 1, DIM)
    for name, of in (("hopper: half the depth", "out"), ("gradients: delta left out of dk", "dk")):
        planted = 1 + [m.name for m in MUTANTS].index(name)
        for gpu in (80, 89, 100):
            check_flash(_kernels(library, rng, planted, gpu), case, backward=of == "dk")
        with pytest.raises((SimError, AssertionError), match=f"{of}: error"):
            check_flash(_kernels(library, rng, planted, 90), case, backward=of == "dk")


@pytest.mark.parametrize("place", range(len(CHOICE_MUTANTS)), ids=lambda n: CHOICE_MUTANTS[n].name)
def test_mutant_is_killed(place: int, library: Library, rng: np.random.Generator) -> None:
    with pytest.raises(AssertionError) as killed:
        check_choice(_kernels(library, rng, 1 + len(MUTANTS) + place, 90), rng)
    print(killed.value)


# ---- vision_attention


def check_vision_on_hopper(library: Library, rng: np.random.Generator, number: int = 0) -> None:
    """With workspace for the queries by wgmma, without it by mma.sync."""
    kernels = WindowKernels(library, rng, number, "flash_vision", capability=90)
    for check in tiled_suite(queries=True).values():
        check(kernels, rng)
    check_tiled(kernels, rng, [20], 1, DIM)


def test_vision_attention(library: Library, rng: np.random.Generator) -> None:
    check_vision_on_hopper(library, rng)


@pytest.mark.parametrize("place", range(len(TURN_MUTANTS)), ids=lambda n: TURN_MUTANTS[n].name)
def test_vision_mutant_is_killed(place: int, library: Library, rng: np.random.Generator) -> None:
    number = 1 + len(MUTANTS) + len(CHOICE_MUTANTS) + place
    with pytest.raises((SimError, AssertionError)) as killed:
        check_vision_on_hopper(library, rng, number)
    print(killed.value)

"""Every mutant that the fibers can show, all planted in one build behind a switch."""

from __future__ import annotations

import numpy as np
import pytest

from tools.cudasim.fibers.build import Library
from tools.cudasim.ptx.ptxtypes import SimError

from .checks import CASES
from .emulated import Emulated, kernels_of
from .mutants import CATALOGUE, Mutant

MUTANTS = [m for m in CATALOGUE if m.engine == "fibers"]


@pytest.mark.parametrize(
    ("family", "case"),
    [(f, c) for f, cases in CASES.items() for c in cases if (f, c) != ("sm80-vision", "dim 72")],
)
def test_case(family: str, case: str, library: Library, rng: np.random.Generator) -> None:
    """Without a mutant it passes."""
    CASES[family][case](kernels_of(library, rng, family), rng)


def planted(mutant: Mutant, library: Library, rng: np.random.Generator) -> Emulated:
    return kernels_of(library, rng, mutant.family, 1 + MUTANTS.index(mutant))


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
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
        mutant = next(m for m in MUTANTS if (m.family, m.name) == (family, name))
        check = CASES[family]["one"]
        check(kernels_of(library, rng, "sm80", 1 + MUTANTS.index(mutant)), rng)
        with pytest.raises((SimError, AssertionError), match=f"{of}: error"):
            check(planted(mutant, library, rng), rng)

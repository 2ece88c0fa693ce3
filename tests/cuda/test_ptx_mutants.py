"""Mutants that only the interpreter shows, and one of each class that the fibers show as well."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tools.cudasim.ptx.ptxtypes import SimError

from .checks import CASES
from .interpreted import planted
from .mutants import CATALOGUE, Mutant

QUICK = [m for m in CATALOGUE if m.canary or m.engine == "ptx" and m.quick]


def must_be_noticed(mutant: Mutant, runtime: Path, folder: Path, rng: np.random.Generator) -> None:
    kernels = planted(mutant, folder, runtime)
    with pytest.raises((SimError, AssertionError)) as noticed:
        CASES[mutant.family][mutant.case](kernels, rng)
    print(noticed.value)


@pytest.mark.parametrize("mutant", QUICK, ids=str)
def test_mutant_is_noticed(
    mutant: Mutant, fake_runtime: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    must_be_noticed(mutant, fake_runtime, tmp_path, rng)

"""Mutants that only the interpreter shows, and one of each class that the fibers show as well."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cuda.checks import CASES
from tests.cuda.mutants import CATALOGUE, Mutant

from .planted import planted
from .ptxtypes import SimError

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

"""Mutants that only the interpreter shows, and one of each class that the fibers show as well.

MUTANTS=all plants those of the fibers too: hours.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tools.cudasim.ptx.ptxtypes import SimError

from .checks import CASES
from .interpreted import planted
from .mutants import CATALOGUE, Mutant

ALL = os.environ.get("MUTANTS") == "all"
MUTANTS = [
    m
    for m in CATALOGUE
    if m.canary or m.engine == "ptx" or ALL and m.engine == "fibers" and m.family != "sm90-vision"
]


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, id=str(m), marks=() if m.quick else pytest.mark.slow) for m in MUTANTS],
)
def test_mutant_is_noticed(
    mutant: Mutant, fake_runtime: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    kernels = planted(mutant, tmp_path, fake_runtime)
    with pytest.raises((SimError, AssertionError)) as noticed:
        CASES[mutant.family][mutant.case](kernels, rng)
    print(noticed.value)

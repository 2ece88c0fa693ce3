"""The rest of the mutants that only the interpreter shows: `make test-flash`.

MUTANTS=all plants those of the fibers too, hours.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from .mutants import CATALOGUE, Mutant
from .test_ptx_mutants import QUICK, must_be_noticed

ALL = os.environ.get("MUTANTS") == "all"
REST = [
    m
    for m in CATALOGUE
    if m not in QUICK
    and (m.engine == "ptx" or ALL and m.engine == "fibers")
    and m.family != "sm90-vision"
]


@pytest.mark.parametrize("mutant", REST, ids=str)
def test_mutant_is_noticed(
    mutant: Mutant, fake_runtime: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    must_be_noticed(mutant, fake_runtime, tmp_path, rng)

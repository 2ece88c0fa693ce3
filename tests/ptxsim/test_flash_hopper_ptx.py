"""Tiled attention for sm_90a as nvcc compiled it, against float64, and planted bugs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from .attention_cases import Case
from .flash_build import HOPPER_GRAD_SOURCES, build_flash
from .flash_cases import FlashKernels, hopper_grad_suite, hopper_suite, run_flash
from .flash_hopper_grad_mutants import MUTANTS as GRAD_MUTANTS
from .flash_hopper_grad_mutants import HopperGradMutant
from .flash_hopper_mutants import DIM, MUTANTS, HopperMutant

#: make test-flash runs every instance, all cases and all planted bugs.
QUICK = ("ragged", "neighbours")
QUICK_GRADIENTS = ("causal, negative scale, groups", "groups, scores far below zero")
QUICK_MUTANTS = [m for m in MUTANTS if m.quick]
QUICK_GRAD_MUTANTS = [m for m in GRAD_MUTANTS if m.quick]


@pytest.fixture(scope="session")
def hopper(fake_runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> FlashKernels:
    folder = tmp_path_factory.mktemp("hopper")
    return build_flash(folder, fake_runtime, DIM, "90a", sources=HOPPER_GRAD_SOURCES)


@pytest.mark.parametrize("name", QUICK)
def test_accuracy(name: str, hopper: FlashKernels, rng: np.random.Generator) -> None:
    hopper_suite(DIM)[name](hopper, rng)


@pytest.mark.parametrize("name", QUICK_GRADIENTS)
def test_accuracy_of_gradients(name: str, hopper: FlashKernels, rng: np.random.Generator) -> None:
    hopper_grad_suite(DIM)[name](hopper, rng)


def test_no_token(hopper: FlashKernels, rng: np.random.Generator) -> None:
    """No tensor map describes a tensor without elements."""
    for lengths in ([], [0, 0]):
        _, found = run_flash(hopper, Case(rng, lengths, 1, 1, DIM, max_length=0))
        assert found["out"].size == found["dq"].size == 0


@pytest.mark.parametrize("mutant", QUICK_MUTANTS, ids=lambda m: m.name)
def test_mutant_is_killed(
    mutant: HopperMutant, fake_runtime: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    mutant.must_be_noticed(fake_runtime, tmp_path, rng)


@pytest.mark.parametrize("mutant", QUICK_GRAD_MUTANTS, ids=lambda m: m.name)
def test_mutant_of_gradients_is_killed(
    mutant: HopperGradMutant, hopper: FlashKernels, tmp_path: Path, rng: np.random.Generator
) -> None:
    mutant.must_be_noticed(hopper, tmp_path, rng)

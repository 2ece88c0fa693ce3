"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer: register arrays too."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys

import pytest

from tools.cudasim import CSRC
from tools.cudasim.fibers.build import Library, build, compiler, preload

from .instances import INSTANCES, edits
from .mutants import CATALOGUE

pytestmark = pytest.mark.slow

#: What these tools say: of an array in registers, which only they see, and of what all builds see.
MESSAGES = {
    "past an array in registers": "(stack-buffer-overflow|out of bounds for type)",
    "rows read past the window": "(heap-buffer-overflow|heap-use-after-free|SEGV on unknown)",
    "read while cp.async is under way": "use-after-poison",
}
MUTANTS = [m for m in CATALOGUE if m.family == "window" and m.name in MESSAGES]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    if compiler() is None:
        pytest.skip("CUDA kernels were not emulated: no g++ (CXX names another)")
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        pytest.skip(f"address space is limited to {limit >> 30} GiB; AddressSanitizer takes 16 TiB")
    folder = tmp_path_factory.mktemp("sanitized")
    sources = sorted((CSRC / "cuda").rglob("*.cu"))
    return build(folder / "build", sources, "sanitized", edits(INSTANCES[:1], MUTANTS))


def _run(library: Library, seed: int, mutant: int) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "LD_PRELOAD": preload("sanitized"),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=0",
    }
    command = [sys.executable, "-m", "tests.cuda.sanitized", str(library.path)]
    return subprocess.run(
        [*command, str(seed), str(mutant)], capture_output=True, text=True, env=environment,
        cwd=CSRC.parent,
    )  # fmt: skip


def test_kernels_are_clean(library: Library, seed: int) -> None:
    done = _run(library, seed, 0)
    assert done.returncode == 0 and done.stdout == "clean\n", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("number", "message"),
    [pytest.param(n, MESSAGES[m.name], id=m.name) for n, m in enumerate(MUTANTS, 1)],
)
def test_mutant_is_noticed(number: int, message: str, library: Library, seed: int) -> None:
    done = _run(library, seed, number)
    print(done.stderr)
    assert done.returncode != 0 and re.search(message, done.stderr)

"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer: register arrays too."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys

import pytest

from .build import CSRC, Library, Mutant, build, compiler, preload
from .instances import EDIT_ONE, SOURCES

_W = "attention_window.cuh"
#: What only these tools see, an array in registers and a shift, and a read that all builds see.
MUTANTS = [
    (Mutant("past an array in registers", _W, "c0[3]", "c0[4 + (threadIdx.x & 1)]",
            "a[1] = Math::pack(c0[2], c0[3]);"),
     "(stack-buffer-overflow|out of bounds for type)"),
    (Mutant("rows read past the window", _W,
            "ptx::copy_async(tile + row * S::kPitch + unit * 16,\n"
            "                    from + rows.of(inside ? row : 0) * x.token_stride + unit * 8, "
            "inside);",
            "ptx::copy_async(tile + row * S::kPitch + unit * 16, "
            "from + row * x.token_stride + unit * 8, true);"),
     "(heap-buffer-overflow|SEGV on unknown address)"),
    (Mutant("read while cp.async is under way", _W, "ptx::wait_copies<0>();", ";",
            "ptx::wait_copies<0>();\n    if constexpr"),
     "use-after-poison"),
]  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    if compiler() is None:
        pytest.skip("CUDA kernels were not emulated: no g++ (CXX names another)")
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        pytest.skip(f"address space is limited to {limit >> 30} GiB; AddressSanitizer takes 16 TiB")
    folder = tmp_path_factory.mktemp("sanitized")
    sources = [CSRC / "cuda" / name for name in SOURCES]
    return build(folder / "build", sources, "sanitized", [m for m, _ in MUTANTS], EDIT_ONE)


def _run(library: Library, seed: int, mutant: int) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "LD_PRELOAD": preload("sanitized"),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=0",
    }
    command = [sys.executable, "-m", "tests.emulation.sanitized", str(library.path)]
    return subprocess.run(
        [*command, str(seed), str(mutant)], capture_output=True, text=True, env=environment,
        cwd=CSRC.parent,
    )  # fmt: skip


def test_kernels_are_clean(library: Library, seed: int) -> None:
    done = _run(library, seed, 0)
    assert done.returncode == 0 and done.stdout == "clean\n", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("number", "message"),
    [pytest.param(n, message, id=m.name) for n, (m, message) in enumerate(MUTANTS, 1)],
)
def test_mutant_is_killed(number: int, message: str, library: Library, seed: int) -> None:
    done = _run(library, seed, number)
    print(done.stderr)
    assert done.returncode != 0 and re.search(message, done.stderr)

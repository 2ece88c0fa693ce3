"""nvcc, gcc and the pieces that a test builds with them."""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from .. import CSRC, run

HERE = Path(__file__).resolve().parent
ARCHITECTURES = ("80", "90a")


def find_nvcc() -> str | None:
    """The nvcc that the package would be built with, as setup.py finds it."""
    candidates = [os.environ.get("CUDACXX"), shutil.which("nvcc")]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if folder := os.environ.get(variable):
            candidates.append(os.path.join(folder, "bin", "nvcc"))
    candidates.append("/usr/local/cuda/bin/nvcc")
    for folder in sys.path:
        candidates += map(str, sorted(Path(folder).glob("nvidia/c*/bin/nvcc"), reverse=True))
    return next((c for c in candidates if c and shutil.which(c)), None)


def missing_tool() -> str | None:
    """Why kernels can't be built here, or None."""
    if find_nvcc() is None:
        return (
            "no nvcc (looked at CUDACXX, PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda, pip toolkits)"
        )
    return next((f"no {tool} on PATH" for tool in ("gcc", "nm") if not shutil.which(tool)), None)


@dataclass
class Build:
    """One .cu file: the PTX of each architecture and the host launchers in a library."""

    ptx: dict[str, str]  # "80" -> PTX text
    library: Path

    @cached_property
    def _exported(self) -> list[str]:
        symbols = run(["nm", "-D", "--defined-only", str(self.library)])
        return re.findall(r"\bT (_ZN\w+)", symbols)

    def function(self, name: str) -> Any:
        """The C++ launcher of that name (without its namespace), callable through ctypes."""
        mangled = [s for s in self._exported if re.fullmatch(rf"_ZN\w*?{len(name)}{name}E\w*", s)]
        assert len(mangled) == 1, f"{name}: {mangled}"
        # Its own libraries first: a torch with CUDA has the real runtime in the global scope.
        mode = os.RTLD_NOW | os.RTLD_DEEPBIND
        return getattr(ctypes.CDLL(str(self.library), mode=mode), mangled[0])


@cache
def fake_runtime() -> Path:
    """fakecudart.c as a library, one for the process: host launchers name it, and whoever loads
    one has loaded it (`Device`)."""
    folder = Path(tempfile.mkdtemp(prefix="fakecudart-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / "libfakecudart.so"
    run(["gcc", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", str(HERE / "fakecudart.c")]
        + [f"-Wl,-Bsymbolic,-soname,{library.name}", "-o", str(library)])  # fmt: skip
    return library


def build_kernels(
    source: Path, folder: Path, architectures: Sequence[str], include: Path = CSRC
) -> Build:
    """Compiles a .cu file once: PTX per architecture, host code as a library. `include` is where
    its headers are.

    Both come from one run of nvcc, so that the launches name the kernels of that PTX.
    """
    nvcc = find_nvcc()
    assert nvcc is not None
    keep = folder / "keep"
    keep.mkdir(parents=True)
    library, runtime = folder / "kernels.so", fake_runtime()
    targets = [f"-gencode=arch=compute_{a},code=compute_{a}" for a in architectures]
    run(
        [nvcc, "-std=c++17", "-O3", "--expt-relaxed-constexpr", "-lineinfo", *targets]
        + ["--keep", "--keep-dir", str(keep), "-cudart", "none", "-shared"]
        + ["-Xcompiler", "-fPIC", "-I", str(include)]
        + [str(source), "-o", str(library), f"-L{runtime.parent}", "-lfakecudart"]
    )
    ptx: dict[str, str] = {}
    for path in keep.glob("*.ptx"):
        text = path.read_text()
        found = re.search(r"^\.target sm_(\w+)", text, flags=re.M)
        assert found is not None, f"{path} has no .target"
        ptx[found.group(1)] = text
    assert sorted(ptx) == sorted(architectures), f"nvcc left PTX for {sorted(ptx)}"
    return Build(ptx, library)

"""setuptools + CMake: the metadata is in pyproject.toml, the build in CMakeLists.txt.

torch is not needed to build: the native module takes raw pointers. Environment:
    VLMKERNELS_CUDA   AUTO (default: CUDA kernels where nvcc is found), ON (fatal without), OFF
    CUDACXX           the nvcc to use, ahead of PATH, CUDA_HOME, /usr/local/cuda, the pip toolkit
    CMAKE_ARGS        further arguments for CMake
    MAX_JOBS          parallel compilers; default: the number of cores
"""

from __future__ import annotations

import importlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
# Not setuptools' build_temp: that is a fresh folder on every editable install, and would throw
# CMake's incremental state away.
BUILD = ROOT / "build" / f"cmake-{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
# What CMake reads in a folder's first build only.
FIRST = "CC CXX CFLAGS CXXFLAGS CUDACXX CUDAHOSTCXX CUDAFLAGS LDFLAGS CMAKE_ARGS".split()


def find_nvcc() -> str | None:
    """The first nvcc among CUDACXX, PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda, pip toolkits."""
    candidates = [os.environ.get("CUDACXX"), shutil.which("nvcc")]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if folder := os.environ.get(variable):
            candidates.append(os.path.join(folder, "bin", "nvcc"))
    candidates.append("/usr/local/cuda/bin/nvcc")
    for folder in sys.path:
        found = sorted(Path(folder).glob("nvidia/c*/bin/nvcc"), reverse=True)  # newest first
        candidates += map(str, found)
    return next((c for c in candidates if c and shutil.which(c)), None)


def tool(name: str) -> str:
    """cmake or ninja: this interpreter's own package (PEP 517 environment, venv), else PATH."""
    try:
        module = importlib.import_module(name)
        folder = getattr(module, "CMAKE_BIN_DIR", None) or module.BIN_DIR
    except (ImportError, AttributeError):
        folder = None
    found = (folder and shutil.which(name, path=str(folder))) or shutil.which(name)
    if not found:
        raise SystemExit(f"{name} was not found: pip install {name}, or put it on PATH")
    return found


def number_of_jobs() -> str:
    if jobs := os.environ.get("MAX_JOBS"):
        return jobs
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return str(cores or 2)


class CMakeExtension(Extension):
    def __init__(self, name: str) -> None:
        # Named here, they are part of a source distribution.
        native = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/**/*.*"))
        super().__init__(name, sources=[], depends=["CMakeLists.txt", *native])


class CMakeBuild(build_ext):
    """Configures, builds and installs the extension at the place setuptools asks for."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        prefix = target.parent.parent
        nvcc = find_nvcc()
        self._forget_other_settings(nvcc)
        environment = dict(os.environ)
        environment.pop("DESTDIR", None)  # CMake would install there
        cuda = os.environ.get("VLMKERNELS_CUDA", "AUTO").upper()
        arguments = [
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={self._pybind11_folder()}",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DVLMKERNELS_CUDA={cuda}",
            f"-DVLMKERNELS_VERSION={self.distribution.get_version()}",
            "-GNinja",
            # Given anew each time: an isolated build's ninja is gone after that build.
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        if cuda != "OFF" and nvcc:
            environment["CUDACXX"] = nvcc
            # pip's toolkit keeps its libraries in lib/, while its nvcc.profile says lib64/.
            library = Path(nvcc).resolve().parent.parent / "lib"
            inherited = environment.get("LIBRARY_PATH")
            environment["LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(library), inherited]))
        cmake = tool("cmake")
        configure = [cmake, "-S", str(ROOT), "-B", str(BUILD), *arguments]
        build = [cmake, "--build", str(BUILD), "-j", number_of_jobs()]
        install = [cmake, "--install", str(BUILD), "--prefix", str(prefix), "--strip"]
        for command in (configure, build, install):
            if (code := subprocess.run(command, env=environment).returncode) != 0:
                raise SystemExit(f"vlmkernels: failed with {code}: {shlex.join(command)}")
        if not target.exists():
            raise SystemExit(f"vlmkernels: the build ended well, but did not make {target}")

    @staticmethod
    def _forget_other_settings(nvcc: str | None) -> None:
        """Drops the cache of a copied tree, which CMake refuses, and that of other compilers or
        flags, or of no nvcc: CMake would keep to them."""
        settings = ascii([str(ROOT), nvcc, *map(os.environ.get, FIRST)])
        known = BUILD / "vlmkernels-settings.txt"
        if BUILD.exists() and not (known.exists() and known.read_text() == settings):
            shutil.rmtree(BUILD)
        BUILD.mkdir(parents=True, exist_ok=True)
        known.write_text(settings)

    @staticmethod
    def _pybind11_folder() -> str:
        import pybind11

        return pybind11.get_cmake_dir()


if __name__ == "__main__":  # setuptools' build backend runs this file as __main__, too
    setup(ext_modules=[CMakeExtension("vlmkernels._C")], cmdclass={"build_ext": CMakeBuild})

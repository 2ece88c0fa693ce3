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
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# Not setuptools' build_temp: that is a fresh folder on every editable install, and would throw
# CMake's incremental state away.
BUILD = ROOT / "build" / f"cmake-{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
# What CMake reads in a folder's first build only.
FIRST = "CC CXX CFLAGS CXXFLAGS CUDACXX CUDAHOSTCXX CUDAFLAGS LDFLAGS CMAKE_ARGS".split()


def find_nvcc() -> str | None:
    """The first nvcc among CUDACXX, PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda, pip toolkits."""
    if (named := os.environ.get("CUDACXX")) and not shutil.which(named):
        raise SystemExit(f"CUDACXX is {named}, which is no program: name an nvcc, or unset it")
    candidates = [named, shutil.which("nvcc")]
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
        if not jobs.isdigit() or jobs == "0":
            raise SystemExit(f"MAX_JOBS is {jobs!r}; it must be a number, 1 or more")
        return jobs
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return str(cores or 2)


def cmake_arguments() -> list[str]:
    arguments = os.environ.get("CMAKE_ARGS", "")
    try:
        return shlex.split(arguments)
    except ValueError as error:
        raise SystemExit(f"CMAKE_ARGS is {arguments!r}: {error}") from None


def version_of(compiler: str | None) -> tuple[str, str] | None:
    """Where a compiler lies and what it says of itself: one name may be another one tomorrow."""
    found = shutil.which(compiler) if compiler else None
    if found is None:
        return None
    said = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    return os.path.realpath(found), said


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
        cuda = os.environ.get("VLMKERNELS_CUDA", "AUTO").upper()
        nvcc = find_nvcc() if cuda != "OFF" else None
        self._forget_other_settings(nvcc)
        environment = dict(os.environ)
        environment.pop("DESTDIR", None)  # CMake would install there
        arguments = [
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={self._pybind11_folder()}",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DVLMKERNELS_CUDA={cuda}",
            f"-DVLMKERNELS_VERSION={self.distribution.get_version()}",
            "-GNinja",
            # Given anew each time: an isolated build's ninja is gone after that build.
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            *cmake_arguments(),
        ]
        if nvcc:
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
        compilers = [nvcc, *(os.environ.get("CXX") or "c++").split()[:1]]
        versions = [version_of(compiler) for compiler in compilers]
        settings = ascii([str(ROOT), nvcc, versions, *map(os.environ.get, FIRST)])
        known = BUILD / "vlmkernels-settings.txt"
        if BUILD.exists() and not (known.exists() and known.read_text() == settings):
            shutil.rmtree(BUILD)
        BUILD.mkdir(parents=True, exist_ok=True)
        known.write_text(settings)

    @staticmethod
    def _pybind11_folder() -> str:
        try:
            import pybind11
        except ModuleNotFoundError:
            raise SystemExit("pybind11 was not found: pip install pybind11") from None

        return pybind11.get_cmake_dir()


class PythonBuild(build_py):
    def run(self) -> None:
        """Without what an earlier build left, such as modules that are no more."""
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


if __name__ == "__main__":  # setuptools' build backend runs this file as __main__, too
    setup(
        ext_modules=[CMakeExtension("vlmkernels._C")],
        cmdclass={"build_ext": CMakeBuild, "build_py": PythonBuild},
    )

"""Builds vlmkernels/_C in the source tree with whatever this machine has: python build_inplace.py

With cmake, ninja and pybind11 it is `setup.py build_ext --inplace`. Without, g++ and nvcc are
called directly, with the headers of pybind11 or of torch's own copy. Needs no network.
Environment: CXX, MAX_JOBS, VLMKERNELS_CUDA (as for setup.py; default ON: a GPU check without CUDA
kernels checks nothing).
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / f"direct-{sys.implementation.cache_tag}"

# The direct build repeats what CMakeLists.txt says.
ISA_FLAGS = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
    "avx512_bf16": ["-mavx512bf16"],
}
ISA_FLAGS["avx512"] = [*ISA_FLAGS["avx2"], *ISA_FLAGS["avx512"], "-mprefer-vector-width=512"]
ISA_FLAGS["avx512_bf16"] = [*ISA_FLAGS["avx512"], *ISA_FLAGS["avx512_bf16"]]
COMMON = ["-O3", "-DNDEBUG", "-std=c++17", "-fPIC", "-fvisibility=hidden"]
HOST = [*COMMON, "-fvisibility-inlines-hidden", "-ffp-contract=off", "-fno-math-errno", "-fopenmp"]


def find_nvcc() -> str | None:
    """The first nvcc among CUDACXX, PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda."""
    candidates = [os.environ.get("CUDACXX"), shutil.which("nvcc")]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if folder := os.environ.get(variable):
            candidates.append(os.path.join(folder, "bin", "nvcc"))
    candidates.append("/usr/local/cuda/bin/nvcc")
    return next((c for c in candidates if c and shutil.which(c)), None)


def missing_tools() -> list[str]:
    """What `setup.py build_ext` would lack."""
    missing = [m for m in ("pybind11", "setuptools") if importlib.util.find_spec(m) is None]
    for tool in ("cmake", "ninja"):
        if importlib.util.find_spec(tool) is None and shutil.which(tool) is None:
            missing.append(tool)
    return missing


def pybind11_include() -> Path:
    """The folder that holds pybind11/pybind11.h: pybind11's own, else the copy inside torch."""
    for name, below in (("pybind11", "include"), ("torch", "include")):
        spec = importlib.util.find_spec(name)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            include = Path(folder) / below
            if (include / "pybind11" / "pybind11.h").is_file():
                return include
    raise SystemExit("pybind11's headers were found neither in pybind11 nor in torch/include")


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"failed: {' '.join(command)}\n{done.stdout}{done.stderr}")


def accepts(compiler: str, flags: list[str]) -> bool:
    command = [compiler, *flags, "-x", "c++", "-fsyntax-only", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


def cuda_archs() -> list[str]:
    """CMakeLists.txt's default list."""
    text = (ROOT / "CMakeLists.txt").read_text()
    found = re.search(r'set\(VLMKERNELS_CUDA_ARCHS "([^"]+)"', text)
    return found[1].split(";") if found else ["80", "90a"]


def _variable(dryrun: str, name: str) -> str:
    """A variable that `nvcc -dryrun` prints: #$ NAME=value."""
    found = re.search(rf"^#\$ {name}=(.*)$", dryrun, re.M)
    return found[1].strip() if found else ""


def direct(cuda: str) -> None:
    """Compiles and links without CMake."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise SystemExit("no C++ compiler was found: set CXX")
    nvcc = None if cuda == "OFF" else find_nvcc()
    if cuda == "ON" and nvcc is None:
        raise SystemExit("no nvcc was found (CUDACXX, PATH, CUDA_HOME, /usr/local/cuda)")
    csrc = ROOT / "csrc"
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    defines = [f'-DVLMKERNELS_VERSION="{version[1] if version else "0+unknown"}"']
    includes = [f"-I{csrc}", f"-I{pybind11_include()}", f"-I{sysconfig.get_paths()['include']}"]
    usable = {}
    if platform.machine().lower() in ("x86_64", "amd64"):
        usable = {isa: f for isa, f in ISA_FLAGS.items() if accepts(compiler, f)}
    defines += [f"-DVLMKERNELS_HAVE_{isa.upper()}" for isa in usable]
    BUILD.mkdir(parents=True, exist_ok=True)

    commands: list[list[str]] = []
    objects: list[str] = []

    def add(source: Path, command: list[str], isa: str = "") -> None:
        parts = source.relative_to(csrc).with_suffix("").parts
        target = BUILD / f"{'-'.join((isa, *parts))}.o"
        objects.append(str(target))
        commands.append([*command, "-c", str(source), "-o", str(target)])

    if nvcc:
        archs = cuda_archs()
        version_text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
        release = re.search(r"V([\d.]+)", version_text)
        defines += ["-DVLMKERNELS_WITH_CUDA", f'-DVLMKERNELS_CUDA_ARCHS="{",".join(archs)}"']
        defines.append(f'-DVLMKERNELS_CUDA_VERSION="{release[1] if release else "unknown"}"')
        # Asked of nvcc itself: the nvcc on PATH may be a script that stands elsewhere.
        dryrun = subprocess.run([nvcc, "-dryrun", "-c", "x.cu"], capture_output=True, text=True)
        includes += re.findall(r"-I[^\s\"]+", _variable(dryrun.stderr, "INCLUDES"))
        libraries = re.findall(r"-L[^\s\"]+", _variable(dryrun.stderr, "LIBRARIES"))
        toolkit = Path(_variable(dryrun.stderr, "TOP"))
        includes.append(f"-I{toolkit / 'include'}")
        libraries += [f"-L{toolkit / name}" for name in ("lib64", "lib")]
        targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
        targets.append(f"-gencode=arch=compute_{archs[0]},code=compute_{archs[0]}")
        flags = ["-O3", "-std=c++17", "--expt-relaxed-constexpr", "-lineinfo", "--threads=0"]
        flags += ["-Xptxas=-warn-spills,-Werror", "-Xcompiler=-fPIC,-fvisibility=hidden"]
        for source in sorted(csrc.glob("cuda/**/*.cu")):
            add(source, [nvcc, *flags, *targets, f"-I{csrc}"])
    for source in sorted([*csrc.glob("bindings/*.cpp"), *csrc.glob("cpu/**/*.cpp")]):
        if not source.stem.endswith("kernel"):
            add(source, [compiler, *HOST, *defines, *includes])
            continue
        for isa, isa_flags in {"generic": [], **usable}.items():
            if isa != "avx512_bf16" or source.parent.name == "attention":
                add(source, [compiler, *HOST, *isa_flags, f"-DVLMK_ISA={isa}", *includes], isa)

    jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 2)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, commands))
    target = ROOT / "vlmkernels" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    link = [compiler, "-shared", "-fopenmp", *objects, "-o", str(target), "-s"]
    if nvcc:
        link += [
            *libraries,
            "-lcudart_static",
            "-ldl",
            "-lrt",
            "-lpthread",
            "-Wl,--exclude-libs,ALL",
        ]
    run(link)
    print(f"{target} built by direct calls of {compiler}{f' and {nvcc}' if nvcc else ''}")


def main() -> None:
    cuda = os.environ.get("VLMKERNELS_CUDA", "ON").upper()
    missing = missing_tools()
    if missing:
        print(f"{', '.join(missing)} missing: building without CMake", flush=True)
        direct(cuda)
        return
    environment = dict(os.environ, VLMKERNELS_CUDA=cuda)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    if subprocess.run(command, cwd=ROOT, env=environment).returncode != 0:
        print("setup.py failed (see above): building without CMake", flush=True)
        direct(cuda)


if __name__ == "__main__":
    main()

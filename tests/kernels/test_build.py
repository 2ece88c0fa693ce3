"""The native module: what it links, which kernels it picks, what it says when something is off."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

import vlmkernels
from vlmkernels import _native, info

ROOT = Path(__file__).resolve().parents[2]
ORDER = ["generic", "avx2", "avx512", "avx512_bf16", "amx_bf16", "amx_emulated"]


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def needed_tool(name: str) -> str:
    return shutil.which(name) or pytest.skip(f"{name} is not installed")


def setup_module_of_the_build() -> ModuleType:
    pytest.importorskip("setuptools")
    specification = importlib.util.spec_from_file_location("vlmkernels_setup", ROOT / "setup.py")
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_links_neither_torch_nor_the_cuda_runtime():
    readelf = needed_tool("readelf")
    command = [readelf, "-d", _native._C.__file__]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    libraries = re.findall(r"\(NEEDED\).*\[(.*)\]", listing)
    assert any(name.startswith("libgomp") for name in libraries)
    assert not [n for n in libraries if re.match("libtorch|libc10|libcuda|libpython", n)]


def test_shares_one_openmp_runtime_with_torch():
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc")
    runtimes = {
        os.path.realpath(line.split()[-1])
        for line in maps.read_text().splitlines()
        if re.search(r"/lib(gomp|omp|iomp5)[^/]*\.so", line)
        and ("torch" in line or "gomp" in line)
        and "scikit_learn" not in line
    }
    assert len(runtimes) == 1, runtimes


def test_version_is_that_of_pyproject():
    declared = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared
    assert vlmkernels.__version__ == declared[1]
    assert _native._C.build_info()["version"] == declared[1], "rebuild the native module"


@pytest.mark.slow
def test_best_instruction_set_is_chosen_and_can_be_overridden():
    available = _native.available_isas()
    assert available[0] == "generic"
    assert available == sorted(available, key=ORDER.index)
    code = "from vlmkernels import _native; print(_native._C.isa())"
    chosen = run_python(code, VLMKERNELS_ISA="")
    assert chosen.stdout.strip() == [n for n in available if n != "amx_emulated"][-1]
    assert run_python(code, VLMKERNELS_ISA="generic").stdout.strip() == "generic"
    bad = run_python(code, VLMKERNELS_ISA="avx1024")
    assert bad.returncode != 0
    assert "VLMKERNELS_ISA is 'avx1024', but this machine runs generic" in bad.stderr


def test_set_isa_names_what_it_got():
    before = _native._C.isa()
    with pytest.raises(ValueError, match="the instruction set is 'mmx', but this machine runs"):
        _native.set_isa("mmx")
    assert _native._C.isa() == before
    _native.set_isa("generic")
    assert _native._C.isa() == "generic"
    _native.set_isa("")
    assert _native._C.isa() == before


def test_isa_files_share_no_symbols():
    """The linker keeps one copy of a shared inline function: it may be the AVX-512 one."""
    nm = needed_tool("nm")
    objects = [
        path
        for folder in (ROOT / "build").glob("cmake-*")
        for path in folder.rglob("*kernel.cpp.o")
        if re.search(r"vlmkernels_(avx|amx)\w*\.dir", str(path))
    ]
    if not objects:
        pytest.skip("the package was not built in this source tree")
    for path in objects:
        command = [nm, "-C", "--defined-only", str(path)]
        symbols = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        shared = [x for x in symbols.splitlines() if re.search(r" [VWu] (?!DW\.ref\.)", x)]
        assert not shared, f"{path}: {shared}"


def test_load_error_says_what_was_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "vlmkernels._C", None)
    monkeypatch.delattr(vlmkernels, "_C")
    pattern = r"native module did not load .*; .*vlmkernels holds _C.*; build it .*`pip install -e"
    with pytest.raises(ImportError, match=pattern):
        _native._load()


def test_a_library_of_other_sources_says_so():
    with pytest.raises(AttributeError, match="has no attention_9: it was built from other sources"):
        _native._C.attention_9()
    assert not hasattr(_native._C, "attention_9")


def test_info_tells_what_is_on_and_why_something_is_off():
    lines = dict(re.split(r"\s{2,}|(?<=^CUDA kernels)\s+", x, maxsplit=1) for x in rows())
    assert lines["vlmkernels"].startswith(vlmkernels.__version__)
    assert lines["CPU kernels"].startswith(_native._C.isa())
    assert lines["experts"].startswith("one after another by torch")
    assert lines["available"] == ", ".join(_native.available_isas())
    assert (lines["AMX"][:3] == "on,") == ("amx_bf16" in _native.available_isas())
    if _native.has_cuda_kernels():
        assert re.match(r"sm_80, sm_90a and PTX, by nvcc \d+", lines["CUDA kernels"])
        long = r"bfloat16, head_dim 64, 80, 96: window up to 128, sm[89]0 above"
        assert any(re.search(f"on CUDA .*: vision_attention, {long}", row) for row in rows())
    else:
        assert lines["CUDA kernels"].startswith("not built")
    if not torch.cuda.is_available():
        assert lines["GPU"].startswith("none: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells of this machine's GPU only")
def test_info_says_what_each_gpu_gets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_native, "cuda_archs", lambda: ("80", "90a"))
    monkeypatch.setattr(info.select, "flash_attn", lambda: None)
    lines = info.attention_lines()
    of_128 = "varlen_attention, bfloat16, head_dim 128: window up to 64"
    for gpus, longer in (("8.0, 10.0", "sm80"), ("8.6, 8.9, 12.0", "sdpa"), ("9.0", "sm90")):
        assert f"on CUDA {gpus}: {of_128}, {longer} above" in lines
    monkeypatch.setattr(_native, "cuda_archs", lambda: ("90a",))
    off = "on CUDA 8.0, 8.6, 8.9, 10.0, 12.0: sm80: off, vlmkernels was built for 90a"
    assert off in info.attention_lines()


def rows() -> list[str]:
    return info.report().splitlines()


def test_info_explains_broken_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "vlmk_broken.py").write_text("raise OSError('libcudart.so.11.0: no such file')")
    (tmp_path / "vlmk_partial.py").write_text("import vlmk_missing.part")
    (tmp_path / "vlmk_fine.py").write_text("__version__ = '1.2'")
    backend = info.optional_backend
    why = "installed, but fails to import: OSError: libcudart.so.11.0: no such file"
    assert backend("vlmk_broken", "vlmk-broken") == (None, why)
    assert backend("vlmk_partial", "vlmk-partial") == (None, "needs vlmk_missing")
    assert backend("vlmk_fine", "vlmk-fine") == ("1.2", "")
    assert backend("vlmk_absent", "vlmk-absent") == (None, "not installed")


def test_nvcc_is_looked_for_in_the_documented_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    module = setup_module_of_the_build()

    def place(folder: str) -> str:
        path = tmp_path / folder / "nvcc"
        path.parent.mkdir(parents=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return str(path)

    pip_toolkit = place("site/nvidia/cu13/bin")
    cuda_home, on_path, cudacxx = place("home/bin"), place("path"), place("cudacxx")
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    default = "/usr/local/cuda/bin/nvcc"
    assert module.find_nvcc() == (default if os.path.exists(default) else pip_toolkit)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert module.find_nvcc() == cuda_home
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert module.find_nvcc() == on_path
    monkeypatch.setenv("CUDACXX", cudacxx)
    assert module.find_nvcc() == cudacxx


def test_build_starts_afresh_where_cmake_would_keep_old_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    module = setup_module_of_the_build()
    monkeypatch.setattr(module, "BUILD", tmp_path / "build")

    def kept(nvcc: str | None) -> bool:
        module.CMakeBuild._forget_other_settings(nvcc)
        cache = tmp_path / "build" / "CMakeCache.txt"
        before = cache.exists()
        cache.touch()
        return before

    assert [kept(None), kept(None), kept("nvcc"), kept("nvcc")] == [False, True, False, True]
    monkeypatch.setenv("CXXFLAGS", "-DÖ=\udcff")
    assert [kept("nvcc"), kept("nvcc")] == [False, True]
    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert [kept("nvcc"), kept("nvcc")] == [False, True]


def test_build_that_makes_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    setuptools = pytest.importorskip("setuptools")
    module = setup_module_of_the_build()
    monkeypatch.setattr(module, "BUILD", tmp_path / "build")
    monkeypatch.setattr(module, "tool", str)
    monkeypatch.setattr(module, "version_of", lambda compiler: None)
    monkeypatch.setattr(module.CMakeBuild, "_pybind11_folder", lambda self: "pybind11")
    monkeypatch.setenv("DESTDIR", str(tmp_path / "elsewhere"))
    environments = []

    def run(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        environments.append(env)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(module.subprocess, "run", run)
    build = module.CMakeBuild(setuptools.Distribution())
    build.build_lib = str(tmp_path / "lib")
    with pytest.raises(SystemExit, match="ended well, but did not make .*lib/vlmkernels/_C"):
        build.build_extension(module.CMakeExtension("vlmkernels._C"))
    assert len(environments) == 3 and not any("DESTDIR" in env for env in environments)


def test_another_compiler_of_the_same_name_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """CMake would keep to what it found out about the one before."""
    module = setup_module_of_the_build()
    monkeypatch.setattr(module, "BUILD", tmp_path / "build")
    compiler = tmp_path / "c++"
    monkeypatch.setenv("CXX", str(compiler))
    for version, fresh in (("12", True), ("12", False), ("13", True)):
        compiler.write_text(f"#!/bin/sh\necho version {version}\n")
        compiler.chmod(0o755)
        module.CMakeBuild._forget_other_settings(None)
        cache = module.BUILD / "CMakeCache.txt"
        assert cache.exists() is not fresh
        cache.touch()


@pytest.mark.parametrize(
    ("function", "name", "value", "message"),
    [
        ("find_nvcc", "CUDACXX", "/none/nvcc", "CUDACXX is /none/nvcc, which is no program"),
        ("number_of_jobs", "MAX_JOBS", "many", "MAX_JOBS is 'many'; it must be a number"),
        (
            "cmake_arguments",
            "CMAKE_ARGS",
            "-DX='y",
            "No closing quotation",
        ),
    ],
)
def test_bad_variables_are_named(
    function: str, name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=re.escape(message)):
        getattr(setup_module_of_the_build(), function)()


def test_a_build_holds_nothing_of_the_one_before(tmp_path: Path):
    """A module that has become another, or is no more."""
    pytest.importorskip("setuptools")
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "setup.cfg").write_text("[options]\npackages = package\n")
    (tmp_path / "package").mkdir()
    for module in ("old", "new"):
        (tmp_path / "package" / f"{module}.py").touch()
        command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", "lib"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        assert [x.name for x in (tmp_path / "lib" / "package").iterdir()] == [f"{module}.py"]
        (tmp_path / "package" / f"{module}.py").unlink()


def test_source_distribution_holds_what_is_compiled(tmp_path: Path):
    pytest.importorskip("setuptools", "77")  # as pyproject's build-system has it
    if not (ROOT / "CMakeLists.txt").exists():
        pytest.skip("no source tree")
    tree = tmp_path / "tree"
    for name in ("setup.py", "pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        tree.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "csrc", tree / "csrc")
    code = "import setuptools.build_meta as b; b.build_sdist('..')"
    subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    wanted = {str(x.relative_to(ROOT)) for x in (ROOT / "csrc").rglob("*.*")} | {"CMakeLists.txt"}
    assert len(wanted) > 50 and wanted <= names


BUILDS = [
    ("=ON", False, "VLMKERNELS_CUDA=ON, but no working nvcc was found: set CUDACXX to it"),
    ("=AUTO", True, "==== vlmkernels: CUDA kernels OFF: no working nvcc was found"),
    ("=MAYBE", False, "VLMKERNELS_CUDA is 'MAYBE'; it must be AUTO, ON or OFF"),
    ("_ARCHS=80;90a;100f;120", True, "CUDA kernels OFF"),
    ("_ARCHS=90a", True, "CUDA kernels OFF"),
    ("_ARCHS=80;90;90a", False, "code for 90 has no wgmma, and the kernels for Hopper would"),
    ("_ARCHS=sm_90a", False, "'sm_90a' is none from 80 on"),
    ("_ARCHS=90a;80", False, "the first one's PTX is for GPUs that came later; it must be a"),
    ("_ARCHS=", False, "it must be a plain one, such as 80"),
]


@pytest.mark.parametrize(
    "option, succeeds, says",
    [
        ("_ARCHS=75", False, "VLMKERNELS_CUDA_ARCHS is '75' (default 80;90a): '75' is none from"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in BUILDS),
    ],
)
def test_build_without_nvcc(option: str, succeeds: bool, says: str, tmp_path: Path):
    pytest.importorskip("pybind11")
    if not (ROOT / "CMakeLists.txt").exists():
        pytest.skip("no source tree")
    module = setup_module_of_the_build()
    try:
        cmake, ninja = module.tool("cmake"), module.tool("ninja")
    except SystemExit as error:
        pytest.skip(str(error))
    configured = subprocess.run(
        [
            *(cmake, "-S", str(ROOT), "-B", str(tmp_path), "-GNinja"),
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DVLMKERNELS_CUDA{option}",
        ],
        env={**os.environ, "CUDACXX": str(tmp_path / "no-nvcc")},
        capture_output=True,
        text=True,
    )
    text = re.sub(r"\s+", " ", configured.stdout + configured.stderr)
    assert (configured.returncode == 0) == succeeds, text
    assert says in text

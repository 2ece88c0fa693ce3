"""CUDA sources -> C++ that a host compiler takes -> a library, for one of two kinds of checking."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import CSRC, run

HERE = Path(__file__).resolve().parent
#: From a source's path below csrc, or its name elsewhere, and its code to the code that is built.
Edit = Callable[[str, str], str]
RUNTIME = ("runtime.cpp", "memory.cpp", "warp.cpp", "hopper.cpp")

#: "checked": every access goes to memory.cpp, by the instrumentation of -fsanitize=thread without
#: its runtime. "sanitized": AddressSanitizer and UndefinedBehaviorSanitizer.
KERNEL_FLAGS = {
    "checked": ["-O1", "-fsanitize=thread"],
    "sanitized": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
RUNTIME_FLAGS = {"checked": ["-O2"], "sanitized": ["-O1", "-fsanitize=address"]}
LINK_FLAGS = {"checked": [], "sanitized": ["-fsanitize=address,undefined"]}
COMMON = [
    "-std=c++17",
    "-g1",
    "-fPIC",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-Wno-psabi",
    "-Wno-narrowing",  # a mutant of a constant in a braced list
    "-Werror",
]


def compiler() -> str | None:
    """CXX, or g++; it must know -fsanitize (GCC and Clang do)."""
    return shutil.which(os.environ.get("CXX") or "g++")


def as_cpp(code: str, path: Path) -> str:
    """The source with launches and shared memory spelled in C++; lines keep their numbers."""
    code = re.sub(
        r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];",
        r"\1* \2 = reinterpret_cast<\1*>(::emu::dynamic_shared());",
        code,
    )
    assert "__shared__" not in code, f"{path}: static __shared__ variables are not emulated"
    at = 0
    while (at := code.find("<<<", at)) >= 0:
        kernel = re.search(r"[\w:]+(?:<[^<>;{}]*>)?\s*$", code[:at])
        end = code.index(">>>", at)
        assert kernel is not None and code[end + 3] == "(", f"{path}: cannot read a launch"
        close, depth = end + 3, 0
        while True:
            depth += {"(": 1, ")": -1}.get(code[close], 0)
            close += 1
            if depth == 0:
                break
        call = f"{kernel[0]}{code[end + 3 : close]}"
        launch = f"::emu::launch([=] {{ {call}; }}, {code[at + 3 : end]})"
        code = code[: kernel.start()] + launch + code[close:]
        at = kernel.start() + len(launch)
    return f'#line 1 "{path}"\n{code}'


@dataclass
class Library:
    """A built library."""

    path: Path
    kind: str

    @cached_property
    def handle(self) -> ctypes.CDLL:
        library = ctypes.CDLL(str(self.path))
        library.emu_begin.argtypes = [ctypes.c_uint64, ctypes.c_int]
        library.emu_error.restype = ctypes.c_char_p
        library.emu_allocate.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]
        library.emu_allocate.restype = ctypes.c_void_p
        library.emu_upload.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        library.emu_unwritten.argtypes = [ctypes.c_void_p]
        library.emu_unwritten.restype = ctypes.c_int64
        return library

    @cached_property
    def _exported(self) -> list[str]:
        symbols = run(["nm", "-D", "--defined-only", str(self.path)])
        return re.findall(r"\bT (_ZN\w+)", symbols)

    def function(self, name: str) -> Any:
        """The C++ launcher of that name, without its namespace."""
        pattern = rf"_ZN\w*?{len(name)}{name}E\w*"
        mangled = [s for s in self._exported if re.fullmatch(pattern, s)]
        assert len(mangled) == 1, f"{name}: {mangled}"
        return getattr(self.handle, mangled[0])

    def line(self, offset: str) -> str:
        """file:line of an offset into the library, or "" where addr2line doesn't know."""
        if not (tool := shutil.which("addr2line")):
            return ""
        # A return address: the call stands before it. -i: out of what functions it was inlined.
        address = hex(int(offset, 16) - 1)
        found = run([tool, "-i", "-e", str(self.path), address]).splitlines()
        own = [f for f in found if "/fibers/include/" not in f and not f.startswith("??")]
        return "/".join(own[0].split(" ")[0].rsplit("/", 2)[-2:]) if own else ""


def build(
    folder: Path,
    sources: Sequence[Path],
    kind: str = "checked",
    edit: Edit = lambda name, code: code,
) -> Library:
    """Compiles .cu files of csrc/cuda, or others, with the runtime into one library.

    Args:
        folder: where the translated sources and the library go; made here.
        kind: of KERNEL_FLAGS.
        edit: applied to each source before it is translated. It may plant mutants under conditions
            `::emu::mutant == N`: Device's `mutant` is the N that is on.
    """
    cxx = compiler()
    assert cxx is not None
    folder.mkdir(parents=True)

    def translated(source: Path, suffix: str) -> Path:
        inside = source.is_relative_to(CSRC)
        name = source.relative_to(CSRC) if inside else Path(source.name)
        to = (folder / name).with_suffix(suffix)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(as_cpp(edit(name.as_posix(), source.read_text()), source))
        return to

    for header in (CSRC / "cuda").rglob("*.cuh"):
        if not (HERE / "include" / header.relative_to(CSRC)).exists():
            translated(header, ".cuh")
    commands, objects = [], []
    # The translated headers first, then the emulated ones, then the rest.
    paths = [f"-I{path}" for path in (folder, HERE / "include", CSRC)]
    for source in sources:
        code = translated(source, ".cpp")
        objects.append(str(code.with_suffix(".o")))
        commands.append([cxx, *COMMON, *KERNEL_FLAGS[kind], *paths, "-c", str(code)])
    for name in RUNTIME:
        objects.append(str(folder / f"{name}.o"))
        commands.append([cxx, *COMMON, *RUNTIME_FLAGS[kind], *paths, "-c", str(HERE / name)])
    commands = [[*c, "-o", o] for c, o in zip(commands, objects, strict=True)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, commands))
    library = folder / f"{kind}.so"
    run([cxx, "-shared", "-Wl,-Bsymbolic", *objects, *LINK_FLAGS[kind], "-ldl", "-o", str(library)])
    return Library(library, kind)


def preload(kind: str) -> str:
    """The value of LD_PRELOAD with which a Python process can load a library of that kind."""
    if kind != "sanitized":
        return ""
    cxx = compiler()
    assert cxx is not None
    return run([cxx, "-print-file-name=libasan.so"]).strip()

"""Builds one instance of tiled attention, from csrc or from a copy with a planted bug."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from .attention_cases import WindowKernels
from .flash_cases import FlashKernels
from .parser import parse_ptx
from .toolchain import CSRC, build_kernels, kernel_ptx

FORWARD, BACKWARD = "attention_flash.cuh", "attention_flash_backward.cuh"
SHARED, ROWS, PRIMITIVES = "attention_tiles.cuh", "attention_rows.cuh", "primitives.cuh"
VISION, HOPPER, WARPGROUPS = "attention_flash_vision.cu", "attention_flash_hopper.cu", "hopper.cuh"
HOPPER_BACKWARD, HOPPER_SHARED = "attention_flash_hopper_backward.cu", "attention_hopper.cuh"
#: What is built: mma.sync's two ways, or those for sm_90a.
SOURCES = {"forward": "attention_flash.cu", "backward": "attention_flash_backward.cu"}
HOPPER_SOURCES = {"forward": HOPPER}
HOPPER_GRAD_SOURCES = {"forward": HOPPER, "backward": HOPPER_BACKWARD}
HEADERS = {"forward": FORWARD, "backward": BACKWARD}
LAUNCHERS = {
    SOURCES["forward"]: "flash_mma_forward_cuda",
    SOURCES["backward"]: "flash_mma_backward_cuda",
    HOPPER: "flash_hopper_forward_cuda",
    HOPPER_BACKWARD: "flash_hopper_backward_cuda",
}
FILES = (
    *LAUNCHERS,
    VISION,
    FORWARD,
    BACKWARD,
    SHARED,
    ROWS,
    PRIMITIVES,
    WARPGROUPS,
    HOPPER_SHARED,
    "attention_flash.h",
)
#: (file, text, its replacement)
Change = tuple[str, str, str]


def keep_head_dim(code: str, dim: int) -> str:
    """attention_tiles.cuh with one instance: the others take most of the compiler's time."""
    others = rf" *case (?!{dim}:)\d+: *\\\n *return launch<[^\n]*\n"
    code, count = re.subn(others, "", code)
    assert count == 4, f"{count} other instances were taken out of {SHARED}"
    return code


def copy_sources(folder: Path, dim: int, types: tuple[str, ...], changes: list[Change]) -> Path:
    """A copy of csrc whose launchers know one head_dim and these of Bf16Math and Fp16Math: the rest
    takes most of nvcc's time. Returns its cuda folder."""
    cuda = folder / "csrc" / "cuda"
    cuda.mkdir(parents=True)
    (cuda.parent / "params.h").write_text((CSRC / "params.h").read_text())
    for name in FILES:
        code = (CSRC / "cuda" / name).read_text()
        if name == SHARED:
            code = keep_head_dim(code, dim)
        for other in {"Bf16Math", "Fp16Math"} - set(types):
            code = re.sub(rf"VLMK_FLASH_DIMS\(\w+, ptx::{other}, f.head_dim\)", "return 1;", code)
        for file, text, replacement in changes:
            if file == name:
                assert code.count(text) == 1, f"{text!r} is {code.count(text)} times in {name}"
                code = code.replace(text, replacement)
        (cuda / name).write_text(code)
    return cuda


def build_flash(
    folder: Path,
    runtime: Path,
    dim: int,
    architecture: str,
    types: tuple[str, ...] = ("Bf16Math", "Fp16Math"),
    changes: list[Change] | None = None,
    sources: dict[str, str] = SOURCES,
) -> FlashKernels:
    """Host code and PTX of one instance."""
    cuda = copy_sources(folder, dim, types, changes or [])
    builds = {
        which: build_kernels(cuda / source, folder / which, [architecture])
        for which, source in sources.items()
    }
    launchers = {which: LAUNCHERS[source] for which, source in sources.items()}
    return FlashKernels(builds, launchers, runtime, architecture)


def mutated(kernels: FlashKernels, folder: Path, dim: int, change: Change) -> FlashKernels:
    """The same kernels with one change, in bf16 alone; the host code stays."""
    cuda = copy_sources(folder, dim, ("Bf16Math",), [change])
    changed = replace(kernels)
    changed.modules = dict(kernels.modules)
    for which, source in SOURCES.items():
        if change[0] in (HEADERS[which], SHARED, PRIMITIVES):
            like = kernels.builds[which]
            text = kernel_ptx(cuda / source, like, kernels.architecture)
            changed.modules[which] = parse_ptx(text)
    return changed


def build_vision(
    folder: Path,
    runtime: Path,
    dim: int,
    architecture: str,
    types: tuple[str, ...] = ("Bf16Math", "Fp16Math"),
) -> WindowKernels:
    """The same of attention_flash_vision.cu."""
    cuda = copy_sources(folder, dim, types, [])
    build = build_kernels(cuda / VISION, folder / "vision", [architecture])
    return WindowKernels(build, runtime, architecture, "flash_vision", "mma_")


def mutated_vision(kernels: WindowKernels, folder: Path, dim: int, change: Change) -> WindowKernels:
    """The same kernels with one change; the host code stays."""
    cuda = copy_sources(folder, dim, ("Bf16Math", "Fp16Math"), [change])
    changed = replace(kernels)
    changed.module = parse_ptx(kernel_ptx(cuda / VISION, kernels.build, kernels.architecture))
    return changed

"""Builds a family of kernels for the interpreter from a copy of csrc, with or without a mutant."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cuda.mutants.mutant import Mutant, markers, plant

from .attention_cases import WindowKernels, keep_instances
from .embedding_cases import Kernels
from .flash_cases import FlashKernels
from .toolchain import CSRC, build_kernels

Types = tuple[str, ...]
BOTH: Types = ("Bf16Math", "Fp16Math")
#: The tiled kernels' files for an architecture, and their launchers.
TILED = {
    "80": {
        "forward": ("attention_flash.cu", "flash_mma_forward_cuda"),
        "backward": ("attention_flash_backward.cu", "flash_mma_backward_cuda"),
    },
    "90a": {
        "forward": ("attention_flash_hopper.cu", "flash_hopper_forward_cuda"),
        "backward": ("attention_flash_hopper_backward.cu", "flash_hopper_backward_cuda"),
    },
}
#: The file of a family that has one, and the prefix and kind of its launchers.
SINGLE = {
    "window": ("attention_window.cu", "window_attention", ""),
    "window-vision": ("attention_window_vision.cu", "vision_window", ""),
    "sm80-vision": ("attention_flash_vision.cu", "flash_vision", "mma_"),
}


def keep_head_dim(code: str, dim: int) -> str:
    """attention_tiles.cuh with one instance: the others take most of the compiler's time."""
    others = rf" *case (?!{dim}:)\d+: *\\\n *return launch<[^\n]*\n"
    code, count = re.subn(others, "", code)
    assert count == 4, f"{count} other instances were taken out of attention_tiles.cuh"
    return code


def copy_csrc(
    folder: Path,
    *,
    dim: int = 80,
    window: tuple[int, int] = (80, 64),
    types: Types = BOTH,
    mutants: Sequence[Mutant] = (),
) -> Path:
    """A copy of csrc/cuda whose launchers know one instance, since the rest takes most of nvcc's
    time.

    Args:
        folder: where the copy goes.
        dim: head_dim of tiled attention.
        window: head_dim and keys of window attention.
        types: of Bf16Math and Fp16Math, of tiled attention.
        mutants: what is planted.
    """
    cuda = folder / "csrc" / "cuda"
    cuda.mkdir(parents=True)
    (cuda.parent / "params.h").write_text((CSRC / "params.h").read_text())
    left = {m.marker for m in mutants}
    for path in (CSRC / "cuda").iterdir():
        code = path.read_text()
        if path.name == "attention_tiles.cuh":
            code = keep_head_dim(code, dim)
        if path.name == "attention_window.cuh":
            code = keep_instances(code, [window])
        for other in set(BOTH) - set(types):
            code = re.sub(rf"VLMK_FLASH_DIMS\(\w+, ptx::{other}, f.head_dim\)", "return 1;", code)
        left -= set(markers(code))
        (cuda / path.name).write_text(plant(code, [("true", m) for m in mutants]))
    assert not left, f"no source has the markers {left}"
    return cuda


def tiled(
    cuda: Path, folder: Path, runtime: Path, architecture: str, **sources: str
) -> FlashKernels:
    """The launchers of tiled attention; `sources` names another architecture's for a part."""
    files = {part: TILED[sources.get(part, architecture)][part] for part in ("forward", "backward")}
    builds = {
        part: build_kernels(cuda / source, folder / part, [architecture])
        for part, (source, _) in files.items()
    }
    names = {part: launcher for part, (_, launcher) in files.items()}
    return FlashKernels(builds, names, runtime, architecture)


def single(
    family: str, cuda: Path, folder: Path, runtime: Path, architecture: str = "80"
) -> WindowKernels:
    """The launchers of a family that has one file."""
    source, prefix, kind = SINGLE[family]
    build = build_kernels(cuda / source, folder / family, [architecture])
    return WindowKernels(build, runtime, architecture, prefix, kind)


def planted(mutant: Mutant, folder: Path, runtime: Path) -> Any:
    """The kernels of a mutant's family with it; of the large ones those in bf16."""
    family, dim = mutant.family, 72 if mutant.case == "dim 72" else 80
    types = BOTH if family in SINGLE else ("Bf16Math",)
    cuda = copy_csrc(folder, dim=dim, types=types, mutants=[mutant])
    if family == "embedding":
        return Kernels(build_kernels(cuda / "embedding.cu", folder / "all", ["80"]), runtime, "80")
    if family in SINGLE:
        return single(family, cuda, folder, runtime)
    return tiled(cuda, folder, runtime, "80" if family == "sm80" else "90a")

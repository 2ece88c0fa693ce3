"""Builds a family of kernels for the interpreter from a copy of csrc, with or without a mutant."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tools.cudasim import CSRC
from tools.cudasim.ptx.device import Device
from tools.cudasim.ptx.parser import Module, parse_ptx
from tools.cudasim.ptx.toolchain import Build, build_kernels

from .instances import TILED_INSTANCES, WINDOW_INSTANCES, keep_head_dim, keep_instances
from .mutants.mutant import Mutant, markers, plant

Types = tuple[str, ...]
BOTH: Types = ("Bf16Math", "Fp16Math")
#: The tiled kernels' files for an architecture, and their launchers.
TILED = {
    "80": {
        "forward": ("cuda/attention/sm80/forward.cu", "sm80_forward_cuda"),
        "backward": ("cuda/attention/sm80/backward.cu", "sm80_backward_cuda"),
    },
    "90a": {
        "forward": ("cuda/attention/sm90/forward.cu", "sm90_forward_cuda"),
        "backward": ("cuda/attention/sm90/backward.cu", "sm90_backward_cuda"),
    },
    "fused": {"backward": ("cuda/attention/sm90/fused.cu", "sm90_fused_backward_cuda")},
}
TILES = ("cuda/attention/schedule.cu", "list_tiles_cuda")
#: The file of a family that has one, and its launchers.
SINGLE = {
    "window": ("cuda/attention/window/varlen.cu", "window_{}_cuda"),
    "window-vision": ("cuda/attention/window/vision.cu", "window_vision_{}_cuda"),
    "sm80-vision": ("cuda/attention/sm80/vision.cu", "sm80_vision_{}_cuda"),
    "embedding": ("cuda/embedding/embedding.cu", "embedding_{}_cuda"),
    "loss": ("cuda/loss/cross_entropy.cu", "cross_entropy_cuda"),
}


@dataclass
class Interpreted:
    """Launchers, the runtime that they are linked to, and the PTX that they launch."""

    launchers: dict[str, tuple[Build, str]]
    runtime: Path
    architecture: str
    device_number: int = 0
    stream: int | None = None

    @cached_property
    def module(self) -> Module:
        """The kernels of all files."""
        builds = {id(build): build for build, _ in self.launchers.values()}
        parts = [parse_ptx(build.ptx[self.architecture]) for build in builds.values()]
        kernels = {name: kernel for part in parts for name, kernel in part.kernels.items()}
        variables = {name: value for part in parts for name, value in part.globals.items()}
        return Module(parts[0].target, kernels, variables)

    def exponents(self) -> list[tuple[str, bool]]:
        """The subtractions in front of exponentials, and whether each takes a product without a
        rounding of its own: ptxas makes a multiply-add of such, which the interpreter does not."""
        found = []
        for build in {id(build): build for build, _ in self.launchers.values()}.values():
            for kernel in build.ptx[self.architecture].split(".entry"):
                products = set(re.findall(r"mul\.f32\s+(%f\d+),", kernel))
                before = r"((?:add|sub)\.f32[^;]+);\s+(?:(?://|\.loc).*\s+)*ex2\."
                for line in re.findall(before, kernel):
                    taken = set(re.findall(r"%f\d+", line)[1:])
                    found.append((line, bool(products & taken)))
        return found

    def device(self) -> Device:
        return Device(self.runtime, self.module, 16 << 20, self.device_number)

    def run(self, device: Device, launcher: str, params: ctypes.Structure) -> int:
        build, name = self.launchers[launcher]
        return device.call(build.function(name), ctypes.byref(params), ctypes.c_void_p(self.stream))


def copy_csrc(
    folder: Path,
    *,
    dim: int = 80,
    window: tuple[int, int] = (80, 64),
    types: Types = BOTH,
    mutants: Sequence[Mutant] = (),
) -> Path:
    """A copy of csrc, for CUDA, whose launchers know one instance, since the rest takes most of
    nvcc's time.

    Args:
        folder: where the copy goes.
        dim: head_dim of tiled attention.
        window: head_dim and keys of window attention.
        types: of Bf16Math and Fp16Math, of tiled attention.
        mutants: what is planted.
    """
    csrc = folder / "csrc"
    left = {m.marker for m in mutants}
    for path in (*(CSRC / "common").iterdir(), *(CSRC / "cuda").rglob("*.*")):
        name, code = path.relative_to(CSRC), path.read_text()
        if name.as_posix() == TILED_INSTANCES:
            code = keep_head_dim(code, dim)
        if name.as_posix() == WINDOW_INSTANCES:
            code = keep_instances(code, [window])
        for other in set(BOTH) - set(types):
            code = re.sub(rf"VLMK_HEAD_DIMS\(\w+, ptx::{other}, head_dim\)", "return 1;", code)
        left -= set(markers(code))
        (csrc / name).parent.mkdir(parents=True, exist_ok=True)
        (csrc / name).write_text(plant(code, [("true", m) for m in mutants]))
    assert not left, f"no source has the markers {left}"
    return csrc


def tiled(
    csrc: Path, folder: Path, runtime: Path, architecture: str, **sources: str
) -> Interpreted:
    """The launchers of tiled attention; `sources` names another architecture's for a part."""
    launchers = {}
    for part in ("tiles", "forward", "backward"):
        known = {**TILED[sources.get(part, architecture)], "tiles": TILES}
        source, launcher = known[part]
        build = build_kernels(csrc / source, folder / part, [architecture], csrc)
        launchers[part] = build, launcher
    return Interpreted(launchers, runtime, architecture)


def of_build(build: Build, name: str, runtime: Path, architecture: str) -> Interpreted:
    """The launchers of one file; `name` is theirs, with {} for what they do."""
    parts = ("forward", "backward", "add", "gather", "reduce", "loss")
    return Interpreted({p: (build, name.format(p)) for p in parts}, runtime, architecture)


def single(
    family: str, csrc: Path, folder: Path, runtime: Path, architecture: str = "80"
) -> Interpreted:
    """The launchers of a family that has one file."""
    source, name = SINGLE[family]
    build = build_kernels(csrc / source, folder / family, [architecture], csrc)
    actual = of_build(build, name, runtime, architecture)
    if family == "sm80-vision":
        lists = build_kernels(csrc / TILES[0], folder / "tiles", [architecture], csrc)
        actual.launchers["tiles"] = lists, TILES[1]
    return actual


def planted(mutant: Mutant, folder: Path, runtime: Path) -> Interpreted:
    """The kernels of a mutant's family with it; of the large ones those in bf16."""
    family, dim = mutant.family, 72 if mutant.case == "dim 72" else 80
    types = BOTH if family in SINGLE else ("Bf16Math",)
    csrc = copy_csrc(folder, dim=dim, types=types, mutants=[mutant])
    if family in SINGLE:
        return single(family, csrc, folder, runtime)
    more = {"backward": "fused"} if family == "sm90-fused" else {}
    return tiled(csrc, folder, runtime, "80" if family == "sm80" else "90a", **more)

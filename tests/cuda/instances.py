"""What is built: of window attention two instances, of tiled attention one. All take minutes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tools.cudasim.fibers.build import Edit

from .mutants import Mutant
from .mutants.mutant import plant


def keep_head_dim(code: str, dim: int) -> str:
    """attention/launch.cuh with one instance: the others take most of the compiler's time."""
    others = rf" *case (?!{dim}:)\d+: *\\\n *return launch<[^\n]*\n"
    code, count = re.subn(others, "", code)
    assert count == 4, f"{count} other instances were taken out of launch.cuh"
    return code


def keep_instances(code: str, instances: Sequence[tuple[int, int]]) -> str:
    """window/tile.cuh with these instances, (head_dim, keys), at most one a head_dim: the rest take
    most of the compiler's time."""
    kept = dict(instances)
    code, actual = re.subn(r" *case 128:[ \\]*\n *return launch<.*\n", "", code)
    assert actual == 1
    for dim in (64, 80, 96):
        line = re.compile(rf" *VLMK_WINDOW_KEYS\(launch, Math, {dim}, Rows\)[ \\]*\n")
        case = f"case {dim}: return launch<Math, {dim}, {kept.get(dim)}, Rows>(p, stream); \\\n"
        code, actual = line.subn(lambda _, case=case, dim=dim: case if dim in kept else "", code)
        assert actual == 1, f"head_dim {dim} is {actual} times in the list of instances"
    return code


#: Where the launchers of window attention list their instances, and those of tiled attention.
WINDOW_INSTANCES = "cuda/attention/window/tile.cuh"
TILED_INSTANCES = "cuda/attention/launch.cuh"
#: (head_dim, keys) of window attention, and the head_dim of tiled attention.
INSTANCES = ((80, 64), (64, 128))
TILED = 80


def edits(instances: Sequence[tuple[int, int]], mutants: Sequence[Mutant] = ()) -> Edit:
    """For the fibers: a source with these instances of window attention and one of the tiled, and
    the mutants, each under its number, which is 1 for the first."""

    def edit(name: str, code: str) -> str:
        if name == WINDOW_INSTANCES:
            code = keep_instances(code, instances)
        if name == TILED_INSTANCES:
            code = keep_head_dim(code, TILED)
        return plant(code, [(f"::emu::mutant == {n}", m) for n, m in enumerate(mutants, 1)])

    return edit

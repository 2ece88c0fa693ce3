"""The CUDA kernels of visual embedding, as nvcc compiled them, against numpy, bit for bit."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tools.cudasim.ptx.ptxtypes import SimError

from .cases.embedding import Pack, check_forward, check_gather, check_reduce, small_suite
from .interpreted import Interpreted


@pytest.mark.parametrize("name", small_suite())
def test_bitwise(name: str, kernels: Interpreted, rng: np.random.Generator) -> None:
    small_suite()[name](kernels, rng)


def test_random_shapes(kernels: Interpreted, rng: np.random.Generator) -> None:
    for _ in range(6):
        dtype = str(rng.choice(["float32", "bfloat16", "float16"]))
        hidden = int(rng.choice([1, 3, 8, 24, 100, 264, 640]))
        # A pointer must be aligned to its element; beyond that anything goes.
        step = 4 if dtype == "float32" else 2
        misalign = int(rng.choice([0, 0, 16, step]))
        pack = Pack(rng, int(rng.integers(1, 60)), hidden, dtype, 7, rng.random(), misalign)
        print(pack.positions, hidden, dtype, misalign)
        check_forward(kernels, pack, vocab_range=(0, 4) if rng.random() < 0.5 else None)
        check_gather(kernels, pack)
        check_reduce(kernels, pack)


def test_access_width(kernels: Interpreted, rng: np.random.Generator) -> None:
    """16-byte accesses wherever rows and pointers allow them; 4 or 2 bytes elsewhere."""
    for hidden, misalign, unit in ((64, 0, "5uint4"), (66, 0, "j"), (65, 0, "t"), (64, 2, "t")):
        device = check_forward(kernels, Pack(rng, 4, hidden, "bfloat16", misalign=misalign))
        (launched,) = device.launches
        assert re.search(rf"move_rowsI\w*CopyI{unit}\w*EmbeddingSource", launched[0]), launched
        assert launched[1] == (1, 1, 1, 128, 1, 1)


def test_out_of_range_is_trapped(kernels: Interpreted, rng: np.random.Generator) -> None:
    """The message names position, value and limit; nothing out of range is read."""
    pack = Pack(rng, 20, 16, "bfloat16")
    place = int(np.flatnonzero(pack.index < 0)[0])
    for bad in (pack.vocabulary, -1, 1 << 62, -(1 << 63)):
        pack.ids[place] = bad
        expected = f"input_ids[{place}] is {bad}, but weight has 11 rows"
        with pytest.raises(SimError, match="trap after printing .*" + re.escape(expected)):
            check_forward(kernels, pack)
    check_forward(kernels, pack, vocab_range=(0, 11))  # there an id of another rank is a zero row

    pack = Pack(rng, 20, 16, "bfloat16")
    place = int(np.flatnonzero(pack.index >= 0)[-1])
    pack.index[place] = pack.visual_rows
    expected = f"visual_index[{place}] is {pack.visual_rows}, but visual has {pack.visual_rows}"
    with pytest.raises(SimError, match="trap after printing .*" + re.escape(expected)):
        check_forward(kernels, pack)
    with pytest.raises(SimError, match="trap after printing .*" + re.escape(expected)):
        check_gather(kernels, pack)
    check_forward(kernels, pack, with_visual=False)  # no row of visual is read

    pack.index[place] = 0
    with pytest.raises(SimError, match=f"names row 0 at positions 0 and {place}"):
        check_gather(kernels, pack)

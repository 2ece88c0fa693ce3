"""The checks that look for mutants: by family and name, for kernels of either engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptxsim import attention_cases, embedding_cases, flash_cases, vision_cases
from tests.ptxsim.attention_cases import Case
from tests.ptxsim.embedding_cases import Pack, check_forward
from tests.ptxsim.flash_cases import check_flash, check_neighbours
from tests.ptxsim.ptxtypes import SimError
from tests.ptxsim.vision_cases import check_tiled

Check = Callable[[Any, np.random.Generator], Any]
DIM = 80


def _flash(lengths: list[int], heads: int = 1, kv_heads: int = 1, **more: Any) -> Check:
    return lambda k, r: check_flash(k, Case(r, list(lengths), heads, kv_heads, DIM, **more))


def _forward(lengths: list[int], heads: int = 1, kv_heads: int = 1, **more: Any) -> Check:
    return lambda k, r: check_flash(k, Case(r, list(lengths), heads, kv_heads, DIM, **more), False)


def _bad_index(kernels: Any, rng: np.random.Generator) -> None:
    """A row that visual does not have is named, and not read."""
    pack = Pack(rng, 10, 16, "float32", share=1.0)
    pack.index[4] = pack.visual_rows
    try:
        check_forward(kernels, pack)
    except SimError as error:
        assert f"visual_index[4] is {pack.visual_rows}" in str(error), error
    else:
        raise AssertionError("a bad index is taken")


#: Of the forward for sm_90a. The GPU has 3 multiprocessors, the rings of keys and values 3 stages.
SM90_FORWARD: dict[str, Check] = {
    "ragged": _forward([150]),
    "rounds": _forward([500, 130], 2, 2),
    "many rounds": _forward([900, 130], 2, 2),
    "one": _forward([70]),
    "two": _forward([256]),
    "causal": _forward([200], causal=True),
    "idle": _forward([30] * 10),
    "one query": _forward([65]),
    "two and a bit": _forward([270]),
    "negative": _forward([70] * 4, scale=-0.3),
    "groups": _forward([30], 4, 2),
    "low": _forward([40], 4, 2, scale=0.12, shift=4.0),
    "neighbours": lambda k, r: check_neighbours(k, r, DIM),
}
#: Of the backward for sm_90a, whose rings have 4 stages of 64 rows.
SM90_BACKWARD: dict[str, Check] = {
    "one": _flash([70]),
    "tiles": _flash([150]),
    "rounds": _flash([260, 65], 1, 1),
    "causal": _flash([200], causal=True),
    "idle": _flash([30] * 5),
    "negative": _flash([40], scale=-0.3),
    "groups": _flash([30], 4, 2),
    "idle groups": _flash([20], 8, 1),
    "causal groups": _flash([140], 2, 1, causal=True),
    "causal rounds": _flash([130] * 2, 2, 1, causal=True),
    "low": _flash([40], 4, 2, scale=0.12, shift=4.0),
    "neighbours": lambda k, r: check_neighbours(k, r, DIM, backward=True),
}
SM80: dict[str, Check] = {
    "ragged": _flash([150]),
    "two segments": _flash([5, 131]),
    "empty segments": _flash([0, 5, 0]),
    "causal": _flash([140], causal=True, scale=-0.3),
    "group": _flash([30], 4, 2),
    "low": _flash([40], 4, 2, scale=0.12, shift=4.0),
}

CASES: dict[str, dict[str, Check]] = {
    "window": attention_cases.small_suite(),
    "window-vision": vision_cases.small_suite(),
    "sm80": SM80 | flash_cases.small_suite(),
    "sm80-vision": {
        # Where half a row is no multiple of 16 bytes; built for the interpreter alone.
        "dim 72": lambda k, r: check_tiled(k, r, [3, 135], 1, 72),
        **vision_cases.tiled_suite(),
    },
    "sm90-forward": SM90_FORWARD | flash_cases.hopper_suite(),
    "sm90-backward": SM90_BACKWARD | flash_cases.hopper_grad_suite(),
    "sm90-vision": vision_cases.tiled_suite(queries=True),
    "embedding": {"bad index": _bad_index} | embedding_cases.small_suite(),
}

"""The checks that look for mutants: by family and name, for kernels of either engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tools.cudasim.ptx.ptxtypes import SimError

from .cases import embedding, layer, loss, tiled, vision, window
from .cases.embedding import Pack, check_add, check_forward
from .cases.tiled import check_flash
from .cases.vision import VisionCase, check_tiled
from .cases.window import Case, run_attention

Check = Callable[[Any, np.random.Generator], Any]
DIM = 80


def _flash(lengths: list[int], heads: int = 1, kv_heads: int = 1, **more: Any) -> Check:
    return lambda k, r: check_flash(k, Case(r, list(lengths), heads, kv_heads, DIM, **more))


def _forward(lengths: list[int], heads: int = 1, kv_heads: int = 1, **more: Any) -> Check:
    return lambda k, r: check_flash(k, Case(r, list(lengths), heads, kv_heads, DIM, **more), False)


def _refused(message: str, run: Callable[..., Any], *arguments: Any, **more: Any) -> None:
    try:
        run(*arguments, **more)
    except SimError as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"no error {message!r}")


def _bad_index(kernels: Any, rng: np.random.Generator) -> None:
    """A row that visual does not have is named, and not read."""
    pack = Pack(rng, 10, 16, "float32", share=1.0)
    pack.index[4] = pack.visual_rows
    _refused(f"visual_index[4] is {pack.visual_rows}", check_forward, kernels, pack)


def _bad_index_to_add(kernels: Any, rng: np.random.Generator) -> None:
    pack = Pack(rng, 10, 16, "float32", share=1.0)
    pack.index[9] = pack.visual_rows
    _refused(f"add_visual_: visual_index[9] is {pack.visual_rows}", check_add, kernels, pack)


def _gap(case: Callable[[np.random.Generator], Any], tiled: bool = False) -> Check:
    """Of segments [5, 6]: rows before the first or after the last would never be written."""

    def check(kernels: Any, rng: np.random.Generator) -> None:
        for offsets, place in (
            ([2, 5, 11], "0 is tokens 2 to 5"),
            ([0, 5, 9], "1 is tokens 5 to 9"),
        ):
            broken = case(rng)
            broken.cu_seqlens = np.array(offsets, np.int32)
            _refused(f"segment {place} of 11,", run_attention, kernels, broken, tiled=tiled)

    return check


def _stale(message: str, **more: Any) -> Check:
    """Lists of tiles of [0, 5, 11] are not taken for [0, 4, 11]."""

    def check(kernels: Any, rng: np.random.Generator) -> None:
        case = Case(rng, [5, 6], 1, 1, DIM, written=np.array([0, 4, 11], np.int32), **more)
        _refused(message, run_attention, kernels, case, tiled=True)

    return check


_GAP = _gap(lambda r: Case(r, [5, 6], 1, 1, DIM))
_VISION_GAP = _gap(lambda r: VisionCase(r, [5, 6], 1, DIM))
_TILED_GAP = _gap(lambda r: Case(r, [5, 6], 1, 1, DIM), tiled=True)


#: Of the forward for sm_90a. The GPU has 3 multiprocessors, the rings of keys and values 4 stages.
SM90_FORWARD: dict[str, Check] = {
    "rounds": _forward([500, 130], 2, 2),
    "many rounds": _forward([900, 130], 2, 2),
    "one": _forward([70]),
    "two": _forward([256]),
    "causal": _forward([200], causal=True),
    "idle": _forward([30] * 10),
    "one query": _forward([65]),
    "two and a bit": _forward([270]),
    "negative": _forward([70] * 4, scale=-0.3),
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
    "parts": _flash([20, 130], 6, 2, scale=-0.3, parts=2),
    "causal parts": _flash([140], 2, 1, causal=True, parts=2),
}
#: Of the backward of one kernel.
SM90_FUSED: dict[str, Check] = {
    "one": _flash([70], fused=True),
    "tiles": _flash([150], fused=True),
    "many tiles": _flash([270], fused=True),
    "rounds": _flash([150, 65], fused=True),
    "causal": _flash([200], causal=True, fused=True),
    "groups": _flash([30], 4, 2, fused=True),
    "causal groups": _flash([140], 2, 1, causal=True, fused=True),
    "negative": _flash([40], scale=-0.3, fused=True),
    "idle": _flash([30] * 5, fused=True),
    "stale": _stale("trap", fused=True),
}
SM80: dict[str, Check] = {
    "ragged": _flash([150]),
    "two segments": _flash([5, 131]),
    "empty segments": _flash([0, 5, 0]),
    "causal": _flash([140], causal=True, scale=-0.3),
}

CASES: dict[str, dict[str, Check]] = {
    "window": {"gap": _GAP} | window.small_suite(),
    "window-vision": {"gap": _VISION_GAP} | vision.small_suite(),
    "sm80": {"gap": _TILED_GAP, "stale": _stale("written to where torch does not count")}
    | SM80
    | tiled.small_suite(),
    "sm80-vision": {
        # Where half a row is no multiple of 16 bytes; built for the interpreter alone.
        "dim 72": lambda k, r: check_tiled(k, r, [3, 135], 1, 72),
        **vision.tiled_suite(),
    },
    "sm90-forward": {"stale": _stale("trap")} | SM90_FORWARD | tiled.sm90_suite(),
    "sm90-backward": SM90_BACKWARD | tiled.sm90_grad_suite(),
    "sm90-fused": SM90_FUSED | tiled.sm90_grad_suite(fused=True),
    "sm90-vision": vision.tiled_suite(queries=True)
    | {
        "one backward kernel": lambda k, r: check_tiled(
            k, r, [70], 1, DIM, queries=True, fused=True
        )
    },
    "embedding": {"bad index": _bad_index, "bad index to add": _bad_index_to_add}
    | embedding.small_suite(),
    "loss": loss.small_suite(),
    "layer": layer.small_suite(),
}

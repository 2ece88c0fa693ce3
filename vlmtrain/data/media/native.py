"""vlmkernels' native resize for processes without torch.

A decoder is a small process, and there are many: importing torch, as the package vlmkernels does,
would cost each some seconds and hundreds of megabytes. The native module itself needs none of it.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from importlib.machinery import PathFinder
from typing import Any

import numpy as np
import PIL


@functools.lru_cache
def native() -> Any:
    """The module `vlmkernels._C`, with torch only where torch is there anyway."""
    package = importlib.util.find_spec("vlmkernels")
    if "torch" not in sys.modules and package is not None:
        spec = PathFinder.find_spec("vlmkernels._C", package.submodule_search_locations)
        if spec is not None and spec.loader is not None:
            try:
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                return module
            except ImportError:  # a system without libgomp: torch brings one
                pass
    from vlmkernels._native import _C

    return _C


def resize(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bicubic, bit for bit as the installed Pillow does it (see `vlmkernels.resize`).

    Args:
        pixels: uint8 [H, W, 3], or [H, W, 4], whose fourth byte is not looked at.

    Returns:
        uint8 [height, width, 3].
    """
    pixels = np.ascontiguousarray(pixels)
    out = np.empty((height, width, 3), dtype=np.uint8)
    major, minor = map(int, PIL.__version__.split(".")[:2])
    pillow = 100 * major + minor
    native().resize(pixels.ctypes.data, out.ctypes.data, 1, *pixels.shape, height, width, pillow, 1)
    return out

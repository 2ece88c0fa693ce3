"""What the cases ask of a build of kernels, whichever engine runs it."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol


class Kernels(Protocol):
    """Launchers, and a fresh device with `memory` and `call` for each case."""

    def device(self) -> Any: ...

    def run(self, device: Any, launcher: str, params: ctypes.Structure) -> int:
        """Calls a launcher, "forward" or the like; its cudaError_t. Raises SimError."""
        ...

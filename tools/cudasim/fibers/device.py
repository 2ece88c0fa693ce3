"""The emulated GPU in the interpreter's form: memory, a launch, an error."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np

from ..ptx.ptxtypes import Array, SimError
from .build import Library


class Memory:
    """Device memory of one Device: names for addresses, as for the interpreter."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._buffers: dict[str, tuple[int, Any, tuple[int, ...]]] = {}
        library.handle.emu_free_all()

    def reserve(self, name: str, shape: tuple[int, ...], dtype: Any, misalign: int = 0) -> int:
        """An allocation that nothing has written yet, `misalign` bytes off a multiple of 256."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        address = self._library.handle.emu_allocate(name.encode(), size, misalign)
        if not address:
            raise SimError(f"no room for the {size} bytes of '{name}'")
        self._buffers[name] = (address, np.dtype(dtype), shape)
        return address

    def upload(self, name: str, array: Array, misalign: int = 0) -> int:
        """An allocation that holds a copy of `array`."""
        address = self.reserve(name, array.shape, array.dtype, misalign)
        dense = np.ascontiguousarray(array)
        self._library.handle.emu_upload(address, dense.ctypes.data, dense.nbytes)
        return address

    def array(self, name: str) -> Array:
        """A copy of a buffer; an error where a byte of it was never written."""
        address, dtype, shape = self._buffers[name]
        first = self._library.handle.emu_unwritten(address)
        if first >= 0:
            raise SimError(
                f"bytes of '{name}' were never written, the first in element "
                f"{first // dtype.itemsize}"
            )
        size = int(np.prod(shape)) * dtype.itemsize
        return np.frombuffer(ctypes.string_at(address, size), dtype).reshape(shape)


class Device:
    """One emulated GPU in the process; making another frees its memory."""

    def __init__(self, library: Library, seed: int, mutant: int = 0, capability: int = 80) -> None:
        self.memory = Memory(library)
        self._library, self._seed, self._mutant = library, seed, mutant
        self._capability = capability

    def call(self, launcher: Any, *arguments: Any) -> int:
        """Calls a host launcher; its cudaError_t, or SimError with what a kernel did wrong."""
        handle = self._library.handle
        handle.emu_begin(self._seed, self._mutant)
        handle.emu_capability(self._capability)
        code = int(launcher(*arguments))
        if error := handle.emu_error().decode():
            at = re.search(r", at \+(0x[0-9a-f]+)\)$", error)
            if at:
                line = self._library.line(at[1])
                error = error[: at.start()] + (f", {line})" if line else ")")
            raise SimError(error)
        return code

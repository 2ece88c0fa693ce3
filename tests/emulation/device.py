"""The emulated GPU as the cases of tests/ptxsim use one: memory, a launch, an error."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.ptxsim.ptxtypes import Array, SimError

from .build import Library


class Memory:
    """Device memory of one Device: names for addresses, as ptxsim's GlobalMemory has them."""

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


@dataclass
class EmulatedKernels:
    """What ptxsim's Kernels and WindowKernels are to the cases, on a library of build.py."""

    library: Library
    rng: np.random.Generator  # of the schedule
    mutant: int = 0
    prefix: str = ""  # of the launchers' names
    capability: int = 80  # of the GPU

    def device(self) -> Device:
        seed = int(self.rng.integers(1 << 62))
        return Device(self.library, seed, self.mutant, self.capability)

    def launch(self, device: Device, launcher: str, params: ctypes.Structure) -> int:
        function = self.library.function(f"{self.prefix}_{launcher}_cuda")
        return device.call(function, ctypes.byref(params), ctypes.c_void_p(None))


class EmbeddingKernels(EmulatedKernels):
    def run(self, device: Device, launcher: str, params: ctypes.Structure) -> None:
        code = self.launch(device, launcher, params)
        assert code == 0, f"{launcher} returned cudaError_t {code}"


class WindowKernels(EmulatedKernels):
    def run(self, device: Device, launcher: str, params: ctypes.Structure) -> int:
        return self.launch(device, launcher, params)


#: The launchers of a family of mutants and the GPU that they run on.
FAMILIES = {
    "window": ("window_attention", 80),
    "window-vision": ("vision_window", 80),
    "sm80": ("flash_mma", 80),
    "sm80-vision": ("flash_vision_mma", 80),
    "sm90-forward": ("flash_hopper", 90),
    "sm90-backward": ("flash_hopper", 90),
    "sm90-vision": ("flash_vision_hopper", 90),
    "embedding": ("embedding", 80),
}


def kernels_of(
    library: Library, rng: np.random.Generator, family: str, mutant: int = 0
) -> EmulatedKernels:
    """What the cases of a family run; `mutant` is the number of the one that is on."""
    kind = EmbeddingKernels if family == "embedding" else WindowKernels
    prefix, capability = FAMILIES[family]
    return kind(library, rng, mutant, prefix, capability)

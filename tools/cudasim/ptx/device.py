"""The fake GPU: routes every launch of a host library to the interpreter."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np

from . import access, arithmetic, bulk, hopper, matrix  # noqa: F401  they register the instructions
from .machine import launch
from .memory import GlobalMemory
from .parser import Module, parse_ptx
from .ptxtypes import SimError

_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_void_p),
)


class Device:
    """One fake GPU in the process: the kernels of one PTX text and fresh memory.

    `call` runs a host launcher. What a kernel does wrong comes back as SimError.
    """

    def __init__(
        self, runtime: Path, ptx: str | Module, memory_bytes: int = 4 << 20, number: int = 0
    ) -> None:
        self.number = number  # of the two that the fake runtime has: 3 and 5 multiprocessors
        self.module = parse_ptx(ptx) if isinstance(ptx, str) else ptx
        self.memory = GlobalMemory(memory_bytes)
        self.printed: list[str] = []
        self.launches: list[tuple[str, tuple[int, ...]]] = []  # kernel, grid and block
        self.streams: list[int | None] = []  # of the launches
        self.steps = 0
        self._error: Exception | None = None
        self._symbols = {
            name: self.memory.upload(name, np.frombuffer(variable.init, np.uint8))
            for name, variable in self.module.globals.items()
        }
        # The launchers need a library of this name: the loader takes the one that is there.
        self._runtime = ctypes.CDLL(str(runtime))
        self._runtime.fakecuda_launch_stream.restype = ctypes.c_void_p
        self._callback = _Callback(self._launched)

    def call(self, launcher: Any, *arguments: Any) -> int:
        """Calls a host launcher; returns its cudaError_t, or raises what a kernel did wrong."""
        self._runtime.fakecuda_set_callback(self._callback)
        capability = re.match(r"sm_(\d+)(\d)", self.module.target)
        assert capability is not None
        self._runtime.fakecuda_set_capability(*(int(n) for n in capability.groups()))
        self._runtime.fakecuda_set_device(self.number)
        self._error = None
        try:
            code = int(launcher(*arguments))
        finally:
            self._runtime.fakecuda_set_callback(_Callback(0))
        if self._error is not None:
            raise self._error
        return code

    def _launched(self, name: bytes, dims: Any, shared: int, arguments: Any) -> int:
        try:
            self._run(name.decode(), tuple(dims[i] for i in range(6)), shared, arguments)
        except Exception as error:  # of the interpreter itself too: ctypes would swallow it
            self._error = self._error or error
            return 1
        return 0

    def _run(self, name: str, dims: tuple[int, ...], shared: int, arguments: Any) -> None:
        if name not in self.module.kernels:
            raise SimError(f"launch of {name}, which the PTX does not have")
        kernel = self.module.kernels[name]
        parameters = bytearray(kernel.parameter_bytes)
        for i, parameter in enumerate(kernel.parameters):
            value = ctypes.string_at(arguments[i], parameter.size)
            parameters[parameter.offset : parameter.offset + parameter.size] = value
        self.launches.append((name, dims))
        self.streams.append(self._runtime.fakecuda_launch_stream())
        grid, block = (dims[0], dims[1], dims[2]), (dims[3], dims[4], dims[5])
        self.steps += launch(
            kernel,
            self.memory,
            self._symbols,
            bytes(parameters),
            grid,
            block,
            self.printed,
            shared,
        )

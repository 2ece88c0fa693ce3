"""A GPU made of numpy: runs the PTX that nvcc wrote, behind the project's own host launchers.

See README.md in this folder for what it proves and what it does not.
"""

from __future__ import annotations

from .device import Device
from .memory import GlobalMemory
from .parser import parse_ptx
from .ptxtypes import SimError

__all__ = ["Device", "GlobalMemory", "SimError", "parse_ptx"]

"""AMX refused to this process and to all that it starts: what a processor without it would do.

A program must ask Linux for the tile registers (arch_prctl, ARCH_REQ_XCOMP_PERM). A seccomp filter
answers EPERM, so that our kernels, oneDNN and MKL all take AVX-512.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

# linux/prctl.h, linux/seccomp.h, linux/audit.h, asm/unistd_64.h, asm/prctl.h
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW = 0x00050000, 0x7FFF0000
AUDIT_ARCH_X86_64, ARCH_PRCTL, ARCH_REQ_XCOMP_PERM = 0xC000003E, 158, 0x1023
# linux/bpf_common.h: a word of seccomp_data, a jump where it is equal, the end
LOAD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in seccomp_data


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def refuse_amx() -> None:
    """Cannot be taken back, and comes too late where AMX has been asked for.

    Raises OSError where Linux takes no filter, RuntimeError on other systems and processors.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise RuntimeError(f"no AMX to refuse on {platform.system()} {platform.machine()}")
    instructions = (
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 0, 5, AUDIT_ARCH_X86_64),
        (LOAD, 0, 0, NUMBER),
        (JUMP_EQUAL, 0, 3, ARCH_PRCTL),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (JUMP_EQUAL, 0, 1, ARCH_REQ_XCOMP_PERM),
        (RETURN, 0, 0, SECCOMP_RET_ERRNO | errno.EPERM),
        (RETURN, 0, 0, SECCOMP_RET_ALLOW),
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *i) for i in instructions))
    program = _Program(len(instructions), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*call) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"Linux takes no seccomp filter ({os.strerror(number)})")

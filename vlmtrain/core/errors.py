"""The errors a user can cause and fix."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys


class UserError(Exception):
    """Bad input: the message is one sentence that names what was read, what it held, what to do.

    The command line prints it without a traceback and exits with 1.
    """

    print_here = True  # False on the ranks that raise what another rank prints


def said_by_system(error: OSError) -> str | None:
    """The sentence about a file that may not be opened, or about standard output that can't be
    written and leads nowhere from then on; None of another error."""
    if isinstance(error, PermissionError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return None
    try:
        print(flush=True)  # a flush alone would not fail again: what failed is not kept
    except OSError as output:
        discard_output()
        return f"standard output can't be written: {output.strerror}"
    return None


def discard_output() -> None:
    """Standard output leads nowhere from now on."""
    with contextlib.suppress(io.UnsupportedOperation):  # a stream without a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def shown(names: list[str], most: int = 6, others: str = "") -> str:
    """The first `most` names, and how many more there are; `others`: where those are named."""
    more = f" and {len(names) - most} more{others}" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class UsageError(UserError):
    """Options that can't be understood: the command line exits with 2."""

"""The errors a user can cause and fix."""

from __future__ import annotations


class UserError(Exception):
    """Bad input: the message is one sentence that names what was read, what it held, what to do.

    The command line prints it without a traceback and exits with 1.
    """

    print_here = True  # False on the ranks that raise what another rank prints


class UsageError(UserError):
    """Options that can't be understood: the command line exits with 2."""

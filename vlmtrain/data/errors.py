"""The one error type of the data package."""

from __future__ import annotations

from vlmtrain.errors import UserError


class DataError(UserError):
    """Bad training data: the message names the file, the sample where there is one, and the fix."""

"""The one error type of the data package."""

from __future__ import annotations

from typing import Literal

from vlmtrain.core.errors import UserError

#: unreadable: a media file is missing, broken or refused; marks: text and media do not match;
#: too_long: more tokens than a pack holds; format: anything else that is wrong with a record.
Kind = Literal["unreadable", "marks", "too_long", "format"]


class DataError(UserError):
    """Bad training data: the message names the file, the sample where there is one, and the fix."""

    kind: Kind = "format"
    sample_id: str | None = None
    whole_source = False  # nothing of the source can be read: no policy skips that

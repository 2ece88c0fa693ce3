"""What one training sample is, whatever file format it came from."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vlmtrain.core.spec import MediaKind
from vlmtrain.data.errors import DataError, Kind

Role = Literal["system", "user", "assistant", "tool"]

# The marks that stand for media inside a turn's text; each is replaced where it stands.
MARKS: dict[str, MediaKind] = {"<image>": "image", "<video>": "video"}
REF_MARK, BOX_MARK = "<ref-object>", "<bbox>"  # and these for names and boxes of objects
MARK_PATTERN = re.compile("(" + "|".join(re.escape(mark) for mark in MARKS) + ")")


@dataclass(frozen=True)
class FileRange:
    """Bytes of a file: all of it, or `size` bytes from `offset` (a member of a tar).

    Where a record brings the bytes itself (a parquet column), `data` holds them and `path` only
    names them.
    """

    path: str
    offset: int = 0
    size: int | None = None
    data: bytes | None = field(default=None, compare=False, repr=False)

    def read(self) -> bytes:
        """Raises OSError when the file is missing or shorter than the range."""
        if self.data is not None:
            return self.data
        if not stat.S_ISREG(os.stat(self.path).st_mode):  # a pipe would block, a device never end
            raise OSError(f"{self.path} is not a file")
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            data = file.read() if self.size is None else file.read(self.size)
        if self.size is not None and len(data) != self.size:
            raise OSError(f"{self.path} ends before byte {self.offset + self.size}")
        return data


@dataclass(frozen=True)
class MediaInfo:
    """What must be known of a medium to lay out its tokens, before any pixel is needed."""

    width: int  # pixels, after EXIF orientation
    height: int
    frames: int = 1  # in the file, before sampling
    fps: float | None = None  # of the file; for a list of frames, the rate they were taken at


@dataclass(frozen=True)
class Media:
    """One image or one video of a sample."""

    kind: MediaKind
    name: str  # as the user wrote it; for messages
    parts: tuple[FileRange, ...]  # one file, or the frames of a video in order
    frame_list: bool = False  # a video given as images, one per frame: all frames are used
    fps: float | None = None  # frame_list: the rate the frames were taken at, if given
    info: MediaInfo | None = None  # known already (shards hold it), else None

    @property
    def key(self) -> tuple[object, ...]:
        """What makes two media the same pixels; small, whatever the media hold."""
        parts = tuple((part.path, part.offset, part.size) for part in self.parts)
        return self.kind, parts, self.frame_list, self.fps


@dataclass(frozen=True)
class Turn:
    role: Role
    text: str  # with <image> and <video> marks
    weight: float = 1.0  # an assistant's: the factor of its tokens' loss; 0: they are not learned
    calls: tuple[dict[str, Any], ...] = ()  # an assistant's: of tools, as chat templates take them


@dataclass(frozen=True)
class Box:
    """A point (x, y) or a box (x1, y1, x2, y2) on an image."""

    corners: tuple[float, ...]
    image: int = 0  # which of the sample's images
    relative: bool = False  # parts of its width and height; else pixels of the upright file


@dataclass(frozen=True)
class Objects:
    """What stands for the <ref-object> and <bbox> marks of a sample, in order."""

    names: tuple[str, ...] = ()
    boxes: tuple[Box, ...] = ()


@dataclass(frozen=True)
class Sample:
    """A conversation, or a text to learn: then its only turn is the assistant's. `media` is in the
    order of the marks in the turns."""

    id: str
    turns: tuple[Turn, ...]
    media: tuple[Media, ...]
    source: str  # the file it was read from; for messages
    tools: tuple[dict[str, Any], ...] = ()  # that the assistant may call
    objects: Objects | None = None

    def with_infos(self, infos: Sequence[MediaInfo]) -> Sample:
        """The same sample whose media carry what is known of them."""
        pairs = zip(self.media, infos, strict=True)
        return replace(self, media=tuple(replace(media, info=info) for media, info in pairs))

    def fail(self, problem: str, kind: Kind = "format") -> DataError:
        """The error to raise for this sample: `problem` says what is wrong and what to do."""
        error = DataError(f"{self.source}: sample {self.id!r}: {problem}")
        error.kind, error.sample_id = kind, self.id
        return error

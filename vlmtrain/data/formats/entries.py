"""Images and videos as records write them: paths, bytes, data URIs, folders and lists of frames."""

from __future__ import annotations

import base64
import binascii
import math
import os
import re
import zlib
from pathlib import Path
from typing import Any

from vlmtrain.data.formats.fields import Fields, RecordContext, is_empty
from vlmtrain.data.sample import FileRange, Media, MediaKind

VIDEO_SUFFIXES = {".mp4", ".mov", ".m4v", ".avi", ".mkv", ".webm", ".ts", ".flv", ".wmv", ".mpg"}
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".jfif"}
_LONGEST_PATH = 4096  # no system takes longer ones
_MAGIC = (  # of files that come as bytes alone
    (rb"\xff\xd8\xff", ".jpg"),
    (rb"\x89PNG", ".png"),
    (rb"GIF8", ".gif"),
    (rb"BM", ".bmp"),
    (rb"II\*\0|MM\0\*", ".tif"),
    (rb"RIFF....WEBP", ".webp"),
    (rb"RIFF....AVI ", ".avi"),
    (rb"....ftyp", ".mp4"),
    (rb"\x1a\x45\xdf\xa3", ".mkv"),
)


def listed_media(fields: Fields, kind: MediaKind) -> list[Media]:
    """The media under the singular and the plural key of a record."""
    media: list[Media] = []
    singular, plural = fields.take(kind), fields.take(f"{kind}s")
    if not is_empty(singular):
        if kind == "video" and _is_frames(singular):
            singular = [singular]  # one video, written as its frames
        for entry in singular if isinstance(singular, list) else [singular]:
            media.append(one_medium(kind, entry, fields.context))
    if not is_empty(plural):
        for entry in plural if isinstance(plural, list) else [plural]:
            media.append(one_medium(kind, entry, fields.context))
    return media


def one_medium(kind: MediaKind, entry: Any, context: RecordContext) -> Media:
    """One image or video. Raises DataError for what is none, naming the sample."""
    fps = None
    if isinstance(entry, FileRange):  # a member of a tar
        return Media(kind, f"{Path(entry.path).name} at {entry.offset}", (entry,))
    if isinstance(entry, bytes):
        entry = ("", entry)
    if isinstance(entry, dict):
        fields = context.fields(entry, f"its {kind}")
        entry = from_part(kind, fields)
        if kind == "video":
            fps = _rate(fields)
        fields.finish()
    if isinstance(entry, tuple):  # a name and bytes
        name, data = entry
        return _brought(kind, name, data, context)
    if kind == "video" and isinstance(entry, list):
        return _frames(entry, fps, context)
    if not isinstance(entry, str) or not entry:
        what = "a file path" if kind == "image" else "a file, a folder or a list of frames"
        raise context.fail(f"{_article(kind)} must be {what}, got {str(entry)[:80]!r}")
    if entry.startswith("data:"):
        return _brought(kind, "", _decoded(entry, kind, context), context)
    file = _file(entry, context)
    if kind == "video" and os.path.isdir(file.path):
        return _folder(entry, fps, context)
    if fps is not None:
        raise context.fail(
            f"fps {fps:g} was given for the video file {entry}, which has its own; it is for "
            "frames only. How many frames a second are taken --media.fps says"
        )
    return Media(kind, entry, (file,))


def from_part(kind: MediaKind, fields: Fields) -> Any:
    """What an object says of its medium: a path, a list of frames, (name, bytes), or None."""
    names = [kind, f"{kind}_url", "url", "value", *(["frames"] if kind == "video" else [])]
    entry, path, data = fields.take(*names), fields.take("path"), fields.take("bytes")
    if isinstance(entry, dict):
        inner = fields.context.fields(entry, f"its {kind}")
        entry = from_part(kind, inner)
        inner.finish()
    if isinstance(entry, bytes):
        data, entry = entry, None
    if not isinstance(data, (bytes, type(None))):
        raise fields.context.fail(f"{fields.what} has 'bytes' that are none: {str(data)[:80]!r}")
    if data is not None:  # the record brings the file: its path is only a name
        return path or entry or "", data
    if entry is not None and path is not None:
        raise fields.context.fail(f"{fields.what} has two files, {entry!r} and {path!r}; keep one")
    return path if entry is None else entry


def _rate(fields: Fields) -> float | None:
    fps = fields.take("fps", "sample_fps")
    try:
        value = None if fps is None else float(fps)
    except (TypeError, ValueError):
        value = 0.0
    if value is not None and (isinstance(fps, bool) or not 0 < value < math.inf):
        raise fields.context.fail(f"a video's fps must be a number above 0, got {fps!r}")
    return value


def _brought(kind: MediaKind, name: str, data: bytes, context: RecordContext) -> Media:
    """A medium whose bytes stand in the record."""
    if not Path(name).suffix:
        name = f"{name or kind}{suffix_of(data)}"
    where = f"{context.bare.source}#{context.bare.id}/{zlib.crc32(data):08x}/{Path(name).name}"
    return Media(kind, name, (FileRange(where, 0, len(data), data),))


def suffix_of(data: bytes) -> str:
    """By the first bytes of a file; .bin where they say nothing."""
    return next((end for start, end in _MAGIC if re.match(start, data, re.DOTALL)), ".bin")


def _decoded(uri: str, kind: MediaKind, context: RecordContext) -> bytes:
    """The bytes of a data URI."""
    head, comma, body = uri.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError("it must begin with data:TYPE;base64,")
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise context.fail(
            f"{_article(kind)} is the data URI {uri[:40]}... that cannot be decoded: {error}"
        ) from None


def _folder(entry: str, fps: float | None, context: RecordContext) -> Media:
    """A video as a folder of frames, 2 before 10, hidden files left out."""
    entry = entry.removeprefix("file://")
    names = [
        path.name
        for path in (context.root / entry).iterdir()
        if path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")
    ]
    if not names:
        raise context.fail(f"the video folder {entry} holds no images")
    parts = tuple(
        _file(str(Path(entry) / name), context) for name in sorted(names, key=natural_order)
    )
    return Media("video", entry, parts, frame_list=True, fps=fps)


def _frames(entry: list[Any], fps: float | None, context: RecordContext) -> Media:
    if not entry or not all(isinstance(item, str) for item in entry):
        raise context.fail(
            f"a video must be a file, a folder or a list of frames, got {str(entry)[:80]!r}"
        )
    for item in entry:
        if Path(item).suffix.lower() in VIDEO_SUFFIXES:
            raise context.fail(
                f"{item} stands where a video's frames are listed; write a video file as its path, "
                "without a list of its own"
            )
    parts = tuple(_file(frame, context) for frame in entry)
    name = f"{entry[0]} ... ({len(entry)} frames)"
    return Media("video", name, parts, frame_list=True, fps=fps)


def natural_order(name: str) -> tuple[list[tuple[int, str]], str]:
    """Runs of digits as numbers: 2 before 10."""
    pieces = re.findall(r"\d+|\D+", name)
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in pieces], name


def _is_frames(value: Any) -> bool:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        return False
    suffixes = [Path(item).suffix.lower() for item in value]
    # An animation is a video of its own; {"frames": [...]} says where it is a frame.
    return ".gif" not in suffixes and all(suffix in IMAGE_SUFFIXES for suffix in suffixes)


def _file(entry: str, context: RecordContext) -> FileRange:
    if len(entry) > _LONGEST_PATH:
        raise context.fail(
            f"{entry[:40]}... is no file path but {len(entry)} characters of content; write it to "
            "a file and give the file's path, or give a data URI (data:image/png;base64,...)"
        )
    if "://" in entry and not entry.startswith("file://"):
        raise context.fail(f"{entry} is a URL; download it (wget) and give the file's path")
    if "\0" in context.text(entry, "a file path"):
        raise context.fail(f"the file path {entry!r} holds a zero byte")
    path = str(context.root / entry.removeprefix("file://"))
    if "\\" in entry and os.sep == "/" and not os.path.exists(path):
        raise context.fail(
            f"the file path {entry} is written with backslashes, as on Windows; write "
            f"{entry.replace(chr(92), '/')}"
        )
    return FileRange(path)


def _article(kind: MediaKind) -> str:
    return "an image" if kind == "image" else "a video"

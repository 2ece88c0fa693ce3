"""Reads ShareGPT, LLaVA and alpaca files (JSON and JSONL) into `Sample`s.

A record holds `conversations` (from/value), `messages` (role/content) or alpaca's `instruction`,
`input`, `output`, `history` and `system`, and its media in `image`, `images`, `video` or
`videos`. Each `<image>` or `<video>` mark in the text, wherever it stands, takes the next image or
video of the record; the text around a mark is kept to the letter.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmtrain.data.errors import DataError
from vlmtrain.data.sample import (
    MARK_PATTERN,
    MARKS,
    FileRange,
    Media,
    MediaKind,
    Role,
    Sample,
    Turn,
)

ROLES: dict[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
# What other trainers let a sample say about its media; here a model's settings hold for all.
_SETTINGS = (
    *("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width"),
    *("nframes", "min_frames", "max_frames", "video_start", "video_end"),
)
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".jfif"}


@dataclass(frozen=True)
class Record:
    """Where one record lies in its source file, and its bytes."""

    number: int  # counted from 0
    offset: int  # bytes from the start of the file
    data: bytes


class JsonSource:
    """A conversation file whose records are found once and read again by byte offset.

    Args:
        path: a .json file holding a list of records, or a file with one record a line.
        media_root: folder that relative media paths start from; default: the file's own folder.
    """

    def __init__(self, path: str | Path, media_root: str | Path | None = None) -> None:
        self.path = str(path)
        self.media_root = Path(media_root) if media_root is not None else Path(path).parent

    def records(self) -> Iterator[Record | DataError]:
        """Every record in file order; a bad line comes as an error in its place.

        Raises:
            DataError: the file is missing, empty, not UTF-8, or not JSON as a whole.
        """
        data = _read(self.path)
        start = 3 if data.startswith(b"\xef\xbb\xbf") else 0  # a byte order mark
        first = data[start:].lstrip()[:1]
        if not first:
            raise DataError(f"{self.path}: the file is empty; it must hold at least one sample")
        any_record = False
        for record in self._array(data, start) if first == b"[" else self._lines(data, start):
            any_record = True
            yield record
        if not any_record:
            raise DataError(f"{self.path}: the list is empty; it must hold at least one sample")

    def read(self, number: int, offset: int, size: int) -> Record:
        """One record again. Raises OSError."""
        with open(self.path, "rb") as file:
            file.seek(offset)
            return Record(number, offset, file.read(size))

    def measured(self, record: Record, fingerprint: str) -> None:
        """Conversation files do not hold what their samples become."""

    def parse(self, record: Record) -> Sample:
        """The sample of one record. Raises DataError as `parse_record`."""
        return parse_record(
            _loads(record.data, self.path, record.number), self.path, record.number, self.media_root
        )

    def _array(self, data: bytes, start: int) -> Iterator[Record]:
        text = _decode(data[start:], self.path)
        ascii_only = len(text) == len(data) - start
        decoder = json.JSONDecoder()
        position = text.index("[") + 1
        at_char, at_byte = 0, start  # the same place, in characters and in bytes
        number = 0
        while True:
            position = _skip_space(text, position)
            if text[position : position + 1] == "]":
                break
            try:
                _, end = decoder.raw_decode(text, position)
            except json.JSONDecodeError as error:
                raise self._not_json(error, number) from None
            except RecursionError:
                raise DataError(f"{self.path}: record {number} is nested too deeply") from None
            if ascii_only:
                offset, size = start + position, end - position
            else:
                offset = at_byte + len(text[at_char:position].encode())
                size = len(text[position:end].encode())
                at_char, at_byte = end, offset + size
            yield Record(number, offset, data[offset : offset + size])
            number += 1
            position = _skip_space(text, end)
            delimiter = text[position : position + 1]
            if delimiter == ",":
                position += 1
            elif delimiter != "]":
                line = text.count("\n", 0, position) + 1
                raise DataError(
                    f"{self.path}: not valid JSON at line {line}: expected ',' or ']' after "
                    f"record {number - 1}; is the file cut short?"
                )
        if text[position + 1 :].strip():
            raise DataError(f"{self.path}: there is text after the closing ']' of the list")

    def _lines(self, data: bytes, start: int) -> Iterator[Record | DataError]:
        # A whole-file object is the likeliest other mistake: say so instead of "line 1 is bad".
        if start == 0 and data.lstrip()[:1] == b"{" and _is_one_object(data):
            value = json.loads(data)
            if not {"conversations", "messages", "instruction"} & value.keys():
                raise DataError(
                    f"{self.path}: the file holds one object with keys {sorted(value)[:5]}; it "
                    "must be a list of samples, or one sample a line"
                )
            yield Record(0, len(data) - len(data.lstrip()), data.strip())
            return
        offset, number = start, 0
        for line_number, line in enumerate(data[start:].split(b"\n"), 1):
            stripped = line.strip()
            if stripped:
                try:
                    json.loads(stripped)
                except (ValueError, RecursionError) as error:
                    yield DataError(
                        f"{self.path}: line {line_number} is not valid JSON ({error}); a JSONL "
                        "file holds one sample a line"
                    )
                else:
                    yield Record(number, offset + line.index(stripped), stripped)
                number += 1
            offset += len(line) + 1

    def _not_json(self, error: json.JSONDecodeError, number: int) -> DataError:
        return DataError(
            f"{self.path}: not valid JSON at line {error.lineno}, column {error.colno} (record "
            f"{number}): {error.msg}; is the file cut short?"
        )


def parse_record(
    record: Any, source: str, number: int, media_root: Path, *, question: bool = False
) -> Sample:
    """Read one record of a ShareGPT / LLaVA file.

    Args:
        record: the parsed JSON value.
        source: the file's path, for messages.
        number: the record's place in the file, used as its id when it has none.
        media_root: folder that relative media paths start from.
        question: the record waits for an answer: its last turn must be the human's, and an
            assistant's turn is not needed.

    Raises:
        DataError: no turns, an unknown role, marks that do not match the media, no assistant turn.
    """
    if not isinstance(record, dict):
        raise DataError(
            f"{source}: record {number} is a {type(record).__name__}; it must be an object with "
            "'conversations' or 'messages'"
        )
    identity = record.get("id")
    sample_id = str(identity) if identity not in (None, "") else f"{Path(source).name}:{number}"
    sample_id = sample_id.encode("utf-8", "backslashreplace").decode()
    bare = Sample(sample_id, (), (), source)
    turns, embedded = _turns(record, bare, question)
    pools: dict[MediaKind, list[Media]] = {
        "image": listed_media(record, "image", media_root, bare),
        "video": listed_media(record, "video", media_root, bare),
    }
    for kind, entry in embedded:
        pools[kind].extend(_media(kind, entry, media_root, bare))
    return Sample(sample_id, turns, _match(turns, pools, bare), source)


def _turns(
    record: dict[str, Any], bare: Sample, question: bool
) -> tuple[tuple[Turn, ...], list[Any]]:
    """The turns, and the media written inside the turns as (kind, entry) pairs."""
    for key in ("conversations", "messages"):
        if record.get(key) is not None:
            raw = record[key]
            break
    else:
        if record.get("instruction") is None:
            raise bare.fail(
                "it has no 'conversations' (from/value), 'messages' (role/content) or "
                "'instruction' and 'output'"
            )
        raw = _alpaca(record, bare)
    if record.get("tools") not in (None, "", "[]", []):
        raise bare.fail("it has 'tools', which are not supported; drop the sample")
    if not isinstance(raw, list) or not raw:
        raise bare.fail(f"'{key}' must be a list with at least one turn")
    turns: list[Turn] = []
    embedded: list[tuple[MediaKind, Any]] = []
    if isinstance(record.get("system"), str) and record["system"]:
        turns.append(Turn("system", _sound(record["system"], "'system'", bare)))
    for position, turn in enumerate(raw):
        if not isinstance(turn, dict):
            raise bare.fail(f"turn {position} is not an object")
        name = turn.get("from", turn.get("role"))
        role = ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            raise bare.fail(
                f"turn {position} has the unknown role {name!r}; use one of {', '.join(ROLES)}"
            )
        if role == "system" and turns:
            raise bare.fail(
                f"turn {position} is a second or late system prompt; only the first turn can be one"
            )
        content = turn.get("value", turn.get("content"))
        turns.append(Turn(role, _text(content, position, embedded, bare)))
    first = next((turn.role for turn in turns if turn.role != "system"), None)
    if first == "assistant":
        raise bare.fail("the first turn is the assistant's; begin with a human turn")
    if question and turns[-1].role != "user":
        raise bare.fail("its last turn is not a human's; end with the question to answer")
    if not question and not any(turn.role == "assistant" for turn in turns):
        raise bare.fail(
            "it has no assistant turn, so there is nothing to learn; add one or drop it"
        )
    return tuple(turns), embedded


def _alpaca(record: dict[str, Any], bare: Sample) -> list[dict[str, Any]]:
    """The turns of an alpaca record: history, instruction and input, output."""
    history = record.get("history") or []
    pairs = isinstance(history, list) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in history
    )
    if not pairs:
        raise bare.fail("'history' must be a list of [instruction, answer] pairs")
    for key in ("instruction", "input", "output"):
        if not isinstance(record.get(key), (str, type(None))):
            raise bare.fail(f"'{key}' must be a string")
    question = "\n".join(
        record[key] for key in ("instruction", "input") if record.get(key) not in (None, "")
    )
    turns = [*history, (question, record.get("output"))]
    return [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def _text(content: Any, position: int, embedded: list[tuple[MediaKind, Any]], bare: Sample) -> str:
    """A turn's text with marks; list contents put their own media into `embedded`."""
    if isinstance(content, str):
        return _sound(content, f"turn {position}", bare)
    if not isinstance(content, list):
        raise bare.fail(f"turn {position} has no text ('value' or 'content' must be a string)")
    text = ""
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            text += _sound(part["text"], f"turn {position}", bare)
        elif kind in ("image", "video"):
            _check_settings(kind, part, bare)
            text += f"<{kind}>"
            entry = part.get(kind, part.get("path"))
            if entry is not None:
                embedded.append((kind, entry if kind == "image" else {**part, "video": entry}))
        else:
            raise bare.fail(
                f"turn {position} holds a content part that is no text, image or video: "
                f"{str(part)[:80]}"
            )
    return text


def _sound(text: str, where: str, bare: Sample) -> str:
    """The text, unless it holds half a character (an escape such as \\ud83d without its pair)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bare.fail(
            f"{where} holds half a character at {error.start} ({error.object[error.start]!r}); "
            "save the text as UTF-8"
        ) from None
    return text


def listed_media(record: dict[str, Any], kind: MediaKind, root: Path, bare: Sample) -> list[Media]:
    """The media under the singular and the plural key."""
    singular, plural = record.get(kind), record.get(f"{kind}s")
    media: list[Media] = []
    if singular not in (None, "", []):
        if kind == "video" and _is_frames(singular):
            media += _media(kind, singular, root, bare)  # one video, written as its frames
        else:
            for entry in singular if isinstance(singular, list) else [singular]:
                media += _media(kind, entry, root, bare)
    if plural not in (None, "", []):
        if not isinstance(plural, list):
            plural = [plural]
        for entry in plural:
            media += _media(kind, entry, root, bare)
    return media


def _is_frames(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, str) and Path(item).suffix.lower() in IMAGE_SUFFIXES for item in value
    )


def _check_settings(kind: str, entry: dict[str, Any], bare: Sample) -> None:
    """Raises DataError for a setting that would be ignored."""
    for key in _SETTINGS:
        if entry.get(key) is not None:
            raise bare.fail(
                f"its {kind} has its own {key!r}, which is not supported; drop it, and where the "
                "model folder has that setting set it there"
            )


def _media(kind: MediaKind, entry: Any, root: Path, bare: Sample) -> list[Media]:
    if isinstance(entry, dict):
        _check_settings(kind, entry, bare)
    if kind == "image":
        data = None
        if isinstance(entry, dict):
            data = entry.get("bytes")
            entry = entry.get("path", entry.get("image"))
        elif isinstance(entry, bytes):
            data, entry = entry, None
        if isinstance(data, bytes):  # the record brings the file: its path is only a name
            name = f"{entry or 'image'}{'' if Path(entry or '').suffix else _magic(data)}"
            place = f"{bare.source}#{bare.id}/{zlib.crc32(data):08x}/{Path(name).name}"
            return [Media("image", name, (FileRange(place, 0, len(data), data),))]
        if not isinstance(entry, str) or not entry:
            raise bare.fail(f"an image must be a file path, got {str(entry)[:80]!r}")
        return [Media("image", entry, (_file(entry, root, bare),))]
    fps = None
    if isinstance(entry, dict):
        fps = entry.get("fps")
        if fps is not None and not (isinstance(fps, (int, float)) and 0 < fps < math.inf):
            raise bare.fail(f"a video's fps must be a number above 0, got {fps!r}")
        entry = entry.get("frames", entry.get("video", entry.get("path")))
    if isinstance(entry, list) and entry and all(isinstance(item, str) for item in entry):
        frames = entry
        name = f"{entry[0]} ... ({len(entry)} frames)"
    elif isinstance(entry, str) and entry:
        if "\0" in entry or len(entry) > 4096 or not (root / entry).is_dir():
            if fps is not None:
                raise bare.fail(
                    f"fps {fps:g} was given for the video file {entry}, which has its own; it is "
                    "for frames only. Set the frames taken a second in the model's "
                    "video_preprocessor_config.json"
                )
            return [Media("video", entry, (_file(entry, root, bare),))]
        frames = sorted(  # from the root, as the entry itself
            str(Path(entry) / path.name)
            for path in (root / entry).iterdir()
            if path.suffix.lower() in IMAGE_SUFFIXES
        )
        name = entry
        if not frames:
            raise bare.fail(f"the video folder {entry} holds no images")
    else:
        raise bare.fail(
            "a video must be a file, a folder of frames or a list of frames, got "
            f"{str(entry)[:80]!r}"
        )
    parts = tuple(_file(frame, root, bare) for frame in frames)
    return [Media("video", name, parts, frame_list=True, fps=fps)]


def _magic(data: bytes) -> str:
    """The suffix that belongs to the first bytes of an image."""
    known = {b"\xff\xd8\xff": ".jpg", b"\x89PNG": ".png", b"GIF8": ".gif", b"RIFF": ".webp"}
    return next((suffix for start, suffix in known.items() if data.startswith(start)), ".bin")


def _file(entry: str, root: Path, bare: Sample) -> FileRange:
    if entry.startswith("data:") or len(entry) > 4096:  # no system takes longer paths
        raise bare.fail(
            f"{entry[:40]!r}... is no file path but {len(entry)} characters of content; write it "
            "to a file and give the file's path"
        )
    if "://" in entry and not entry.startswith("file://"):
        raise bare.fail(f"{entry} is a URL; download it and give the file's path")
    if "\0" in _sound(entry, "a file path", bare):
        raise bare.fail(f"the file path {entry!r} holds a zero byte")
    return FileRange(str(root / entry.removeprefix("file://")))


def _match(
    turns: tuple[Turn, ...], pools: dict[MediaKind, list[Media]], bare: Sample
) -> tuple[Media, ...]:
    """The media in the order of their marks; every mark and every medium used exactly once."""
    order = [MARKS[mark] for turn in turns for mark in MARK_PATTERN.findall(turn.text)]
    for kind, pool in pools.items():
        marks = order.count(kind)
        if marks != len(pool):
            raise bare.fail(
                f"it has {marks} <{kind}> mark{'s' * (marks != 1)} but {len(pool)} "
                f"{kind}{'s' * (len(pool) != 1)}; put one <{kind}> in the text for each {kind}",
                "marks",
            )
    iterators = {kind: iter(pool) for kind, pool in pools.items()}
    return tuple(next(iterators[kind]) for kind in order)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"{path}: no such file; name a .json, .jsonl or .parquet file, or a folder written "
            "by 'vlmtrain data build'"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _decode(data: bytes, path: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8"
        ) from None


def _loads(data: bytes, path: str, number: int) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: record {number} is not valid JSON: {error}") from None


def _is_one_object(data: bytes) -> bool:
    """Whether the file as a whole is one JSON object (cheap to refuse for JSONL)."""
    if data.rstrip().count(b"\n") and data.split(b"\n", 1)[0].rstrip().endswith(b"}"):
        return False
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position

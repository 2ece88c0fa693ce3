"""Conversation files: JSON lists and files with one record a line, read by byte offset."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmtrain.data.errors import DataError
from vlmtrain.data.formats.record import TURN_KEYS, parse_record
from vlmtrain.data.sample import Sample


@dataclass(frozen=True)
class Record:
    """Where one record lies in its source file, and its bytes."""

    number: int  # counted from 0
    offset: int  # bytes from the start of the file
    data: bytes
    content: int | None = None  # checksum of what it says, where data says where that lies

    @property
    def checksum(self) -> int:
        """uint32: equal for records that say the same."""
        return zlib.crc32(self.data) if self.content is None else self.content


class JsonSource:
    """A conversation file whose records are found once and read again by byte offset.

    Args:
        path: a .json file holding a list of records, or a file with one record a line.
        media_root: folder that relative media paths start from; default: the file's own folder.
        ignored: keys and marks of records that are not looked at.
    """

    def __init__(
        self,
        path: str | Path,
        media_root: str | Path | None = None,
        ignored: Collection[str] = (),
    ) -> None:
        self.path, self.ignored = str(path), ignored
        self.media_root = Path(media_root) if media_root is not None else Path(path).parent

    def records(self) -> Iterator[Record | DataError]:
        """Every record in file order; a bad line comes as an error in its place.

        Raises:
            DataError: the file is missing, empty, not UTF-8, or not JSON as a whole.
        """
        data = _read(self.path)
        if data.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise DataError(
                f"{self.path}: the file is UTF-16; write it as UTF-8 (iconv -f UTF-16 -t UTF-8)"
            )
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
        value = _loads(record.data, self.path, record.number)
        return parse_record(value, self.path, record.number, self.media_root, ignored=self.ignored)

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
        data = data[start:]
        if data.lstrip()[:1] == b"{" and _is_one_object(data):
            value = json.loads(data)
            if not value.keys() & set(TURN_KEYS):
                raise DataError(
                    f"{self.path}: the file holds one object with keys {sorted(value)[:5]}; it "
                    "must be a list of samples, or one sample a line"
                )
            yield Record(0, start + len(data) - len(data.lstrip()), data.strip())
            return
        offset, number = start, 0
        for line_number, line in enumerate(data.split(b"\n"), 1):
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


def _read(path: str) -> bytes:
    if Path(path).suffix.lower() in (".csv", ".tsv", ".xlsx"):
        raise DataError(
            f"{path}: tables of this form are not read; write it as JSON lines, for example with "
            "pandas: read_csv(...).to_json('data.jsonl', orient='records', lines=True)"
        )
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

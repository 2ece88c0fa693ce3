"""Reads the folders that `vlmtrain data build` writes (webdataset.py), by byte offset.

Nothing is ever unpacked to disk and no member name is ever used as a path: only byte ranges of
the shards that stand beside the index are read.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlmtrain.core.files import is_file
from vlmtrain.data.errors import DataError
from vlmtrain.data.formats.json_source import Record
from vlmtrain.data.processor import Measure, MediaLayout
from vlmtrain.data.sample import Box, FileRange, Media, MediaInfo, Objects, Sample, Turn

INDEX_NAME = "index.jsonl"
FORMAT = "vlmtrain-shards"
VERSION = 2
_SHARD = re.compile(r"shard-\d{6}\.tar")


class ShardSource:
    """A folder written by `build_shards`; same interface as `JsonSource`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = str(folder)
        self.path = str(Path(folder) / INDEX_NAME)
        self._shards: list[tuple[str, int]] | None = None
        self._samples = 0  # as the index's first line says
        self._processor: str | None = None

    def records(self) -> Iterator[Record]:
        """Every sample's index line, in order.

        Raises:
            DataError: unfinished or foreign folder, a shard that is missing or cut short, or an
                index that is.
        """
        shards = self._header()
        for path, size in shards:
            actual = os.path.getsize(path) if is_file(path) else None
            if actual != size:
                state = "is missing" if actual is None else f"has {actual} bytes"
                raise DataError(
                    f"{path} {state} where {self.path} says {size} bytes; build the shards again"
                )
        with open(self.path, "rb") as file:
            offset, count = len(file.readline()), 0
            for line in file:
                yield Record(count, offset, line, _content(line))
                offset += len(line)
                count += 1
        if count != self._samples or not count:
            raise DataError(
                f"{self.path} holds {count} samples and says {self._samples} in its first line; it "
                "must hold at least one, and all that it says: build the shards again"
            )

    def read(self, number: int, offset: int, size: int) -> Record:
        """One index line again. Raises OSError."""
        with open(self.path, "rb") as file:
            file.seek(offset)
            return Record(number, offset, file.read(size))

    def measured(self, record: Record, fingerprint: str) -> Measure | None:
        """What the build wrote about a sample, if its processor was the one asked about."""
        shards = self._header()
        if self._processor != fingerprint:
            return None
        try:
            line = json.loads(record.data)
            for media in line["media"]:
                for part in (line["json"], *media["parts"]):
                    _range(*shards[int(line["shard"])], part)
            known = line["measure"]
            return Measure(
                str(line["id"]),
                tuple(media["kind"] for media in line["media"]),
                tuple(MediaInfo(**media["info"]) for media in line["media"]),
                tuple(MediaLayout((t, h, w), seconds) for t, h, w, seconds in known["layouts"]),
                int(known["length"]),
                int(known["target_tokens"]),
                int(known["image_tokens"]),
            )
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise self._damaged(record, error) from None

    def parse(self, record: Record) -> Sample:
        """The sample of an index line; reads its JSON member from the shard.

        Raises:
            DataError: the line or the shard is damaged.
        """
        shards = self._header()
        try:
            line = json.loads(record.data)
            path, size = shards[int(line["shard"])]
            where = _range(path, size, line["json"])
            data = where.read()
            if zlib.crc32(data) != line["crc"]:
                raise ValueError("the sample's bytes are not those that were written")
            content = json.loads(data)
            turns = tuple(
                Turn(
                    turn["role"],
                    turn["content"],
                    turn.get("loss_weight", 1.0),
                    tuple(turn.get("tool_calls", ())),
                )
                for turn in content["messages"]
            )
            media = tuple(
                Media(
                    entry["kind"],
                    f"{Path(path).name}:{entry['name']}",
                    tuple(_range(path, size, part) for part in entry["parts"]),
                    entry["frame_list"],
                    entry["fps"],
                    MediaInfo(**entry["info"]),
                )
                for entry in line["media"]
            )
            tools, objects = tuple(content.get("tools", ())), content.get("objects")
            if objects is not None:
                boxes = tuple(Box(tuple(corners), *rest) for corners, *rest in objects["boxes"])
                objects = Objects(tuple(objects["names"]), boxes)
            return Sample(str(content["id"]), turns, media, self.folder, tools, objects)
        except (ValueError, KeyError, TypeError, IndexError, OSError) as error:
            raise self._damaged(record, error) from None

    def _damaged(self, record: Record, error: Exception) -> DataError:
        return DataError(
            f"{self.path}: entry {record.number} is damaged ({error}); build the shards again"
        )

    def _header(self) -> list[tuple[str, int]]:
        """(path, bytes) of every shard."""
        if self._shards is not None:
            return self._shards
        if not is_file(self.path):
            raise DataError(
                f"{self.folder} has no {INDEX_NAME}: it is no folder of shards, or its build was "
                "interrupted; run 'vlmtrain data build' (again)"
            )
        try:
            with open(self.path, "rb") as file:
                header = json.loads(file.readline())
            if header["format"] != FORMAT or header["version"] not in (1, VERSION):
                raise ValueError(f"format {header['format']} version {header['version']}")
            self._samples = int(header["samples"])
            names = [(str(shard["name"]), int(shard["bytes"])) for shard in header["shards"]]
            for name, _ in names:
                if not _SHARD.fullmatch(name):
                    raise ValueError(f"shard name {name!r}")
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self.path} is no index of shards that this version reads ({error}); build the "
                "shards again"
            ) from None
        self._shards = [(str(Path(self.folder) / name), size) for name, size in names]
        self._processor = header.get("processor")
        return self._shards


def _content(line: bytes) -> int | None:
    """The checksum of the record that an entry was built from, which older builds did not write."""
    try:
        value = json.loads(line)["record"]
    except (ValueError, KeyError, TypeError):  # `parse` says what is wrong with it
        return None
    return value if isinstance(value, int) else None


def _range(path: str, size: int, part: Any) -> FileRange:
    offset, length = int(part[0]), int(part[1])
    if offset < 0 or length < 0 or offset + length > size:
        raise ValueError(f"bytes {offset} to {offset + length} lie outside the shard")
    return FileRange(path, offset, length)

"""WebDataset shards: written once from a conversation file, read by byte offset.

A folder holds `shard-000000.tar`, `shard-000001.tar`, ... and `index.jsonl`. In a shard each
sample is `<key>.json` followed by its media, `<key>.0.jpg`, `<key>.1.png`, ..., the original
bytes of the files. `index.jsonl` is written last: a folder without it is an unfinished build. Its
first line describes the folder, each further line one sample: where its members lie in the tar,
and sizes and frame counts of its media, so that reading needs neither unpacking nor probing.

Nothing is ever unpacked to disk and no member name is ever used as a path: only byte ranges of
the shards that stand beside the index are read.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from vlmtrain.data.errors import DataError
from vlmtrain.data.sample import FileRange, Media, MediaInfo, Sample, Turn
from vlmtrain.data.sharegpt import JsonSource, Record
from vlmtrain.data.videos import probe_media

INDEX_NAME = "index.jsonl"
FORMAT = "vlmtrain-shards"
VERSION = 1
_OWN_FILES = re.compile(r"(shard-\d{6}\.tar|index\.jsonl)(\.tmp)?")


@dataclass(frozen=True)
class ShardSummary:
    """What `build_shards` wrote."""

    samples: int
    images: int
    videos: int
    shards: int
    bytes: int


def build_shards(
    source: str | Path,
    target: str | Path,
    *,
    samples_per_shard: int = 1000,
    shard_bytes: int = 1 << 30,
    verify: bool = True,
    media_root: str | Path | None = None,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> ShardSummary:
    """Write a conversation file and its media as WebDataset shards.

    Args:
        source: a .json or .jsonl conversation file.
        target: the folder to write; created if missing.
        samples_per_shard: samples in a shard, at most.
        shard_bytes: a shard is closed once it holds this many bytes.
        verify: decode every image and video once, so that a broken one is found now.
        media_root: folder that relative media paths start from; default: the source's folder.
        overwrite: replace a finished build.
        progress: called with the number of samples written so far.

    Raises:
        DataError: bad source or sample, or a target that holds something else. Whatever was
            written until then is removed again.
    """
    if samples_per_shard < 1 or shard_bytes < 1:
        raise DataError(
            f"samples_per_shard ({samples_per_shard}) and shard_bytes ({shard_bytes}) must be at "
            "least 1"
        )
    reader = JsonSource(source, media_root)
    records = reader.records()
    first = next(records)  # refuse a bad source before the target is touched
    folder = Path(target)
    created = _prepare(folder, overwrite)
    writer = _ShardWriter(folder, samples_per_shard, shard_bytes)
    try:
        record: Record | DataError | None = first
        while record is not None:
            if isinstance(record, DataError):
                raise record
            sample = reader.parse(record)
            writer.add(sample, [probe_media(media, sample, verify) for media in sample.media])
            if progress is not None:
                progress(writer.samples)
            record = next(records, None)
        return writer.finish()
    except BaseException:
        writer.abandon()
        if created and not any(folder.iterdir()):
            folder.rmdir()
        raise


class ShardSource:
    """A folder written by `build_shards`; same interface as `JsonSource`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = str(folder)
        self.path = str(Path(folder) / INDEX_NAME)
        self._shards: list[tuple[str, int]] | None = None

    def records(self) -> Iterator[Record]:
        """Every sample's index line, in order.

        Raises:
            DataError: unfinished or foreign folder, or a shard that is missing or cut short.
        """
        shards = self._header()
        for path, size in shards:
            found = os.path.getsize(path) if os.path.isfile(path) else None
            if found != size:
                state = "is missing" if found is None else f"has {found} bytes"
                raise DataError(
                    f"{path} {state} where {self.path} says {size} bytes; build the shards again"
                )
        with open(self.path, "rb") as file:
            offset = len(file.readline())
            for number, line in enumerate(file):
                yield Record(number, offset, line)
                offset += len(line)

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
            turns = tuple(Turn(turn["role"], turn["content"]) for turn in content["messages"])
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
            return Sample(str(content["id"]), turns, media, self.folder)
        except (ValueError, KeyError, TypeError, IndexError, OSError) as error:
            raise DataError(
                f"{self.path}: entry {record.number} is damaged ({error}); build the shards again"
            ) from None

    def _header(self) -> list[tuple[str, int]]:
        """(path, bytes) of every shard."""
        if self._shards is not None:
            return self._shards
        if not os.path.isfile(self.path):
            raise DataError(
                f"{self.folder} has no {INDEX_NAME}: it is no folder of shards, or its build was "
                "interrupted; run 'vlmtrain data build' (again)"
            )
        try:
            with open(self.path, "rb") as file:
                header = json.loads(file.readline())
            if header["format"] != FORMAT or header["version"] != VERSION:
                raise ValueError(f"format {header['format']} version {header['version']}")
            names = [(str(shard["name"]), int(shard["bytes"])) for shard in header["shards"]]
            for name, _ in names:
                if not _OWN_FILES.fullmatch(name):
                    raise ValueError(f"shard name {name!r}")
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self.path} is no index of shards that this version reads ({error}); build the "
                "shards again"
            ) from None
        self._shards = [(str(Path(self.folder) / name), size) for name, size in names]
        return self._shards


class _ShardWriter:
    def __init__(self, folder: Path, samples_per_shard: int, shard_bytes: int) -> None:
        self.folder = folder
        self.samples_per_shard, self.shard_bytes = samples_per_shard, shard_bytes
        self.samples = self.images = self.videos = 0
        self.shards: list[dict[str, Any]] = []
        self._lines: list[bytes] = []
        self._pending: list[dict[str, Any]] = []  # samples of the open shard, ranges not yet known
        self._file: BinaryIO | None = None
        self._tar: tarfile.TarFile | None = None
        self._written: list[Path] = []

    def add(self, sample: Sample, infos: list[MediaInfo]) -> None:
        if self._tar is None:
            path = self.folder / f"shard-{len(self.shards):06d}.tar.tmp"
            self._written.append(path)
            self._file = path.open("wb")
            self._tar = tarfile.open(fileobj=self._file, mode="w", format=tarfile.USTAR_FORMAT)
        key = f"{self.samples:09d}"
        entries: list[dict[str, Any]] = []
        members: list[tuple[str, FileRange]] = []
        for position, (media, info) in enumerate(zip(sample.media, infos, strict=True)):
            names = [
                f"{key}.{position}{f'.{i:05d}' if media.frame_list else ''}{_suffix(part.path)}"
                for i, part in enumerate(media.parts)
            ]
            members += zip(names, media.parts, strict=True)
            entries.append(
                {
                    "kind": media.kind,
                    "name": Path(media.name).name,
                    "parts": names,
                    "frame_list": media.frame_list,
                    "fps": media.fps,
                    "info": asdict(info),
                }
            )
        content = {
            "id": sample.id,
            "messages": [{"role": turn.role, "content": turn.text} for turn in sample.turns],
            "media": [
                {key: entry[key] for key in ("kind", "parts", "frame_list", "fps")}
                for entry in entries
            ],
        }
        data = json.dumps(content, ensure_ascii=False).encode()
        self._member(f"{key}.json", data)
        for name, part in members:
            try:
                self._member(name, part.read())
            except OSError as error:
                raise sample.fail(f"{part.path} cannot be read: {error}") from None
        self._pending.append(
            {"json": f"{key}.json", "crc": zlib.crc32(data), "media": entries, "id": sample.id}
        )
        self.samples += 1
        self.images += sum(media.kind == "image" for media in sample.media)
        self.videos += sum(media.kind == "video" for media in sample.media)
        assert self._file is not None
        if len(self._pending) >= self.samples_per_shard or self._file.tell() >= self.shard_bytes:
            self._close()

    def finish(self) -> ShardSummary:
        """Close the last shard and write the index, which makes the build valid."""
        if self._tar is not None:
            self._close()
        header = {
            "format": FORMAT,
            "version": VERSION,
            "samples": self.samples,
            "shards": self.shards,
        }
        temporary = self.folder / f"{INDEX_NAME}.tmp"
        self._written.append(temporary)
        with temporary.open("wb") as file:
            file.write(json.dumps(header).encode() + b"\n")
            file.writelines(self._lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.folder / INDEX_NAME)
        return ShardSummary(
            self.samples,
            self.images,
            self.videos,
            len(self.shards),
            sum(shard["bytes"] for shard in self.shards),
        )

    def abandon(self) -> None:
        """Remove everything written."""
        if self._file is not None:
            self._file.close()
        for path in self._written:
            path.unlink(missing_ok=True)

    def _member(self, name: str, data: bytes) -> None:
        assert self._tar is not None
        member = tarfile.TarInfo(name)
        member.size = len(data)
        member.mode = 0o644
        self._tar.addfile(member, io.BytesIO(data))

    def _close(self) -> None:
        assert self._tar is not None and self._file is not None
        self._tar.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._tar = self._file = None
        temporary = self._written[-1]
        final = temporary.with_suffix("")
        with tarfile.open(temporary) as tar:
            ranges = {member.name: [member.offset_data, member.size] for member in tar}
        number = len(self.shards)
        for entry in self._pending:
            line = {
                **entry,
                "shard": number,
                "json": ranges[entry["json"]],
                "media": [
                    {**media, "parts": [ranges[name] for name in media["parts"]]}
                    for media in entry["media"]
                ],
            }
            self._lines.append(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self._pending = []
        os.replace(temporary, final)
        self._written[-1] = final
        self.shards.append({"name": final.name, "bytes": final.stat().st_size})


def _prepare(folder: Path, overwrite: bool) -> bool:
    """Make the target ready. Returns whether it was created here."""
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file; --target must be a folder")
    created = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be created: {error.strerror}") from None
    foreign = [path.name for path in folder.iterdir() if not _OWN_FILES.fullmatch(path.name)]
    if foreign:
        raise DataError(f"{folder} holds other files ({foreign[0]}, ...); name an empty folder")
    if (folder / INDEX_NAME).exists() and not overwrite:
        raise DataError(f"{folder} holds a finished build; name another folder or overwrite it")
    # The index goes first: from here on the folder counts as unfinished.
    for path in sorted(folder.iterdir(), key=lambda path: path.name != INDEX_NAME):
        path.unlink()
    return created


def _suffix(path: str) -> str:
    suffix = Path(path).suffix.lower()
    return suffix if re.fullmatch(r"\.[a-z0-9]{1,8}", suffix) else ".bin"


def _range(path: str, size: int, part: Any) -> FileRange:
    offset, length = int(part[0]), int(part[1])
    if offset < 0 or length < 0 or offset + length > size:
        raise ValueError(f"bytes {offset} to {offset + length} lie outside the shard")
    return FileRange(path, offset, length)

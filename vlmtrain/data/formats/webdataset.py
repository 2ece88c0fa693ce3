"""WebDataset shards, written once from a conversation file (read by shards.py).

A folder holds `shard-000000.tar`, `shard-000001.tar`, ... and `index.jsonl`. In a shard each
sample is `<key>.json` followed by its media, `<key>.0.jpg`, `<key>.1.png`, ..., the original
bytes of the files. `index.jsonl` is written last: a folder without it is an unfinished build. Its
first line describes the folder, each further line one sample: where its members lie in the tar,
sizes and frame counts of its media, and, where the build knew the model, its tokens and grids, so
that reading needs neither unpacking nor probing nor tokenizing. `*.tar.idx` and `.nv-meta` are
what Megatron-Energon needs to read the same shards (energon.py).

The shards are cut first, from the sizes of the files, and then written side by side. Each leaves
a `.part` file when it is done; a build that is run again keeps the shards whose part says that
they were made of the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import sqlite3
import tarfile
import threading
import zlib
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from vlmtrain.core.files import exists, is_dir, write_bytes
from vlmtrain.data.errors import DataError
from vlmtrain.data.formats.energon import META_FOLDER, write_energon
from vlmtrain.data.formats.entries import suffix_of
from vlmtrain.data.formats.json_source import JsonSource, Record
from vlmtrain.data.formats.shards import FORMAT, INDEX_NAME, VERSION
from vlmtrain.data.formats.tars import TarSource
from vlmtrain.data.media.videos import probe_media
from vlmtrain.data.processor import Measure, Processor
from vlmtrain.data.sample import FileRange, MediaInfo, Sample, Turn

LEFT_OUT = "left_out.jsonl"
_OWN_FILES = re.compile(
    r"(shard-\d{6}\.(tar|tar\.idx|part)|index\.jsonl|left_out\.jsonl)(\.tmp|\.incomplete)?|\.nv-meta"
)
_HEADER = 512  # bytes of a member's header in a USTAR archive


@dataclass(frozen=True)
class ShardSummary:
    """What `build_shards` wrote."""

    samples: int
    images: int
    videos: int
    shards: int
    bytes: int
    left_out: int = 0  # bad samples, which the folder's left_out.jsonl lists


def build_shards(
    source: str | Path,
    target: str | Path,
    *,
    samples_per_shard: int = 1000,
    shard_bytes: int = 1 << 30,
    verify: bool = True,
    skip: bool = False,
    media_root: str | Path | None = None,
    ignored: Collection[str] = (),
    overwrite: bool = False,
    processor: Processor | None = None,
    workers: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> ShardSummary:
    """Write a conversation file and its media as WebDataset shards.

    Args:
        source: a .json, .jsonl or .parquet conversation file.
        target: the folder to write; created if missing. An unfinished build is continued.
        samples_per_shard: samples in a shard, at most.
        shard_bytes: a shard is closed once it holds this many bytes of records and media.
        verify: decode every image and video once, so that a broken one is found now.
        skip: leave bad samples out and list them in the folder's left_out.jsonl.
        media_root: folder that relative media paths start from; default: the source's folder.
        ignored: keys and marks of records that are not looked at.
        overwrite: replace a finished build.
        processor: of the model to train; with it the index holds each sample's tokens and grids,
            and training with the same settings starts without a scan.
        workers: threads; each writes one shard.
        progress: called with the number of samples written so far, and of all.

    Raises:
        DataError: bad source or sample, or a target that holds something else or can't be written.
            Shards that were finished until then stay for the next run.
    """
    if samples_per_shard < 1 or shard_bytes < 1 or workers < 1:
        raise DataError(
            f"samples_per_shard ({samples_per_shard}), shard_bytes ({shard_bytes}) and workers "
            f"({workers}) must be at least 1"
        )
    reader = _reader(source, media_root, ignored)
    tokens = processor.fingerprint() if processor else None
    settings = f"{VERSION} {verify} {skip} {tokens} {sorted(ignored)} {media_root}"
    left_out: list[str] | None = [] if skip else None
    # Refuses before it writes.
    shards = _cut(reader, samples_per_shard, shard_bytes, settings, left_out)
    folder = Path(target)
    created = _prepare(folder, overwrite, len(shards))
    build = _Build(folder, reader, processor, verify, skip, shards, progress)
    try:
        parts = build.run(workers)
        if not any(part["lines"] for part in parts):
            for part in parts:
                (folder / part["name"]).unlink()
                (folder / part["name"]).with_suffix(".part").unlink()
            raise _all_bad(reader, [problem for part in parts for problem in part["left_out"]])
        return _finish(folder, parts, processor, left_out or [])
    except BaseException as error:
        for path in folder.glob("*.tmp"):
            path.unlink()
        if created and not any(folder.iterdir()):
            folder.rmdir()
        if isinstance(error, (OSError, sqlite3.Error)):  # a full disk, most often
            reason = getattr(error, "strerror", None) or error
            raise DataError(
                f"--output {folder} cannot be written: {reason}; run it again to go on from the "
                "shards that are finished"
            ) from error
        raise


@dataclass
class _Build:
    """Shards that threads write."""

    folder: Path
    reader: Any
    processor: Processor | None
    verify: bool
    skip: bool
    shards: list[_Shard]
    progress: Callable[[int, int], None] | None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._written, self._total = 0, sum(len(shard.records) for shard in self.shards)
        # Shards from this number on are given up; those before it go on, so that with any number
        # of workers the first error in file order is the one reported, and the shards before it
        # stay.
        self._limit = len(self.shards)

    def run(self, workers: int) -> list[dict[str, Any]]:
        """What each shard's part file says."""
        with ThreadPoolExecutor(workers) as pool:
            jobs = [pool.submit(self._write, shard) for shard in self.shards]
            try:
                errors = [error for job in jobs if (error := job.exception()) is not None]
            except BaseException:  # ctrl-C: let the shards at work stop early
                self._give_up(0)
                raise
            if errors:
                raise errors[0]  # the first in file order: nothing before it was given up
            return [job.result() for job in jobs]

    def _write(self, shard: _Shard) -> dict[str, Any]:
        done = shard.finished(self.folder)
        if done is not None:
            self._count(len(shard.records))
            return done

        def given_up() -> bool:
            return shard.number >= self._limit

        try:
            return _write_shard(
                shard,
                self.folder,
                self.reader,
                self.processor,
                self.verify,
                self.skip,
                self._count,
                given_up,
            )
        except BaseException:
            self._give_up(shard.number)
            raise

    def _count(self, samples: int) -> None:
        with self._lock:
            self._written += samples
            if self.progress is not None:
                self.progress(self._written, self._total)

    def _give_up(self, number: int) -> None:
        with self._lock:
            self._limit = min(self._limit, number)


class _GivenUp(Exception):
    """An earlier shard failed, so this one is not wanted any more."""


@dataclass(frozen=True)
class _Shard:
    """What will stand in one shard."""

    number: int
    first: int  # samples in the shards before
    records: list[tuple[int, int, int]]  # number, offset, size in the source
    digest: str  # of the records' bytes, sizes and times of their media, and the settings

    @property
    def name(self) -> str:
        return f"shard-{self.number:06d}.tar"

    def finished(self, folder: Path) -> dict[str, Any] | None:
        """The part of an earlier run, if it holds just this and its shard is whole."""
        try:
            part = json.loads((folder / self.name).with_suffix(".part").read_bytes())
            complete = (folder / self.name).stat().st_size == part["bytes"]
            return part if complete and part["digest"] == self.digest else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _reader(source: str | Path, media_root: str | Path | None, ignored: Collection[str]) -> Any:
    if "," in str(source) and not exists(source):
        raise DataError(f"{source}: no such file; --data takes one file, each its own --output")
    if is_dir(source):
        raise DataError(
            f"{source} is a folder; --data takes a .json, .jsonl, .parquet or .tar file"
        )
    if Path(source).suffix.lower() == ".parquet":
        from vlmtrain.data.formats.parquet import ParquetSource

        return ParquetSource(source, media_root, ignored)
    if Path(source).suffix.lower() == ".tar":
        return TarSource(source, ignored)
    return JsonSource(source, media_root, ignored)


def _cut(
    reader: Any, samples: int, size: int, settings: str, left_out: list[str] | None
) -> list[_Shard]:
    """Divide the records among shards. A bad record or a missing file goes to `left_out`, or
    raises DataError where there is none."""
    shards: list[_Shard] = []
    records: list[tuple[int, int, int]] = []
    digest, filled, first = hashlib.sha256(settings.encode()), 0, 0

    def close() -> None:
        nonlocal records, digest, filled, first
        shards.append(_Shard(len(shards), first, records, digest.hexdigest()))
        first += len(records)
        records, digest, filled = [], hashlib.sha256(settings.encode()), 0

    for record in reader.records():
        try:
            if isinstance(record, DataError):
                raise record
            sizes = _sizes(reader.parse(record))
        except DataError as error:
            if left_out is None:
                raise
            left_out.append(str(error))
            continue
        records.append((record.number, record.offset, len(record.data)))
        digest.update(hashlib.sha256(record.data).digest())
        digest.update("".join(f"{size} {written} " for size, written in sizes).encode())
        filled += len(record.data) + sum(size for size, _ in sizes)
        if len(records) >= samples or filled >= size:
            close()
    if records:
        close()
    if not shards:
        raise _all_bad(reader, left_out or [""])
    return shards


def _all_bad(reader: Any, problems: list[str]) -> DataError:
    return DataError(f"{reader.path}: all samples are bad; the last: {problems[-1]}")


def _sizes(sample: Sample) -> list[tuple[int, int]]:
    """Of a sample's media the bytes, and when their files were written last, in nanoseconds. Raises
    DataError where one is missing."""
    sizes = []
    for part in (part for media in sample.media for part in media.parts):
        try:
            if part.data is not None:
                sizes.append((len(part.data), 0))
                continue
            status = os.stat(part.path)
            size = status.st_size if part.size is None else part.size
            sizes.append((size, status.st_mtime_ns))
        except OSError:
            raise sample.fail(
                f"the file {part.path} is missing; put it there or correct the path in the sample",
                "unreadable",
            ) from None
    return sizes


def _write_shard(
    shard: _Shard,
    folder: Path,
    reader: Any,
    processor: Processor | None,
    verify: bool,
    skip: bool,
    count: Callable[[int], None],
    given_up: Callable[[], bool],
) -> dict[str, Any]:
    """Write one shard, its energon index and, last, its part; returns the part."""
    lines: list[dict[str, Any]] = []
    left_out: list[str] = []
    path = folder / f"{shard.name}.tmp"
    if given_up():
        raise _GivenUp
    with path.open("wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for place, position in enumerate(shard.records):
                if given_up():
                    raise _GivenUp
                try:
                    record = _again(reader, position)
                    sample = reader.parse(record)
                    infos = [probe_media(media, sample, verify) for media in sample.media]
                    measure = processor.measure(sample, infos) if processor is not None else None
                except DataError as error:
                    if not skip:
                        raise
                    left_out.append(str(error))
                else:
                    key = f"{shard.first + place:09d}"
                    line = _write_sample(tar, file, key, sample, infos)
                    if measure is not None:
                        line["measure"] = _measured(measure)
                    lines.append({**line, "shard": shard.number, "record": record.checksum})
                count(1)
            end = file.tell()
        file.flush()
        os.fsync(file.fileno())
    os.replace(path, folder / shard.name)
    part = {
        "digest": shard.digest,
        "name": shard.name,
        "bytes": (folder / shard.name).stat().st_size,
        "end": end,
        "lines": lines,
        "left_out": left_out,
    }
    write_bytes(folder / f"shard-{shard.number:06d}.part", json.dumps(part).encode())
    return part


def _again(reader: Any, position: tuple[int, int, int]) -> Record:
    try:
        return reader.read(*position)
    except OSError as error:
        raise DataError(f"{reader.path}: cannot be read: {error.strerror or error}") from None


def _write_sample(
    tar: tarfile.TarFile, file: BinaryIO, key: str, sample: Sample, infos: list[MediaInfo]
) -> dict[str, Any]:
    """Add a sample's members; returns its index line."""
    entries: list[dict[str, Any]] = []
    members: list[tuple[str, FileRange]] = []
    for position, (media, info) in enumerate(zip(sample.media, infos, strict=True)):
        names = [
            f"{key}.{position}{f'.{i:05d}' if media.frame_list else ''}{_suffix(part)}"
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
    content: dict[str, Any] = {
        "id": sample.id,
        "messages": [_message(turn) for turn in sample.turns],
        "media": [
            {name: entry[name] for name in ("kind", "parts", "frame_list", "fps")}
            for entry in entries
        ],
    }
    if sample.tools:
        content["tools"] = list(sample.tools)
    if sample.objects is not None:
        boxes = [[list(box.corners), box.image, box.relative] for box in sample.objects.boxes]
        content["objects"] = {"names": list(sample.objects.names), "boxes": boxes}
    data = json.dumps(content, ensure_ascii=False).encode()
    ranges = {f"{key}.json": _member(tar, file, f"{key}.json", data)}
    for name, part in members:
        try:
            ranges[name] = _member(tar, file, name, part.read())
        except (OSError, ValueError) as error:  # ValueError: above 8 GB, too much for USTAR
            raise sample.fail(f"{part.path} cannot be read or stored: {error}") from None
    return {
        "id": sample.id,
        "key": key,
        "json": ranges[f"{key}.json"],
        "crc": zlib.crc32(data),
        "media": [
            {**entry, "names": entry["parts"], "parts": [ranges[name] for name in entry["parts"]]}
            for entry in entries
        ],
    }


def _message(turn: Turn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.text}
    if turn.weight != 1:
        message["loss_weight"] = turn.weight
    if turn.calls:
        message["tool_calls"] = list(turn.calls)
    return message


def _member(tar: tarfile.TarFile, file: BinaryIO, name: str, data: bytes) -> list[int]:
    """Add a file; returns where its bytes lie: offset, size."""
    offset = file.tell() + _HEADER
    member = tarfile.TarInfo(name)
    member.size = len(data)
    member.mode = 0o644
    tar.addfile(member, io.BytesIO(data))
    return [offset, len(data)]


def _measured(measure: Measure) -> dict[str, Any]:
    return {
        "length": measure.length,
        "target_tokens": measure.target_tokens,
        "image_tokens": measure.image_tokens,
        "layouts": [[*layout.grid, layout.seconds] for layout in measure.layouts],
    }


def _finish(
    folder: Path, parts: list[dict[str, Any]], processor: Processor | None, left_out: list[str]
) -> ShardSummary:
    """Write energon's files and then the index, which makes the build valid."""
    write_energon(folder, parts)
    lines = [line for part in parts for line in part["lines"]]
    header = {
        "format": FORMAT,
        "version": VERSION,
        "samples": len(lines),
        "shards": [{"name": part["name"], "bytes": part["bytes"]} for part in parts],
        "processor": processor.fingerprint() if processor else None,
    }
    left_out = left_out + [problem for part in parts for problem in part["left_out"]]
    if left_out:
        write_bytes(folder / LEFT_OUT, _json_lines({"problem": one} for one in left_out))
    write_bytes(folder / INDEX_NAME, _json_lines([header, *lines]))
    for part in parts:
        (folder / part["name"]).with_suffix(".part").unlink()
    kinds = [media["kind"] for line in lines for media in line["media"]]
    return ShardSummary(
        len(lines),
        kinds.count("image"),
        kinds.count("video"),
        len(parts),
        sum(part["bytes"] for part in parts),
        len(left_out),
    )


def _json_lines(items: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(item, ensure_ascii=False).encode() + b"\n" for item in items)


def _prepare(folder: Path, overwrite: bool, shards: int) -> bool:
    """Make the target ready for this many shards. Returns whether it was created here."""
    if exists(folder) and not is_dir(folder):
        raise DataError(f"{folder} is a file; --output must be a folder")
    created = not exists(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be created: {error.strerror}") from None
    foreign = [path.name for path in folder.iterdir() if not _OWN_FILES.fullmatch(path.name)]
    if foreign:
        raise DataError(f"{folder} holds other files ({foreign[0]}, ...); name an empty folder")
    finished = exists(folder / INDEX_NAME)
    if finished and not overwrite:
        raise DataError(
            f"{folder} holds a finished build; name another --output, or pass --overwrite"
        )
    # The index goes first: from here on the folder counts as unfinished. Shards that an unfinished
    # build left with their part may be used again; the rest goes, and so do those beyond the last.
    wanted = {f"shard-{number:06d}" for number in range(shards)}
    try:
        for path in sorted(folder.iterdir(), key=lambda path: path.name != INDEX_NAME):
            name = path.name.split(".")[0]
            kept = path.suffix in (".part", ".tar") and exists(folder / f"{name}.part")
            if path.name == META_FOLDER:
                shutil.rmtree(path)
            elif finished or name not in wanted or not kept:
                path.unlink()
    except OSError as error:
        raise DataError(f"--output {folder} cannot be cleared: {error}") from None
    return created


def _suffix(part: FileRange) -> str:
    suffix = Path(part.path).suffix.lower()
    if suffix == ".tar":  # a member, whose name the archive has
        suffix = suffix_of(FileRange(part.path, part.offset, min(part.size or 0, 16)).read())
    return suffix if re.fullmatch(r"\.[a-z0-9]{1,8}", suffix) else ".bin"

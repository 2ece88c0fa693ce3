"""Scans the training data once: everything is checked, and every sample's layout is recorded.

The index is a few numpy arrays (about 100 bytes a sample). It is made on one process and sent to
the others; the samples themselves are read again from their files by byte offset when needed.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from vlmtrain.data.errors import DataError
from vlmtrain.data.processor import MediaLayout, Processor
from vlmtrain.data.sample import MediaInfo, Sample
from vlmtrain.data.sharegpt import JsonSource, Record
from vlmtrain.data.videos import probe_media
from vlmtrain.data.webdataset import ShardSource
from vlmtrain.models.spec import ModelSpec

_KINDS = ("image", "video")


class Source(Protocol):
    """A file of records."""

    path: str

    def records(self) -> Iterator[Record | DataError]: ...

    def parse(self, record: Record) -> Sample: ...


def open_source(path: str | Path, media_root: str | Path | None = None) -> Source:
    """A conversation file, or a folder written by `build_shards`."""
    return ShardSource(path) if Path(path).is_dir() else JsonSource(path, media_root)


@dataclass(frozen=True)
class Row:
    """What the scan found out about one sample."""

    source: int
    record: Record
    sample: Sample
    infos: tuple[MediaInfo, ...]
    layouts: tuple[MediaLayout, ...]
    length: int
    target_tokens: int
    image_tokens: int


@dataclass
class SampleIndex:
    """Every sample's place and layout; n samples with m images and videos in all."""

    sources: list[tuple[str, str | None]]  # path, media_root
    ids: list[str]
    source: np.ndarray  # int32 [n]: which source
    number: np.ndarray  # int64 [n]: the record's number in it
    offset: np.ndarray  # int64 [n]: bytes
    size: np.ndarray  # int64 [n]: bytes
    crc: np.ndarray  # uint32 [n]
    lengths: np.ndarray  # int64 [n]: tokens
    target_tokens: np.ndarray  # int64 [n]
    image_tokens: np.ndarray  # int64 [n]: language tokens of images and videos
    media_start: np.ndarray  # int64 [n + 1]: rows of grids, kinds, seconds
    grids: np.ndarray  # int64 [m, 3]
    kinds: np.ndarray  # uint8 [m]: 0 image, 1 video
    seconds: np.ndarray  # float64 [m]
    infos: np.ndarray  # float64 [m, 4]: width, height, frames, fps (0: unknown) of the files
    pack_length: int
    content_hash: str  # of every record, its layout and the processor's settings, not of paths
    _opened: dict[int, Source] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.ids)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_opened": {}}

    @property
    def num_samples(self) -> int:
        return len(self.ids)

    def sample_id(self, position: int) -> str:
        return self.ids[position]

    def layouts(self, position: int) -> list[MediaLayout]:
        """Grid and seconds of each medium of a sample."""
        rows = range(self.media_start[position], self.media_start[position + 1])
        return [
            MediaLayout((int(t), int(h), int(w)), float(self.seconds[row]))
            for row in rows
            for t, h, w in [self.grids[row]]
        ]

    def load(self, position: int) -> Sample:
        """Read a sample's record again; its media carry what the scan found out about them.

        Raises:
            DataError: the source file has changed since the scan.
        """
        which = int(self.source[position])
        if which not in self._opened:
            self._opened[which] = open_source(*self.sources[which])
        source = self._opened[which]
        try:
            with open(source.path, "rb") as file:
                file.seek(int(self.offset[position]))
                data = file.read(int(self.size[position]))
        except OSError as error:
            raise DataError(f"{source.path}: cannot be read: {error.strerror}") from None
        if zlib.crc32(data) != int(self.crc[position]):
            raise DataError(
                f"{source.path}: sample {self.ids[position]!r} has changed since the file was "
                "scanned; start the run again"
            )
        record = Record(int(self.number[position]), int(self.offset[position]), data)
        sample = source.parse(record)
        infos = self.infos[self.media_start[position] : self.media_start[position + 1]].tolist()
        media = tuple(
            replace(medium, info=MediaInfo(int(width), int(height), int(frames), fps or None))
            for medium, (width, height, frames, fps) in zip(sample.media, infos, strict=True)
        )
        return replace(sample, media=media)


def scan_sources(
    paths: Sequence[str | Path],
    processor: Processor,
    spec: ModelSpec,
    pack_length: int,
    *,
    verify: bool = True,
    workers: int | None = None,
    media_root: str | Path | None = None,
    log: Callable[[str], None] | None = None,
) -> SampleIndex:
    """Read and check all training data before anything is trained.

    Args:
        paths: .json or .jsonl files, or folders written by `build_shards`.
        processor: the model's tokenizer and image settings.
        spec: the model's shape; must be the processor's.
        pack_length: tokens in a pack; no sample may be longer.
        verify: decode every image and video of .json files, to find broken ones. Shards were
            verified when they were built.
        workers: threads; default: the CPUs this process may use, at most 8.
        media_root: folder that relative media paths start from; default: each file's own.
        log: called with a line of progress now and then.

    Raises:
        DataError: the first problem in file order, naming file, sample and what to do.
    """
    if not paths:
        raise DataError("no data given; --data takes .json or .jsonl files or folders of shards")
    if pack_length < 1:
        raise DataError(f"pack_length must be at least 1, got {pack_length}")
    if processor.spec != spec:
        raise DataError("the processor belongs to another model than the one given")
    rows: list[tuple[int, ...]] = []
    media: list[tuple[int, int, int, int]] = []
    seconds: list[float] = []
    infos: list[tuple[float, ...]] = []
    ids: list[str] = []
    media_start = [0]
    digest = hashlib.sha256(processor.fingerprint().encode())
    for outcome in scan(
        paths, processor, pack_length, verify=verify, workers=workers, media_root=media_root
    ):
        if isinstance(outcome, DataError):
            raise outcome
        row = outcome
        crc = zlib.crc32(row.record.data)
        rows.append(
            (row.source, row.record.number, row.record.offset, len(row.record.data), crc)
            + (row.length, row.target_tokens, row.image_tokens)
        )
        for medium, info, layout in zip(row.sample.media, row.infos, row.layouts, strict=True):
            media.append((*layout.grid, _KINDS.index(medium.kind)))
            seconds.append(layout.seconds)
            infos.append((info.width, info.height, info.frames, info.fps or 0.0))
        media_start.append(len(media))
        ids.append(row.sample.id)
        digest.update(hashlib.sha256(row.record.data).digest())
        if log is not None and len(ids) % 10_000 == 0:
            log(f"scanned {len(ids)} samples")
    table = np.array(rows, dtype=np.int64).reshape(-1, 8).T
    grids = np.array(media, dtype=np.int64).reshape(-1, 4)
    for array in (table[5], table[6], grids, np.array(seconds), np.array(infos)):
        digest.update(array.tobytes())
    index = SampleIndex(
        sources=[(str(path), None if media_root is None else str(media_root)) for path in paths],
        ids=ids,
        source=table[0].astype(np.int32),
        number=table[1].copy(),
        offset=table[2].copy(),
        size=table[3].copy(),
        crc=table[4].astype(np.uint32),
        lengths=table[5].copy(),
        target_tokens=table[6].copy(),
        image_tokens=table[7].copy(),
        media_start=np.array(media_start, dtype=np.int64),
        grids=np.ascontiguousarray(grids[:, :3]),
        kinds=grids[:, 3].astype(np.uint8),
        seconds=np.array(seconds, dtype=np.float64),
        infos=np.array(infos, dtype=np.float64).reshape(-1, 4),
        pack_length=pack_length,
        content_hash=digest.hexdigest(),
    )
    if log is not None:
        log(
            f"{len(index)} samples, {len(grids)} images and videos, {index.lengths.sum()} tokens, "
            f"{index.target_tokens.sum()} of them targets"
        )
    return index


def scan(
    paths: Sequence[str | Path],
    processor: Processor | None,
    pack_length: int | None,
    *,
    verify: bool = True,
    workers: int | None = None,
    media_root: str | Path | None = None,
) -> Iterator[Row | DataError]:
    """Every sample in order, as a row or as the error found in it.

    Without a processor only the records and the media files are checked and lengths are 0.
    A source that cannot be read at all gives one error.
    """
    probed: dict[object, MediaInfo] = {}  # several samples may share an image
    with ThreadPoolExecutor(workers or _default_workers()) as pool:
        for number, path in enumerate(paths):
            source = open_source(path, media_root)

            def examine(
                record: Record | DataError, source: Source = source, number: int = number
            ) -> Row | DataError:
                if isinstance(record, DataError):
                    return record
                try:
                    return _examine(number, source, record, processor, pack_length, verify, probed)
                except DataError as error:
                    return error

            try:
                yield from _ordered_map(pool, examine, source.records())
            except DataError as error:
                yield error


def _examine(
    number: int,
    source: Source,
    record: Record,
    processor: Processor | None,
    pack_length: int | None,
    verify: bool,
    probed: dict[object, MediaInfo],
) -> Row:
    sample = source.parse(record)
    infos: list[MediaInfo] = []
    layouts: list[MediaLayout] = []
    for media in sample.media:
        key = (media.kind, media.parts, media.fps)
        if key not in probed:
            probed[key] = probe_media(media, sample, verify)
        infos.append(probed[key])
        if processor is not None:
            layouts.append(processor.layout(media, probed[key], sample))
    if processor is None:
        return Row(number, record, sample, tuple(infos), (), 0, 0, 0)
    encoded = processor.encode(sample, layouts)
    length, visual = len(encoded.input_ids), int(encoded.visual_mask.sum())
    if pack_length is not None and length > pack_length:
        raise sample.fail(
            f"it has {length} tokens, {visual} of them image tokens, and a pack holds "
            f"{pack_length}; raise --train.pack_length to {length} or more, lower max_pixels in "
            "preprocessor_config.json, or shorten the sample"
        )
    if encoded.target_tokens == 0:
        raise sample.fail("it has no token to learn; give the assistant's turns some text")
    targets = encoded.target_tokens
    return Row(number, record, sample, tuple(infos), tuple(layouts), length, targets, visual)


_In = TypeVar("_In")
_Out = TypeVar("_Out")


def _ordered_map(
    pool: ThreadPoolExecutor, function: Callable[[_In], _Out], items: Iterable[_In]
) -> Iterator[_Out]:
    """`pool.map` that reads its input as it goes: at most 64 items are under way."""
    waiting: deque[Future[_Out]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) >= 64:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _default_workers() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return min(len(affinity(0)) if affinity else os.cpu_count() or 1, 8)

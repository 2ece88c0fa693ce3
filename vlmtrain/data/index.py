"""Scans the training data once: everything is checked, and every sample's layout is recorded.

The index is a few numpy arrays (about 100 bytes a sample). It is made on one process and sent to
the others; the samples themselves are read again from their files by byte offset when needed.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import numpy as np

from vlmtrain.core.config import LoaderSection
from vlmtrain.core.files import is_dir, is_file
from vlmtrain.core.progress import progress
from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.errors import DataError
from vlmtrain.data.formats.json_source import JsonSource, Record
from vlmtrain.data.formats.shards import ShardSource
from vlmtrain.data.formats.sources import SourceSpec, parse_sources
from vlmtrain.data.formats.tars import TarSource
from vlmtrain.data.media.limits import smaller
from vlmtrain.data.media.videos import probe_media
from vlmtrain.data.processor import Measure, Processor
from vlmtrain.data.sample import MediaInfo, Sample

_KINDS = ("image", "video")
_FEWEST = 0.01  # samples in an epoch by their weights: epochs are planned one by one
TooLong = Literal["error", "drop", "truncate"]


class Source(Protocol):
    """A file of records."""

    path: str

    def records(self) -> Iterator[Record | DataError]: ...

    def read(self, number: int, offset: int, size: int) -> Record: ...

    def measured(self, record: Record, fingerprint: str) -> Measure | None: ...

    def parse(self, record: Record) -> Sample: ...


def open_source(spec: SourceSpec) -> Source:
    """A conversation file, a tar file, or a folder written by `build_shards`."""
    if Path(spec.path).suffix.lower() == ".tar":
        return TarSource(spec.path, spec.ignored)
    if is_dir(spec.path):
        return ShardSource(spec.path)
    if Path(spec.path).suffix.lower() == ".parquet":
        from vlmtrain.data.formats.parquet import ParquetSource

        return ParquetSource(spec.path, spec.media_root, spec.ignored)
    return JsonSource(spec.path, spec.media_root, spec.ignored)


@dataclass(frozen=True)
class Row:
    """What the scan found out about one sample."""

    source: int
    record: Record
    measure: Measure  # without a processor: the media only, lengths 0


@dataclass
class SampleIndex:
    """Every sample's place and layout; n samples with m images and videos in all."""

    sources: list[SourceSpec]
    ids: list[str]
    source: np.ndarray  # int32 [n]: which source
    number: np.ndarray  # int64 [n]: the record's number in it
    offset: np.ndarray  # int64 [n]: bytes
    size: np.ndarray  # int64 [n]: bytes
    crc: np.ndarray  # uint32 [n]: of the record's bytes
    content: np.ndarray  # uint32 [n]: of what it says, wherever that lies
    lengths: np.ndarray  # int64 [n]: tokens
    target_tokens: np.ndarray  # int64 [n]
    image_tokens: np.ndarray  # int64 [n]: language tokens of images and videos
    media_start: np.ndarray  # int64 [n + 1]: rows of grids, kinds, infos
    grids: np.ndarray  # int64 [m, 3]
    kinds: np.ndarray  # uint8 [m]: 0 image, 1 video
    infos: np.ndarray  # float64 [m, 4]: width, height, frames, fps (0: unknown) of the files
    pack_length: int
    content_hash: str  # of every record, its layout and the processor's settings, not of paths
    skipped: list[str] = field(default_factory=list)  # why each left-out sample was left out
    _opened: dict[int, Source] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.ids)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_opened": {}}

    def media(self, position: int) -> slice:
        """The rows of a sample in grids, kinds and infos."""
        return slice(*self.media_start[position : position + 2].tolist())

    def pack_grids(self, pack: np.ndarray) -> np.ndarray:
        """int64 [m, 3]: of all media of a pack's samples, in order."""
        start = self.media_start
        return np.concatenate(
            [self.grids[:0], *(self.grids[start[i] : start[i + 1]] for i in pack.tolist())]
        )

    def pack_tokens(self, pack: np.ndarray) -> int:
        """Of a pack's samples, without padding."""
        return int(self.lengths[pack].sum())

    def split(self, ratio: float) -> tuple[SampleIndex, SampleIndex]:
        """The samples to train on, and a share of all that is held out: those whose records have
        the lowest checksums. It depends on what the records say alone, not on their order, paths or
        a seed, and equal ones are on one side; a file and the shards that were built from it are
        divided alike.

        Raises:
            DataError: nothing is left to train on.
        """
        count = max(1, round(ratio * len(self)))
        held_out = self.content <= np.partition(self.content, count - 1)[count - 1]
        if held_out.all():
            raise DataError(
                f"--evaluate.split_ratio {ratio} of {len(self)} samples leaves none to train on; "
                "lower it, or hold out a file of its own with --evaluate.data"
            )
        return self._only(~held_out), self._only(held_out)

    def _only(self, chosen: np.ndarray) -> SampleIndex:
        media = np.diff(self.media_start)
        of_media = np.repeat(chosen, media)
        digest = hashlib.sha256(self.content_hash.encode() + np.packbits(chosen).tobytes())
        per_sample = ("source", "number", "offset", "size", "crc", "content", "lengths")
        return replace(
            self,
            ids=list(itertools.compress(self.ids, chosen)),
            **{
                name: getattr(self, name)[chosen]
                for name in (*per_sample, "target_tokens", "image_tokens")
            },
            media_start=np.concatenate([[0], media[chosen].cumsum()]),
            **{name: getattr(self, name)[of_media] for name in ("grids", "kinds", "infos")},
            content_hash=digest.hexdigest(),
            skipped=[],
            _opened={},
        )

    def load(self, position: int) -> Sample:
        """Read a sample's record again; its media carry what the scan found out about them.

        Raises:
            DataError: the source file has changed since the scan.
        """
        which = int(self.source[position])
        if which not in self._opened:
            self._opened[which] = open_source(self.sources[which])
        source = self._opened[which]
        number, offset, size = (
            int(array[position]) for array in (self.number, self.offset, self.size)
        )
        try:
            record = source.read(number, offset, size)
        except OSError as error:
            raise DataError(
                f"{source.path}: sample {self.ids[position]!r}: the file cannot be read: "
                f"{error.strerror or error}"
            ) from None
        if zlib.crc32(record.data) != int(self.crc[position]):
            raise DataError(
                f"{source.path}: sample {self.ids[position]!r} has changed since the file was "
                "scanned; start the run again"
            )
        return source.parse(record).with_infos(
            [
                MediaInfo(int(width), int(height), int(frames), fps or None)
                for width, height, frames, fps in self.infos[self.media(position)].tolist()
            ]
        )


def scan_sources(
    paths: Sequence[str | Path | SourceSpec],
    processor: Processor,
    spec: ModelSpec,
    pack_length: int,
    *,
    verify: bool = True,
    workers: int | None = None,
    media_root: str | Path | None = None,
    max_samples: int | None = None,
    skip_limit: int = 0,
    too_long: TooLong = "error",
    log: Callable[[str], None] | None = None,
) -> SampleIndex:
    """Read and check all training data before anything is trained.

    Args:
        paths: what `parse_sources` takes or gives.
        processor: the model's tokenizer and image settings.
        spec: the model's shape; must be the processor's.
        pack_length: tokens that a pack holds at most; no sample may be longer.
        verify: decode every image and video of files that are not shards, to find broken ones.
            Shards were verified when they were built.
        workers: threads; default: the CPUs this process may use, at most 8.
        media_root: folder that relative media paths start from; default: each file's own.
        max_samples: of every source, the first so many.
        skip_limit: leave out up to this many bad samples, which `SampleIndex.skipped` lists; 0:
            the first one is an error. Those that are too long do not count.
        too_long: samples longer than a pack are an error, are dropped, or lose text at the end.
        log: called with a line for each sample left out, and what was read; progress is then shown.

    Raises:
        DataError: the first problem in file order, naming file, sample and what to do; or more
            than `skip_limit` bad samples.
    """
    sources = parse_sources(paths, max_samples=max_samples, media_root=media_root)
    if pack_length < 1:
        raise DataError(f"pack_length must be at least 1, got {pack_length}")
    if processor.spec != spec:
        raise DataError("the processor belongs to another model than the one given")
    rows: list[tuple[int, ...]] = []
    media: list[tuple[int, int, int, int]] = []
    seconds: list[float] = []
    infos: list[tuple[float, ...]] = []
    ids: list[str] = []
    skipped: list[str] = []
    media_start = [0]
    digest = hashlib.sha256(processor.fingerprint().encode())
    digest.update(repr([source.weight for source in sources]).encode())
    digest.update("".join(key for source in sources for key in source.ignored).encode())
    outcomes = scan(
        sources,
        processor,
        pack_length,
        verify=verify,
        workers=workers,
        truncate=too_long == "truncate",
    )
    with closing(counted(outcomes, sources, shown=log is not None)) as outcomes:
        for outcome in _good(outcomes, pack_length, too_long, skip_limit, skipped, log):
            row, record = outcome.measure, outcome.record
            rows.append(
                (outcome.source, record.number, record.offset, len(record.data))
                + (zlib.crc32(record.data), record.checksum)
                + (row.length, row.target_tokens, row.image_tokens)
            )
            for kind, info, layout in zip(row.kinds, row.infos, row.layouts, strict=True):
                media.append((*layout.grid, _KINDS.index(kind)))
                seconds.append(layout.seconds)
                infos.append((info.width, info.height, info.frames, info.fps or 0.0))
            media_start.append(len(media))
            ids.append(row.id)
            digest.update(hashlib.sha256(record.data).digest())
    columns = np.array(rows, dtype=np.int64).T.copy()
    seen = sum(sources[i].weight for i in columns[0])  # in an epoch
    if seen < _FEWEST:
        raise DataError(
            f"by their weights {', '.join(f'{one.path}:{one.weight:g}' for one in sources)} give a "
            f"sample in {1 / seen:,.0f} epochs; raise the weights"
        )
    source, number, offset, size, crc, content, lengths, target_tokens, image_tokens = columns
    grids = np.array(media, dtype=np.int64).reshape(-1, 4)
    for array in (source, lengths, target_tokens, grids, np.array(seconds), np.array(infos)):
        digest.update(array.tobytes())
    index = SampleIndex(
        sources=sources,
        ids=ids,
        source=source.astype(np.int32),
        number=number,
        offset=offset,
        size=size,
        crc=crc.astype(np.uint32),
        content=content.astype(np.uint32),
        lengths=lengths,
        target_tokens=target_tokens,
        image_tokens=image_tokens,
        media_start=np.array(media_start, dtype=np.int64),
        grids=np.ascontiguousarray(grids[:, :3]),
        kinds=grids[:, 3].astype(np.uint8),
        infos=np.array(infos, dtype=np.float64).reshape(-1, 4),
        pack_length=pack_length,
        content_hash=digest.hexdigest(),
        skipped=skipped,
    )
    if log is not None:
        log(
            f"{len(index)} samples, {len(grids)} images and videos, {index.lengths.sum()} tokens, "
            f"{index.target_tokens.sum()} of them targets"
            + (f"; {len(skipped)} bad samples left out" if skipped else "")
        )
    return index


def _good(
    outcomes: Iterable[Row | DataError],
    pack_length: int,
    too_long: TooLong,
    skip_limit: int,
    skipped: list[str],
    log: Callable[[str], None] | None,
) -> Iterator[Row]:
    """The rows; errors that `scan_sources` is to leave out are added to `skipped` or counted.

    Raises:
        DataError: the first that is not left out, one too many, or no row at all.
    """
    dropped, any_row = 0, False
    for outcome in outcomes:
        if not isinstance(outcome, DataError):
            any_row = True
            yield outcome
        elif outcome.kind == "too_long" and too_long == "drop":
            dropped += 1
        elif outcome.whole_source or outcome.kind == "too_long" or not skip_limit:
            raise outcome
        else:
            skipped.append(str(outcome))
            if log is not None:
                log(f"left out: {outcome}")
            if len(skipped) > skip_limit:
                raise DataError(
                    f"{len(skipped)} samples are bad, more than the {skip_limit} that "
                    f"--loader.skip_limit allows; the last: {outcome}"
                )
    if dropped and log is not None:
        log(f"{dropped} samples are longer than a pack and dropped (--loader.too_long)")
    if not any_row and dropped:
        raise DataError(
            f"all samples are longer than a pack of {pack_length} tokens, or bad; raise "
            "--train.pack_length, or choose --loader.too_long truncate"
        )
    if not any_row:
        raise DataError(
            f"all {len(skipped)} samples are bad; mend them, `vlmtrain data check` lists all; the "
            f"last: {skipped[-1]}"
        )


def scan_data(
    data: str,
    section: LoaderSection,
    processor: Processor,
    pack_length: int,
    log: Callable[[str], None] | None = None,
) -> SampleIndex:
    """`scan_sources` of --data as the --loader options say.

    Raises:
        DataError: as `scan_sources`.
    """
    sources = parse_sources(
        data,
        max_samples=section.max_samples,
        media_root=section.media_root,
        ignored=section.ignore_keys,
    )
    return scan_sources(
        sources,
        processor,
        processor.spec,
        pack_length,
        verify=section.verify,
        skip_limit=section.skip_limit if section.unreadable == "skip" else 0,
        too_long=section.too_long,
        log=log,
    )


def scan(
    sources: Sequence[SourceSpec],
    processor: Processor | None,
    pack_length: int | None,
    *,
    verify: bool = True,
    workers: int | None = None,
    truncate: bool = False,
) -> Iterator[Row | DataError]:
    """Every sample in order, as a row or as the error found in it.

    Without a processor only the records and the media files are checked and lengths are 0.
    A source that cannot be read at all gives one error, with `whole_source` set. `truncate`: text
    after pack_length tokens is cut off.
    """
    probed: dict[object, MediaInfo] = {}  # several samples may share an image
    pool = ThreadPoolExecutor(workers or default_workers())
    try:
        for number, spec in enumerate(sources):
            source = open_source(spec)

            def examine(
                record: Record | DataError, source: Source = source, number: int = number
            ) -> Row | DataError:
                if isinstance(record, DataError):
                    return record
                try:
                    return _examine(
                        number, source, record, processor, pack_length, verify, truncate, probed
                    )
                except DataError as error:
                    return error

            try:
                records = itertools.islice(source.records(), spec.max_samples)
                yield from ordered_map(pool, examine, records)
            except DataError as error:
                error.whole_source = True
                yield error
    finally:
        # Without waiting: the garbage collector may close what was given up, on a thread that holds
        # the import lock which the pool's threads wait for.
        pool.shutdown(wait=False, cancel_futures=True)


def counted(
    outcomes: Iterable[Row | DataError], sources: Sequence[SourceSpec], *, shown: bool = True
) -> Generator[Row | DataError, None, None]:
    """What `scan` gives, with progress. How many samples there are is estimated from the bytes of
    conversation files, and not known with others among them."""
    paths = [Path(one.path) for one in sources if one.max_samples is None]
    plain = len(paths) == len(sources)
    plain &= all(is_file(path) and path.suffix in (".json", ".jsonl") for path in paths)
    sizes = [path.stat().st_size for path in paths] if plain else []
    starts = list(itertools.accumulate(sizes, initial=0))
    total = 0
    with progress("scan", "samples", shown=shown) as update:
        for done, outcome in enumerate(outcomes, 1):
            if plain and isinstance(outcome, Row):
                read = starts[outcome.source] + outcome.record.offset + len(outcome.record.data)
                total = max(done, round(done * starts[-1] / read))
            update(done, total)
            yield outcome


def _examine(
    number: int,
    source: Source,
    record: Record,
    processor: Processor | None,
    pack_length: int | None,
    verify: bool,
    truncate: bool,
    probed: dict[object, MediaInfo],
) -> Row:
    measure = None
    if processor is not None:
        measure = source.measured(record, processor.fingerprint())
        if measure is not None and (
            (truncate and measure.length > (pack_length or 0))
            # Older builds took every frame of a list.
            or any(layout.grid[0] > processor.videos.most_slices for layout in measure.layouts)
        ):
            measure = None
    where = source.path
    if measure is None:
        sample = source.parse(record)
        where = sample.source
        for media in sample.media:
            if media.key not in probed:
                probed[media.key] = probe_media(media, sample, verify)
        infos = tuple(probed[media.key] for media in sample.media)
        if processor is None:
            kinds = tuple(media.kind for media in sample.media)
            return Row(number, record, Measure(sample.id, kinds, infos, (), 0, 0, 0))
        measure = processor.measure(sample, infos, pack_length if truncate else None)
    if pack_length is not None and measure.length > pack_length:
        advice = f"{smaller(measure.kinds)}, " if measure.kinds else ""
        raise Sample(measure.id, (), (), where).fail(
            f"it has {measure.length} tokens, {measure.image_tokens} of them image tokens, and a "
            f"pack holds {pack_length}; raise --train.pack_length (outside of training "
            f"--pack_length) to {measure.length} or more, {advice}or choose --loader.too_long drop "
            "or truncate",
            "too_long",
        )
    return Row(number, record, measure)


_In = TypeVar("_In")
_Out = TypeVar("_Out")


def ordered_map(
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


def default_workers() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return min(len(affinity(0)) if affinity else os.cpu_count() or 1, 8)

"""Packs as tensors: samples read, tokenized and laid end to end, their images decoded.

A sample that can't be read any more may be skipped: it then stays in its pack, in its length, but
counts for nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from vlmtrain.core.batch import IGNORE, EncodedSample, PackedBatch, collate, empty_pack
from vlmtrain.core.config import LoaderSection
from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.errors import DataError
from vlmtrain.data.index import SampleIndex
from vlmtrain.data.media.decoding import DecoderPool
from vlmtrain.data.processor import Processor
from vlmtrain.data.sample import Media, Sample


class PackBuilder:
    """Makes batches of the samples of an index. Thread-safe but for `close`.

    Args:
        pack_length: tokens that a batch holds at most.
        multiple: what its tokens are a multiple of.
        pixel_dtype: float32, or bfloat16 where the model casts to it anyway.
        threads: that decode, where `section.workers` is 0.
        cache_bytes: bound of the memory that keeps decoded, resized images (uint8).
    """

    def __init__(
        self,
        index: SampleIndex,
        processor: Processor,
        spec: ModelSpec,
        section: LoaderSection,
        *,
        pack_length: int,
        multiple: int,
        pixel_dtype: torch.dtype,
        threads: int,
        cache_bytes: int,
    ) -> None:
        self.index, self.processor, self.spec, self.section = index, processor, spec, section
        self.multiple, self.pixel_dtype = multiple, pixel_dtype
        self._max_length = pack_length if section.too_long == "truncate" else None
        self._frames = _FrameCache(cache_bytes)
        # Processes of their own: a crash of a decoder is an unreadable sample.
        isolate = section.workers > 0
        self._pool = DecoderPool(processor.images, processor.videos) if isolate else None
        self._threads = ThreadPoolExecutor(section.workers or threads, thread_name_prefix="decode")

    def close(self) -> None:
        """Stop the threads and processes."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._pool is not None:
            self._pool.close()

    def build(
        self, pack: list[int], decode: tuple[bool, ...] | None
    ) -> tuple[PackedBatch, dict[int, DataError]]:
        """A pack of samples as a batch.

        Args:
            pack: positions in the index.
            decode: which of its media, [m]; None: all.

        Returns:
            The batch, and the segments that could not be read.

        Raises:
            DataError: a sample can't be read, unless they are to be skipped.
        """
        if not pack:
            pad, width = self.processor.pad_token_id, self.spec.vision.patch_dim
            return empty_pack(self.multiple, pad, width, self.pixel_dtype), {}
        bad: dict[int, DataError] = {}

        def note(segment: int, error: DataError) -> None:
            if self.section.unreadable == "raise":
                raise error
            bad.setdefault(segment, error)

        encoded: list[EncodedSample] = []
        media: list[tuple[int, Media | None, Sample | None]] = []
        rows = [self.index.media(position) for position in pack]
        for segment, position in enumerate(pack):
            try:
                sample = self.index.load(position)
                layouts = self.processor.layouts(sample)
                one = self.processor.encode(sample, layouts, max_length=self._max_length)
                if len(one.input_ids) != self.index.lengths[position]:
                    raise sample.fail("it has changed since it was scanned; start the run again")
                media += [(segment, item, sample) for item in sample.media]
            except DataError as error:
                note(segment, error)
                one = self._blank(position)
                media += [(segment, None, None)] * len(self.index.kinds[rows[segment]])
            encoded.append(one)
        grids = torch.from_numpy(np.concatenate([self.index.grids[part] for part in rows]))
        wanted = decode if decode is not None else (True,) * len(grids)
        counts = grids.prod(1).tolist()
        patches = sum(count for count, here in zip(counts, wanted, strict=True) if here)
        pixels = torch.empty(patches, self.spec.vision.patch_dim, dtype=self.pixel_dtype)
        self._decode(media, counts, wanted, pixels, note)
        pad = self.processor.pad_token_id
        batch = collate(encoded, grids, pixels, self.multiple, pad)
        return replace(batch, has_pixels=decode), bad

    def _decode(
        self,
        media: list[tuple[int, Media | None, Sample | None]],
        counts: list[int],
        wanted: Sequence[bool],
        pixels: torch.Tensor,
        note: Callable[[int, DataError], None],
    ) -> None:
        """Fill the rows of the media that are wanted; with zeros those of one that can't be read,
        whose segment goes to `note`."""
        parts = pixels.split([n for n, here in zip(counts, wanted, strict=True) if here])
        jobs = []
        items = (item for item, here in zip(media, wanted, strict=True) if here)
        for (segment, item, sample), part in zip(items, parts, strict=True):
            if item is None or sample is None:
                part.zero_()
            else:
                jobs.append((segment, part, self._threads.submit(self._pixels, item, sample, part)))
        try:
            for segment, part, job in jobs:
                try:
                    job.result()
                except DataError as error:
                    note(segment, error)
                    part.zero_()
        except BaseException:  # the others write into `pixels`: not after it is gone
            for _, _, job in jobs:
                job.cancel()
            raise

    def _blank(self, position: int) -> EncodedSample:
        """A sample that could not even be read, in its length: its images' rows, then padding."""
        length = int(self.index.lengths[position])
        visual = torch.arange(length) < int(self.index.image_tokens[position])
        ids = torch.full((length,), self.processor.pad_token_id)
        media = self.index.media(position)
        tokens = self.index.grids[media].prod(1) // self.spec.vision.merge_unit
        kinds = torch.tensor([self.spec.image_token_id, self.spec.video_token_id])
        kind = torch.from_numpy(self.index.kinds[media].astype(np.int64))
        ids[visual] = kinds[kind].repeat_interleave(torch.from_numpy(tokens))
        return EncodedSample(
            self.index.ids[position],
            ids,
            torch.full((length,), IGNORE),
            torch.arange(length).expand(3, length),
            visual,
        )

    def _pixels(self, media: Media, sample: Sample, out: torch.Tensor) -> None:
        frames = self._frames.get(media.key)
        if frames is None:
            frames = (self._pool or self.processor).frames(media, sample)
            self._frames.put(media.key, frames)
        self.processor.pixels(media, frames, out)


class _FrameCache:
    """Least recently used frames, within a bound in bytes; safe to share between threads."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._entries: OrderedDict[object, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: object) -> np.ndarray | None:
        with self._lock:
            frames = self._entries.get(key)
            if frames is not None:
                self._entries.move_to_end(key)
            return frames

    def put(self, key: object, frames: np.ndarray) -> None:
        with self._lock:
            if key in self._entries or frames.nbytes > self.max_bytes:
                return
            self._entries[key] = frames
            self.bytes += frames.nbytes
            while self.bytes > self.max_bytes:
                _, dropped = self._entries.popitem(last=False)
                self.bytes -= dropped.nbytes

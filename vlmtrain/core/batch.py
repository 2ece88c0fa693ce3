"""One microbatch: a pack of samples laid end to end, with their offsets.

Legend: S tokens of the pack, n segments, P patches, m images and videos.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from vlmkernels._native import to_device

IGNORE = -100  # the label of a token without loss


@dataclass(frozen=True)
class EncodedSample:
    """One sample as tensors, without pixels."""

    id: str
    input_ids: Tensor  # int64 [S]
    labels: Tensor  # int64 [S]: shifted by one, -100 where there is no loss
    position_ids: Tensor  # int64 [3, S]
    visual_mask: Tensor  # bool [S]: placeholders
    loss_weights: Tensor | None = None  # float32 [S]: factors of the labels' losses; None: all 1

    @property
    def target_tokens(self) -> int:
        return int((self.labels != IGNORE).sum())


@dataclass
class PackedBatch:
    """One microbatch = one pack."""

    input_ids: Tensor  # int64 [S]
    labels: Tensor  # int64 [S]: shifted by one inside each sample, -100: no loss; in host memory
    position_ids: Tensor  # int64 [3, S]: M-RoPE time, height, width, counted per sample
    cu_seqlens: Tensor  # int32 [n + 1]: offsets of segments; a padded tail is a segment of its own
    visual_index: Tensor  # int32 [S]: row of the merged visual features, -1 for text
    pixel_values: Tensor  # [P, 1176], media in sequence order; [0, 1176] if not wanted
    grid_thw: Tensor  # int64 [m, 3], media in sequence order; always in host memory
    sample_ids: list[str]
    target_tokens: int
    image_tokens: int  # tokens of images and videos
    pad_tokens: int
    pad_token_id: int = 0
    has_pixels: tuple[bool, ...] | None = None  # [m]: media in pixel_values; None: all or none
    max_seqlen: int | None = None  # tokens of the longest segment; `to` sets it
    loss_weights: Tensor | None = None  # float32 [S]: factors of the labels' losses; None: all 1
    rows_before: np.ndarray | None = None  # [S + 1]: visual rows before each position; so too

    @property
    def length(self) -> int:
        """Tokens, padding included."""
        return len(self.input_ids)

    @property
    def decoded(self) -> tuple[bool, ...]:
        """Whether the rows of each medium are in pixel_values, [m]."""
        if self.has_pixels is not None:
            return self.has_pixels
        return (len(self.pixel_values) > 0,) * len(self.grid_thw)

    def visual_rows(self, part: int, parts: int) -> tuple[int, int]:
        """The first visual row and their number in one of `parts` equal parts of the sequence."""
        before = self._rows_before() if self.rows_before is None else self.rows_before
        size = self.length // parts
        first, end = int(before[part * size]), int(before[(part + 1) * size])
        return first, end - first

    def _rows_before(self) -> np.ndarray:
        return np.concatenate([[0], (self.visual_index.numpy() >= 0).cumsum()])

    def target_rows(self, parts: int) -> np.ndarray | None:
        """Positions [parts, n] within each of `parts` equal parts of the sequence, each target
        token among them: n is the largest number in a part, at least 1, and others fill a part up.
        None: all positions."""
        ignored = (self.labels == IGNORE).numpy().reshape(parts, -1)
        most = max(ignored.shape[1] - int(ignored.sum(1).min()), 1)
        if most == ignored.shape[1]:
            return None
        return ignored.argsort(axis=1, kind="stable")[:, :most]

    def media_pixels(self) -> list[Tensor | None]:
        """The rows of pixel_values of each medium; None: they are not in this batch."""
        decoded, patches = self.decoded, self.grid_thw.prod(1).tolist()
        counts = [count for count, here in zip(patches, decoded, strict=True) if here]
        parts = iter(self.pixel_values.split(counts))
        return [next(parts) if here else None for here in decoded]

    def padded_to(self, length: int) -> PackedBatch:
        """The same pack with a tail of padding up to `length` tokens, one segment of its own.

        The tail has the pad token, no loss, positions from 0 on, and no visual rows; an existing
        tail grows. Being a segment, it is attended to by nothing but itself.

        Raises:
            ValueError: the pack is longer than `length`.
        """
        if length < self.length:
            raise ValueError(f"length is {length} but the pack already has {self.length} tokens")
        if length == self.length:
            return self
        grown = length - self.length
        real = self.length - self.pad_tokens
        tail = self.pad_tokens + grown
        positions = torch.arange(tail, dtype=torch.int64).expand(3, tail)
        weights = self.loss_weights
        offsets = self.cu_seqlens if self.pad_tokens == 0 else self.cu_seqlens[:-1]
        return replace(
            self,
            input_ids=_extend(self.input_ids[:real], tail, self.pad_token_id),
            labels=_extend(self.labels[:real], tail, IGNORE),
            position_ids=torch.cat((self.position_ids[:, :real], positions), dim=1),
            cu_seqlens=torch.cat((offsets, offsets.new_tensor([length]))),
            visual_index=_extend(self.visual_index[:real], tail, -1),
            pad_tokens=tail,
            max_seqlen=None,
            loss_weights=None if weights is None else _extend(weights[:real], tail, 1),
            rows_before=None,
        )

    def without(self, segment: int) -> PackedBatch:
        """The same pack in which a sample stands but counts for nothing.

        The rows of its images stand first, then padding; its pixels are zeros, its labels -100.
        Length and number of rows stay, so every rank, whether it could read the sample or not,
        now has the same. The tensors are written in place.
        """
        begin, end = self.cu_seqlens[segment : segment + 2].tolist()
        part = slice(begin, end)
        visual = self.visual_index[part] >= 0
        rows, ids = self.visual_index[part][visual], self.input_ids[part][visual]
        targets = int((self.labels[part] != IGNORE).sum())
        self.input_ids[part] = self.pad_token_id
        self.input_ids[begin : begin + len(ids)] = ids
        self.visual_index[part] = -1
        self.visual_index[begin : begin + len(rows)] = rows
        self.labels[part] = IGNORE
        self.position_ids[:, part] = torch.arange(end - begin)
        if len(rows) and len(self.pixel_values):
            patches = self.grid_thw.prod(1)
            unit = int(patches.sum()) // int((self.visual_index >= 0).sum())  # patches a row
            ends = patches.cumsum(0) // unit  # of each medium, in rows
            of_sample = (ends > int(rows[0])) & (ends <= int(rows[-1]) + 1)
            if self.has_pixels is not None:
                here = torch.tensor(self.has_pixels)
                patches, of_sample = patches[here], of_sample[here]
            self.pixel_values[of_sample.repeat_interleave(patches)] = 0
        return replace(self, target_tokens=self.target_tokens - targets, rows_before=None)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        """The same batch with its tensors on `device`, but for grids and labels: shapes
        and target rows follow from them on the host, which must not wait for a device."""
        moved = self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        max_seqlen, rows = self.max_seqlen, self.rows_before
        if max_seqlen is None:
            max_seqlen = int(self.cu_seqlens.diff().max())
        if rows is None:
            rows = self._rows_before()
        kept = dict(grid_thw=self.grid_thw, labels=self.labels)
        return replace(moved, **kept, max_seqlen=max_seqlen, rows_before=rows)

    def pin_memory(self) -> PackedBatch:
        """The same batch with its tensors in page-locked host memory."""
        return self._map(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tensors on a GPU are read on that stream too: their memory is not used again before."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and value.is_cuda:
                value.record_stream(stream)

    def _map(self, function) -> PackedBatch:  # type: ignore[no-untyped-def]
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return PackedBatch(
            **{
                name: function(value) if isinstance(value, Tensor) else value
                for name, value in values.items()
            }
        )


def padded_length(tokens: int, multiple: int) -> int:
    """Tokens of a pack with its padding: a multiple of what the layout needs, at least that."""
    return max(-(-tokens // multiple), 1) * multiple


def empty_pack(length: int, pad_token_id: int, patch_dim: int, dtype: torch.dtype) -> PackedBatch:
    """A pack of padding alone: it fills the last step of a pass over data, and counts nothing."""
    nothing = torch.empty(0, dtype=torch.int64)
    pack = PackedBatch(
        input_ids=nothing,
        labels=nothing,
        position_ids=nothing.expand(3, 0),
        cu_seqlens=torch.zeros(1, dtype=torch.int32),
        visual_index=nothing.to(torch.int32),
        pixel_values=torch.empty(0, patch_dim, dtype=dtype),
        grid_thw=torch.empty(0, 3, dtype=torch.int64),
        sample_ids=[],
        target_tokens=0,
        image_tokens=0,
        pad_tokens=0,
        pad_token_id=pad_token_id,
    )
    return pack.padded_to(length)


def collate(
    samples: Sequence[EncodedSample],
    grids: Tensor,
    pixel_values: Tensor,
    multiple: int,
    pad_token_id: int,
) -> PackedBatch:
    """Lay samples end to end and pad to a multiple of `multiple` tokens.

    Args:
        samples: the pack, in order.
        grids: int64 [m, 3] of all their media, in order.
        pixel_values: float32 [P, patch_dim] of the same media, or [0, patch_dim].
        multiple: that the layout needs (the tensor-parallel size).
        pad_token_id: id of the tail.
    """
    lengths = torch.tensor([len(sample.input_ids) for sample in samples])
    offsets = torch.zeros(len(samples) + 1, dtype=torch.int32)
    offsets[1:] = lengths.cumsum(0)
    mask = torch.cat([sample.visual_mask for sample in samples])
    rows = mask.cumsum(0, dtype=torch.int32) - 1
    weights = None
    if any(sample.loss_weights is not None for sample in samples):
        ones = (torch.ones(len(sample.input_ids)) for sample in samples)
        parts = zip((sample.loss_weights for sample in samples), ones, strict=True)
        weights = torch.cat([one if given is None else given for given, one in parts])
    packed = PackedBatch(
        input_ids=torch.cat([sample.input_ids for sample in samples]),
        labels=torch.cat([sample.labels for sample in samples]),
        position_ids=torch.cat([sample.position_ids for sample in samples], dim=1),
        cu_seqlens=offsets,
        visual_index=torch.where(mask, rows, -1).to(torch.int32),
        pixel_values=pixel_values,
        grid_thw=grids,
        sample_ids=[sample.id for sample in samples],
        target_tokens=sum(sample.target_tokens for sample in samples),
        image_tokens=int(mask.sum()),
        pad_tokens=0,
        pad_token_id=pad_token_id,
        loss_weights=weights,
    )
    return packed.padded_to(padded_length(packed.length, multiple))


def _extend(values: Tensor, count: int, fill: int) -> Tensor:
    return torch.cat((values, values.new_full((count,), fill)))


@dataclass
class EncodedPack(PackedBatch):
    """A pack whose images are encoded, on a rank that embeds words: the rows that it writes, in the
    order of their positions.

    Where another rank writes a visual row, visual_index is -1 and the id that of no word.
    """

    encoded: Tensor | None = None  # [n, h], or with DeepStack's features behind it [n, sets * h]
    pack_index: Tensor | None = None  # visual_index of the pack

    @classmethod
    def of(cls, pack: PackedBatch, rows: Tensor, index: Tensor) -> EncodedPack:
        index = to_device(index, pack.visual_index.device)
        kept = {f.name: getattr(pack, f.name) for f in fields(pack)}
        kept["input_ids"] = pack.input_ids.masked_fill((pack.visual_index >= 0) & (index < 0), -1)
        kept["visual_index"] = index
        return cls(**kept, encoded=rows, pack_index=pack.visual_index)

"""What travels from one pipeline stage to the next: one tensor (megatron-core sends no more), whose
shape both ends know beforehand.

In it lie, one after another where there are several:

- the hidden states of the vision tower, or behind the merger those of the language model;
- word embeddings that were looked up before the merger;
- DeepStack's sets of features that a later stage adds, of the visual rows in this rank's part of
  the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vlmtrain.core.layout import Layout
from vlmtrain.core.spec import ModelSpec

Shape = tuple[int, int, int]


def parts(
    spec: ModelSpec, layout: Layout, stage: int, *, tokens: int, patches: int, rows: int
) -> list[tuple[int, int]]:
    """(rows, width) of each tensor in what `stage` sends to the next one.

    Args:
        tokens, patches: of the pack on this rank, with the tower's padding.
        rows: visual rows in this rank's part of the sequence.
    """
    words = tokens, spec.hidden_size
    if layout.multiplexed or stage >= layout.merger_stage:
        result = [words]
    else:
        result = [(patches, spec.vision.hidden_size)]
        if stage >= layout.embedding_stage:
            result.append(words)
    sets = layout.carried(spec.vision.deepstack_layers, stage)
    return result + [(rows, spec.hidden_size)] * len(sets)


def shape(sizes: Sequence[tuple[int, int]]) -> Shape:
    if len(sizes) == 1:
        return sizes[0][0], 1, sizes[0][1]
    return 1, 1, sum(rows * width for rows, width in sizes)


def join(tensors: Sequence[Tensor]) -> Tensor:
    """Not a view where there are several: Megatron frees what it has sent, which a view would not
    allow."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([tensor.reshape(1, 1, -1) for tensor in tensors], dim=-1)


def split(message: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The tensors [rows, 1, width] that were joined."""
    if len(sizes) == 1:
        return [message]
    flat = message.view(-1).split([rows * width for rows, width in sizes])
    return [part.view(rows, 1, width) for part, (rows, width) in zip(flat, sizes, strict=True)]

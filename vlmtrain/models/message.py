"""What travels from one pipeline stage to the next: one tensor (megatron-core sends no more), whose
shape both ends know beforehand.

In it lie, one after another where there are several:

- the hidden states of the vision tower, or behind the merger those of the language model;
- word embeddings that were looked up before the merger;
- DeepStack's sets of features that a later stage adds, of the visual rows in this rank's part of
  the sequence;
- with a load-balancing loss what its layers so far have added up (`balance.Routing.sums`), in
  float32 whatever the message's type: as the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
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
    result += [(rows, spec.hidden_size)] * len(sets)
    if spec.router_aux_loss_coef and stage >= layout.merger_stage:
        result.append((1, 4 * spec.num_experts))
    return result


def shape(sizes: Sequence[tuple[int, int]]) -> Shape:
    if len(sizes) == 1:
        return sizes[0][0], 1, sizes[0][1]
    return 1, 1, sum(rows * width for rows, width in sizes)


def join(tensors: Sequence[Tensor]) -> Tensor:
    """Not a view: on CUDA Megatron frees what it has sent, and a view would not allow that."""
    if len(tensors) == 1:
        assert tensors[0]._base is None, "a message that is a view can't be freed"
        return tensors[0]
    return torch.cat([tensor.reshape(1, 1, -1) for tensor in tensors], dim=-1)


def split(message: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The tensors [rows, 1, width] that were joined."""
    if len(sizes) == 1:
        return [message]
    flat = message.view(-1).split([rows * width for rows, width in sizes])
    return [part.view(rows, 1, width) for part, (rows, width) in zip(flat, sizes, strict=True)]


class _Bits(torch.autograd.Function):
    """The same bits as entries of another type, [n] to [m]; so too of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        return x.clone().view(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.clone().view(ctx.dtype), None


def from_sums(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """A part [1, 1, 4E] of a message of 16 or 32 bits an entry, of float32 sums [2, E]."""
    bits = _Bits.apply(sums.reshape(-1), dtype)
    return F.pad(bits, (0, 2 * sums.numel() - bits.numel())).view(1, 1, -1)


def to_sums(part: Tensor) -> Tensor:
    used = part.numel() * 2 // part.element_size()
    return _Bits.apply(part.reshape(-1)[:used], torch.float32).view(2, -1)

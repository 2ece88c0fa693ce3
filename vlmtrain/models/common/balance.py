"""The load-balancing loss of a mixture of experts, as transformers has it.

Of a pack with N tokens without its padding, L layers and E experts:

    aux_loss = E * sum over e of (c_e / LN) * (p_e / LN)

    c_e     how often expert e was chosen, by all layers
    p_e     sum of its probabilities before the choice, over all tokens and layers

It couples the layers: what a probability adds to it depends on the counts of all. So c and p
travel through the pipeline with the hidden states (message.py), the last stage makes the loss, and
autograd brings the gradient of p back to every router.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from vlmtrain.core.batch import PackedBatch
from vlmtrain.core.spec import ModelSpec


@dataclass
class Routing:
    """What the layers so far have done with this rank's part of a pack's tokens."""

    sums: Tensor  # float32 [2, E]: c and p
    padding: Tensor  # bool [S or S/tp]: tokens that count for nothing

    @classmethod
    def of(cls, sums: Tensor, batch: PackedBatch, part: int, parts: int) -> Routing:
        size = batch.length // parts
        positions = torch.arange(part * size, (part + 1) * size, device=sums.device)
        return cls(sums, positions >= batch.length - batch.pad_tokens)


def routed(logits: Tensor, chosen: Tensor, padding: Tensor) -> Tensor:
    """A layer's share of c and p [2, E], of the logits and choices [S or S/tp, E]."""
    counted = (~padding).to(logits.dtype)
    return torch.stack((counted @ chosen.to(logits.dtype), counted @ logits.softmax(-1)))


def aux_loss(routing: Routing, batch: PackedBatch, spec: ModelSpec, sequence: bool) -> Tensor:
    """Of all layers' sums, []; with `sequence` each tensor-parallel rank has those of its part."""
    sums = routing.sums
    if sequence:  # the gradient of the whole is that of each part
        sums = tensor_parallel.reduce_from_tensor_model_parallel_region(sums)
    counts, probabilities = sums
    total = spec.num_layers * max(1, batch.length - batch.pad_tokens)
    return spec.num_experts * (counts.detach() / total) @ (probabilities / total)

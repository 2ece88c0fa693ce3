"""The language model on one stage: megatron-core's GPTModel with an exact loss."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from vlmtrain.core.spec import ModelSpec


class LanguageModel(GPTModel):
    """GPTModel whose loss ignores the rows that pad the vocabulary to 128 x tensor-parallel size.

    Their weights are zero, so they would add exp(0) each to every softmax: at TP 2 a released
    Qwen2-VL gets 128 such rows.
    """

    def __init__(self, *args: Any, spec: ModelSpec, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.true_vocab_size = spec.vocab_size

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Cross entropy [1, S] of logits [S, 1, padded vocabulary / tp]."""
        local = logits.shape[-1]
        start = parallel_state.get_tensor_model_parallel_rank() * local
        valid = max(0, min(local, self.true_vocab_size - start))
        if valid < local:
            logits = _IgnoreColumns.apply(logits, valid)
        return super().compute_language_model_loss(labels, logits)


class _IgnoreColumns(torch.autograd.Function):
    """Sets columns from `valid` on to -inf in place. Their gradient, a softmax of 0, is 0 as it
    comes, so backward has nothing to do: no copy of the logits is ever made."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, valid: int) -> Tensor:
        ctx.mark_dirty(logits)
        logits[..., valid:] = float("-inf")
        return logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None

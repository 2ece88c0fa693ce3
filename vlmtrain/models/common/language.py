"""The language model on one stage: megatron-core's GPTModel whose loss needs no logits."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from vlmkernels import linear_cross_entropy
from vlmtrain.core.spec import ModelSpec
from vlmtrain.models.common.layers import touch


class LanguageModel(GPTModel):
    """GPTModel that multiplies by the head only the tokens with a label.

    The rows that pad the vocabulary to 128 x tensor-parallel size count for nothing: their weights
    are zero and would add exp(0) each to every softmax.
    """

    def __init__(self, *args: Any, spec: ModelSpec, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.true_vocab_size = spec.vocab_size

    def _postprocess(
        self,
        hidden_states: Tensor,
        *,
        labels: Tensor | None,
        loss_mask: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Of hidden_states [S or S/tp, 1, h]: with labels [S] the sum of the losses, each times
        its loss_mask [S] where that is given; else what GPTModel returns."""
        if labels is None:
            return super()._postprocess(hidden_states=hidden_states, labels=None, **options)
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        touch(self.output_layer)
        group = self.pg_collection.tp
        ends = [min(len(weight) * i, self.true_vocab_size) for i in range(group.size() + 1)]
        scale = self.config.grad_scale_func
        factor = torch.ones((), device=weight.device) if loss_mask is None else loss_mask
        losses = linear_cross_entropy(
            hidden_states[:, 0],
            weight,
            labels,
            reduction="sum" if loss_mask is None else "none",
            group=group if group.size() > 1 else None,
            vocab_range=list(itertools.pairwise(ends)) if group.size() > 1 else (0, ends[1]),
            shard=(group.rank(), group.size()) if self.config.sequence_parallel else None,
            # Megatron's wrapper gives a parameter a main_grad: then no gradient of its size is made
            weight_grad="main_grad" if hasattr(weight, "main_grad") else "dense",
            grad_scale=factor if scale is None else scale(factor).reshape(factor.shape),
        )
        return losses if loss_mask is None else (losses * loss_mask).sum()

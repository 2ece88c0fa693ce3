"""The language model on one stage: megatron-core's GPTModel whose loss needs no logits."""

from __future__ import annotations

import itertools
from typing import Any

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

    def _postprocess(self, hidden_states: Tensor, *, labels: Tensor | None, **options: Any) -> Any:
        """Of hidden_states [S or S/tp, 1, h]: with labels [S] the sum of the losses, else what
        GPTModel returns."""
        if labels is None:
            return super()._postprocess(hidden_states=hidden_states, labels=None, **options)
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        touch(self.output_layer)
        group = self.pg_collection.tp
        ends = [min(len(weight) * i, self.true_vocab_size) for i in range(group.size() + 1)]
        return linear_cross_entropy(
            hidden_states[:, 0],
            weight,
            labels,
            reduction="sum",
            group=group if group.size() > 1 else None,
            vocab_range=list(itertools.pairwise(ends)) if group.size() > 1 else (0, ends[1]),
            shard=(group.rank(), group.size()) if self.config.sequence_parallel else None,
            # Megatron's wrapper gives a parameter a main_grad: then no gradient of its size is made
            weight_grad="main_grad" if hasattr(weight, "main_grad") else "dense",
            grad_scale=1.0,  # bf16 and float32 are trained without a loss scale
        )

"""VarlenCoreAttention refuses the forms of megatron-core's attention that it does not compute."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.kernels.numeric import assert_bitwise
from vlmkernels import varlen_attention
from vlmkernels.integrations.megatron import VarlenCoreAttention

CONFIG = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, attention_dropout=0)


def make(mask: AttnMaskType = AttnMaskType.causal, kind: str = "self", **config: Any) -> Any:
    changed = copy.copy(CONFIG)
    for name, value in config.items():
        setattr(changed, name, value)
    return VarlenCoreAttention(changed, 1, mask, kind)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("softmax_type is 'learnable'; .* needs 'vanilla'", {"softmax_type": "learnable"}),
        (r"window_size is \(8, 0\); .* needs None", {"window_size": (8, 0)}),
        ("attention_type is 'cross'", {"kind": "cross"}),
        ("attention_dropout is 0.1", {"attention_dropout": 0.1}),
        ("attn_mask_type is .*padding", {"mask": AttnMaskType.padding}),
    ],
)
def test_refused_when_made(message: str, options: Any) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_mask_types() -> None:
    q, k, v = torch.randn(3, 5, 2, 8)
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, max_seqlen_q=3)
    for mask in (AttnMaskType.causal, AttnMaskType.no_mask):
        for given in (None, mask):
            out = make(mask)(q, k, v, None, attn_mask_type=given, packed_seq_params=packed)
            causal = mask == AttnMaskType.causal
            assert_bitwise("out", out, varlen_attention(q, k, v, cu, causal=causal))
    with pytest.raises(ValueError, match="no_mask; this layer was made for .*causal"):
        make()(q, k, v, None, attn_mask_type=AttnMaskType.no_mask, packed_seq_params=packed)

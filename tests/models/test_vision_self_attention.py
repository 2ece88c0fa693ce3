"""What VisionSelfAttention refuses; its values are compared with transformers in tests/parity."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from vlmkernels.integrations.megatron import VisionPackedSeqParams, VisionSelfAttention

MASK = torch.ones(1, 1, 4, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("mask", "keywords", "message"),
    [
        (MASK, {}, "takes no attention_mask: segments and angles come from"),
        (None, {"rotary_pos_emb": torch.zeros(4, 1, 1, 8)}, "takes no rotary_pos_emb: segments"),
        (None, {"rotary_pos_emb": None}, "needs packed_seq_params with a layout"),
        (None, {"packed_seq_params": VisionPackedSeqParams()}, "needs packed_seq_params with a"),
    ],
)
def test_what_it_cannot_honour_is_an_error(mask: Any, keywords: dict[str, Any], message: str):
    layer = object.__new__(VisionSelfAttention)  # refused before anything of it is used
    with pytest.raises(ValueError, match=re.escape(message)):
        VisionSelfAttention.forward(layer, torch.zeros(4, 1, 16), mask, **keywords)

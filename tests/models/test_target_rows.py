"""Behind the last language layer's attention go the tokens with a loss, and no others. tests/parity
compares loss and gradients with transformers' on every layout, and counts the rows there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.kernels.numeric import assert_bitwise
from tests.parity import reference
from tests.parity.matrix import FAMILIES
from tests.released import RELEASED, released_spec
from vlmkernels.integrations.megatron import RotaryPackedSeqParams, VarlenCoreAttention
from vlmtrain.core.batch import IGNORE, empty_pack
from vlmtrain.models.family import parse_spec


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.6, 1.0])
def test_every_target_is_among_equally_many_rows_of_a_part(
    parts: int, share: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    pack = empty_pack(96, 0, 1176, torch.float32)
    pack.labels[:] = torch.from_numpy(np.where(rng.random(96) < share, 5, IGNORE))
    rows = pack.target_rows(parts)
    targets = [
        {i for i in range(96 // parts) if pack.labels[part * 96 // parts + i] != IGNORE}
        for part in range(parts)
    ]
    most = max([1, *map(len, targets)])
    if most == 96 // parts:
        assert rows is None
        return
    assert rows is not None and rows.shape == (parts, most)
    for chosen, wanted in zip(rows.tolist(), targets, strict=True):
        assert wanted <= set(chosen) and len(set(chosen)) == most
        assert chosen[: len(wanted)] == sorted(wanted)  # the order of the sequence


def test_models_whose_last_layer_is_read_as_a_whole() -> None:
    """A router's statistics are of all tokens, and so are the rows that DeepStack adds."""
    for name in RELEASED:
        spec = released_spec(name)
        assert spec.ends_on_targets == (spec.family != "qwen3_vl_moe")
        sets = len(spec.vision.deepstack_layers)
        assert not replace(spec, num_layers=sets).ends_on_targets
    for family in FAMILIES:
        spec = parse_spec(reference.make_model(family).config.to_dict())
        assert spec.ends_on_targets == (family != "qwen3_vl_moe")


@pytest.mark.parametrize("batched", [True, False])
def test_attention_returns_the_wanted_rows(batched: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, attention_dropout=0
    )
    attention = VarlenCoreAttention(config, 1, AttnMaskType.causal, "self")
    lengths = [3, 7, 1, 9]
    total = sum(lengths)
    q, k, v, dout = torch.from_numpy(rng.standard_normal((4, total, 2, 8), dtype=np.float32))
    inputs = [x.unsqueeze(1) if batched else x for x in (q, k, v)]
    for x in inputs:
        x.requires_grad_()
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    rows = torch.from_numpy(rng.permutation(total)[:6])
    plain = PackedSeqParams(qkv_format="sbhd", cu_seqlens_q=offsets, max_seqlen_q=9)
    wanted = RotaryPackedSeqParams(
        qkv_format="sbhd", cu_seqlens_q=offsets, max_seqlen_q=9, output_rows=rows
    )
    whole = attention(*inputs, None, packed_seq_params=plain)
    some = attention(*inputs, None, packed_seq_params=wanted)
    assert_bitwise("rows", some, whole[rows])
    grad = dout.view(whole.shape)[rows]
    expected = torch.autograd.grad(whole[rows], inputs, grad)
    for name, a, b in zip("qkv", torch.autograd.grad(some, inputs, grad), expected, strict=True):
        assert_bitwise(name, a, b)

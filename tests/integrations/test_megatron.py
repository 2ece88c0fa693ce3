"""VarlenCoreAttention refuses the forms of megatron-core's attention that it does not compute."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention

from tests.kernels.numeric import assert_bitwise
from tests.worker import one_rank
from vlmkernels import varlen_attention
from vlmkernels.integrations.megatron import (
    PackedSelfAttention,
    RotaryPackedSeqParams,
    VarlenCoreAttention,
    VisionSelfAttention,
)

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
        ("context parallelism is not supported", {"context_parallel_size": 2}),
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


def test_what_the_layer_says_comes_before_the_config() -> None:
    """Its dropout and scale; masks and biases beside the segments are refused."""
    own: Any = dict(layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self")
    with pytest.raises(ValueError, match="attention_dropout is 0.1"):
        VarlenCoreAttention(CONFIG, **own, attention_dropout=0.1)
    changed = copy.copy(CONFIG)
    changed.attention_dropout = 0.1
    core = VarlenCoreAttention(changed, **own, attention_dropout=0.0, softmax_scale=0.9)
    q, k, v = torch.randn(3, 5, 2, 8)
    cu = torch.tensor([0, 5], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, max_seqlen_q=5)
    heads = (x.transpose(0, 1) for x in (q, k, v))
    want = scaled_dot_product_attention(*heads, is_causal=True, scale=0.9).transpose(0, 1)
    torch.testing.assert_close(core(q, k, v, None, packed_seq_params=packed), want)
    for mask, bias in ((torch.zeros(1, 1, 5, 5).bool(), None), (None, torch.zeros(1, 2, 5, 5))):
        with pytest.raises(ValueError, match="attention_mask and attention_bias must be None"):
            core(q, k, v, mask, attention_bias=bias, packed_seq_params=packed)


def layer(core: Any, kind: Any, norm: Any = IdentityOp, **config: Any) -> Any:
    """A SelfAttention, the second layer, with random weights that are the same each time; `norm`:
    of queries and keys."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttentionSubmodules

    options: dict[str, Any] = dict(num_layers=2, hidden_size=32, num_attention_heads=4)
    options |= dict(use_cpu_initialization=True, attention_dropout=0.0, params_dtype=torch.float32)
    parts = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=core,
        linear_proj=RowParallelLinear,
        q_layernorm=norm,
        k_layernorm=norm,
    )
    torch.manual_seed(0)
    made = kind(
        TransformerConfig(**options | config),
        parts,
        layer_number=2,
        attn_mask_type=AttnMaskType.causal,
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return made


def test_activations_are_offloaded_by_megatrons_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fine_grained_activation_offloading: where it is asked to, here without a GPU's copies."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import attention

    seen = []

    class Offload:
        def __init__(self, on: bool, tensor: torch.Tensor, name: str) -> None:
            self.tensor = tensor
            seen.extend([name] if on else [])

        def __enter__(self) -> torch.Tensor:
            return self.tensor

        def __exit__(self, *_: Any) -> None:
            pass

        @staticmethod
        def group_commit(tensor: torch.Tensor, **_: Any) -> torch.Tensor:
            return tensor

    monkeypatch.setattr(attention, "off_interface", Offload)
    parts = ["qkv_linear", "core_attn", "attn_proj"]
    options = dict(fine_grained_activation_offloading=True, offload_modules=parts)
    half = torch.rand(24, 4)
    packed = RotaryPackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=torch.tensor([0, 24], dtype=torch.int32),
        max_seqlen_q=24,
        rotary_table=torch.cat([half.cos(), half.sin()], -1),
    )
    with one_rank():
        parallel_state.initialize_model_parallel()
        try:
            model_parallel_cuda_manual_seed(1)
            made = layer(VarlenCoreAttention, PackedSelfAttention, **options).train()
            made(torch.randn(24, 1, 32, requires_grad=True), None, packed_seq_params=packed)
            assert seen == parts
            with pytest.raises(ValueError, match="take them out of offload_modules"):
                layer(VarlenCoreAttention, VisionSelfAttention, **options)
        finally:
            parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("kind", [SelfAttention, PackedSelfAttention])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"no_rope_freq": [0, 1]},
        {"no_rope_freq": [1, 0]},
        {"norm": L2Norm},
        {"softmax_scale": 0.9},
        {"attention_output_gate": True},
    ],
    ids=str,
)
def test_layers_rotate_as_megatrons(kind: Any, config: Any) -> None:
    """Against its DotProductAttention and RotaryEmbedding; of a layer's config what it says of
    rotations, scale and gate."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    with one_rank():
        parallel_state.initialize_model_parallel()
        try:
            model_parallel_cuda_manual_seed(1)
            length, dim = 24, 8
            x = torch.randn(length, 1, 32)
            angles = RotaryEmbedding(dim, 1.0, use_cpu_initialization=True)(length)
            mask = torch.ones(1, 1, length, length).triu(1).bool()
            theirs = layer(DotProductAttention, SelfAttention, **config)
            want, _ = theirs(x, mask, rotary_pos_emb=(angles, angles))
            half = angles[:, 0, 0, : dim // 2]
            cu = torch.tensor([0, length], dtype=torch.int32)
            packed = RotaryPackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=cu,
                max_seqlen_q=length,
                rotary_table=torch.cat([half.cos(), half.sin()], -1),
            )
            got, _ = layer(VarlenCoreAttention, kind, **config)(x, None, packed_seq_params=packed)
            torch.testing.assert_close(got, want)
            with pytest.raises(ValueError, match="attention_mask .* must be None"):
                layer(VarlenCoreAttention, kind)(x, mask, packed_seq_params=packed)
            interleaved = layer(VarlenCoreAttention, kind, rotary_interleaved=True)
            with pytest.raises(ValueError, match="rotary_interleaved is True"):
                interleaved(x, None, packed_seq_params=packed)
            with pytest.raises(ValueError, match="core_attention is DotProductAttention"):
                layer(DotProductAttention, VisionSelfAttention)
            with pytest.raises(ValueError, match="k_layernorm normalizes .*qk_l2_norm"):
                layer(VarlenCoreAttention, VisionSelfAttention, L2Norm)
            with pytest.raises(ValueError, match="num_query_groups is 2; .* needs .*, 4"):
                layer(VarlenCoreAttention, VisionSelfAttention, num_query_groups=2)
        finally:
            parallel_state.destroy_model_parallel()

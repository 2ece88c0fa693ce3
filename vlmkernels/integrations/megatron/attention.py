"""megatron-core: the packed attention as a layer's `core_attention`.

Usage, in a layer spec of your own:

    spec.submodules.self_attention.submodules.core_attention = VarlenCoreAttention

The attention reads segments from `packed_seq_params.cu_seqlens_q`; with
`RotaryPackedSeqParams` it also rotates queries and keys, by angles that are computed once per
forward (Megatron's own rotary code takes their cosine and sine in every layer). On a CPU the module
around it can read the fused projection where it lies, without Megatron's split of it:

    spec.submodules.self_attention.module = PackedSelfAttention

A vision tower of Qwen2-VL or Qwen2.5-VL also replaces the module itself and passes
`VisionPackedSeqParams`, of which every layer takes the windows that the config does not list in
`full_attention_layers`:

    spec.submodules.self_attention.module = VisionSelfAttention
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from vlmkernels import VisionLayout, varlen_attention, vision_attention
from vlmkernels.attention.api import qkv_attention
from vlmkernels.rotary import apply_rotary, apply_rotary_qkv


@dataclass
class RotaryPackedSeqParams(PackedSeqParams):
    """PackedSeqParams with what a layer's attention needs beside the segments.

    rotary_table: float32 [T, head_dim], of each token the cosines of its head_dim / 2 angles, then
        the sines. Leave the layers' own `rotary_pos_emb` None with it. Layers that the config's
        no_rope_freq names don't rotate; rotary_interleaved is refused.
    output_rows: int64 [n], tokens of which the attention returns its output, on the device of the
        hidden states; None: of all. Behind the last layer's attention nothing needs the tokens
        without a loss; the layer must take the same rows of its residual.
    """

    rotary_table: Tensor | None = None
    output_rows: Tensor | None = None


@dataclass
class VisionPackedSeqParams(PackedSeqParams):
    """PackedSeqParams of a vision tower: segments, windows and angles are the layout's."""

    layout: VisionLayout | None = None


def _rows(out: Tensor, params: PackedSeqParams) -> Tensor:
    """Of the attention's output [T, H, D] the rows that are wanted."""
    rows = getattr(params, "output_rows", None)
    return out if rows is None else out.index_select(0, rows)


class VarlenCoreAttention(MegatronModule):
    """Attention over packed segments, for megatron-core's local layer spec.

    Takes query [T, 1, H, D] and key, value [T, 1, Hkv, D] (or without the 1, `thd`), returns
    [T, 1, H * D] (or [T, H, D]), or of RotaryPackedSeqParams's output_rows alone. Causal where the
    layer's mask type is causal.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.no_mask):
            raise ValueError(
                f"attn_mask_type is {attn_mask_type}; VarlenCoreAttention takes causal or no_mask"
            )
        if attention_type != "self":
            raise ValueError(
                f"attention_type is {attention_type!r}; VarlenCoreAttention needs 'self'"
            )
        for name, needed in (("softmax_type", "vanilla"), ("window_size", None)):
            if (value := getattr(config, name, needed)) != needed:
                raise ValueError(f"{name} is {value!r}; VarlenCoreAttention needs {needed!r}")
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(f"attention_dropout is {dropout}; VarlenCoreAttention needs 0")
        if getattr(config, "context_parallel_size", 1) != 1:
            raise ValueError("context parallelism is not supported by VarlenCoreAttention, use 1")
        self.attn_mask_type = attn_mask_type
        self.scale = softmax_scale
        without = getattr(config, "no_rope_freq", None)
        self.rotates = not (without and without[layer_number - 1])

    def rotary_table(self, packed_seq_params: PackedSeqParams | None) -> Tensor | None:
        """RotaryPackedSeqParams's, where this layer rotates.

        Raises:
            ValueError: the config pairs neighbours, not halves.
        """
        table = getattr(packed_seq_params, "rotary_table", None)
        if table is not None and getattr(self.config, "rotary_interleaved", False):
            raise ValueError(
                "rotary_interleaved is True; a rotary_table pairs halves: give the layers "
                "Megatron's rotary_pos_emb instead"
            )
        return table if self.rotates else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        if packed_seq_params is None:
            raise ValueError("VarlenCoreAttention needs packed_seq_params with cu_seqlens_q")
        if attention_mask is not None or attention_bias is not None:
            raise ValueError(
                "attention_mask and attention_bias must be None: segment borders come from "
                "packed_seq_params"
            )
        if attn_mask_type not in (None, self.attn_mask_type):
            raise ValueError(
                f"attn_mask_type is {attn_mask_type}; this layer was made for {self.attn_mask_type}"
            )
        batched = query.dim() == 4
        if batched:
            query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        table = self.rotary_table(packed_seq_params)
        if table is not None:
            cos, sin = table.chunk(2, -1)
            query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        out = varlen_attention(
            query,
            key,
            value,
            packed_seq_params.cu_seqlens_q,
            max_seqlen=packed_seq_params.max_seqlen_q,
            causal=self.attn_mask_type == AttnMaskType.causal,
            scale=self.scale,
        )
        out = _rows(out, packed_seq_params)
        return out.reshape(out.shape[0], 1, -1) if batched else out

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        return {}  # no parameters


class PackedSelfAttention(SelfAttention):
    """megatron-core's SelfAttention around VarlenCoreAttention, without its split of the fused
    projection: by qkv_attention on the CPU, apply_rotary_qkv and varlen_attention on CUDA.

    With RotaryPackedSeqParams, queries and keys that are not normalized, a key/value head or more
    a rank and no activations of attention that are offloaded; else Megatron's own forward.
    """

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [T, 1, width], or [T / tp, 1, width] with sequence parallelism."""
        ours = isinstance(self.core_attention, VarlenCoreAttention)
        table = self.core_attention.rotary_table(packed_seq_params) if ours else None
        if (
            packed_seq_params is None
            or table is None
            or hidden_states.device.type not in ("cpu", "cuda")
            or (hidden_states.is_cuda and self.checkpoint_core_attention)
            or _normalizes(self)
            or _offloads(self)
            or getattr(self.config, "attention_output_gate", False)
            or (self.config.num_query_groups or 0) < self.world_size
            or attention_mask is not None
            or any(value is not None for value in others.values())
        ):
            return super().forward(
                hidden_states, attention_mask, packed_seq_params=packed_seq_params, **others
            )
        core, head_dim = self.core_attention, self.hidden_size_per_attention_head
        qkv, _ = self.linear_qkv(hidden_states)  # [T, 1, Hkv * (H / Hkv + 2) * D]
        qkv = qkv.view(qkv.shape[0], self.num_query_groups_per_partition, -1, head_dim)
        causal = core.attn_mask_type == AttnMaskType.causal
        segments = packed_seq_params.cu_seqlens_q
        if qkv.is_cuda:
            q, k, v = apply_rotary_qkv(qkv, *table.chunk(2, -1))
            longest = packed_seq_params.max_seqlen_q
            out = varlen_attention(
                q, k, v, segments, max_seqlen=longest, causal=causal, scale=core.scale
            )
        else:
            out = qkv_attention(qkv, table, segments, causal=causal, scale=core.scale)
        out = _rows(out, packed_seq_params)
        return self.linear_proj(out.view(len(out), 1, out.shape[1] * out.shape[2]))


def _normalizes(attention: SelfAttention) -> bool:
    """Whether queries or keys are normalised: Megatron's L2Norm is in the modules alone."""
    norms = (attention.q_layernorm, attention.k_layernorm)
    return any(norm is not None and not isinstance(norm, IdentityOp) for norm in norms)


def _offloads(attention: SelfAttention) -> bool:
    """Whether activations go to host memory (fine_grained_activation_offloading)."""
    parts = ("qkv_linear", "core_attention", "attn_proj")
    return any(getattr(attention, f"offload_{part}", False) for part in parts)


class VisionSelfAttention(SelfAttention):
    """megatron-core's SelfAttention with vision_attention between its two projections.

    The fused projection's rows [P, H, 3, D] are read as they are: no split into q, k and v, no
    rotated copy, and the gradient comes back in one tensor of the same order.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.num_query_groups != config.num_attention_heads:
            raise ValueError(
                f"num_query_groups is {config.num_query_groups}; VisionSelfAttention needs "
                f"num_attention_heads, {config.num_attention_heads}"
            )
        if _normalizes(self):
            raise ValueError(
                "q_layernorm or k_layernorm normalizes (qk_layernorm, qk_l2_norm); "
                "VisionSelfAttention normalizes no queries"
            )
        if _offloads(self):
            raise ValueError(
                "fine_grained_activation_offloading has offload_modules of attention; "
                "VisionSelfAttention offloads none of them: take them out of offload_modules"
            )
        if not isinstance(self.core_attention, VarlenCoreAttention):
            raise ValueError(
                f"core_attention is {type(self.core_attention).__name__}; VisionSelfAttention "
                "needs VarlenCoreAttention"
            )
        # Absent on Qwen2-VL's config; layer numbers are global and start at 1.
        full = getattr(config, "full_attention_layers", None)
        self.windowed = full is not None and self.layer_number - 1 not in full

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [P, 1, width], or [P / tp, 1, width] with sequence parallelism."""
        others["attention_mask"] = attention_mask
        refused = [name for name, value in others.items() if value is not None]
        if refused:
            raise ValueError(
                f"VisionSelfAttention takes no {', '.join(refused)}: segments and angles come from "
                "VisionPackedSeqParams.layout"
            )
        layout = getattr(packed_seq_params, "layout", None)
        if layout is None:
            raise ValueError("VisionSelfAttention needs packed_seq_params with a layout")
        qkv, _ = self.linear_qkv(hidden_states)  # [P, 1, H * 3 * D]
        qkv = qkv.view(qkv.shape[0], -1, 3, self.hidden_size_per_attention_head).transpose(1, 2)
        out = vision_attention(qkv, layout, window=self.windowed, scale=self.core_attention.scale)
        return self.linear_proj(out.view(len(out), 1, out.shape[1] * out.shape[2]))

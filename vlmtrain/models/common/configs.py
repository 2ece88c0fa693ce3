"""megatron-core TransformerConfigs of the language model and of the vision tower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from vlmtrain.core.layout import Layout
from vlmtrain.core.spec import ModelSpec
from vlmtrain.models import weight_gradients


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(1.702 x), the activation of CLIP and of Qwen2-VL's vision tower."""
    return x * torch.sigmoid(1.702 * x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by a tanh, the activation of Qwen3-VL's vision tower."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {  # by VisionSpec.hidden_act
    "silu": F.silu,
    "quick_gelu": quick_gelu,
    "gelu_pytorch_tanh": gelu_tanh,
}


def language_config(
    spec: ModelSpec, layout: Layout, dtype: torch.dtype, recompute: str = "none"
) -> TransformerConfig:
    """The language model: RMSNorm, SwiGLU, grouped queries, M-RoPE, bias on q, k, v at most."""
    config = TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        pipeline_model_parallel_layout=layout.megatron_text_layout(),
        **_experts(spec, layout),
        **_common(layout, dtype, recompute),
    )
    config.recompute_mlp = recompute == "selective"  # read by TowerMLP and MixtureOfExperts
    return config


def vision_config(
    spec: ModelSpec, layout: Layout, dtype: torch.dtype, recompute: str = "none"
) -> TransformerConfig:
    """The vision tower: biases everywhere, norm and activation as the spec says."""
    if layout.multiplexed:  # the whole tower on every rank
        layout = replace(
            layout, tensor=1, pipeline=1, virtual_pipeline=1, sequence=False, vision_layers=(1,)
        )
    vision = spec.vision
    config = TransformerConfig(
        num_layers=vision.depth,
        hidden_size=vision.hidden_size,
        num_attention_heads=vision.num_heads,
        kv_channels=vision.head_dim,
        ffn_hidden_size=vision.intermediate_size,
        normalization=vision.normalization,
        layernorm_epsilon=1e-6,
        gated_linear_unit=vision.gated,
        activation_func=ACTIVATIONS[vision.hidden_act],
        add_bias_linear=True,
        pipeline_model_parallel_layout=layout.megatron_vision_layout(),
        **_common(layout, dtype, recompute),
    )
    config.recompute_mlp = recompute == "selective"
    # Read by VisionSelfAttention: every other layer attends within windows.
    config.full_attention_layers = (
        frozenset(vision.full_attention_layers) if vision.window_size is not None else None
    )
    return config


def _experts(spec: ModelSpec, layout: Layout) -> dict[str, Any]:
    """A mixture of experts as transformers has it: softmax of the chosen logits (as that of all,
    divided by the sum of the chosen), no token dropped; balance.py has its load-balancing loss."""
    if not spec.num_experts:
        return {}
    return dict(
        num_moe_experts=spec.num_experts,
        moe_router_topk=spec.num_experts_per_tok,
        moe_ffn_hidden_size=spec.moe_intermediate_size,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,  # experts are whole; see experts.py
    )


def _common(layout: Layout, dtype: torch.dtype, recompute: str) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    weight_gradients.enable()
    common: dict[str, Any] = dict(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        sequence_parallel=layout.sequence,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not cuda,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        variable_seq_lengths=True,  # parallel/p2p_shapes.py knows them
        batch_p2p_sync=False,  # for an old torch; it stops the whole device after each message
        moe_token_dispatcher_type="alltoall",  # asked for by variable_seq_lengths, dense or not
        calculate_per_token_loss=True,
        # Megatron's fusions are torch.compile'd, 20 s of start-up; elementwise.py has others.
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=True,  # by torch's own products: weight_gradients.py
        # On gloo a pipeline output would be freed before its send has completed.
        deallocate_pipeline_outputs=cuda,
    )
    if layout.virtual_pipeline > 1:
        # Without overlap megatron-core 0.16.1 crosses messages between virtual stages.
        common.update(
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
            overlap_p2p_comm=True,
            batch_p2p_comm=False,
            deallocate_pipeline_outputs=False,
        )
    if recompute == "full":
        common.update(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        )
    return common

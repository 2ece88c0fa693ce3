"""Transformer layers of both towers: megatron-core's local spec with our norm and attention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from vlmkernels.integrations.megatron import (
    PackedSelfAttention,
    RotaryPackedSeqParams,
    VarlenCoreAttention,
)
from vlmtrain.models.common import elementwise
from vlmtrain.models.common.balance import Routing
from vlmtrain.models.common.configs import gelu_tanh, quick_gelu
from vlmtrain.models.common.experts import Experts, MixtureOfExperts, Router
from vlmtrain.models.common.linears import input_padding, whole_linear

#: Called behind each layer with its number in the whole tower and its output; returns what the next
#: layer gets. Outside of what recomputation repeats.
AfterLayer = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class LossRows:
    """Tokens with which the last layer goes on behind its attention: those that have a loss, and
    what sequence parallelism needs to give each rank equally many."""

    whole: Tensor  # int64 [n * tp, or n]: positions in the pack, part by part of its sequence
    own: Tensor  # int64 [n]: positions in this rank's part, of a sequence that is not split in all


class Norm:
    """RMSNorm or LayerNorm by `config.normalization`, usable under sequence parallelism.

    Megatron's own wrapper refuses sequence parallelism; what that needs is only the mark by
    which the gradients of the replicated weights are summed over the tensor-parallel group.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any
    ) -> torch.nn.Module:
        kind = elementwise.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype, device=init_device(config))
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def init_device(config: TransformerConfig) -> torch.device | None:
    """Where new parameters are made: host memory, or the current device."""
    return None if config.use_cpu_initialization else torch.cuda.current_device()


def touch(module: torch.nn.Module) -> None:
    """Run a module's forward pre-hooks where its weight is used, or skipped, without a call of it.

    With `overlap_param_gather` Megatron waits there until the weight has arrived.
    """
    for hook in module._forward_pre_hooks.values():
        hook(module, ())


# Activation and whether it is gated -> the same in fewer passes over memory.
_FORMS: dict[tuple[Any, bool], Callable[..., Tensor]] = {
    (F.silu, True): elementwise.swiglu,
    (quick_gelu, False): elementwise.quick_gelu,
    (gelu_tanh, False): elementwise.gelu_tanh,
}


class TowerMLP(MLP):
    """megatron-core's MLP with fewer passes over its widest tensors, and where the config's
    `recompute_mlp` asks for it keeping its input only: most of a layer's activations are made here.

    megatron-core's own `recompute_modules=["mlp"]` returns the bias through the checkpoint, which
    makes a parameter its own ancestor and recurses without end where there is a bias.
    """

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        def product(x: Tensor) -> Tensor:
            config = self.config
            activation = _FORMS.get((config.activation_func, config.gated_linear_unit))
            if activation is None or config.bias_activation_fusion:
                return MLP.forward(self, x, *args, **kwargs)[0]
            more = {}
            if activation is elementwise.swiglu:
                more["padding"] = input_padding(self.linear_fc2)
            return self.linear_fc2(activation(*self.linear_fc1(x), **more))[0]

        fc2 = self.linear_fc2
        bias = fc2.bias if fc2.skip_bias_add else None
        if getattr(self.config, "recompute_mlp", False):
            return tensor_parallel.checkpoint(product, False, hidden_states), bias
        return product(hidden_states), bias


class Block(TransformerBlock):
    """megatron-core's block without what is not used here, and with a place behind each layer."""

    def forward(
        self,
        hidden_states: Tensor | None,
        attention_mask: None = None,
        *,
        packed_seq_params: RotaryPackedSeqParams,
        after_layer: AfterLayer | None = None,
        routing: Routing | None = None,
        loss_rows: LossRows | None = None,
        **unused: Any,
    ) -> Tensor:
        """hidden_states [S or S/tp, 1, h]; without `pre_process` they were set beforehand. Each
        layer adds to `routing`. With `loss_rows` the last one returns those rows, [n, 1, h]."""
        x = hidden_states if self.pre_process else self.input_tensor
        # Megatron's checkpoints and its freeing of what was sent allow no views.
        x = make_viewless_tensor(inp=x, requires_grad=True, keep_graph=True)
        recomputes = self.config.recompute_granularity == "full" and self.training
        needs_sum = recomputes or routing is not None or after_layer is not None
        padding = None if routing is None else routing.padding
        tracker = tensor_parallel.get_cuda_rng_tracker()
        with tracker.fork() if self.config.sequence_parallel else contextlib.nullcontext():
            for layer in self.layers:
                rows = loss_rows if layer is self.layers[-1] else None

                def run(x: Tensor, layer: Any = layer, rows: LossRows | None = rows) -> Any:
                    x = layer(
                        hidden_states=x,
                        attention_mask=attention_mask,
                        packed_seq_params=packed_seq_params,
                        padding_mask=padding,
                        loss_rows=rows,
                    )[0]
                    x = _added(x) if needs_sum else x
                    return x if routing is None else (x, layer.mlp.take_routed())

                out = tensor_parallel.checkpoint(run, False, x) if recomputes else run(x)
                if routing is None:
                    x = out
                else:
                    x, routed = out
                    routing.sums = routing.sums + routed
                if after_layer is not None:
                    x = after_layer(layer.layer_number - 1, x)
        if self.final_layernorm is not None:
            _, x = elementwise.with_norm(self.final_layernorm, x)
            return make_viewless_tensor(inp=x, requires_grad=True, keep_graph=True)
        # The pipeline takes input and output for two nodes of the graph.
        return _added(x) if len(self.layers) or self.pre_process else x.clone()


def _added(x: Tensor | elementwise.Sum) -> Tensor:
    """What a layer returns, as others than the next layer's norm need it."""
    x = x.added() if isinstance(x, elementwise.Sum) else x
    return make_viewless_tensor(inp=x, requires_grad=x.requires_grad, keep_graph=True)


class Layer(TransformerLayer):
    """megatron-core's layer without what is not used here: cross attention, inference, offloading
    of activations, its own recomputation. The residual is left to be added by the next norm."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor | elementwise.Sum,
        attention_mask: None = None,
        *,
        packed_seq_params: RotaryPackedSeqParams,
        padding_mask: Tensor | None = None,
        loss_rows: LossRows | None = None,
    ) -> tuple[elementwise.Sum, None]:
        fused, dropout = self.config.bias_dropout_fusion, self.hidden_dropout
        x, normal = elementwise.with_norm(self.input_layernorm, hidden_states)
        if loss_rows is not None:
            x = x.index_select(0, loss_rows.own)
            packed_seq_params = replace(packed_seq_params, output_rows=loss_rows.whole)
        attended = self.self_attention(
            normal, attention_mask=attention_mask, packed_seq_params=packed_seq_params
        )
        add = self.self_attn_bda(self.training, fused)
        x, normal = elementwise.with_norm(
            self.pre_mlp_layernorm, elementwise.Sum(add, attended, x, dropout)
        )
        out = self.mlp(normal, padding_mask=padding_mask)
        return elementwise.Sum(self.mlp_bda(self.training, fused), out, x, dropout), None


def adapt(block: TransformerBlock) -> None:
    """Make a built block a Block, its layers Layers, their MLPs TowerMLPs and their mixtures of
    experts ours.

    Their class is changed afterwards: a spec with another class than MLP would not get the
    tensor-parallel group from its layer.
    """
    block.__class__ = Block
    for layer in block.layers:
        layer.__class__ = Layer
        layer.mlp.__class__ = MixtureOfExperts if layer.is_moe_layer else TowerMLP
        for linear in layer.modules():
            whole_linear(linear)


def ask_for_gradient(block: TransformerBlock, x: Tensor) -> Tensor:
    """The input of a block that recomputes, so that what learns in it gets its gradients.

    A recomputed layer passes gradients on only if its input asks for one, which the input of
    adapters above frozen layers does not.
    """
    recomputes = block.config.recompute_granularity or getattr(block.config, "recompute_mlp", False)
    if not recomputes or x.requires_grad or not torch.is_grad_enabled():
        return x
    if not any(p.requires_grad for p in block.parameters()):
        return x
    return x.detach().requires_grad_()


def block_submodules(
    config: TransformerConfig, mask: AttnMaskType, num_layers: int
) -> TransformerBlockSubmodules:
    """The submodules of a TransformerBlock of `num_layers` layers with packed attention."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        normalization=config.normalization,
        qk_layernorm=config.qk_layernorm,
    )
    spec.submodules.input_layernorm = Norm
    spec.submodules.pre_mlp_layernorm = Norm
    spec.submodules.self_attention.module = PackedSelfAttention
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = VarlenCoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    spec.submodules.self_attn_bda = elementwise.bias_dropout_add
    spec.submodules.mlp_bda = elementwise.bias_dropout_add
    spec.submodules.self_attention.params = {"attn_mask_type": mask}
    if config.num_moe_experts:
        spec.submodules.mlp.submodules.router = Router
        spec.submodules.mlp.submodules.experts = Experts
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=Norm)

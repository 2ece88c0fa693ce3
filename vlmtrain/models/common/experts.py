"""A mixture of experts: megatron-core's layer, router and dispatcher around experts in one tensor.

megatron-core's experts are a module each (SequentialMLP), or need transformer-engine or the
grouped_gemm package. Here all experts of a rank are one parameter to each linear, as they are on
disk; torch multiplies one expert's rows after another's.

N = rows that have come to a rank, one for each token and expert; E = its experts, h = language
width, f = an expert's width.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from vlmkernels._native import no_rows
from vlmkernels.product import mm
from vlmtrain.models import weight_gradients
from vlmtrain.models.common import balance, elementwise

if not hasattr(moe_utils, "te_general_gemm"):
    # Its router asks whether this is None, and without transformer-engine never says so.
    moe_utils.te_general_gemm = None


class _Product(torch.autograd.Function):
    """y_e = x_e w_e^T for the rows of each expert. The weight's gradient goes into its main_grad
    where it has one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.counts = counts
        y = x.new_empty(x.shape[0], weight.shape[1])
        for rows, w, out in zip(x.split(counts), weight, y.split(counts), strict=True):
            mm(rows, w.t(), out=out)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grads = grad.contiguous().split(ctx.counts)
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = grad.new_empty(grad.shape[0], weight.shape[2])
            for g, w, out in zip(grads, weight, dx.split(ctx.counts), strict=True):
                mm(g, w, out=out)
        if ctx.needs_input_grad[1]:
            main_grad = getattr(weight, "main_grad", None)
            if main_grad is None:
                dweight = torch.empty_like(weight)
                for g, rows, out in zip(grads, x.split(ctx.counts), dweight, strict=True):
                    mm(g.t(), rows, out=out)
            else:
                for g, rows, out in zip(grads, x.split(ctx.counts), main_grad, strict=True):
                    weight_gradients.wgrad_gemm_accum_fp32(rows, g, out)
                # Megatron's hook waits for a gradient, and adds it: one without entries.
                dweight = no_rows(weight)
        return dx, dweight, None


class ExpertLinear(nn.Module):
    """One linear of each of a rank's experts, weight [E, out, in], without bias."""

    def __init__(self, experts: int, inputs: int, outputs: int, config: TransformerConfig) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(
            torch.empty(experts, outputs, inputs, dtype=config.params_dtype, device=device)
        )
        if config.perform_initialization:
            with tensor_parallel.get_cuda_rng_tracker().fork(
                get_expert_parallel_rng_tracker_name()
            ):
                config.init_method(self.weight)
        # Split over the expert-parallel group, and reduced over the other ranks of the stage.
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, True, 0, 1)
        self.weight.allreduce = False  # type: ignore[attr-defined]

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        """x [N, in], the rows of one expert after another's; counts: how many each has."""
        return _Product.apply(x, self.weight, counts)


class Experts(nn.Module):
    """A rank's experts, each a SwiGLU."""

    def __init__(
        self, experts: int, config: TransformerConfig, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__()
        width = config.moe_ffn_hidden_size
        self.linear_fc1 = ExpertLinear(experts, config.hidden_size, 2 * width, config)
        self.linear_fc2 = ExpertLinear(experts, width, config.hidden_size, config)
        self.groups = pg_collection

    def forward(self, x: Tensor, rows: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """x [N, h], rows [E] in host memory, probs [N]: what a row's output is multiplied by."""
        counts = rows.tolist()
        hidden = elementwise.swiglu(self.linear_fc1(x, counts), None) * probs[:, None]
        return self.linear_fc2(hidden.to(x.dtype), counts), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Under megatron-core's keys, with the expert as a dimension behind the layer's."""
        axis, expert = len(sharded_offsets), self.groups.ep
        return {
            f"{prefix}{name}.weight": ShardedTensor.from_rank_offsets(
                f"{prefix}experts.{name}.weight",
                linear.weight,
                *sharded_offsets,
                (axis, expert.rank(), expert.size()),
                replica_id=(0, 0, self.groups.expt_dp.rank()),
                prepend_axis_num=axis,
            )
            for name, linear in self.named_children()
        }


class Router(TopKRouter):
    """megatron-core's, that also adds up what a balance loss is made of."""

    def forward(
        self, input: Tensor, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Weights and choices [S or S/tp, E], and where `padding` is given `balance.routed`."""
        logits = self.gating(input)
        probs, chosen = self.routing(logits)
        if padding is None:
            return probs, chosen, None
        return probs, chosen, balance.routed(logits.view(chosen.shape), chosen, padding)


class MixtureOfExperts(MoELayer):
    """megatron-core's layer, also with tensor parallelism alone, and with the config's
    `recompute_mlp` keeping its input only."""

    routed: Tensor | None = None  # of the last forward pass, until it is taken

    def take_routed(self) -> Tensor | None:
        routed, self.routed = self.routed, None
        return routed

    def forward(
        self, hidden_states: Tensor, *args: Any, padding_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if getattr(self.config, "recompute_mlp", False):
            output, self.routed = tensor_parallel.checkpoint(
                self._run, False, hidden_states, padding_mask
            )
        else:
            output, self.routed = self._run(hidden_states, padding_mask)
        return output, None

    def _run(self, x: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor | None]:
        group = self.attn_tp_group
        # Ranks that have the same tokens share them out: experts are not split.
        shared = group.size() > 1 and not self.config.sequence_parallel
        probs, chosen, routed = self.router(x, padding)
        if shared:
            x = tensor_parallel.scatter_to_sequence_parallel_region(x, group=group)
            probs = tensor_parallel.scatter_to_sequence_parallel_region(probs, group=group)
            chosen = chosen.chunk(group.size())[group.rank()]
        x, probs = self.preprocess(x, probs, chosen)
        exchange: Any = self.token_dispatcher
        for name in ("input_splits", "output_splits"):
            sizes = getattr(exchange, name)
            if isinstance(sizes, Tensor) and not sizes.is_cuda:  # Megatron unpacks a GPU's only
                setattr(exchange, name, sizes.tolist())
        output, _ = self.routed_experts_compute(*self.dispatch(x, probs))
        output = self.postprocess(self.combine(output), None)
        if shared:
            output = tensor_parallel.gather_from_sequence_parallel_region(
                output, tensor_parallel_output_grad=False, group=group
            )
        return output, routed

"""The vision tower (ViT + merger) in megatron-core, or the slice of it that a stage holds.

P = patches (rows of pixels), G = P / 4 merged groups, D = tower width, h = language width.
Reference: transformers' Qwen2VisionTransformerPretrainedModel and
Qwen2_5_VisionTransformerPretrainedModel.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vlmkernels import VisionLayout
from vlmkernels.integrations.megatron import VisionPackedSeqParams, VisionSelfAttention
from vlmtrain.core.spec import VisionSpec
from vlmtrain.models.common.layers import (
    Norm,
    adapt,
    ask_for_gradient,
    block_submodules,
    init_device,
    touch,
)
from vlmtrain.models.common.linears import PlainLinear, whole_linear


def padded_groups(groups: int, shards: int) -> int:
    """Groups of four patches that the tower's slices hand on: at least one for each of `shards`,
    and as many for each."""
    return max(groups + -groups % shards, shards)


class _Skipped(torch.autograd.Function):
    """`output` in place of what would have been computed from x; x's gradient is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, output: Tensor, on_backward: Callable[[], None] | None) -> Any:
        ctx.shape, ctx.on_backward = x.shape, on_backward
        return output.detach()  # no view: Megatron frees what it has sent

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        if ctx.on_backward is not None:
            ctx.on_backward()
        return grad.new_zeros(ctx.shape), None, None


@dataclass
class VisionInputs:
    """What every slice of the tower needs to know about a microbatch's images and videos.

    Rows stand in window order in the whole tower, from the pixels to the merger. Letting each layer
    read through the permutation (vision_attention can) would save one copy of the pixels, 2 x 1176
    elements a patch, 0.2% of what the 32 layers move; but where the kernel does not, on CUDA, it
    would cost 4 copies of 1280 elements in each of 28 layers.
    """

    window_index: Tensor | None  # int64 [G]: group at each place in window order
    reverse_index: Tensor | None  # int64 [G]: place of each group in window order
    packed: VisionPackedSeqParams  # the layout of the tower's row order
    grids: list[list[int]]  # (t, h, w) in patches of each medium
    num_patches: int  # P with padding
    padded_patches: int
    empty: bool  # no image and no video: the tower does not run

    @classmethod
    def from_grid(
        cls, grid_thw: Tensor, spec: VisionSpec, *, shards: int, device: torch.device
    ) -> VisionInputs:
        """Build them from grid_thw int64 [media, 3] (t, h, w in patches).

        Zero patches are appended, as a segment of their own, until there is at least one group
        of four and, with `shards` > 1 (sequence parallelism), until the groups can be dealt out
        evenly. Their rows are never read; without images they are only what travels from one
        slice of the tower to the next.
        """
        layout = VisionLayout.from_grid(
            grid_thw,
            patch_size=spec.patch_size,
            merge_size=spec.spatial_merge_size,
            window_size=spec.window_size,
        )
        groups = layout.num_patches // spec.merge_unit
        extra = padded_groups(groups, shards) - groups
        layout = layout.padded(extra).to(device)
        ordered = layout.in_window_order()
        return cls(
            window_index=layout.window_index,
            reverse_index=layout.reverse_index,
            packed=VisionPackedSeqParams(
                qkv_format="sbhd",
                cu_seqlens_q=ordered.cu_seqlens,
                cu_seqlens_kv=ordered.cu_seqlens,
                layout=ordered,
            ),
            grids=grid_thw.tolist(),
            num_patches=layout.num_patches,
            padded_patches=extra * spec.merge_unit,
            empty=groups == 0,
        )

    def visual_index(self, index: Tensor) -> Tensor:
        """Point `index` (int32 [S], rows in media order) at the merger's row order.

        The merger keeps window order; following the permutation in the index that the
        embedding reads anyway costs nothing, putting its rows back would cost a copy.
        """
        if self.reverse_index is None:
            return index
        moved = self.reverse_index[index.clamp_min(0).long()].to(torch.int32)
        return torch.where(index >= 0, moved, index)


class Merger(MegatronModule):
    """Rows of the language model's width, one of four patches: [P or P/tp, 1, D] -> [G, h].

    `joined`: the norm is of the four patches side by side, not of each.
    """

    def __init__(
        self,
        config: TransformerConfig,
        spec: VisionSpec,
        groups: ProcessGroupCollection,
        *,
        joined: bool = False,
    ) -> None:
        gather, config = config.sequence_parallel, copy.copy(config)
        config.sequence_parallel = False
        super().__init__(config=config)
        self.gather = gather
        self.merged = merged = spec.merge_unit * spec.hidden_size
        self.width = merged if joined else spec.hidden_size
        self.norm = Norm(config, self.width, eps=1e-6)
        self.fc1 = ColumnParallelLinear(
            merged,
            merged,
            config=config,
            init_method=config.init_method,
            bias=True,
            gather_output=False,
            tp_group=groups.tp,
        )
        self.fc2 = RowParallelLinear(
            merged,
            spec.out_hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=groups.tp,
        )
        for linear in (self.fc1, self.fc2):
            whole_linear(linear)

    def forward(self, x: Tensor) -> Tensor:
        if self.gather:
            # Every rank merges all rows, so the gradient that comes back is whole already.
            x = tensor_parallel.gather_from_sequence_parallel_region(
                x, tensor_parallel_output_grad=False
            )
        x = self.norm(x.reshape(-1, 1, self.width)).reshape(-1, 1, self.merged)
        return self.fc2(F.gelu(self.fc1(x)[0]))[0].squeeze(1)


def touch_all(tower: VisionTower) -> None:
    """As a forward pass would touch its modules, in the same order on every rank."""
    for part in tower.in_order():
        for module in part.modules():
            touch(module)


class VisionTower(MegatronModule):
    """The slice of the vision tower on one stage; the last slice ends with the merger."""

    def __init__(
        self,
        config: TransformerConfig,
        spec: VisionSpec,
        num_layers: int,
        *,
        first: bool,
        last: bool,
        vp_stage: int | None,
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        self.spec, self.first, self.last = spec, first, last
        self.on_skipped_backward: Callable[[], None] | None = None
        if first:
            self.make_embeddings()
            # Each rank embeds its own rows only: the gradients are partial sums.
            for parameter in self.parameters():
                parameter.sequence_parallel = config.sequence_parallel  # type: ignore
        submodules = block_submodules(config, AttnMaskType.no_mask, num_layers)
        for layer in submodules.layer_specs or ():
            layer.submodules.self_attention.module = VisionSelfAttention
        self.blocks = TransformerBlock(
            config,
            submodules,
            post_layer_norm=False,
            pre_process=first,
            post_process=False,
            pg_collection=groups,
            vp_stage=vp_stage,
        )
        adapt(self.blocks)
        if last:
            self.merger = Merger(config, spec, groups)
        # DeepStack's, each on the stage of the layer behind which it stands and under its number.
        # No ModuleDict: Megatron's checkpoints would take every tensor in it for replicated.
        self.deepstack_mergers = MegatronModule(config)
        for layer in self.blocks.layers:
            if (number := layer.layer_number - 1) in spec.deepstack_layers:
                deepstack = Merger(config, spec, groups, joined=True)
                self.deepstack_mergers.add_module(str(number), deepstack)

    def make_embeddings(self) -> None:
        """What stands before the layers."""
        self.patch_embed = PlainLinear(
            self.spec.patch_dim,
            self.spec.hidden_size,
            bias=self.spec.patch_bias,
            dtype=self.config.params_dtype,
            device=init_device(self.config),
        )

    def in_order(self) -> Iterator[torch.nn.Module]:
        """Everything with parameters, in the order of a forward pass."""
        for child in self.children():
            if child is self.blocks:
                for layer in self.blocks.layers:
                    yield layer
                    yield from filter(None, [self._merger_behind(layer.layer_number - 1)])
            elif child is not self.deepstack_mergers:
                yield child

    def _merger_behind(self, layer: int) -> Merger | None:
        return getattr(self.deepstack_mergers, str(layer), None)

    def forward(self, x: Tensor, inputs: VisionInputs) -> tuple[Tensor, dict[int, Tensor]]:
        """x: pixel rows [patches, patch_dim] on the first slice, else hidden [P or P/tp, 1, D].

        Returns hidden states [P or P/tp, 1, D], or on the last slice rows [G, h] in the order
        that `VisionInputs.visual_index` follows; and the rows [G, h] of DeepStack's sets that this
        slice makes, by number. Without images these are zeros that nobody reads, and neither pass
        computes anything.
        """
        if inputs.empty:
            return self._skip(x, inputs)
        if self.first:
            x = ask_for_gradient(self.blocks, self.embed_patches(x, inputs))
        else:
            self.blocks.set_input_tensor(ask_for_gradient(self.blocks, x))
        features: dict[int, Tensor] = {}

        def after_layer(layer: int, x: Tensor) -> Tensor:
            merger = self._merger_behind(layer)
            if merger is not None:
                features[self.spec.deepstack_layers.index(layer)] = merger(x)
            return x

        x = self.blocks(
            hidden_states=x,
            packed_seq_params=inputs.packed,
            after_layer=after_layer if self.spec.deepstack_layers else None,
        )
        return self.merger(x) if self.last else x, features

    def _skip(self, x: Tensor, inputs: VisionInputs) -> tuple[Tensor, dict[int, Tensor]]:
        """Zeros of the output's shape. In the graph where anything learns: the stage before waits
        for a gradient, and reductions that run beside the backward pass (DDP's overlap) must hear
        that these parameters are done too."""
        touch_all(self)
        spec, config = self.spec, self.config
        world = 1
        if config.sequence_parallel:
            world = parallel_state.get_tensor_model_parallel_world_size()
        shape: tuple[int, ...] = (inputs.num_patches // world, 1, spec.hidden_size)
        merged = inputs.num_patches // spec.merge_unit, spec.out_hidden_size
        if self.last:
            shape = merged
        zeros = torch.zeros(shape, dtype=config.params_dtype, device=x.device)
        features = {
            number: zeros.new_zeros(merged)
            for number, layer in enumerate(spec.deepstack_layers)
            if self._merger_behind(layer) is not None
        }
        learns = any(parameter.requires_grad for parameter in self.parameters())
        if self.first:
            x = zeros.new_empty(0, requires_grad=learns)
        skipped = _Skipped.apply(x, zeros, self.on_skipped_backward if learns else None)
        return skipped, features

    def embed_patches(self, pixels: Tensor, inputs: VisionInputs) -> Tensor:
        """Hidden states [P or P/tp, 1, D] of pixel rows."""
        unit, dim = self.spec.merge_unit, self.spec.patch_dim
        pixels = pixels.to(self.config.params_dtype)
        if inputs.padded_patches:
            pixels = F.pad(pixels, (0, 0, 0, inputs.padded_patches))
        if inputs.window_index is not None:
            groups = pixels.view(-1, unit * dim).index_select(0, inputs.window_index)
            pixels = groups.view(-1, dim)
        return self.patch_embed(self.own_rows(pixels)).unsqueeze(1)

    def own_rows(self, x: Tensor) -> Tensor:
        """Of rows of the whole tower those that this rank has."""
        if not self.config.sequence_parallel:
            return x
        world = parallel_state.get_tensor_model_parallel_world_size()
        return x.chunk(world, 0)[parallel_state.get_tensor_model_parallel_rank()]

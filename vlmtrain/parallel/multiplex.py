"""Multiplexed vision: every rank of a pipeline encodes images, data-parallel, before it starts.

A tower on the first stage is the pipeline's bottleneck. Here each of the n = tensor x pipeline
ranks of a replica holds the whole tower. Per step:

1. The images and videos of the step's microbatches are dealt to the ranks by cost
   (`StepInputs.owners`).
2. Each rank encodes its share without keeping activations, in pieces of bounded size, and sends
   each row to the rank that writes it into the word embeddings (row_exchange.py).
3. The pipeline runs; the embedding's ranks collect the gradients of the rows.
4. The gradients go back; each rank encodes its pieces again, now with a backward pass.
5. The tower's gradients are summed over all ranks of the run.

Memory per rank: the pixels dealt to it, the rows of the whole step on the embedding's ranks (each
has a part under tensor parallelism), and the activations of one piece. The price is one more
forward pass of the tower, spread over n ranks.
(The idea: DistTrain, arXiv 2408.04275; OrchMLLM, arXiv 2503.23830.)
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vlmtrain.core.batch import EncodedPack, PackedBatch
from vlmtrain.core.clock import Clock
from vlmtrain.core.spec import ModelSpec
from vlmtrain.models.common.vision import VisionInputs, VisionTower, touch_all
from vlmtrain.models.family import family_of
from vlmtrain.parallel.ddp import parameters_ready
from vlmtrain.parallel.row_exchange import StepRows
from vlmtrain.parallel.step_inputs import StepInputs


def replicated_groups() -> ProcessGroupCollection:
    """Groups of a module that every rank of the run holds whole: data parallel over all."""
    alone = parallel_state.get_context_parallel_group()  # context parallelism is 1
    groups = ProcessGroupCollection()
    for name in ("tp", "pp", "cp", "ep", "mp", "tp_ep_pp", "expt_dp", "expt_tp", "embd"):
        setattr(groups, name, alone)
    groups.pos_embd = alone
    groups.dp = groups.dp_cp = groups.intra_dist_opt = dist.group.WORLD
    return groups


class VisionReplica(MegatronModule):
    """The whole tower on one rank; for weights in and out it looks like a stage."""

    language_model = None

    def __init__(self, spec: ModelSpec, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.vision = family_of(spec).tower(
            config,
            spec.vision,
            spec.vision.depth,
            first=True,
            last=True,
            vp_stage=None,
            groups=replicated_groups(),
        )
        for parameter in self.parameters():
            parameter.tensor_model_parallel = False  # whole here, whatever the language model's TP

    def forward(self, pixels: Tensor, grids: Tensor) -> Tensor:
        """Rows [G, sets * h] in media order (the merger's, then DeepStack's sets) of pixels
        [P, patch_dim] with grids int64 [media, 3]."""
        inputs = VisionInputs.from_grid(grids, self.vision.spec, shards=1, device=pixels.device)
        rows, features = self.vision(pixels, inputs)
        if features:
            rows = torch.cat([rows, *(features[number] for number in sorted(features))], -1)
        return rows if inputs.reverse_index is None else rows[inputs.reverse_index]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        everywhere = {**(metadata or {}), "dp_cp_group": dist.group.WORLD}
        state = self.vision.sharded_state_dict(prefix + "vision.", (), everywhere)
        for value in nested_values(state):
            # Where a module does not name its groups, Megatron counts tensor-parallel copies.
            value.replica_id = (0, 0, dist.get_rank())
        return state


class Multiplexer:
    """Encodes the images of a step on all ranks of this replica."""

    def __init__(
        self,
        tower: Any,
        spec: ModelSpec,
        tensor: int,
        dtype: torch.dtype,
        clock: Clock,
        piece_patches: int,
    ) -> None:
        """
        Args:
            tower: the VisionReplica, or its DistributedDataParallel wrapper.
            piece_patches: encoded at once, but for a larger medium. Activations are about 41 kB a
                patch and layer in bf16: 16,384 patches through 32 layers of width 1280 take 21 GB.
        """
        self.piece_patches = piece_patches
        self.tower, self.spec, self.dtype = tower, spec, dtype
        self.clock = clock
        self.group = parallel_state.get_model_parallel_group()
        self.rank = dist.get_rank(self.group)
        first = parallel_state.get_pipeline_model_parallel_rank() == 0
        part = (parallel_state.get_tensor_model_parallel_rank(), tensor) if first else None
        # What each member embeds of a sequence.
        self.shards: list[tuple[int, int] | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(self.shards, part, group=self.group)
        replica = tower if isinstance(tower, VisionReplica) else tower.module
        self.whole: VisionTower = replica.vision
        self.learns = any(p.requires_grad for p in tower.parameters())

    def expect(self, inputs: StepInputs, packs: list[PackedBatch]) -> None:
        """Prepare for a step over `packs`, which lie in host memory: no device is waited for."""
        indices = [pack.visual_index for pack in packs]
        self.rows = StepRows(indices, inputs.row_owners(), self.shards, self.group)
        grids = [grid for pack in inputs.grids for grid in pack.tolist()]
        patches = [count for pack in inputs.patches for count in pack]
        owners = [owner for pack in inputs.owners for owner in pack]
        self.pieces: list[list[int]] = []  # this rank's media by their number in the step
        space = 0
        for number, owner in enumerate(owners):
            if owner != self.rank:
                continue
            if not self.pieces or patches[number] > space:
                self.pieces.append([])
                space = self.piece_patches
            self.pieces[-1].append(number)
            space -= patches[number]
        self.grids = [torch.tensor([grids[number] for number in piece]) for piece in self.pieces]

    def encode(self, packs: list[PackedBatch]) -> list[PackedBatch]:
        """The packs that were expected, now on this rank's device, with their rows where the
        embedding is (leaves that collect a gradient)."""
        self.pixels: list[Any] = [part for pack in packs for part in pack.media_pixels()]
        tracker = get_cuda_rng_tracker()
        self._random = tracker.get_states()
        # A random stream of its own: ranks encode different numbers of images, and those of a
        # tensor-parallel group must go on to drop the same values in the language model.
        with torch.no_grad(), tracker.fork(), self.clock.span("compute"):
            parts = [self._encode(piece) for piece in range(len(self.pieces))]
        if not parts:  # the others gather their updated weights at this point
            touch_all(self.whole)
            width = self.spec.visual_sets * self.spec.hidden_size
            parts = [packs[0].pixel_values.new_empty(0, width, dtype=self.dtype)]
        rows = self.rows.send(torch.cat(parts), self.learns)
        if self.shards[self.rank] is None:
            return packs
        return [
            EncodedPack.of(pack, part, index)
            for pack, part, index in zip(packs, rows, self.rows.indices, strict=True)
        ]

    def backward(self, num_tokens: Tensor) -> None:
        """Send the rows' gradients back, and from them make the tower's, summed over all ranks and
        divided by the number of target tokens. After the pipeline's backward pass."""
        if self.learns:
            self._accumulate()
        with self.clock.span("gradients"):
            self.tower.finish_grad_sync()
            self.tower.scale_gradients(1.0 / num_tokens.clamp_min(1))

    def _accumulate(self) -> None:
        gradients = self.rows.send_back()
        tracker = get_cuda_rng_tracker()
        now = tracker.get_states()
        tracker.set_states(self._random)  # dropout falls where it fell in the first pass
        start = 0
        with tracker.fork(), self.clock.span("compute"):
            for piece in range(len(self.pieces)):
                last = piece == len(self.pieces) - 1
                with contextlib.nullcontext() if last else self.tower.no_sync():
                    rows = self._encode(piece)
                    rows.backward(gradients[start : start + rows.shape[0]])
                start += rows.shape[0]
        tracker.set_states(now)
        if not self.pieces and self.tower.ddp_config.overlap_grad_reduce:
            parameters_ready(self.tower, self.whole.in_order())

    def _encode(self, piece: int) -> Tensor:
        pixels = [self.pixels[number] for number in self.pieces[piece]]
        return self.tower(torch.cat(pixels), self.grids[piece])

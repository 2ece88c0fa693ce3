"""Multiplexed vision: every rank of a pipeline encodes images, data-parallel, before it starts.

A tower on the first stage is the pipeline's bottleneck. Here each of the n = tensor x pipeline
ranks of a replica holds the whole tower. Per step:

1. The images and videos of the step's microbatches are dealt to the ranks by cost, longest
   first; every rank computes the same deal from the grids alone.
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
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vlmtrain.core.batch import EncodedPack, PackedBatch
from vlmtrain.core.clock import Clock
from vlmtrain.core.spec import ModelSpec, VisionSpec
from vlmtrain.models.common.layers import touch
from vlmtrain.models.common.vision import VisionInputs
from vlmtrain.models.family import family_of
from vlmtrain.parallel.overlap import parameters_ready
from vlmtrain.parallel.row_exchange import StepRows

# Patches encoded at once: about 41 kB of activations each and layer in bf16, so 16,384 patches
# through 32 layers of width 1280 take about 21 GB.
PIECE_PATCHES = 16384


@dataclass(frozen=True)
class Medium:
    """One image or video of a step."""

    pack: int
    grid: tuple[int, int, int]
    first_patch: int | None  # in its pack's pixel rows; None: not decoded on this rank

    @property
    def patches(self) -> int:
        t, h, w = self.grid
        return t * h * w


def media_of(packs: list[PackedBatch]) -> list[Medium]:
    """All media of a step, in pack order and sequence order."""
    media = []
    for number, pack in enumerate(packs):
        grids = pack.grid_thw.tolist()
        here = pack.has_pixels or (len(pack.pixel_values) > 0,) * len(grids)
        first = 0
        for (t, h, w), decoded in zip(grids, here, strict=True):
            media.append(Medium(number, (t, h, w), first if decoded else None))
            first += t * h * w if decoded else 0
    return media


def vision_cost(spec: VisionSpec, grid: tuple[int, int, int]) -> float:
    """Forward multiply-accumulates of one image or video, up to a common factor."""
    t, h, w = grid
    patches, width = t * h * w, spec.hidden_size
    gates = 3 if spec.window_size is not None else 2
    linear = spec.depth * (4 * width**2 + gates * width * spec.intermediate_size)
    if spec.window_size is None:
        attention = spec.depth * 2 * width * h * w
    else:
        window = (spec.window_size // spec.patch_size) ** 2
        full = len(spec.full_attention_layers)
        attention = 2 * width * (full * h * w + (spec.depth - full) * min(window, h * w))
    return patches * (linear + attention)


def deal(costs: list[float], ranks: int) -> list[int]:
    """Owner of each item: longest processing time first, ties by order. Deterministic.

    The slowest rank is at most 4/3 of the best possible (Graham 1969).
    """
    heap = [(0.0, rank) for rank in range(ranks)]
    owner = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(heap)
        owner[item] = rank
        heapq.heappush(heap, (load + costs[item], rank))
    return owner


def deal_media(spec: VisionSpec, grids: Iterable[Sequence[int]], ranks: int) -> list[int]:
    """Owner among `ranks` of each medium of a step, (t, h, w) in pack and sequence order."""
    return deal([vision_cost(spec, (int(t), int(h), int(w))) for t, h, w in grids], ranks)


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
        """Rows [G, h] in media order of pixels [P, patch_dim] with grids int64 [media, 3]."""
        inputs = VisionInputs.from_grid(grids, self.vision.spec, shards=1, device=pixels.device)
        rows = self.vision(pixels, inputs)
        return rows if inputs.reverse_index is None else rows[inputs.reverse_index]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        everywhere = {**(metadata or {}), "dp_cp_group": dist.group.WORLD}
        return self.vision.sharded_state_dict(prefix + "vision.", (), everywhere)


class Multiplexer:
    """Encodes the images of a step on all ranks of this replica."""

    def __init__(
        self, tower: Any, spec: ModelSpec, tensor: int, dtype: torch.dtype, clock: Clock
    ) -> None:
        """tower: the VisionReplica, or its DistributedDataParallel wrapper."""
        self.tower, self.spec, self.dtype = tower, spec, dtype
        self.clock = clock
        self.group = parallel_state.get_model_parallel_group()
        self.members, self.mine = dist.get_world_size(self.group), dist.get_rank(self.group)
        first = parallel_state.get_pipeline_model_parallel_rank() == 0
        part = (parallel_state.get_tensor_model_parallel_rank(), tensor) if first else None
        # What each member embeds of a sequence.
        self.shards: list[tuple[int, int] | None] = [None] * self.members
        dist.all_gather_object(self.shards, part, group=self.group)
        self.learns = any(p.requires_grad for p in tower.parameters())

    def share(self, grids: Sequence[np.ndarray]) -> list[tuple[bool, ...]]:
        """Which media of a step's packs this rank encodes, so that it decodes no others.

        Args:
            grids: int64 [m, 3] of each pack, in the order in which `encode` will get the packs.
        """
        owner = iter(deal_media(self.spec.vision, np.concatenate(grids), self.members))
        return [tuple(next(owner) == self.mine for _ in pack) for pack in grids]

    def expect(self, packs: list[PackedBatch]) -> None:
        """Deal the images of a step's packs, which lie in host memory: no device is waited for."""
        self.media = media_of(packs)
        grids = [medium.grid for medium in self.media]
        self.owner = deal_media(self.spec.vision, grids, self.members)
        unit = self.spec.vision.merge_unit
        rows = torch.tensor([m.patches // unit for m in self.media], dtype=torch.int64)
        owners = torch.tensor(self.owner, dtype=torch.int64).repeat_interleave(rows)
        sizes = [0] * len(packs)
        for medium in self.media:
            sizes[medium.pack] += medium.patches // unit
        indices = [pack.visual_index for pack in packs]
        self.rows = StepRows(indices, owners.split(sizes), self.shards, self.group)

    def encode(self, packs: list[PackedBatch]) -> list[PackedBatch]:
        """The packs that were expected, now on this rank's device, with their rows where the
        embedding is (leaves that collect a gradient)."""
        self.packs = packs
        tracker = get_cuda_rng_tracker()
        self._random = tracker.get_states()
        # A random stream of its own: ranks encode different numbers of images, and those of a
        # tensor-parallel group must go on to drop the same values in the language model.
        with torch.no_grad(), tracker.fork(), self.clock.span("compute"):
            parts = [self.tower(*self._inputs(piece)) for piece in self._pieces()]
        if not parts:  # the others gather their updated weights at this point
            for module in self.tower.modules():
                touch(module)
            parts = [packs[0].pixel_values.new_empty(0, self.spec.hidden_size, dtype=self.dtype)]
        rows = self.rows.send(torch.cat(parts), self.learns)
        if self.shards[self.mine] is None:
            return packs
        return [
            EncodedPack.of(pack, part, exchange.visual_index)
            for pack, part, exchange in zip(packs, rows, self.rows.packs, strict=True)
        ]

    def backward(self) -> None:
        """Bring the rows' gradients home and add to the tower's. After the pipeline's backward."""
        if not self.learns:
            return
        mine = self.rows.send_back()
        tracker = get_cuda_rng_tracker()
        now = tracker.get_states()
        tracker.set_states(self._random)  # dropout falls where it fell in the first pass
        pieces = self._pieces()
        start = 0
        with tracker.fork(), self.clock.span("compute"):
            for number, piece in enumerate(pieces):
                last = number == len(pieces) - 1
                with contextlib.nullcontext() if last else self.tower.no_sync():
                    rows = self.tower(*self._inputs(piece))
                    rows.backward(mine[start : start + rows.shape[0]])
                start += rows.shape[0]
        tracker.set_states(now)
        if not pieces and self.tower.ddp_config.overlap_grad_reduce:
            parameters_ready(self.tower, self.tower)

    def _pieces(self) -> list[list[Medium]]:
        """This rank's media in order, cut into pieces of at most PIECE_PATCHES patches."""
        pieces: list[list[Medium]] = []
        room = 0
        for medium, owner in zip(self.media, self.owner, strict=True):
            if owner != self.mine:
                continue
            if not pieces or medium.patches > room:
                pieces.append([])
                room = PIECE_PATCHES
            pieces[-1].append(medium)
            room -= medium.patches
        return pieces

    def _inputs(self, piece: list[Medium]) -> tuple[Tensor, Tensor]:
        pixels = []
        for medium in piece:
            first = medium.first_patch
            assert first is not None, "the loader has dealt otherwise"
            rows = self.packs[medium.pack].pixel_values
            pixels.append(rows[first : first + medium.patches])
        return torch.cat(pixels), torch.tensor([m.grid for m in piece])

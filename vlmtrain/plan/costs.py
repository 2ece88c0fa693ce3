"""Seconds of every stage as a linear function of a pack's work, and bytes of every rank.

A row of costs is [6]: seconds per token, causal pair, patch, frame pair, window pair and target
token, in the order of `flops.Work`; times of many packs are one matrix product. Communication of
tensor parallelism stands beside compute because the driver does not overlap the two.

Per layer and microbatch a group of t ranks moves (t-1)/t of the hidden states, 2sh bytes, 4 times
forward and 6 times backward with sequence parallelism, 4 and 4 times without. A mixture of experts
moves nothing within it under sequence parallelism, and gathers hidden states once without; e ranks
that share experts exchange (e-1)/e of the rows of the chosen experts twice, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from vlmtrain.core.config import FreezeSection, LoraSection, ParallelSection
from vlmtrain.core.layout import Layout
from vlmtrain.core.spec import ModelSpec, padded_vocab_size
from vlmtrain.models import flops
from vlmtrain.models.family import table_of
from vlmtrain.models.lora_costs import adapter_parameters
from vlmtrain.plan import memory, schedule
from vlmtrain.plan.hardware import Gpu
from vlmtrain.plan.workload import COLUMNS, PATCHES, TARGETS, TOKENS, Packs

# Rows of a cost block: compute and communication, forward and backward.
COMPUTE_F, COMPUTE_B, COMM_F, COMM_B = range(4)


@dataclass(frozen=True)
class Option:
    """A layout with what is not in `Layout`: everything the search chooses."""

    layout: Layout
    microbatches: int  # per data-parallel rank and step
    recompute_vision: str = "none"  # none, selective (MLPs) or full (whole layers)
    recompute_text: str = "none"
    offload: float = 0.0

    @property
    def multiplexed(self) -> bool:
        return self.layout.multiplexed

    @property
    def recomputes(self) -> bool:
        return self.recompute_vision != "none" or self.recompute_text != "none"


class CostModel:
    """Prices of a model's parts on one kind of GPU, for packs of one kind of data.

    `element`: bytes of parameters and activations, 2 (bf16) or 4; `cuda`: which layers run.
    """

    def __init__(
        self,
        spec: ModelSpec,
        gpu: Gpu,
        packs: Packs,
        freeze: FreezeSection | None = None,
        lora: LoraSection | None = None,
        *,
        element: int = 2,
        cuda: bool = True,
    ) -> None:
        self.spec, self.gpu, self.packs, self.element = spec, gpu, packs, element
        self.cuda = cuda
        self.freeze, self.lora = freeze or FreezeSection(), lora or LoraSection()
        self.learning = memory.Learning.of(spec, self.freeze, self.lora)
        self.mean, self.large = packs.mean, packs.large
        self._units: dict[tuple[int, bool, int], dict[str, np.ndarray]] = {}
        self._sizes: dict[int, dict[str, tuple[int, int]]] = {}

    # --- seconds ------------------------------------------------------------------------------

    def units(self, tensor: int, sequence: bool, expert: int = 1) -> dict[str, np.ndarray]:
        """Blocks [4, 6] of patch_embed, merger, text, head; vision is [depth + 1, 4, 6], sums of
        the first i layers with DeepStack's mergers behind them."""
        key = (tensor, sequence, expert)
        if key in self._units:
            return self._units[key]
        spec, vision, gpu = self.spec, self.spec.vision, self.gpu
        factors = self.backward_factors()
        language = self._language_seconds(tensor)
        tower = 1 / (gpu.peak * gpu.efficiency.vision * tensor)

        def block(price: flops.Price, part: str, seconds: float) -> np.ndarray:
            weights = np.array(price.weights.values(), dtype=float) * seconds
            pairs = np.array(price.attention.values(), dtype=float) * seconds
            result = np.zeros((4, COLUMNS))
            result[COMPUTE_F] = weights + pairs
            result[COMPUTE_B] = weights * factors[part][0] + pairs * factors[part][1]
            return result

        def adapt(result: np.ndarray, column: int, seconds: float) -> None:
            """Add a layer's adapters: two small products, trained."""
            small = 2 * seconds * self._adapter_products(vision=column == PATCHES)
            result[COMPUTE_F, column] += small
            result[COMPUTE_B, column] += 2 * small

        def exchange(
            result: np.ndarray, column: int, width: float, calls: tuple[float, float]
        ) -> None:
            """Add `calls` collectives, forward and backward, over rows of `width` elements."""
            if tensor == 1:
                return
            bandwidth = gpu.nvlink_gbs * 1e9 * gpu.efficiency.link
            per_row = self.element * width * (tensor - 1) / tensor / bandwidth
            for row, count in zip((COMM_F, COMM_B), calls, strict=True):
                if row == COMM_B and not result[COMPUTE_B].any():
                    continue
                result[row, column] += count * per_row
                # a constant of a pack is a price per token of the mean one
                result[row, TOKENS] += count * gpu.latency_us * 1e-6 / self.mean[TOKENS]

        def dispatch(result: np.ndarray) -> None:
            """Add the exchange of rows with the ranks that have the chosen experts."""
            if expert == 1:
                return
            gbs = gpu.nvlink_gbs if expert <= gpu.gpus_per_node else gpu.network_gbs
            size = (
                self.element * spec.hidden_size * spec.num_experts_per_tok * (expert - 1) / expert
            )
            per_row = size / tensor / (gbs * 1e9 * gpu.efficiency.link)
            per_row += gpu.latency_us * 1e-6 / self.mean[TOKENS]
            result[COMM_F, TOKENS] += 2 * per_row
            result[COMM_B, TOKENS] += 2 * per_row * result[COMPUTE_B].any()

        per_layer = (4, 6) if sequence else (4, 4)
        text = block(flops.text_layer_price(spec), "language", language)
        adapt(text, TOKENS, language)
        per_text = per_layer
        if spec.num_experts:
            per_text = (2, 3) if sequence else (3, 3)
        exchange(text, TOKENS, spec.hidden_size, per_text)
        dispatch(text)
        head = block(flops.head_price(spec), "head", language)
        # The loss computes its gradients in the forward pass, those of hidden in float32.
        head[COMPUTE_F] += head[COMPUTE_B]
        head[COMPUTE_B] = 0
        float32 = 4 / self.element
        exchange(head, TARGETS, spec.hidden_size, (1 + float32 if sequence else 2 * float32, 0))
        merger = block(flops.merger_price(spec), "merger", tower)
        exchange(merger, PATCHES, vision.hidden_size, (1, 1))
        exchange(merger, PATCHES, 2 * vision.out_hidden_size / vision.merge_unit, (1, 1))
        # Computed again by selective recomputation: an MLP, and half a layer's collectives.
        text_mlp, vision_mlp = np.zeros((4, COLUMNS)), np.zeros((4, COLUMNS))
        text_mlp[COMPUTE_F, TOKENS] = flops.mlp_price(spec, vision=False).tokens * language
        vision_mlp[COMPUTE_F, PATCHES] = flops.mlp_price(spec, vision=True).patches * tower
        exchange(text_mlp, TOKENS, spec.hidden_size, (per_text[0] - 2, 0))
        dispatch(text_mlp)
        exchange(vision_mlp, PATCHES, vision.hidden_size, (2, 0))
        layers = [np.zeros((4, COLUMNS))]
        for i in range(vision.depth):
            layer = block(flops.vision_layer_price(spec, i), "vision", tower)
            adapt(layer, PATCHES, tower)
            exchange(layer, PATCHES, vision.hidden_size, per_layer)
            layers.append(layers[-1] + layer + (i in vision.deepstack_layers) * merger)
        embed = block(flops.patch_embed_price(spec), "patch_embed", tower * tensor)
        if sequence:
            embed /= tensor  # each rank embeds its own rows
        self._units[key] = {
            "text": text,
            "head": head,
            "merger": merger,
            "patch_embed": embed,
            "text_mlp": text_mlp,
            "vision_mlp": vision_mlp,
            "vision": np.stack(layers),
        }
        return self._units[key]

    def backward_factors(self) -> dict[str, tuple[int, int]]:
        """As `flops.backward_factors`; beside adapters every weight is frozen."""
        if not self.lora.rank:
            return flops.backward_factors(self.freeze)
        tower = self.learning.tower
        text = tower or any(self.learning.text_adapters)
        return {
            "patch_embed": (0, 0),
            "vision": (int(tower), 2 * tower),
            "merger": (int(tower), 0),
            "language": (int(text), 2 * text),
            "head": (1, 0),
        }

    def _adapter_products(self, *, vision: bool) -> int:
        """Multiply-accumulates per row of a layer's adapters, forward: one a parameter."""
        return sum(adapter_parameters(self.spec, self.lora, 1, vision))

    def adapter_flops(self, work: np.ndarray) -> float:
        """Of all adapters, forward and backward, for (mean) work [6]."""
        text = self.spec.num_layers * self._adapter_products(vision=False) * work[TOKENS]
        tower = self.spec.vision.depth * self._adapter_products(vision=True) * work[PATCHES]
        return 6.0 * float(text + tower)

    def text_cost(self, tensor: int, sequence: bool, recompute: str, expert: int = 1) -> np.ndarray:
        """[4, 6] of a language layer."""
        units = self.units(tensor, sequence, expert)
        again = {"none": 0 * units["text"], "selective": units["text_mlp"], "full": units["text"]}
        return _again(units["text"], again[recompute])

    def _language_seconds(self, tensor: int) -> float:
        """Of a FLOP."""
        return 1 / (self.gpu.peak * self.gpu.efficiency.language * tensor)

    def text_end(self, tensor: int, recompute: str) -> np.ndarray:
        """[4, 6], added to the last language layer because it ends on target tokens. Its
        collectives and adapters count as any layer's."""
        seconds = self._language_seconds(tensor)
        moved = seconds * np.array(flops.moved_to_targets(self.spec).values())
        mlp = seconds * np.array(flops.moved_to_targets(self.spec, mlp=True).values())
        result = np.zeros((4, COLUMNS))
        result[COMPUTE_F] = moved
        result[COMPUTE_B] = moved * self.backward_factors()["language"][0]
        result[COMPUTE_B] += {"none": 0 * moved, "selective": mlp, "full": moved}[recompute]
        return result

    def vision_costs(self, tensor: int, sequence: bool, recompute: str) -> np.ndarray:
        """[depth + 1, 4, 6]: the first i vision layers."""
        units = self.units(tensor, sequence)
        tower = units["vision"]
        number = np.arange(len(tower))[:, None, None]
        again = {"none": 0 * tower, "selective": number * units["vision_mlp"], "full": tower}
        return _again(tower, again[recompute])

    def stage_costs(self, option: Option, *, with_vision: bool = True) -> np.ndarray:
        """[stages, 4, 6]; multiplexed vision is left out (see `multiplexed_seconds`)."""
        layout = option.layout
        sizes = layout.tensor, layout.sequence
        units = self.units(*sizes)
        text = self.text_cost(*sizes, option.recompute_text, layout.expert)
        result = np.array(layout.text_layers, dtype=float)[:, None, None] * text
        result[-1] += units["head"]
        if layout.text_layers[-1]:
            result[-1] += self.text_end(layout.tensor, option.recompute_text)
        if not option.multiplexed and with_vision:
            tower = self.vision_costs(*sizes, option.recompute_vision)
            ends = np.cumsum(layout.vision_layers)
            result += tower[ends] - tower[ends - np.array(layout.vision_layers)]
            result[0] += units["patch_embed"]
            result[layout.merger_stage] += units["merger"]
        return self._with_overhead(result)

    def _with_overhead(self, stages: np.ndarray) -> np.ndarray:
        """Add the host's time between two pieces of work, as a price per token."""
        constant = self.gpu.overhead_us * 1e-6 / self.mean[TOKENS]
        stages[:, COMPUTE_F : COMPUTE_B + 1, TOKENS] += constant
        return stages

    def multiplexed_seconds(self, option: Option) -> tuple[float, float]:
        """Seconds that each rank spends on its share of a step's images, before and after the
        pipeline. Every rank of a replica holds the whole tower; it encodes once without keeping
        anything and once more for the backward pass. Each row goes to one rank of the embedding
        and its gradient comes back from there.
        """
        layout, gpu = option.layout, self.gpu
        units = self.units(1, False)
        tower = self.vision_costs(1, False, option.recompute_vision)[-1]
        tower = tower + units["patch_embed"] + units["merger"]
        cost = tower @ self.mean
        ranks = layout.pipeline * layout.tensor
        share = option.microbatches / ranks * 1.02  # images don't divide evenly
        tokens = option.microbatches * self.mean[PATCHES] / self.spec.vision.merge_unit
        width = self.spec.hidden_size * self.spec.visual_sets
        size = self.element * tokens * width * (ranks - 1) / ranks
        exchange = size / layout.tensor / self.stage_bandwidth(layout)
        latency = gpu.latency_us * 1e-6 * ranks
        forward = share * cost[COMPUTE_F]
        if not (self.learning.tower or self.learning.merger):
            return forward + exchange + latency, 0.0
        backward = share * (cost[COMPUTE_F] + cost[COMPUTE_B])
        return forward + exchange + latency, backward + exchange + latency

    def stage_bandwidth(self, layout: Layout) -> float:
        """Bytes/s between neighbouring stages: ranks are numbered tensor, data, pipeline."""
        inside = layout.tensor * layout.data * layout.pipeline <= self.gpu.gpus_per_node
        gbs = self.gpu.nvlink_gbs if inside else self.gpu.network_gbs
        return gbs * 1e9 * self.gpu.efficiency.link

    def transfers(self, option: Option) -> list[float]:
        """[stages - 1] seconds of the one tensor that goes on to the next stage."""
        layout = option.layout
        shards = layout.sequence_parts
        bandwidth = self.stage_bandwidth(layout)
        text = self.mean[TOKENS] * self.spec.hidden_size
        vision = self.mean[PATCHES] * self.spec.vision.hidden_size
        rows = self.mean[PATCHES] / self.spec.vision.merge_unit * self.spec.hidden_size
        deepstack = self.spec.vision.deepstack_layers
        result = []
        for stage in range(layout.stages - 1):
            size = text if stage >= layout.merger_stage else vision
            if layout.embedding_stage <= stage < layout.merger_stage:
                size = text + vision
            size += rows * len(layout.carried(deepstack, stage))
            seconds = self.element * size / shards / bandwidth
            result.append(seconds + self.gpu.latency_us * 1e-6)
        return result

    def data_parallel_seconds(self, option: Option) -> float:
        """Reduce-scatter of float32 gradients and all-gather of parameters, not overlapped.

        A group with several members per node uses all of their network ports. A multiplexed
        tower is one group of all GPUs.
        """
        layout, gpu = option.layout, self.gpu

        def seconds(elements: int, size: int, stride: int) -> float:
            """A group of `size` ranks, each `stride` ranks from the next."""
            if size == 1:
                return 0.0
            gbs = gpu.nvlink_gbs
            if size * stride > gpu.gpus_per_node:
                gbs = min(gbs, gpu.network_gbs * max(1, gpu.gpus_per_node // stride))
            share = (size - 1) / size
            return (4 + self.element) * elements * share / (gbs * 1e9 * gpu.efficiency.link)

        world = layout.tensor * layout.data * layout.pipeline
        learning = max(n for _, n in self.rank_parameters(option))
        stages = seconds(learning, layout.data, layout.tensor)
        experts = max(n for _, n in self.expert_parameters(option))
        stages += seconds(experts, layout.expert_data, layout.expert)
        return stages + seconds(self.tower_parameters(option)[1], world, 1)

    def optimizer_seconds(self, option: Option) -> float:
        """Memory traffic of clearing gradients, their norm and AdamW; offloaded: host and PCIe.

        Of each offloaded parameter the gradient and the weight cross PCIe in its type, and 28 bytes
        go through host memory.
        """
        gpu, layout = self.gpu, option.layout
        elements = max(n for _, n in self.rank_parameters(option))
        tower = self.tower_parameters(option)[1]
        experts = max(n for _, n in self.expert_parameters(option))
        shard = elements / layout.data + experts / layout.expert_data
        shard += tower / (layout.tensor * layout.data * layout.pipeline)
        elements += tower + experts
        device = (1 - option.offload) * shard * 30 + elements * 4 + shard * 4
        seconds = device / (gpu.memory_gbs * 1e9 * gpu.efficiency.memory)
        host = option.offload * shard * 1e-9
        return seconds + host * (2 * self.element / gpu.pcie_gbs + 28 / gpu.host_gbs)

    # --- bytes --------------------------------------------------------------------------------

    def sizes(self, tensor: int) -> dict[str, tuple[int, int]]:
        """Parameters of the units on one tensor-parallel rank: all, and those that learn."""
        if tensor not in self._sizes:
            spec, learning, lora = self.spec, self.learning, self.lora

            def unit(count: int, trained: bool, adapters: int = 0) -> tuple[int, int]:
                return count + adapters, count * trained + adapters

            table = table_of(spec)
            rows = padded_vocab_size(spec.vocab_size, tensor) // tensor * spec.hidden_size
            text, vision = (
                sum(adapter_parameters(spec, lora, tensor, vision)) for vision in (False, True)
            )
            self._sizes[tensor] = {
                "patch_embed": unit(table.patch_embed.parameters, learning.vision),
                "vision": unit(sum(table.vision_layer.sizes(tensor)), learning.vision, vision),
                "merger": unit(sum(table.merger.sizes(tensor)), learning.merger),
                "deepstack": unit(
                    sum(sum(merger.sizes(tensor)) for merger in table.deepstack[:1]),
                    learning.merger,
                ),
                "text": unit(sum(table.text_layer.sizes(tensor)), learning.language, text),
                "table": unit(rows, learning.language),
                "norm": unit(spec.hidden_size, learning.language),
            }
        return self._sizes[tensor]

    def rank_parameters(self, option: Option) -> list[tuple[int, int]]:
        """Parameters of each pipeline rank, its chunks together, and those that learn; no
        multiplexed tower."""
        layout, sizes = option.layout, self.sizes(option.layout.tensor)
        pair = {name: np.array(size, dtype=np.int64) for name, size in sizes.items()}
        tied = self.spec.tie_word_embeddings
        stages = pair["text"] * np.array(layout.text_layers, dtype=np.int64)[:, None]
        stages[layout.embedding_stage] += pair["table"]
        stages[-1] += pair["norm"]
        if not (tied and layout.embedding_stage == layout.stages - 1):
            stages[-1] += pair["table"]
        if not option.multiplexed:
            stages += pair["vision"] * np.array(layout.vision_layers, dtype=np.int64)[:, None]
            stages[0] += pair["patch_embed"]
            stages[layout.merger_stage] += pair["merger"]
            for layer in self.spec.vision.deepstack_layers:
                stages[layout.stage_of(layer, vision=True)] += pair["deepstack"]
        ranks = stages.reshape(-1, layout.pipeline, 2).sum(0)
        return [(int(total), int(learning)) for total, learning in ranks]

    def expert_parameters(self, option: Option) -> list[tuple[int, int]]:
        """Parameters of the experts on each pipeline rank, and those that learn."""
        layout = option.layout
        layer = sum(table_of(self.spec).text_layer.expert_sizes(layout.expert))
        layers = np.array(layout.text_layers, dtype=np.int64).reshape(-1, layout.pipeline).sum(0)
        totals = [int(count) * layer for count in layers]
        return [(total, total * self.learning.language) for total in totals]

    def tower_parameters(self, option: Option) -> tuple[int, int]:
        """Parameters of the whole vision tower, which every rank holds where it is multiplexed,
        and those that learn."""
        if not option.multiplexed:
            return 0, 0
        sizes, vision = self.sizes(1), self.spec.vision
        counts = {"vision": vision.depth, "deepstack": len(vision.deepstack_layers)}
        counts |= {"patch_embed": 1, "merger": 1}
        total, learning = (
            sum(sizes[name][i] * count for name, count in counts.items()) for i in (0, 1)
        )
        return total, learning

    def rank_memory(self, option: Option) -> list[RankMemory]:
        """Bytes of each pipeline rank at its peak."""
        layout = option.layout
        model = self._activations(layout.tensor, layout.sequence)
        tokens, patches = self.large[TOKENS], self.mean[PATCHES]
        per_token, per_patch = model.stages(
            layout,
            recompute_vision=option.recompute_vision,
            recompute_text=option.recompute_text,
        )
        if layout.virtual_pipeline > 1:  # outputs are not freed after sending
            text = np.array(layout.text_layers) > 0
            per_token += text * model.text_input().per_token
            per_patch += ~text * model.vision_input().per_patch
        mean = per_token * tokens + per_patch * patches
        extra = per_patch * (self.large[PATCHES] - patches)
        transients = self._transients(option, model)
        chunks = layout.virtual_pipeline
        result = []
        tower, tower_learns = self.tower_parameters(option)
        master = memory.STATE_BYTES if self.element == 2 else 8
        world = layout.tensor * layout.data * layout.pipeline
        parameters = zip(self.rank_parameters(option), self.expert_parameters(option), strict=True)
        for rank, ((total, learning), (experts, experts_learn)) in enumerate(parameters):
            padded = learning + 128 * layout.data * chunks
            shard = padded / layout.data + tower_learns / world
            shard += experts_learn / layout.expert_data
            states = float(self.element * (total - learning + padded + tower + experts))
            states += 4 * (padded + tower_learns + experts_learn)
            states += (1 - option.offload) * master * shard
            shape = (layout.pipeline, chunks, option.microbatches, rank)
            # the excess of many microbatches over their mean grows as the root of their number
            number = max(1.0, schedule.peak_kept(*shape, [1 / chunks] * chunks))
            activations = schedule.peak_kept(*shape, mean[rank :: layout.pipeline])
            if extra[rank :: layout.pipeline].any():
                activations += (
                    schedule.peak_kept(*shape, extra[rank :: layout.pipeline]) / number**0.5
                )
            transient = float(transients[rank :: layout.pipeline].max())
            if option.multiplexed:
                # one phase after the other; the rows and their gradients stay for both
                rows = (
                    2 * self.element * self.spec.hidden_size * patches / self.spec.vision.merge_unit
                )
                rows *= self.spec.visual_sets / option.layout.tensor
                waiting = rows * option.microbatches if rank == 0 else 0.0
                activations = max(activations, self._piece_bytes(option) - transient) + waiting
            pixels = self.element * self.spec.vision.patch_dim * patches
            if option.multiplexed:  # those dealt to the rank
                pixels /= layout.pipeline * layout.tensor
            elif rank:
                pixels = 0.0
            batch = option.microbatches * (memory.batch_bytes(tokens) + pixels)
            factor = self.gpu.step_memory
            beside = (factor * activations, factor * transient, factor * batch)
            result.append(RankMemory(states, *beside, option.offload * master * shard))
        return result

    def _piece_bytes(self, option: Option) -> float:
        """Activations and short-lived memory of the largest piece of images that a rank of a
        multiplexed tower encodes."""
        model, again = self._activations(1, False), option.recompute_vision
        kept = model.tower(again) + model.layer_transient(vision=True)
        if again != "none":
            kept += model.vision_layer()
        share = option.microbatches * self.mean[PATCHES]
        share /= option.layout.pipeline * option.layout.tensor
        return kept.per_patch * min(share, ParallelSection.vision_piece)

    def _activations(self, tensor: int, sequence: bool) -> memory.ActivationModel:
        return _activations(self.spec, tensor, sequence, self.element, self.cuda, self.learning)

    def _transients(self, option: Option, model: memory.ActivationModel) -> np.ndarray:
        """[stages] bytes of the largest piece of short-lived memory."""
        layout = option.layout
        tokens, patches = self.large[TOKENS], self.large[PATCHES]
        text = model.layer_transient(vision=False)
        if option.recompute_text != "none":
            text += model.text_layer()
        vision = model.layer_transient(vision=True)
        if option.recompute_vision != "none":
            vision += model.vision_layer()
        has_vision = np.array(layout.vision_layers) > 0
        result = np.maximum(
            (np.array(layout.text_layers) > 0) * text.bytes(tokens, 0),
            has_vision * vision.bytes(0, patches),
        )
        result[-1] = max(result[-1], model.head_transient(self.mean[TARGETS]))
        return result


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one GPU of a pipeline rank, at the peak."""

    states: float  # parameters, gradients, optimizer
    activations: float
    transient: float
    batch: float  # the step's own tensors, pixels above all
    host: float  # in host memory, not on the GPU

    @property
    def total(self) -> float:
        return self.states + self.activations + self.transient + self.batch


@lru_cache(maxsize=64)
def _activations(
    spec: ModelSpec,
    tensor: int,
    sequence: bool,
    element: int,
    cuda: bool,
    learning: memory.Learning,
) -> memory.ActivationModel:
    return memory.ActivationModel(spec, tensor, sequence, element, cuda, learning)


def _again(block: np.ndarray, again: np.ndarray) -> np.ndarray:
    """Recomputation: the forward pass of `again` once more before the backward of `block`."""
    result = block.copy()
    result[..., COMPUTE_B, :] += again[..., COMPUTE_F, :]
    result[..., COMM_B, :] += again[..., COMM_F, :]
    return result

"""Bytes that a rank holds: parameters, gradients and optimizer state exactly, and activations.

Model states follow megatron-core 0.16.1's buffers (`ParamAndGradBuffer`, distributed optimizer):
parameters of a stage lie in one buffer in reverse order, each starting at a multiple of 64
elements, the end padded to a multiple of lcm(data-parallel size, 128). Overlapped reduction cuts
the first stage's buffer, and a multiplexed tower's, into buckets padded so. Gradients are float32;
a data-parallel rank holds float32 master weights (bf16 runs only) and two float32 moments of the
part of every buffer that is its own.

Activations are what autograd keeps between forward and backward in this project's layers, tensor
by tensor. e = bytes per element, t = tensor-parallel size, s = t under sequence parallelism, else
1; per token and language layer (h, q, kv, f as in `flops`, d = head width, H heads):

    4eh/s + 8/s            two norms: input and output, and the statistics
    e(3q + 3kv)/t          rotated q and k, the fused projection that v is a view of, the output
    8H/t                   softmax statistics (on the CPU 256H more in windows of at most 64 patches
                           at head widths from 64 on, where the processor's kernels keep
                           probabilities); a stage's layers share a rotary table of 4d bytes
                           (on the CPU, queries and keys without norms, and vision in bf16 on
                           CUDA at the head widths of its kernels: the fused projection and the
                           output, 4eh/t of vision: qkv_attention and vision_attention rotate as
                           they read)
    2eh/s + 16             of the last stage: the loss's input and its gradient, statistics
    3ef/t                  SwiGLU: both halves, and their product for the weight that reads it

A frozen weight does not keep its input; where nothing below learns, nothing is kept at all. An
adapter keeps its linear's input and its own small product, which behind proj and fc2 sequence
parallelism shares out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlmtrain.core.config import FreezeSection, LoraSection
from vlmtrain.core.layout import Layout
from vlmtrain.core.spec import ModelSpec, padded_vocab_size
from vlmtrain.models.family import table_of
from vlmtrain.models.lora_costs import adapted, adapter_parameters

STATE_BYTES = 12  # float32 master weight and two moments
_ALIGNMENT = 64  # elements at which parameters start in a buffer
_BUCKET = 128  # elements that a buffer is a multiple of
#: vlmkernels.attention.select.TILED_HEAD_DIMS, without its import of torch.
TILED_HEAD_DIMS = (64, 72, 80, 96, 128)
#: vlmkernels.attention.select.KEPT_TOKENS, likewise.
KEPT_TOKENS = 64
#: Logits of the loss on the CPU and on CUDA: vlmkernels.loss.op.KEPT * CHUNK_BYTES, likewise.
LOSS_BYTES, CUDA_LOSS_BYTES = 128 << 20, 512 << 20


@dataclass(frozen=True)
class StageParameters:
    """Parameter sizes of one stage on one tensor-parallel rank."""

    sizes: tuple[int, ...]  # of what learns, in order of registration
    shared: tuple[int, ...] = ()  # places of tied tables, which get a bucket of their own
    frozen: int = 0  # parameters outside the buffers

    @property
    def count(self) -> int:
        return sum(self.sizes) + self.frozen

    def buffer(self, data: int, bucket: int | None = None) -> int:
        """Elements of the parameter buffer, and of the gradient buffer.

        bucket: elements at which a bucket is full; None: tied tables alone stand in one of their
            own.
        """
        return self._bucket_ranges(data, bucket)[0][-1][1] if self.sizes else 0

    def shard(self, data: int, rank: int, bucket: int | None = None) -> int:
        """Parameters (padding left out) whose optimizer state data-parallel `rank` holds."""
        buckets, places = self._bucket_ranges(data, bucket)
        total = 0
        for start, end in buckets:
            size = (end - start) // data
            low, high = start + rank * size, start + (rank + 1) * size
            total += sum(max(0, min(high, b) - max(low, a)) for a, b in places)
        return total

    def _bucket_ranges(
        self, data: int, bucket: int | None
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(start, end) in elements of the buckets, each sharded by itself; of the parameters."""
        unit = math.lcm(data, _BUCKET)
        buckets: list[tuple[int, int]] = []
        places: list[tuple[int, int]] = []
        first = end = 0
        filled = False
        for place in reversed(range(len(self.sizes))):
            start = _round_up(end, _ALIGNMENT)
            if place in self.shared and filled:
                buckets.append((first, _round_up(start, unit)))
                first = start = buckets[-1][1]
            end, filled = start + self.sizes[place], True
            places.append((start, end))
            if place in self.shared or (bucket is not None and end - first >= bucket):
                buckets.append((first, _round_up(end, unit)))
                first = end = buckets[-1][1]
                filled = False
        if filled:
            buckets.append((first, _round_up(end, unit)))
        return buckets, places


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def stage_parameters(
    spec: ModelSpec,
    layout: Layout,
    stage: int,
    freeze: FreezeSection | None = None,
    lora: LoraSection | None = None,
) -> StageParameters:
    """What `QwenVLStage` allocates for `stage` on each tensor-parallel rank."""
    t, merger = layout.tensor, layout.merger_stage
    freeze, lora = freeze or FreezeSection(), lora or LoraSection()
    if lora.rank:
        freeze = FreezeSection(vision=True, merger=True, language=True)
    table, rows = table_of(spec), padded_vocab_size(spec.vocab_size, t) // t * spec.hidden_size
    last, first = stage == layout.stages - 1, stage == layout.embedding_stage
    sizes: list[int] = []
    shared: list[int] = []
    tied = spec.tie_word_embeddings
    frozen = 0

    def add(new: Sequence[int], still: bool, share: bool = False) -> None:
        nonlocal frozen
        if still:
            frozen += sum(new)
            return
        if share:
            shared.append(len(sizes))
        sizes.extend(new)

    if not layout.multiplexed:
        if stage == 0:
            add(table.patch_embed.sizes(t), freeze.vision)
        for _ in range(layout.vision_layers[stage]):
            add(table.vision_layer.sizes(t), freeze.vision)
            add(adapter_parameters(spec, lora, t, True), False)
        if stage == merger:
            add(table.merger.sizes(t), freeze.merger)
        for part, layer in zip(table.deepstack, spec.vision.deepstack_layers, strict=True):
            if layout.stage_of(layer, vision=True) == stage:
                add(part.sizes(t), freeze.merger)
    if first:
        add([rows], freeze.language, tied and not last and layout.pipeline > 1)
    for _ in range(layout.text_layers[stage]):
        add(table.text_layer.sizes(t), freeze.language)
        add(adapter_parameters(spec, lora, t, False), False)
    if last:
        add(table.final_norm.sizes(), freeze.language)
        if not (tied and first):
            add([rows], freeze.language, tied)
    return StageParameters(tuple(sizes), tuple(shared), frozen)


def stage_experts(
    spec: ModelSpec,
    layout: Layout,
    stage: int,
    freeze: FreezeSection | None = None,
    lora: LoraSection | None = None,
) -> StageParameters:
    """The experts of `stage` on each expert-parallel rank: they have buffers of their own."""
    sizes = table_of(spec).text_layer.expert_sizes(layout.expert) * layout.text_layers[stage]
    still = (freeze is not None and freeze.language) or (lora is not None and lora.rank > 0)
    return StageParameters((), (), sum(sizes)) if still else StageParameters(tuple(sizes))


def tower_parameters(
    spec: ModelSpec, freeze: FreezeSection | None = None, lora: LoraSection | None = None
) -> StageParameters:
    """The whole tower, as every rank holds it where vision is multiplexed."""
    freeze, lora = freeze or FreezeSection(), lora or LoraSection()
    if lora.rank:
        freeze = FreezeSection(vision=True, merger=True, language=True)
    table, depth = table_of(spec), spec.vision.depth
    parts = [
        (table.patch_embed.sizes() + table.vision_layer.sizes() * depth, freeze.vision),
        (adapter_parameters(spec, lora, 1, True) * depth, False),
        *((merger.sizes(), freeze.merger) for merger in table.mergers),
    ]
    learning = tuple(size for sizes, frozen in parts if not frozen for size in sizes)
    return StageParameters(learning, (), sum(sum(sizes) for sizes, frozen in parts if frozen))


@dataclass(frozen=True)
class ModelStates:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def model_states(
    spec: ModelSpec,
    layout: Layout,
    pipeline_rank: int,
    data_rank: int,
    *,
    bf16: bool = True,
    freeze: FreezeSection | None = None,
    lora: LoraSection | None = None,
    global_rank: int = 0,
    overlap: bool = False,
    bucket: int | None = None,
) -> ModelStates:
    """Exact bytes of the states of one rank, its virtual chunks and a multiplexed tower together.

    In float32 runs the master weights are the parameters themselves. Frozen weights have neither
    gradients nor optimizer state. `global_rank` matters to a multiplexed tower, which is
    data-parallel over all ranks, and to experts, which are over a stage's with the same. `overlap`:
    of gradient reduction, in buckets of `bucket` elements; default: Megatron's, 40 million or a
    million for each data-parallel rank.
    """
    element, state = (2, STATE_BYTES) if bf16 else (4, 8)
    parameters = gradients = optimizer = 0

    def add(sizes: StageParameters, data: int, rank: int, cut: bool, whole: int = 0) -> None:
        nonlocal parameters, gradients, optimizer
        most = bucket or max(40_000_000, 1_000_000 * (whole or data))
        full = most if overlap and cut else None
        elements = sizes.buffer(data, full)
        parameters += (elements + sizes.frozen) * element
        gradients += elements * 4
        optimizer += sizes.shard(data, rank, full) * state

    for stage in range(pipeline_rank, layout.stages, layout.pipeline):
        sizes = stage_parameters(spec, layout, stage, freeze, lora)
        # Only the first stage reduces on the critical path: Megatron cuts no other one's buffer.
        add(sizes, layout.data, data_rank, cut=stage == 0)
        experts = stage_experts(spec, layout, stage, freeze, lora)
        expert_rank = global_rank % (layout.tensor * layout.data) // layout.expert
        add(experts, layout.expert_data, expert_rank, cut=stage == 0, whole=layout.data)
    if layout.multiplexed:
        world = layout.tensor * layout.pipeline * layout.data
        add(tower_parameters(spec, freeze, lora), world, global_rank, cut=True)
    return ModelStates(parameters, gradients, optimizer)


# --- activations ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """Bytes kept for the backward pass, per unit of work; they add."""

    per_token: float = 0.0
    per_patch: float = 0.0

    def __add__(self, other: Kept) -> Kept:
        return Kept(self.per_token + other.per_token, self.per_patch + other.per_patch)

    def __mul__(self, factor: float) -> Kept:
        return Kept(self.per_token * factor, self.per_patch * factor)

    def bytes(self, tokens: float, patches: float) -> float:
        return self.per_token * tokens + self.per_patch * patches


@dataclass(frozen=True)
class Learning:
    """What learns; adapters by their ranks' sum on qkv, proj, fc1 and fc2 of a layer."""

    vision: bool = True
    merger: bool = True
    language: bool = True
    vision_adapters: tuple[int, ...] = (0, 0, 0, 0)
    text_adapters: tuple[int, ...] = (0, 0, 0, 0)

    @classmethod
    def of(
        cls, spec: ModelSpec, freeze: FreezeSection | None = None, lora: LoraSection | None = None
    ) -> Learning:
        if lora is None or not lora.rank:
            off = freeze or FreezeSection()
            return cls(not off.vision, not off.merger, not off.language)

        def ranks(vision: bool) -> tuple[int, ...]:
            return tuple(
                lora.rank * len(adapted(linear, lora, vision=vision))
                for linear in table_of(spec).layer(vision).linears
            )

        return cls(False, False, False, ranks(True), ranks(False))

    @property
    def tower(self) -> bool:
        """Whether the merger's input needs a gradient."""
        return self.vision or any(self.vision_adapters)

    @property
    def below_text(self) -> bool:
        """Whether the first language layer's input does."""
        return self.tower or self.merger or self.language


@dataclass(frozen=True)
class ActivationModel:
    """What one stage of a layout keeps of a microbatch.

    Norms keep their input and one or two statistics, activations their input alone
    (models/common/elementwise.py).
    """

    spec: ModelSpec
    tensor: int = 1
    sequence: bool = False
    element: int = 2  # bytes
    cuda: bool = True
    learning: Learning = Learning()

    @property
    def shards(self) -> int:
        return self.tensor if self.sequence else 1

    def _norm(self, width: int, shards: int, *, layer_norm: bool) -> float:
        """What a norm itself keeps; its output is kept by the weight that reads it."""
        e = self.element
        if layer_norm:
            statistics = 8 if self.cuda else 2 * e
            return (e * width + statistics) / shards
        return (e * width + 4) / shards

    @property
    def _text_is_fused(self) -> bool:
        """Whether a language layer's attention reads the projection: qkv_attention."""
        spec = self.spec
        return not self.cuda and not spec.qk_norm and self.tensor <= spec.num_kv_heads

    @property
    def _probabilities(self) -> float:
        """Bytes of a patch and head that windows may keep on the CPU; an average of the layers.
        Images and samples of at most 64, which may keep as much, are not what fills a pack."""
        vision = self.spec.vision
        if self.cuda or vision.window_size is None:
            return 0.0
        longest = (vision.window_size // vision.patch_size) ** 2
        windows = 1 - len(vision.full_attention_layers) / vision.depth
        return 4 * KEPT_TOKENS * windows if longest <= KEPT_TOKENS <= vision.head_dim else 0.0

    def _layer(self, recompute: str, *, vision: bool, below: bool) -> float:
        """Bytes per row, linear by linear: what learns, and what it keeps.

        `below`: whether the layer's input needs a gradient.
        """
        spec, e, t = self.spec, self.element, self.tensor
        layer = table_of(spec).layer(vision)
        qkv, proj, *mlp = layer.linears
        h, q = qkv.inputs, proj.inputs
        if vision:
            heads, head_dim = spec.vision.num_heads, spec.vision.head_dim
            trained, ranks = self.learning.vision, self.learning.vision_adapters
        else:
            heads, head_dim = spec.num_heads, spec.head_dim
            trained, ranks = self.learning.language, self.learning.text_adapters
        norm = self._norm(h, self.shards, layer_norm=layer.norm_bias)
        learns = [trained or rank > 0 for rank in ranks]
        read = e * h / self.shards  # the output of a norm, kept by the linear after it
        kept = norm if below else 0.0
        kept += read if learns[0] else 0.0
        needs = below or learns[0]
        if needs:
            # Where attention reads the projection it keeps that and its output.
            if vision:
                fused = not self.cuda or (e == 2 and head_dim in TILED_HEAD_DIMS)
            else:
                fused = self._text_is_fused
            queries_and_keys = (q + qkv.outputs) // 2
            inputs = qkv.outputs + q + (0 if fused else queries_and_keys)
            statistics = 8 + (self._probabilities if vision else 0)
            kept += e * inputs / t + statistics * heads / t
            if not vision and spec.qk_norm:  # their norms' inputs and statistics
                kept += (e * queries_and_keys + 4 * (heads + spec.num_kv_heads)) / t
        elif learns[1]:
            kept += e * q / t
        needs = needs or learns[1]
        kept += norm if needs else 0.0
        kept += e * (ranks[0] + ranks[1] / self.shards)
        if recompute == "selective":
            return kept + (read if needs or learns[2] or learns[3] else 0.0)
        if not vision and spec.num_experts:
            return kept + (self._experts(read, learns[3]) if needs or learns[3] else 0.0)
        fc1, fc2 = mlp
        f = fc2.inputs
        kept += read if learns[2] else 0.0
        needs = needs or learns[2]
        kept += e * fc1.outputs / t if needs else 0.0
        kept += e * f / t if learns[3] else 0.0
        return kept + e * (ranks[2] + ranks[3] / self.shards)

    def _experts(self, read: float, trained: bool) -> float:
        """A mixture of experts, without its norm. Ranks of a tensor-parallel group share the tokens
        out; experts of equal load."""
        spec, e, t = self.spec, self.element, self.tensor
        f, active = spec.moe_intermediate_size, spec.num_experts_per_tok
        # SwiGLU's input, its result, that times the router's probability; numbers of rows
        hidden = 3 * e * f + (spec.hidden_size + f) * e * trained + 24
        routed = 5 + 4 * bool(spec.router_aux_loss_coef)  # choice, weight; probability
        return read + (active * hidden + routed * spec.num_experts) / t

    def text_layer(self, recompute: str = "none", *, first: bool = False) -> Kept:
        """With `selective` the MLP keeps only its input, with `full` the layer does. The `first`
        layer keeps less where nothing below it learns, unless it recomputes."""
        learning = self.learning
        if not learning.below_text and not any(learning.text_adapters):
            return Kept()
        if recompute == "full":
            return self.text_input()
        below = learning.below_text or not first or recompute != "none"
        return Kept(per_token=self._layer(recompute, vision=False, below=below))

    def vision_layer(self, recompute: str = "none", *, first: bool = False) -> Kept:
        learning = self.learning
        if not learning.tower:
            return Kept()
        if recompute == "full":
            return self.vision_input()
        below = learning.vision or not first or recompute != "none"
        return Kept(per_patch=self._layer(recompute, vision=True, below=below))

    def patch_embed(self) -> Kept:
        """The pixels in the run's precision; a shard is a view that keeps all of them. Of learned
        positions 4 entries, weights and places in the result, and 3 numbers a patch."""
        vision, lookup = self.spec.vision, 4 * (8 + 4 + 8) + 3 * 8
        per_patch = float(self.element * vision.patch_dim)
        per_patch += bool(vision.position_side) * lookup / self.shards
        return Kept(per_patch=per_patch * self.learning.vision)

    def merger(self, behind: int | None = None) -> Kept:
        """Runs on all rows on every rank: its norm is not sharded. DeepStack's, `behind` a layer,
        normalise rows of four patches, which without sequence parallelism the next one keeps."""
        wide, layer_norm = self.spec.vision.hidden_size, table_of(self.spec).merger.norm_bias
        trained, e = self.learning.merger, self.element
        norm = self._norm(wide, 1, layer_norm=layer_norm)
        if behind is not None:
            norm = (norm - e * wide) / self.spec.vision.merge_unit
            kept_by_next = self.learning.tower or behind == self.spec.vision.depth - 1
            norm += 0.0 if kept_by_next and not self.sequence else e * wide
        kept = norm if self.learning.tower or trained else 0.0
        kept += e * wide / self.tensor if self.learning.tower or trained else 0.0  # GELU's input
        if trained:
            kept += e * wide + e * wide / self.tensor  # inputs of the two products
        return Kept(per_patch=kept)

    def tower(self, recompute: str = "none") -> Kept:
        """All of a multiplexed one."""
        kept = self.vision_layer(recompute) * self.spec.vision.depth
        kept += self.patch_embed() + self.merger()
        for layer in self.spec.vision.deepstack_layers:
            kept += self.merger(behind=layer)
        return kept

    def head(self) -> Kept:
        """Final norm, the loss's input and its gradient, statistics and labels."""
        width = self.spec.hidden_size
        norm = self._norm(width, self.shards, layer_norm=False)
        labels = 0 if self.cuda else 8
        return Kept(per_token=norm + 2 * self.element * width / self.shards + 16 + labels)

    def embedding(self) -> Kept:
        return Kept(per_token=12)

    def text_input(self) -> Kept:
        """All that full recomputation keeps of a language layer."""
        return Kept(per_token=self.element * self.spec.hidden_size / self.shards)

    def vision_input(self) -> Kept:
        return Kept(per_patch=self.element * self.spec.vision.hidden_size / self.shards)

    def head_transient(self, targets: np.ndarray | float) -> np.ndarray:
        """Bytes of a chunk of logits of so many target tokens."""
        columns = padded_vocab_size(self.spec.vocab_size, self.tensor) / self.tensor
        largest = CUDA_LOSS_BYTES if self.cuda else LOSS_BYTES
        return np.minimum(self.element * columns * targets, largest)

    def layer_transient(self, *, vision: bool) -> Kept:
        """Largest gradients of a layer's backward: of the MLP's input and output, gathered."""
        spec, e, t = self.spec, self.element, self.tensor
        if vision:
            size = spec.vision
            return Kept(per_patch=e * (3 * size.intermediate_size / t + 2 * size.hidden_size))
        if spec.num_experts:  # rows at the experts, before and behind them, and SwiGLU's
            rows = 2 * spec.hidden_size + 3 * spec.moe_intermediate_size
            width = spec.num_experts_per_tok * rows / t
            return Kept(per_token=e * (width + 2 * spec.hidden_size))
        return Kept(per_token=e * (3 * spec.intermediate_size / t + 2 * spec.hidden_size))

    def stages(
        self, layout: Layout, *, recompute_vision: str = "none", recompute_text: str = "none"
    ) -> tuple[np.ndarray, np.ndarray]:
        """Bytes per token and bytes per patch, [stages] each, that stages keep of a microbatch
        from its forward to its backward; without the vision tower where it is multiplexed.

        `recompute_*` are none, selective (MLPs) or full (whole layers).
        """
        text, vision = self.text_layer(recompute_text), self.vision_layer(recompute_vision)
        per_token = text.per_token * np.array(layout.text_layers, dtype=float)
        per_patch = vision.per_patch * np.array(layout.vision_layers, dtype=float)
        start = next(stage for stage, layers in enumerate(layout.text_layers) if layers)
        per_token[start] += self.text_layer(recompute_text, first=True).per_token - text.per_token
        if layout.vision_layers[0]:
            first = self.vision_layer(recompute_vision, first=True).per_patch
            per_patch[0] += first - vision.per_patch
        # layers share the rotary table of their stage
        if recompute_text != "full":
            per_token += 4 * self.spec.head_dim * (per_token > 0)
        if recompute_vision != "full":
            per_patch += 4 * self.spec.vision.head_dim * (per_patch > 0)
        if not layout.multiplexed:
            per_patch[0] += self.patch_embed().per_patch
            per_patch[layout.merger_stage] += self.merger().per_patch
            for layer in self.spec.vision.deepstack_layers:
                stage = layout.stage_of(layer, vision=True)
                per_patch[stage] += self.merger(behind=layer).per_patch
            per_patch[1:] += self._carried(layout)
        per_token[layout.merger_stage] += self.embedding().per_token
        per_token[-1] += self.head().per_token
        return per_token, per_patch

    def _carried(self, layout: Layout) -> np.ndarray:
        """Of DeepStack's sets what each stage but the first has received, per patch."""
        vision = self.spec.vision
        sets = [
            len(layout.carried(vision.deepstack_layers, stage))
            for stage in range(layout.stages - 1)
        ]
        row = self.element * self.spec.hidden_size / vision.merge_unit / self.shards
        return row * np.array(sets, dtype=float)


def batch_bytes(tokens: float) -> float:
    """A microbatch's own tensors on the device but pixels: ids, labels, positions, index."""
    return 44 * tokens

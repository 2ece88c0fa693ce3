"""Bytes that a rank holds: parameters, gradients and optimizer state exactly, and activations.

Model states follow megatron-core 0.16.1's buffers (`ParamAndGradBuffer`, distributed optimizer):
parameters of a stage lie in one buffer in reverse order, each starting at a multiple of 64
elements, the end padded to a multiple of lcm(data-parallel size, 128). Gradients are float32;
a data-parallel rank holds float32 master weights (bf16 runs only) and two float32 moments of the
part of every buffer that is its own.

Activations are what autograd keeps between forward and backward in this project's layers, tensor
by tensor. e = bytes per element, t = tensor-parallel size, s = t under sequence parallelism, else
1; per token and language layer (h, q, kv, f as in `flops`, d = head width, H heads):

    4eh/s + 8/s            two norms: input and output, and the statistics
    e(3q + 3kv)/t          rotated q and k, the fused projection that v is a view of, the output
    8H/t + 4ed             softmax statistics, cos and sin of q and of k
    5ef/t                  SwiGLU unfused: both halves, silu(x), x + 0, the product
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vlmtrain.models.spec import ModelSpec
from vlmtrain.parallel.layout import Layout

STATE_BYTES = 12  # float32 master weight and two moments
_ALIGNMENT = 64  # elements at which parameters start in a buffer
_BUCKET = 128  # elements that a buffer is a multiple of


def padded_vocab(spec: ModelSpec, tensor: int) -> int:
    """Rows of the embedding table: a multiple of 128 x tensor-parallel size."""
    return -(-spec.vocab_size // (128 * tensor)) * 128 * tensor


# --- parameters -------------------------------------------------------------------------------


def vision_layer_parameters(spec: ModelSpec, tensor: int) -> list[int]:
    """Sizes on one rank, in megatron-core's order of registration."""
    vision, t = spec.vision, tensor
    wide, f = vision.hidden_size, vision.intermediate_size
    gated = spec.family == "qwen2_5_vl"
    norm = [wide] if gated else [wide, wide]
    fc1 = (2 if gated else 1) * f // t
    attention = [wide * wide // t, wide, 3 * wide // t * wide, 3 * wide // t]
    return [*norm, *attention, *norm, fc1 * wide, fc1, wide * (f // t), wide]


def text_layer_parameters(spec: ModelSpec, tensor: int) -> list[int]:
    """Sizes on one rank, in megatron-core's order of registration."""
    h, t = spec.hidden_size, tensor
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv, f = (q + 2 * kv) // t, spec.intermediate_size // t
    return [h, h * q // t, qkv * h, qkv, h, 2 * f * h, h * f]


def merger_parameters(spec: ModelSpec, tensor: int) -> list[int]:
    vision = spec.vision
    merged = vision.merge_unit * vision.hidden_size
    norm = [vision.hidden_size] * (1 if spec.family == "qwen2_5_vl" else 2)
    part = merged // tensor
    return [*norm, part * merged, part, spec.hidden_size * part, spec.hidden_size]


@dataclass(frozen=True)
class StageParameters:
    """Parameter sizes of one stage on one tensor-parallel rank, in order of registration."""

    sizes: tuple[int, ...]
    shared: tuple[int, ...] = ()  # places of tied tables, which get a bucket of their own

    @property
    def count(self) -> int:
        return sum(self.sizes)

    def buckets(self, data: int) -> list[tuple[int, int]]:
        """(start, end) in elements of the parts of the gradient buffer that are sharded."""
        return self._place(data)[0]

    def buffer(self, data: int) -> int:
        """Elements of the parameter buffer, and of the gradient buffer."""
        return self.buckets(data)[-1][1] if self.sizes else 0

    def shard(self, data: int, rank: int) -> int:
        """Parameters (padding left out) whose optimizer state data-parallel `rank` holds."""
        buckets, places = self._place(data)
        total = 0
        for start, end in buckets:
            size = (end - start) // data
            low, high = start + rank * size, start + (rank + 1) * size
            total += sum(max(0, min(high, b) - max(low, a)) for a, b in places)
        return total

    def _place(self, data: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
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
            if place in self.shared:
                buckets.append((first, _round_up(end, unit)))
                first = end = buckets[-1][1]
                filled = False
        if filled:
            buckets.append((first, _round_up(end, unit)))
        return buckets, places


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def stage_parameters(spec: ModelSpec, layout: Layout, stage: int) -> StageParameters:
    """What `QwenVLStage` allocates for `stage` on each tensor-parallel rank."""
    t, merger = layout.tensor, layout.merger_stage
    table = padded_vocab(spec, t) // t * spec.hidden_size
    last, first = stage == layout.stages - 1, stage == layout.embedding_stage
    sizes: list[int] = []
    shared: list[int] = []
    tied = spec.tie_word_embeddings
    if stage == 0:
        sizes.append(spec.vision.patch_dim * spec.vision.hidden_size)
    sizes += vision_layer_parameters(spec, t) * layout.vision_layers[stage]
    if stage == merger:
        sizes += merger_parameters(spec, t)
    if first:
        if tied and not last and layout.pipeline > 1:
            shared.append(len(sizes))
        sizes.append(table)
    sizes += text_layer_parameters(spec, t) * layout.text_layers[stage]
    if last:
        sizes.append(spec.hidden_size)
        if not (tied and first):
            if tied:
                shared.append(len(sizes))
            sizes.append(table)
    return StageParameters(tuple(sizes), tuple(shared))


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
    spec: ModelSpec, layout: Layout, pipeline_rank: int, data_rank: int, *, bf16: bool = True
) -> ModelStates:
    """Exact bytes of the states of one rank, its virtual chunks together.

    In float32 runs the master weights are the parameters themselves.
    """
    parameters = gradients = optimizer = 0
    for stage in range(pipeline_rank, layout.stages, layout.pipeline):
        sizes = stage_parameters(spec, layout, stage)
        elements = sizes.buffer(layout.data)
        parameters += elements * (2 if bf16 else 4)
        gradients += elements * 4
        optimizer += sizes.shard(layout.data, data_rank) * (STATE_BYTES if bf16 else 8)
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
class ActivationModel:
    """What one stage of a layout keeps of a microbatch.

    `fused_norm`: the norms of CUDA keep their input and one or two statistics; torch's RMSNorm on
    CPU computes in float32 step by step and keeps that too.
    """

    spec: ModelSpec
    tensor: int = 1
    sequence: bool = False
    element: int = 2  # bytes
    fused_norm: bool = True

    @property
    def shards(self) -> int:
        return self.tensor if self.sequence else 1

    def _norm(self, width: int, shards: int, *, layer_norm: bool) -> float:
        e = self.element
        if layer_norm:
            statistics = 8 if self.fused_norm else 2 * e
            return (2 * e * width + statistics) / shards
        if self.fused_norm:
            return (2 * e * width + 4) / shards
        return (8 * width + 4 + e * width) / shards

    def text_layer(self, recompute: str = "none") -> Kept:
        """With `selective` the MLP keeps only its input, with `full` the layer does."""
        if recompute == "full":
            return self.text_input()
        spec, e, t = self.spec, self.element, self.tensor
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        norms = 2 * self._norm(spec.hidden_size, self.shards, layer_norm=False)
        attention = e * 3 * (q + kv) / t + 8 * spec.num_heads / t + 4 * e * spec.head_dim
        mlp = 0.0 if recompute == "selective" else 5 * e * spec.intermediate_size / t
        return Kept(per_token=norms + attention + mlp)

    def vision_layer(self, recompute: str = "none") -> Kept:
        if recompute == "full":
            return self.vision_input()
        spec, vision = self.spec, self.spec.vision
        e, t, wide = self.element, self.tensor, vision.hidden_size
        gated = spec.family == "qwen2_5_vl"
        norms = 2 * self._norm(wide, self.shards, layer_norm=not gated)
        attention = e * 6 * wide / t + 8 * vision.num_heads / t + 4 * e * vision.head_dim
        mlp = (5 if gated else 3) * e * vision.intermediate_size / t
        mlp = 0.0 if recompute == "selective" else mlp
        return Kept(per_patch=norms + attention + mlp)

    def patch_embed(self) -> Kept:
        """The pixels in the run's precision; a shard is a view that keeps all of them."""
        return Kept(per_patch=self.element * self.spec.vision.patch_dim)

    def merger(self) -> Kept:
        """Runs on all rows on every rank: its norm is not sharded."""
        wide, gated = self.spec.vision.hidden_size, self.spec.family == "qwen2_5_vl"
        norm = self._norm(wide, 1, layer_norm=not gated)
        return Kept(per_patch=norm + 2 * self.element * wide / self.tensor)

    def head(self) -> Kept:
        """Final norm and the float32 softmax of the loss."""
        norm = self._norm(self.spec.hidden_size, self.shards, layer_norm=False)
        columns = padded_vocab(self.spec, self.tensor) / self.tensor
        return Kept(per_token=norm + 4 * columns + 9)

    def embedding(self) -> Kept:
        return Kept(per_token=12)

    def text_input(self) -> Kept:
        """All that full recomputation keeps of a language layer."""
        return Kept(per_token=self.element * self.spec.hidden_size / self.shards)

    def vision_input(self) -> Kept:
        return Kept(per_patch=self.element * self.spec.vision.hidden_size / self.shards)

    def head_transient(self) -> Kept:
        """Logits in the run's precision beside their float32 copy, or their gradient."""
        columns = padded_vocab(self.spec, self.tensor) / self.tensor
        return Kept(per_token=self.element * columns)

    def layer_transient(self, *, vision: bool) -> Kept:
        """Largest gradients of a layer's backward: of the MLP's input and output, gathered."""
        spec, e, t = self.spec, self.element, self.tensor
        if vision:
            size = spec.vision
            return Kept(per_patch=e * (3 * size.intermediate_size / t + 2 * size.hidden_size))
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
        # full recomputation holds on to the float32 rotary table, one for all layers of a stage
        if recompute_text == "full":
            per_token += 4 * self.spec.head_dim * (per_token > 0)
        if recompute_vision == "full":
            per_patch += 4 * self.spec.vision.head_dim * (per_patch > 0)
        if not layout.multiplexed:
            per_patch[0] += self.patch_embed().per_patch
            per_patch[layout.merger_stage] += self.merger().per_patch
        per_token[layout.merger_stage] += self.embedding().per_token
        per_token[-1] += self.head().per_token
        return per_token, per_patch


def batch_bytes(spec: ModelSpec, tokens: float, patches: float, *, pixels: bool) -> float:
    """A microbatch's own tensors on the device: ids, labels, positions, index, float32 pixels."""
    return 44 * tokens + (4 * spec.vision.patch_dim * patches if pixels else 0.0)

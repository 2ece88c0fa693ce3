"""Exact counts of the multiplications and additions of a training step, for MFU and HFU.

Conventions, in which the counts equal `torch.utils.flop_counter.FlopCounterMode` to the last
multiply:

- A multiply-accumulate is 2 FLOPs. Matrix products count, element-wise work does not: norms,
  activations, rotary embeddings, softmax, the embedding lookup and the optimizer are free.
- Causal attention counts the pairs that exist, t (t + 1) / 2 for a segment of t tokens; with
  `causal=False` it counts t^2, as dense implementations compute. Attention in the vision tower
  counts p^2 per frame, and per window (as small as it really is at the border) in windowed layers.
- A backward product costs as much as its forward one for the input's gradient and as much again
  for the weight's. Frozen weights have no second part; where nothing below is trained there is no
  backward at all. Pixels need no gradient.
- The head counts 2NhV and twice that backward: only tokens with a target have logits
  (`vlmkernels.linear_cross_entropy`), however they are made in chunks. Only they go on behind the
  attention of the last language layer too, where that has one MLP (`ModelSpec.ends_on_targets`).
- Adapters (LoRA) are products with two small weights that are trained, beside a frozen one.
- *Model* FLOPs (MFU) leave out recomputation; `hardware_flops` (HFU) adds it.

Sizes as in the released configurations: h = language width, q and kv = widths of queries and of
keys, f = MLP width, V = vocabulary, D = tower width, P = patches, T = tokens, N = target tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from vlmtrain.core.config import FreezeSection, LoraSection
from vlmtrain.core.spec import ModelSpec, VisionSpec
from vlmtrain.models import lora_costs
from vlmtrain.models.family import table_of

#: A typical pack, where the data is not known: tokens of images and videos among all, and tokens
#: with a target among the others.
IMAGE_SHARE, TARGET_SHARE = 0.70, 0.67


@dataclass(frozen=True)
class Work:
    """What decides the cost of a batch; add up as many as you like.

    The same six numbers also serve as prices: a part's FLOPs are `price @ work`.
    """

    tokens: int = 0  # through the language model
    causal_pairs: int = 0  # query-key pairs of the language model's attention, per layer
    patches: int = 0  # through the vision tower
    frame_pairs: int = 0  # pairs of a vision layer that attends to the whole frame
    window_pairs: int = 0  # pairs of a vision layer that attends within windows
    targets: int = 0  # tokens with a target, through the end of the last layer and the head

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def __matmul__(self, other: Work) -> int:
        return sum(a * b for a, b in zip(self.values(), other.values(), strict=True))

    def scaled(self, factor: int) -> Work:
        return Work(*(factor * a for a in self.values()))

    def values(self) -> tuple[int, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    @classmethod
    def of(
        cls,
        segments: Iterable[int],
        grids: Iterable[Sequence[int]],
        vision: VisionSpec,
        *,
        targets: int,
        causal: bool = True,
    ) -> Work:
        """The work of segments of tokens and of images and videos.

        Args:
            segments: tokens of each sample (of each padded tail too, if it is to count).
            grids: (t, h, w) in patches of each image or video.
            vision: the tower they go through.
            targets: tokens with a target.
            causal: count t (t + 1) / 2 pairs for a segment of t tokens, not t^2.
        """
        tokens = pairs = patches = frame_pairs = window_pairs = 0
        for segment in segments:
            length = int(segment)
            tokens += length
            pairs += length * (length + 1) // 2 if causal else length * length
        for grid in grids:
            frames, height, width = (int(size) for size in grid)
            patches += frames * height * width
            frame_pairs += frames * (height * width) ** 2
            window_pairs += frames * window_pairs_of_frame(height, width, vision)
        return cls(tokens, pairs, patches, frame_pairs, window_pairs, targets)

    @classmethod
    def of_batch(cls, batch: Any, vision: VisionSpec, *, padding: bool = False) -> Work:
        """The work of a `PackedBatch`; its padded tail counts only with `padding`."""
        lengths = batch.cu_seqlens.diff().tolist()
        if batch.pad_tokens and not padding:
            lengths = lengths[:-1]
        return cls.of(lengths, batch.grid_thw.tolist(), vision, targets=batch.target_tokens)


def window_pairs_of_frame(height: int, width: int, vision: VisionSpec) -> int:
    """Sum over the frame's windows of their patches squared (the whole frame without windows).

    A window's patches are rows x columns, so the sum of squares factors into one sum per axis.
    """
    if vision.window_size is None:
        return (height * width) ** 2
    side = vision.window_size // vision.patch_size // vision.spatial_merge_size
    side *= vision.spatial_merge_size  # patches along a whole window's side

    def squares(length: int) -> int:
        return length // side * side**2 + (length % side) ** 2

    return squares(height) * squares(width)


@dataclass(frozen=True)
class Price:
    """Forward FLOPs of one part as prices per unit of work: products with weights, and pairs."""

    weights: Work
    attention: Work = Work()

    @property
    def total(self) -> Work:
        return self.weights + self.attention


def text_layer_price(spec: ModelSpec) -> Price:
    return Price(
        Work(tokens=2 * table_of(spec).text_layer.weights),
        Work(causal_pairs=4 * spec.num_heads * spec.head_dim),
    )


def moved_to_targets(spec: ModelSpec, *, mlp: bool = False) -> Work:
    """What is added to the prices of `num_layers` whole layers because the last one goes on behind
    its attention with target tokens alone; `mlp`: to those of their MLPs."""
    layer = table_of(spec).text_layer
    moved = 2 * (layer.mlp_weights if mlp else layer.weights_behind_attention)
    return Work(tokens=-moved, targets=moved) if spec.ends_on_targets else Work()


def vision_layer_price(spec: ModelSpec, layer: int) -> Price:
    """`layer` counts from 0; it decides between windows and whole frames."""
    vision = spec.vision
    pair = 4 * vision.hidden_size
    windowed = vision.window_size is not None and layer not in vision.full_attention_layers
    return Price(
        Work(patches=2 * table_of(spec).vision_layer.weights),
        Work(window_pairs=pair) if windowed else Work(frame_pairs=pair),
    )


def patch_embed_price(spec: ModelSpec) -> Price:
    return Price(Work(patches=2 * table_of(spec).patch_embed.weights))


def merger_price(spec: ModelSpec) -> Price:
    """Of one merger, per patch; exact because patches come in groups of `merge_unit`, of which the
    merger's widths are multiples."""
    return Price(Work(patches=2 * table_of(spec).merger.weights // spec.vision.merge_unit))


def head_price(spec: ModelSpec) -> Price:
    """Logits of the target tokens."""
    return Price(Work(targets=2 * spec.hidden_size * spec.vocab_size))


def prices(spec: ModelSpec) -> dict[str, Price]:
    """Forward price of each part of the model, the layers of a tower summed."""
    text = text_layer_price(spec)
    weights, attention = Work(), Work()
    for layer in range(spec.vision.depth):
        price = vision_layer_price(spec, layer)
        weights, attention = weights + price.weights, attention + price.attention
    return {
        "patch_embed": patch_embed_price(spec),
        "vision": Price(weights, attention),
        "merger": Price(merger_price(spec).weights.scaled(spec.visual_sets)),
        "language": Price(
            text.weights.scaled(spec.num_layers) + moved_to_targets(spec),
            text.attention.scaled(spec.num_layers),
        ),
        "head": head_price(spec),
    }


def backward_factors(freeze: FreezeSection | None = None) -> dict[str, tuple[int, int]]:
    """Per part: backward FLOPs as multiples of the forward ones, (products with weights, pairs).

    Gradients reach as deep as the deepest trained weight, and no deeper.
    """
    freeze = freeze or FreezeSection()
    vision, merger, language = not freeze.vision, not freeze.merger, not freeze.language
    visual = vision or merger  # gradients must pass through the language model to reach these
    through = 1 if visual or language else 0

    def weights(trained: bool, passes: int) -> int:
        return passes + (1 if trained else 0)

    return {
        "patch_embed": (1 if vision else 0, 0),  # pixels need no gradient
        "vision": (2, 2) if vision else (0, 0),
        # its norm is trained with it, so the gradient of its input is needed either way
        "merger": (weights(merger, 1 if visual else 0), 0),
        "language": (weights(language, through), 2 * through),
        "head": (weights(language, through), 0),
    }


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of some work, by part; exact integers."""

    forward: dict[str, int]
    backward: dict[str, int]
    attention_forward: dict[str, int]  # contained in forward
    attention_backward: dict[str, int]  # contained in backward
    mlp_forward: dict[str, int]  # contained in forward

    @property
    def total(self) -> int:
        return sum(self.forward.values()) + sum(self.backward.values())

    def part(self, name: str) -> int:
        return self.forward[name] + self.backward[name]


def mlp_price(spec: ModelSpec, *, vision: bool) -> Work:
    """Forward price of the MLP of one layer of a tower."""
    flops = 2 * table_of(spec).layer(vision).mlp_weights
    return Work(patches=flops) if vision else Work(tokens=flops)


def count(
    spec: ModelSpec,
    work: Work,
    freeze: FreezeSection | None = None,
    lora: LoraSection | None = None,
    *,
    recomputed: Collection[str] = (),
) -> FlopCount:
    """Model FLOPs of forward and backward; with adapters everything else is frozen.

    `recomputed`: "vision", "language": towers that compute the gradient of their input although
    nothing below learns, because they recompute (`models.common.layers.ask_for_gradient`).
    """
    if lora is not None and lora.rank:
        return _count_adapted(spec, work, lora, recomputed)
    factors = backward_factors(freeze)
    result = FlopCount({}, {}, {}, {}, {})
    for name, price in prices(spec).items():
        weights, pairs = price.weights @ work, price.attention @ work
        result.forward[name] = weights + pairs
        result.attention_forward[name] = pairs
        result.attention_backward[name] = pairs * factors[name][1]
        result.backward[name] = weights * factors[name][0] + pairs * factors[name][1]
    result.mlp_forward["vision"] = spec.vision.depth * (mlp_price(spec, vision=True) @ work)
    mlps = mlp_price(spec, vision=False).scaled(spec.num_layers) + moved_to_targets(spec, mlp=True)
    result.mlp_forward["language"] = mlps @ work
    return result


def _count_adapted(
    spec: ModelSpec, work: Work, lora: LoraSection, recomputed: Collection[str]
) -> FlopCount:
    plain = prices(spec)
    result = FlopCount({}, {}, {}, {}, {})

    def layers(name: str, number: int, rows: int, below: bool) -> bool:
        """Count a tower's layers; whether what comes after them needs gradients."""
        vision = name == "vision"
        pairs = [vision_layer_price(spec, i) if vision else text_layer_price(spec)
                 for i in range(number)]  # fmt: skip
        forward = backward = mlp = attention = attention_back = 0
        learn = bool(lora_costs.adapter_parameters(spec, lora, 1, vision))
        below = below or (learn and name in recomputed)
        for layer, price in enumerate(pairs, 1):
            one = lora_costs.layer_products(spec, lora, vision=vision, below=below)
            seen = price.attention @ work
            forward += 2 * one.forward * rows + seen
            backward += 2 * one.backward * rows
            mlp += 2 * one.mlp_forward * rows
            attention += seen
            if one.attention_learns:
                attention_back += 2 * seen
            if not vision and layer == number and spec.ends_on_targets:
                fewer = 2 * (work.targets - rows)
                forward += one.forward_behind * fewer
                backward += one.backward_behind * fewer
                mlp += one.mlp_forward * fewer
            below = below or learn
        result.forward[name], result.mlp_forward[name] = forward, mlp
        result.backward[name] = backward + attention_back
        result.attention_forward[name] = attention
        result.attention_backward[name] = attention_back
        return below

    def single(name: str, rows_learn: bool) -> None:
        forward = plain[name].weights @ work
        result.forward[name], result.backward[name] = forward, forward if rows_learn else 0
        result.attention_forward[name] = result.attention_backward[name] = 0

    single("patch_embed", False)
    below = layers("vision", spec.vision.depth, work.patches, False)
    single("merger", below)
    below = layers("language", spec.num_layers, work.tokens, below)
    single("head", below)
    return result


def hardware_flops(
    model: FlopCount,
    *,
    recompute: Iterable[str] = (),
    selective: Iterable[str] = (),
    multiplexed: bool = False,
    attention_recompute: bool = True,
) -> int:
    """FLOPs that the machine executes.

    Args:
        model: what `count` returned.
        recompute: parts, as `prices` names them, whose forward runs again before their backward.
        selective: "vision", "language": towers whose MLPs run again.
        multiplexed: the tower runs once without keeping anything and once more to learn.
        attention_recompute: the scores are computed a second time in the backward pass, as every
            attention kernel that doesn't store them does: half of a forward pass over the pairs.
    """
    total = model.total
    for name in recompute:
        if model.backward[name]:
            total += model.forward[name]
    for name in selective:
        if model.backward[name]:
            total += model.mlp_forward[name]
    if multiplexed and (model.backward["vision"] or model.backward["merger"]):
        total += sum(model.forward[name] for name in ("patch_embed", "vision", "merger"))
    if attention_recompute:  # backward is 2 x forward without it
        total += sum(pairs // 4 for pairs in model.attention_backward.values())
    return total


def utilization(flops: float, seconds: float, gpus: int, peak_flops: float) -> float:
    """MFU or HFU: FLOPs of a step of all GPUs as a share of what they could have done."""
    return flops / (seconds * gpus * peak_flops)


def parameter_counts(spec: ModelSpec) -> dict[str, int]:
    """Parameters by part, as Hugging Face stores them (the embedding under "embedding")."""
    table = table_of(spec)
    return {
        "patch_embed": table.patch_embed.parameters,
        "vision": spec.vision.depth * table.vision_layer.parameters,
        "merger": sum(merger.parameters for merger in table.mergers),
        "embedding": table.embedding.parameters,
        "language": spec.num_layers * table.text_layer.parameters + table.final_norm.parameters,
        "head": 0 if spec.tie_word_embeddings else table.head.parameters,
    }


def active_parameters(spec: ModelSpec) -> int:
    """Parameters without the experts that a token does not go to."""
    idle = spec.num_experts - spec.num_experts_per_tok
    experts = spec.num_layers * sum(table_of(spec).text_layer.expert_sizes())
    return sum(parameter_counts(spec).values()) - experts * idle // max(1, spec.num_experts)

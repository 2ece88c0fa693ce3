"""A layout is checked and filled in here, before any process group exists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from vlmtrain.core.config import ParallelSection
from vlmtrain.core.layout import Layout, LayoutError
from vlmtrain.core.spec import ModelSpec
from vlmtrain.core.stage_split import Split, contiguous
from vlmtrain.models.family import table_of
from vlmtrain.models.flops import IMAGE_SHARE, TARGET_SHARE

Layers = Sequence[int] | Literal["auto"]


def make_layout(
    spec: ModelSpec,
    *,
    world_size: int,
    tensor: int = 1,
    pipeline: int = 1,
    virtual_pipeline: int = 1,
    sequence: bool = False,
    vision_layers: Layers = (),
    text_layers: Layers = (),
    multiplexed: bool = False,
    expert: int = 1,
    microbatches: int | None = None,
) -> Layout:
    """Check a layout for a model and fill in what was left out.

    Args:
        spec: the model.
        world_size: number of processes.
        tensor, pipeline, virtual_pipeline: parallel sizes.
        sequence: sequence parallelism (needs tensor > 1).
        vision_layers: layers per stage; empty: all on the first; "auto": balanced by FLOPs.
        text_layers: layers per stage; empty or "auto": balanced by FLOPs.
        multiplexed: every rank encodes images (`parallel/multiplex.py`).
        expert: ranks of a stage that share the experts.
        microbatches: packs per data-parallel rank and step, checked for interleaving.

    Raises:
        LayoutError: with the offending numbers and what to change.
    """
    for name, value in (
        ("tensor", tensor),
        ("pipeline", pipeline),
        ("virtual_pipeline", virtual_pipeline),
        ("expert", expert),
    ):
        if value < 1:
            raise LayoutError(f"parallel.{name} is {value}; it must be at least 1")
    if world_size % (tensor * pipeline):
        size = tensor * pipeline
        raise LayoutError(
            f"{world_size} processes can't be divided into parallel.tensor {tensor} x "
            f"parallel.pipeline {pipeline}; start a multiple of {size} processes, e.g. "
            f"{max(1, round(world_size / size)) * size}"
        )
    if sequence and tensor == 1:
        raise LayoutError(
            "parallel.sequence needs parallel.tensor of at least 2, it is 1; turn it off"
        )
    if virtual_pipeline > 1 and pipeline == 1:
        raise LayoutError(
            f"parallel.virtual_pipeline {virtual_pipeline} needs parallel.pipeline of at least 2, "
            "it is 1; use parallel.virtual_pipeline 1 or parallel.pipeline 2"
        )
    _check_tensor(spec, tensor, multiplexed)
    _check_expert(spec, expert, world_size // pipeline, split=tensor > 1 and not sequence)
    stages = pipeline * virtual_pipeline
    if virtual_pipeline > 1 and microbatches is not None and microbatches % pipeline:
        data = world_size // (tensor * pipeline)
        nearest = max(1, round(microbatches / pipeline)) * pipeline * data
        raise LayoutError(
            f"with parallel.virtual_pipeline each rank's microbatches ({microbatches} per step) "
            f"must be a multiple of parallel.pipeline {pipeline}; set "
            f"train.global_batch_packs to a multiple of {pipeline} x data-parallel size {data}, "
            f"e.g. {nearest}"
        )
    if not multiplexed and spec.num_layers + spec.vision.depth < stages:
        raise LayoutError(
            f"{stages} stages (parallel.pipeline {pipeline} x virtual_pipeline {virtual_pipeline}) "
            f"are more than the {spec.vision.depth} vision and {spec.num_layers} language layers "
            f"of this model; use at most {spec.num_layers + spec.vision.depth}"
        )
    split = _multiplexed_layers if multiplexed else _layers
    vision, text = split(spec, stages, vision_layers, text_layers)
    # Tied weights are reduced between the first and the last stage, so the table stays on 0.
    embedding = 0 if multiplexed or spec.tie_word_embeddings else _merger(vision)
    return Layout(
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=virtual_pipeline,
        sequence=sequence,
        data=world_size // (tensor * pipeline),
        vision_layers=vision,
        text_layers=text,
        embedding_stage=embedding,
        multiplexed=multiplexed,
        expert=expert,
    )


def section_layout(
    spec: ModelSpec,
    section: ParallelSection,
    world_size: int,
    *,
    microbatches: int | None = None,
) -> Layout:
    """As `make_layout`, of the `parallel` section of a configuration."""
    return make_layout(
        spec,
        world_size=world_size,
        tensor=section.tensor,
        pipeline=section.pipeline,
        virtual_pipeline=section.virtual_pipeline,
        sequence=section.sequence,
        vision_layers=section.vision_layers,
        text_layers=section.text_layers,
        multiplexed=section.vision == "multiplexed",
        expert=section.expert,
        microbatches=microbatches,
    )


def _merger(vision: Sequence[int]) -> int:
    """The stage of the last vision layer."""
    return max((i for i, n in enumerate(vision) if n), default=0)


def _layers(spec: ModelSpec, stages: int, vision_layers: Layers, text_layers: Layers) -> Split:
    """Vision and text layers per stage, checked."""
    text = () if text_layers == "auto" else tuple(text_layers)

    def balanced() -> tuple[list[int], list[int]]:
        vision, text = _balanced(spec, (), stages)
        return list(vision), list(text)

    if text:
        _check_counts("text_layers", text, stages, spec.num_layers, lambda: balanced()[1])
    if vision_layers == "auto":
        vision, text = _balanced(spec, text, stages)
    else:
        vision = tuple(vision_layers) or (spec.vision.depth, *([0] * (stages - 1)))
    _check_counts("vision_layers", vision, stages, spec.vision.depth, lambda: balanced()[0])
    text = text or _balanced_text_layers(spec, vision, stages)
    if vision[0] == 0:
        raise LayoutError(
            f"parallel.vision_layers {list(vision)} leaves stage 0 without vision layers; the "
            f"first stage reads the pixels, give it at least one, e.g. {balanced()[0]}"
        )
    merger = _merger(vision)
    holes = [i for i in range(merger) if vision[i] == 0]
    if holes:
        raise LayoutError(
            f"parallel.vision_layers {list(vision)} has no layer on stage {holes[0]} but some on a "
            f"later one; fill the stages in order, e.g. {balanced()[0]}"
        )
    early = [i for i in range(merger) if text[i]]
    if early:
        raise LayoutError(
            f"parallel.text_layers {list(text)} puts language layers on stage {early[0]}, before "
            f"the vision tower ends on stage {merger}; use 0 there, e.g. "
            f"{list(_balanced_text_layers(spec, vision, stages))}"
        )
    if text[-1] == 0 and stages > 1 and merger == stages - 1:
        raise LayoutError(
            f"parallel.text_layers {list(text)} leaves the last stage, which holds the merger and "
            f"the head, without a language layer; give it one, e.g. "
            f"vision_layers {balanced()[0]} and text_layers {balanced()[1]}"
        )
    return tuple(vision), text


def _multiplexed_layers(
    spec: ModelSpec, stages: int, vision_layers: Layers, text_layers: Layers
) -> Split:
    if vision_layers and vision_layers != "auto":
        raise LayoutError(
            f"parallel.vision_layers {list(vision_layers)} has no meaning with parallel.vision "
            "multiplexed, where every rank holds the whole tower; leave it out"
        )
    none = (0,) * stages
    text = () if text_layers == "auto" else tuple(text_layers)

    def nearest() -> list[int]:
        return list(_balanced_text_layers(spec, none, stages))

    text = text or tuple(nearest())
    _check_counts("text_layers", text, stages, spec.num_layers, nearest)
    return none, text


def tensor_split_sizes(spec: ModelSpec, multiplexed: bool) -> dict[str, int]:
    """What tensor-parallel ranks divide, by name: parallel.tensor divides them all."""
    sizes = {
        "language attention heads": spec.num_heads,
        "language key/value heads": spec.num_kv_heads,
    }
    if not spec.num_experts:  # which are not split
        sizes["language MLP width"] = spec.intermediate_size
    if not multiplexed:
        sizes["vision attention heads"] = spec.vision.num_heads
        sizes["vision MLP width"] = spec.vision.intermediate_size
    return sizes


def _check_tensor(spec: ModelSpec, tensor: int, multiplexed: bool) -> None:
    sizes = tensor_split_sizes(spec, multiplexed)
    bad = {name: size for name, size in sizes.items() if size % tensor}
    if bad:
        good = [
            t
            for t in range(1, min(sizes.values()) + 1)
            if all(size % t == 0 for size in sizes.values())
        ]
        name, size = next(iter(bad.items()))
        raise LayoutError(
            f"parallel.tensor {tensor} does not divide the {name} ({size}) of this model; "
            f"use one of {good}"
            + (
                ", or --parallel.vision multiplexed, where the tower is not split"
                if name.startswith("vision")
                else ""
            )
        )


def expert_sizes(spec: ModelSpec, ranks: int) -> list[int]:
    """Ranks of a stage with `ranks` that can share a model's experts."""
    experts = spec.num_experts or 1
    return [e for e in range(1, min(experts, ranks) + 1) if experts % e == 0 and ranks % e == 0]


def _check_expert(spec: ModelSpec, expert: int, ranks: int, *, split: bool) -> None:
    if expert > 1 and not spec.num_experts:
        raise LayoutError(
            f"parallel.expert {expert} needs a mixture of experts, this model has none; drop it"
        )
    good = expert_sizes(spec, ranks)
    if expert not in good:
        raise LayoutError(
            f"parallel.expert {expert} does not divide both the {spec.num_experts} experts of this "
            f"model and the {ranks} ranks of a stage (parallel.tensor x data-parallel size); use "
            f"one of {good}, the nearest is {min(good, key=lambda e: abs(e - expert))}"
        )
    if expert > 1 and split:
        raise LayoutError(
            f"parallel.expert {expert} with parallel.tensor needs parallel.sequence; turn it on, "
            "or use parallel.expert 1"
        )


def _check_counts(
    name: str, layers: Sequence[int], stages: int, total: int, nearest: Callable[[], list[int]]
) -> None:
    if len(layers) != stages or sum(layers) != total or min(layers) < 0:
        raise LayoutError(
            f"parallel.{name} {list(layers)} must be {stages} numbers (one per stage: "
            f"pipeline x virtual_pipeline) of at least 0 that sum to {total}; they are "
            f"{len(layers)} that sum to {sum(layers)}; use auto, or e.g. {nearest()}"
        )


def _prices(spec: ModelSpec) -> tuple[float, float, float]:
    """What a vision layer, a language layer, and the head with what the last layer costs less.

    In matmul weights a token of a typical pack passes: a vision layer counts 4 patches per image
    token, the head its target tokens alone, as what is behind the last layer's attention.
    """
    table, patches = table_of(spec), 4 * IMAGE_SHARE
    targets = (1 - IMAGE_SHARE) * TARGET_SHARE
    vision, head = patches * table.vision_layer.weights, targets * table.head.weights
    if spec.ends_on_targets:
        head -= (1 - targets) * table.text_layer.weights_behind_attention
    return vision, table.text_layer.weights, head


def _balanced_text_layers(spec: ModelSpec, vision: Sequence[int], stages: int) -> tuple[int, ...]:
    """Language layers per stage so that the slowest stage is as fast as possible."""
    vision_layer, text_layer, head = _prices(spec)
    cost = [n * vision_layer for n in vision]
    cost[-1] += head
    merger = _merger(vision)
    layers = [0] * stages
    allowed = list(range(merger, stages))
    if stages > 1:
        layers[-1] = 1  # the head's stage normalises the last layer's output
        cost[-1] += text_layer
    for _ in range(spec.num_layers - sum(layers)):
        cheapest = min(allowed, key=lambda i: (cost[i], i))
        layers[cheapest] += 1
        cost[cheapest] += text_layer
    return tuple(layers)


def _balanced(
    spec: ModelSpec, text: tuple[int, ...], stages: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Vision and text layers per stage so that the slowest stage is as fast as possible; given
    `text`, the vision layers only."""
    vision_layer, text_layer, head = _prices(spec)
    depth = spec.vision.depth
    if not text:
        split = contiguous([vision_layer] * depth, text_layer, spec.num_layers, head, stages)
        assert split is not None  # there are layers for every stage
        return split
    cost = [n * text_layer for n in text]
    cost[-1] += head
    first = next(i for i, n in enumerate(text) if n)  # the merger can't stand behind it
    best: tuple[float, tuple[int, ...]] | None = None
    for merger in range(min(first + 1, depth)):
        layers = [int(i <= merger) for i in range(stages)]  # no hole before the merger
        for _ in range(depth - merger - 1):
            loads = [cost[i] + layers[i] * vision_layer for i in range(merger + 1)]
            layers[loads.index(min(loads))] += 1
        slowest = max(c + n * vision_layer for c, n in zip(cost, layers, strict=True))
        if best is None or slowest < best[0]:
            best = slowest, tuple(layers)
    assert best is not None
    return best[1], text

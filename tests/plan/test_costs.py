"""What ranks exchange and what the optimizer moves, in seconds, by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.released import released_spec
from vlmtrain.core.config import (
    FreezeSection,
    LoraSection,
    RecomputeSection,
    TrainConfig,
    TrainSection,
)
from vlmtrain.core.layout import Layout
from vlmtrain.core.spec import ModelSpec
from vlmtrain.models import flops
from vlmtrain.parallel.layout import make_layout
from vlmtrain.plan import costs, hardware, memory
from vlmtrain.plan.peak import PeakModel
from vlmtrain.plan.workload import PATCHES, TARGETS, TOKENS, Packs

# Nodes of 8: 400 GB/s between their GPUs, 40 GB/s a GPU to other nodes; half of it is reached.
GPU = dataclasses.replace(
    hardware.find_gpu("h100"),
    nvlink_gbs=400.0,
    network_gbs=40.0,
    latency_us=10.0,
    efficiency=hardware.Efficiency(link=0.5, memory=0.5),
)
LATENCY, INSIDE, OUTSIDE = 1e-5, 200e9, 20e9
# Packs of 8,000 tokens, 6,000 of them of images, and 1,000 targets.
PACKS = Packs(
    np.array([[8000, 8000 * 8001 / 2, 24000, 24000.0 * 4000, 24000.0 * 64, 1000]]), 8192, ""
)
SPECS = {name: released_spec(name) for name in ("qwen2_5_vl-7b", "qwen2_vl-2b", "qwen3_vl_moe-30b")}
SEVEN, MIXTURE = SPECS["qwen2_5_vl-7b"], SPECS["qwen3_vl_moe-30b"]


def model(spec: ModelSpec = SEVEN, gpu: hardware.Gpu = GPU, **more: Any) -> costs.CostModel:
    return costs.CostModel(spec, gpu, PACKS, **more)


def fullest(spec: ModelSpec, layout: Layout) -> int:
    """Parameters of the fullest stage, experts left out."""
    return max(memory.stage_parameters(spec, layout, s).count for s in range(layout.stages))


@pytest.mark.parametrize(
    ("world", "tensor", "rate"),
    [
        (8, 2, INSIDE),  # 4 ranks, every second one, fill a node
        (16, 2, 4 * OUTSIDE),  # of each node 4 ranks, which send at the same time
        (32, 4, 2 * OUTSIDE),
        (64, 1, 8 * OUTSIDE),
    ],
)
def test_reduction_of_gradients(world: int, tensor: int, rate: float) -> None:
    """Scattered in float32, gathered in bf16; of 7B all ranks but one share a GPU's."""
    layout = make_layout(SEVEN, world_size=world, tensor=tensor)
    n = layout.data
    seconds = 6 * fullest(SEVEN, layout) * (n - 1) / n / rate
    got = model().data_parallel_seconds(costs.Option(layout, 4))
    assert got == pytest.approx(seconds, rel=1e-6)
    exact = model(element=4).data_parallel_seconds(costs.Option(layout, 4))
    assert exact == pytest.approx(seconds * 8 / 6, rel=1e-6)


def test_reduction_of_a_multiplexed_tower_and_of_experts() -> None:
    layout = make_layout(SEVEN, world_size=8, pipeline=4, multiplexed=True)
    tower = memory.tower_parameters(SEVEN).count
    seconds = 6 * (fullest(SEVEN, layout) / 2 + tower * 7 / 8) / INSIDE
    got = model().data_parallel_seconds(costs.Option(layout, 8))
    assert got == pytest.approx(seconds, rel=1e-6)

    layout = make_layout(MIXTURE, world_size=8, expert=4)  # two ranks have the same experts
    experts = memory.stage_experts(MIXTURE, layout, 0).count
    seconds = 6 * (fullest(MIXTURE, layout) * 7 / 8 + experts / 2) / INSIDE
    got = model(MIXTURE).data_parallel_seconds(costs.Option(layout, 8))
    assert got == pytest.approx(seconds, rel=1e-6)


def test_reduction_of_experts_whose_ranks_are_nodes_apart() -> None:
    """Two ranks have the same, 16 ranks from each other: one port each."""
    layout = make_layout(MIXTURE, world_size=32, expert=16)
    experts = memory.stage_experts(MIXTURE, layout, 0).count
    seconds = 6 * (fullest(MIXTURE, layout) * 31 / 32 / (8 * OUTSIDE) + experts / 2 / OUTSIDE)
    got = model(MIXTURE).data_parallel_seconds(costs.Option(layout, 8))
    assert got == pytest.approx(seconds, rel=1e-6)


def test_what_goes_on_to_the_next_stage() -> None:
    """Hidden states of patches before the merger, of tokens behind it; with tied words both."""
    text, vision = 2 * 8000 * SEVEN.hidden_size, 2 * 24000 * SEVEN.vision.hidden_size
    layers: Any = {"vision_layers": [16, 16, 0, 0], "text_layers": [0, 8, 10, 10]}
    layout = make_layout(SEVEN, world_size=4, pipeline=4, **layers)
    got = model().transfers(costs.Option(layout, 8))
    assert got == pytest.approx([size / INSIDE + LATENCY for size in (vision, text, text)])
    apart = make_layout(SEVEN, world_size=16, pipeline=4, **layers)
    got = model().transfers(costs.Option(apart, 8))
    assert got == pytest.approx([size / OUTSIDE + LATENCY for size in (vision, text, text)])
    parts = make_layout(SEVEN, world_size=8, tensor=2, pipeline=4, sequence=True, **layers)
    got = model().transfers(costs.Option(parts, 8))
    assert got == pytest.approx([size / 2 / INSIDE + LATENCY for size in (vision, text, text)])

    apart = make_layout(SEVEN, world_size=16, tensor=2, pipeline=4, sequence=True, **layers)
    got = model().transfers(costs.Option(apart, 8))
    assert got == pytest.approx([size / 2 / OUTSIDE + LATENCY for size in (vision, text, text)])

    small = SPECS["qwen2_vl-2b"]
    assert small.tie_word_embeddings
    layout = make_layout(small, world_size=2, pipeline=2, vision_layers=[16, 16])
    both = 2 * (8000 * small.hidden_size + 24000 * small.vision.hidden_size)
    got = model(small).transfers(costs.Option(layout, 8))
    assert got == pytest.approx([both / INSIDE + LATENCY])

    # DeepStack's sets, of rows of four patches
    layers = {"vision_layers": [MIXTURE.vision.depth, 0], "text_layers": [0, MIXTURE.num_layers]}
    layout = make_layout(MIXTURE, world_size=2, pipeline=2, **layers)
    sets = len(MIXTURE.vision.deepstack_layers)
    size = 2 * (8000 + sets * 6000) * MIXTURE.hidden_size
    got = model(MIXTURE).transfers(costs.Option(layout, 8))
    assert got == pytest.approx([size / INSIDE + LATENCY])


def test_what_multiplexed_ranks_exchange() -> None:
    """Rows to the embedding's two ranks, which share them out, and gradients back; none come back
    to a tower that does not learn."""
    gpu = dataclasses.replace(GPU, peak_tflops=1e12)  # computes in no time
    layout = make_layout(SEVEN, world_size=8, tensor=2, pipeline=4, multiplexed=True)
    option = costs.Option(layout, 16)
    rows = 2 * 16 * 6000 * SEVEN.hidden_size * 7 / 8
    seconds = rows / 2 / INSIDE + 8 * LATENCY
    both = model(gpu=gpu).multiplexed_seconds(option)
    assert both == pytest.approx((seconds, seconds), rel=1e-3)
    frozen = FreezeSection(vision=True, merger=True)
    there, back = model(gpu=gpu, freeze=frozen).multiplexed_seconds(option)
    assert there == pytest.approx(seconds, rel=1e-3) and back == 0
    _, back = model(gpu=gpu, freeze=FreezeSection(vision=True)).multiplexed_seconds(option)
    assert back == pytest.approx(seconds, rel=1e-3)
    # DeepStack's three sets beside the merger's
    layout = make_layout(MIXTURE, world_size=8, pipeline=4, tensor=2, multiplexed=True)
    rows = 2 * 16 * 6000 * 4 * MIXTURE.hidden_size * 7 / 8
    got = model(MIXTURE, gpu=gpu).multiplexed_seconds(costs.Option(layout, 16))
    assert got == pytest.approx([rows / 2 / INSIDE + 8 * LATENCY] * 2, rel=1e-3)


def test_what_the_optimizer_moves() -> None:
    """Of each parameter 4 bytes of its gradient are cleared; of those of the rank's share 4 are
    read for the norm and 30 for the update: gradient, weights and moments."""
    layout = make_layout(SEVEN, world_size=8, pipeline=2)
    stage = fullest(SEVEN, layout)
    seconds = (4 * stage + 34 * stage / 4) / (GPU.memory_gbs * 1e9 * 0.5)
    got = model().optimizer_seconds(costs.Option(layout, 8))
    assert got == pytest.approx(seconds, rel=1e-6)


@pytest.mark.parametrize("offload", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("freeze", [FreezeSection(), FreezeSection(vision=True),
                                    FreezeSection(language=True)])  # fmt: skip
def test_what_is_updated_and_reduced_of_a_part(freeze: FreezeSection, offload: float) -> None:
    """Of a stage a quarter on each of 4 ranks, of experts a half, of the tower a 16th. What is on
    the host crosses PCIe twice in bf16, and 28 bytes go through the host's memory."""
    sizes: dict[str, Any] = {"tensor": 2, "sequence": True, "expert": 4, "pipeline": 2}
    layout = make_layout(MIXTURE, world_size=16, multiplexed=True, **sizes)
    stages = [memory.stage_parameters(MIXTURE, layout, s, freeze) for s in range(2)]
    stage = max(sum(one.sizes) for one in stages)
    experts = max(sum(memory.stage_experts(MIXTURE, layout, s, freeze).sizes) for s in range(2))
    tower = sum(memory.tower_parameters(MIXTURE, freeze).sizes)
    learning = model(MIXTURE, freeze=freeze)
    option = costs.Option(layout, 8, offload=offload)
    shard, rate = stage / 4 + experts / 2 + tower / 16, GPU.memory_gbs * 1e9 * 0.5
    device = 4 * (stage + experts + tower) + (4 + 30 * (1 - offload)) * shard
    host = offload * shard * (4 / (GPU.pcie_gbs * 1e9) + 28 / (GPU.host_gbs * 1e9))
    assert learning.optimizer_seconds(option) == pytest.approx(device / rate + host, rel=1e-6)
    # the tower's 16 ranks lie on two nodes and use all ports
    reduced = 6 * (stage * 3 / 4 / INSIDE + experts / 2 / INSIDE + tower * 15 / 16 / (8 * OUTSIDE))
    assert learning.data_parallel_seconds(option) == pytest.approx(reduced, rel=1e-6)


@pytest.mark.parametrize("sequence", [False, True])
def test_collectives_of_a_language_layer(sequence: bool) -> None:
    """Without sequence parallelism two all-reduces either way; with it two gathers and two
    scatters, and the gathers once more for the gradients of weights."""
    seven, units = model(), model().units(2, sequence)
    once = 2 * SEVEN.hidden_size / 2 / INSIDE + LATENCY / 8000
    forward, backward = (units["text"][row, TOKENS] for row in (costs.COMM_F, costs.COMM_B))
    assert forward == pytest.approx(4 * once)
    assert backward == pytest.approx((6 if sequence else 4) * once)
    columns = [PATCHES, TARGETS]
    assert not units["text"][costs.COMM_F :, columns].any()
    alone = seven.units(1, False)
    assert not any(alone[name][..., costs.COMM_F :, :].any() for name in alone)
    frozen = model(freeze=FreezeSection(True, True, True)).units(2, sequence)["text"]
    assert frozen[costs.COMM_F, TOKENS] == forward and not frozen[costs.COMM_B].any()


def test_rows_of_experts_are_exchanged() -> None:
    """Each token's row goes to its experts and comes back, forward and backward."""
    alone, shared = (model(MIXTURE).units(1, False, expert)["text"] for expert in (1, 4))
    row = 2 * MIXTURE.hidden_size * MIXTURE.num_experts_per_tok * 3 / 4
    once = row / INSIDE + LATENCY / 8000
    difference = shared - alone
    for direction in (costs.COMM_F, costs.COMM_B):
        assert difference[direction, TOKENS] == pytest.approx(2 * once)
    assert not difference[: costs.COMM_F].any()
    full = model(MIXTURE).units(1, False, 8)["text"] - alone  # a node
    assert full[costs.COMM_F, TOKENS] == pytest.approx(2 * (row / 6 * 7 / INSIDE + LATENCY / 8000))
    apart = model(MIXTURE).units(1, False, 16)["text"] - alone
    row = row / (3 / 4) * 15 / 16
    assert apart[costs.COMM_F, TOKENS] == pytest.approx(2 * (row / OUTSIDE + LATENCY / 8000))


# --- compute: by the exact counts of FLOPs --------------------------------------------------------

# A language FLOP takes 2.5 peak ones, a vision FLOP 4; nothing else takes time.
ONLY_FLOPS = dataclasses.replace(
    GPU,
    nvlink_gbs=1e12,
    network_gbs=1e12,
    latency_us=1e-9,
    overhead_us=1e-9,
    efficiency=hardware.Efficiency(language=0.4, vision=0.25),
)
TOWER = ("patch_embed", "vision", "merger")
LEARNING = [
    (FreezeSection(), LoraSection()),
    (FreezeSection(vision=True), LoraSection()),
    (FreezeSection(vision=True, merger=True), LoraSection()),
    (FreezeSection(language=True), LoraSection()),
    (FreezeSection(), LoraSection(rank=256)),
    (FreezeSection(), LoraSection(rank=256, vision=True)),
]


def part_seconds(
    spec: ModelSpec, freeze: FreezeSection, lora: LoraSection
) -> tuple[dict[str, float], dict[str, float]]:
    """Forward and backward, of a pack; the loss makes its gradients in the forward pass."""
    work = flops.Work(*(int(x) for x in PACKS.mean))
    exact = flops.count(spec, work, freeze, lora)
    ahead, back = dict(exact.forward), dict(exact.backward)
    ahead["head"] += back["head"]
    back["head"] = 0
    speed = {name: GPU.peak * (0.25 if name in TOWER else 0.4) for name in ahead}
    return (
        {name: count / speed[name] for name, count in ahead.items()},
        {name: count / speed[name] for name, count in back.items()},
    )


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("freeze", "lora"), LEARNING)
def test_seconds_are_exact_flops_over_speed(
    name: str, freeze: FreezeSection, lora: LoraSection
) -> None:
    """On each of the stages that hold a part, shared out by tensor-parallel ranks."""
    spec = SPECS[name]
    priced = model(spec, ONLY_FLOPS, freeze=freeze, lora=lora)
    layers: Any = {"vision_layers": [spec.vision.depth, 0], "text_layers": [0, spec.num_layers]}
    layout = make_layout(spec, world_size=4, tensor=2, pipeline=2, sequence=True, **layers)
    ahead, back = part_seconds(spec, freeze, lora)
    found = priced.stage_costs(costs.Option(layout, 8)) @ PACKS.mean
    # the search takes the input of the lowest adapted layer to need a gradient, and all tokens
    # through the last one's adapters
    rel = 3e-2 if lora.rank else 1e-6
    for stage, parts in enumerate((TOWER, ("language", "head"))):
        for row, seconds in ((costs.COMPUTE_F, ahead), (costs.COMPUTE_B, back)):
            total = sum(seconds[part] for part in parts) / 2
            assert found[stage, row] == pytest.approx(total, rel=rel, abs=1e-9)

    # computed again: MLPs, or whole layers
    work = flops.Work(*(int(x) for x in PACKS.mean))
    mlps = flops.count(spec, work, freeze, lora).mlp_forward
    tower, text = mlps["vision"] / GPU.peak / 0.25, mlps["language"] / GPU.peak / 0.4
    for again, more in (
        ("selective", (tower, text)),
        ("full", (ahead["vision"], ahead["language"])),
    ):
        option = costs.Option(layout, 8, again, again)
        extra = priced.stage_costs(option) @ PACKS.mean - found
        assert not extra[:, costs.COMPUTE_F].any()
        if not lora.rank:
            assert extra[1, costs.COMPUTE_B] == pytest.approx(more[1] / 2)
        if not lora.rank and not spec.vision.deepstack_layers:
            assert extra[0, costs.COMPUTE_B] == pytest.approx(more[0] / 2)

    # multiplexed: a tower as a whole on every rank, which encodes twice where it learns
    layout = make_layout(spec, world_size=4, tensor=2, pipeline=2, multiplexed=True)
    option = costs.Option(layout, 8)
    first, second = priced.multiplexed_seconds(option)
    share = 1.02 * 8 / 4
    forward, backward = (sum(seconds[part] for part in TOWER) for seconds in (ahead, back))
    assert first == pytest.approx(share * forward, rel=1e-6)
    learns = backward > 0
    assert second == pytest.approx(share * (forward + backward) * learns, rel=rel, abs=1e-9)
    stages = (priced.stage_costs(option) @ PACKS.mean)[:, : costs.COMM_F]
    rest = sum(seconds[part] for seconds in (ahead, back) for part in ("language", "head"))
    assert stages.sum() == pytest.approx(rest / 2, rel=rel, abs=1e-9)

    # a stage with the head alone, and the patch embedding, which every rank computes whole
    one = make_layout(spec, world_size=2, tensor=2)
    whole = priced.stage_costs(costs.Option(one, 8)) @ PACKS.mean
    embedding = ahead["patch_embed"] + back["patch_embed"]
    total = (sum(ahead.values()) + sum(back.values()) + embedding) / 2
    assert whole[0, : costs.COMM_F].sum() == pytest.approx(total, rel=rel)


@pytest.mark.parametrize("name", SPECS)
def test_seconds_of_a_tower_on_two_stages(name: str) -> None:
    """Layers differ where some see windows; DeepStack's mergers stand behind theirs, the last
    merger on the second stage."""
    spec = SPECS[name]
    depth = spec.vision.depth
    layers: Any = {"vision_layers": [10, depth - 10, 0], "text_layers": [0, 0, spec.num_layers]}
    layout = make_layout(spec, world_size=3, pipeline=3, **layers)
    found = model(spec, ONLY_FLOPS).stage_costs(costs.Option(layout, 8)) @ PACKS.mean
    work = flops.Work(*(int(x) for x in PACKS.mean))
    merger = flops.merger_price(spec).total @ work
    for stage, places in enumerate((range(10), range(10, depth))):
        count = sum(flops.vision_layer_price(spec, i).total @ work for i in places)
        count += merger * sum(i in places for i in spec.vision.deepstack_layers)
        count += merger * stage
        pixels = (1 - stage) * (flops.patch_embed_price(spec).total @ work)
        speed = GPU.peak * 0.25
        assert found[stage, costs.COMPUTE_F] == pytest.approx((count + pixels) / speed)
        assert found[stage, costs.COMPUTE_B] == pytest.approx((2 * count + pixels) / speed)


def test_adapters_of_the_tower_alone() -> None:
    """Their gradients pass the language model and the merger, whose weights stay."""
    lora = LoraSection(rank=8, vision=True, targets=("qkv",))
    seven = model(lora=lora)
    assert seven.backward_factors()["language"] == (1, 2)
    units = seven.units(1, False)
    assert not seven.learning.language and any(seven.learning.vision_adapters)
    for part in ("merger", "vision_mlp", "text"):
        forward, backward = units[part][costs.COMPUTE_F], units[part][costs.COMPUTE_B]
        pairs = forward * (np.arange(6) == 1)
        expected = 0 * forward if part == "vision_mlp" else forward + pairs
        assert backward == pytest.approx(expected)
    assert not units["patch_embed"][costs.COMPUTE_B].any()


def test_stages_exchange_rows_of_experts() -> None:
    """Of each language layer; recomputed ones once more."""
    layers: Any = {"text_layers": [20, MIXTURE.num_layers - 20]}
    alone, shared = (
        make_layout(MIXTURE, world_size=8, pipeline=2, expert=e, **layers) for e in (1, 4)
    )
    once = 2 * MIXTURE.hidden_size * MIXTURE.num_experts_per_tok * 3 / 4 / INSIDE + LATENCY / 8000
    for again, passes in (("none", 1), ("selective", 2), ("full", 2)):
        one, other = (
            model(MIXTURE).stage_costs(costs.Option(layout, 8, "none", again))
            for layout in (alone, shared)
        )
        more = (other - one)[..., TOKENS]
        for stage, count in enumerate(layers["text_layers"]):
            assert more[stage, costs.COMM_F] == pytest.approx(2 * once * count)
            assert more[stage, costs.COMM_B] == pytest.approx(2 * once * count * passes)


def test_the_host_takes_its_time() -> None:
    """300 us before either pass of a stage, whatever it computes."""
    slow = dataclasses.replace(ONLY_FLOPS, overhead_us=300.0)
    layout = make_layout(SEVEN, world_size=2, pipeline=2)
    option = costs.Option(layout, 8)
    rows = [model(gpu=gpu).stage_costs(option) @ PACKS.mean for gpu in (slow, ONLY_FLOPS)]
    both = np.array([[3e-4, 3e-4, 0, 0]] * 2)
    assert rows[0] - rows[1] == pytest.approx(both, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("sequence", [False, True])
def test_collectives_of_the_other_parts(sequence: bool) -> None:
    """Rows of a vision layer as of a language layer; of a mixture without its MLPs' two; the
    merger's rows in, and its sets out to all ranks; the loss's gradients in float32."""
    units, mixture = model().units(2, sequence), model(MIXTURE).units(2, sequence)
    vision, rows = SEVEN.vision, costs.COMM_F
    once = 2 * vision.hidden_size / 2 / INSIDE
    layer = np.diff(units["vision"], axis=0)[:, rows:, PATCHES]
    assert layer == pytest.approx(np.array([[4 * once, (6 if sequence else 4) * once]] * 32))
    assert units["vision_mlp"][rows:, PATCHES] == pytest.approx([2 * once, 0])
    out = 2 * 2 * SEVEN.hidden_size / 4 / 2 / INSIDE
    assert units["merger"][rows:, PATCHES] == pytest.approx([once + out] * 2)
    text = 2 * SEVEN.hidden_size / 2 / INSIDE
    head = [3 * text if sequence else 4 * text, 0]
    assert units["head"][rows:, TARGETS] == pytest.approx(head)
    assert units["text_mlp"][rows:, TOKENS] == pytest.approx([2 * (text + LATENCY / 8000), 0])
    small = 2 * MIXTURE.hidden_size / 2 / INSIDE + LATENCY / 8000
    counts = (2, 3) if sequence else (3, 3)
    assert mixture["text"][rows:, TOKENS] == pytest.approx([n * small for n in counts])
    assert mixture["text_mlp"][rows:, TOKENS] == pytest.approx([0 if sequence else small, 0])
    shared = model(MIXTURE).units(2, True, 4)["text_mlp"] if sequence else None
    if shared is not None:  # recomputed experts get their rows again
        row = 2 * MIXTURE.hidden_size * MIXTURE.num_experts_per_tok * 3 / 4 / 2
        again = shared[costs.COMM_F, TOKENS]
        assert again == pytest.approx(2 * (row / INSIDE + LATENCY / 8000))


# --- bytes: what the search says of packs that are all the same, and the walk over their step ---

SAME = Packs(PACKS.work.copy(), 8192, "")
SAME.work[:, TARGETS] = 8000  # a run's plan takes every token for a target
SHARED: dict[str, Any] = {"world_size": 16, "tensor": 2, "sequence": True, "expert": 4}
SPREAD: dict[str, Any] = {"world_size": 8, "pipeline": 4, "vision_layers": "auto"}
CHUNKS: dict[str, Any] = {**SPREAD, "pipeline": 2, "virtual_pipeline": 3}
MULTIPLEXED: dict[str, Any] = {"world_size": 16, "pipeline": 4, "tensor": 2, "multiplexed": True}
STEPS: list[tuple[str, dict[str, Any], int, dict[str, Any]]] = [
    ("qwen2_5_vl-7b", {"world_size": 1}, 4, {}),
    ("qwen2_5_vl-7b", {"world_size": 8, "tensor": 2, "sequence": True}, 4, {"element": 4}),
    ("qwen2_5_vl-7b", {"world_size": 8, "tensor": 4}, 2, {"cuda": False}),
    ("qwen2_vl-2b", SPREAD, 8, {}),
    ("qwen3_vl_moe-30b", SPREAD, 3, {"again": ("selective", "full")}),
    ("qwen2_5_vl-7b", SPREAD, 8, {"again": ("full", "selective"), "offload": 0.75}),
    ("qwen2_5_vl-7b", SPREAD, 2, {"freeze": FreezeSection(vision=True)}),
    ("qwen2_5_vl-7b", SPREAD, 8, {"lora": LoraSection(rank=64, vision=True)}),
    ("qwen2_5_vl-7b", CHUNKS, 8, {}),
    ("qwen3_vl_moe-30b", CHUNKS, 4, {"again": ("none", "full")}),
    ("qwen3_vl_moe-30b", SHARED, 2, {"offload": 0.5}),
    ("qwen3_vl_moe-30b", {**SHARED, "pipeline": 2}, 2, {"freeze": FreezeSection(language=True)}),
    ("qwen3_vl_moe-30b", MULTIPLEXED, 8, {"offload": 0.25}),
    ("qwen2_vl-2b", MULTIPLEXED, 4, {}),  # a piece of images is fuller than the pipeline
    ("qwen2_vl-2b", MULTIPLEXED, 8, {"again": ("full", "selective")}),
    ("qwen2_5_vl-7b", {**MULTIPLEXED, "virtual_pipeline": 2}, 4, {"element": 4, "factor": 1.5}),
    ("qwen2_5_vl-7b", {**MULTIPLEXED, "pipeline": 2}, 1, {"freeze": FreezeSection(vision=True)}),
]


@pytest.mark.parametrize(("name", "sizes", "microbatches", "more"), STEPS)
def test_memory_of_the_search_is_that_of_a_run(
    name: str, sizes: dict[str, Any], microbatches: int, more: dict[str, Any]
) -> None:
    spec = SPECS.get(name) or released_spec(name)
    layout = make_layout(spec, **sizes)
    again, offload = more.get("again", ("none", "none")), more.get("offload", 0.0)
    element, cuda, factor = more.get("element", 2), more.get("cuda", True), more.get("factor", 1.0)
    learning = more.get("freeze", FreezeSection()), more.get("lora", LoraSection())
    gpu = dataclasses.replace(GPU, step_memory=factor)
    searched = costs.CostModel(spec, gpu, SAME, *learning, element=element, cuda=cuda)
    ranks = searched.rank_memory(costs.Option(layout, microbatches, *again, offload))
    train = TrainSection(
        pack_length=8192,
        global_batch_packs=microbatches * layout.data,
        precision="bf16" if element == 2 else "fp32",
    )
    config = TrainConfig(Path("model"), "data", Path("output"), train=train)
    config.freeze, config.lora = learning
    config.recompute = RecomputeSection(*again)
    config.optimizer.offload_fraction = offload
    packs = [np.full((1, microbatches), SAME.mean[column]) for column in (TOKENS, PATCHES)]
    for rank, found in enumerate(ranks):
        run = PeakModel(config, spec, layout, rank, cuda=cuda, factor=factor)
        peak = float(run.peaks(*packs, np.array([1000.0]))[0])
        assert found.states == pytest.approx(run.states(), rel=2e-3)
        assert found.total - found.states == pytest.approx(peak - run.states(), rel=1e-9)
        whole = dataclasses.replace(config.optimizer, offload_fraction=0.0)
        without = dataclasses.replace(config, optimizer=whole)
        kept = PeakModel(without, spec, layout, rank, cuda=cuda).states() - run.states()
        assert found.host == pytest.approx(kept, rel=2e-3)


def test_memory_of_packs_with_more_patches_than_others() -> None:
    """A rank holds several packs at a time: what one has more than the mean is less of a surprise
    among many, as the root of their number."""
    work = np.repeat(SAME.work, 50, axis=0)
    work[:2, PATCHES] *= 1.5  # one in 25: the pack that 99 of 100 don't exceed is of them
    mixed = costs.CostModel(SEVEN, GPU, Packs(work, 8192, ""))
    even = costs.CostModel(SEVEN, GPU, SAME)
    mean = work[:, PATCHES].mean()
    layout = make_layout(SEVEN, world_size=4, pipeline=4, vision_layers=[16, 16, 0, 0])
    option = costs.Option(layout, 8)
    _, per_patch = memory.ActivationModel(SEVEN).stages(layout)
    pairs = zip(mixed.rank_memory(option), even.rank_memory(option), strict=True)
    for rank, (found, usual) in enumerate(pairs):
        packs = 4 - rank  # between forward and backward, of 8
        more = packs * (mean - 24000) + packs**0.5 * (36000 - mean)
        assert found.activations - usual.activations == pytest.approx(per_patch[rank] * more)

"""Memory against the buffers and saved tensors of real megatron-core stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.parity.reference import make_model
from tests.plan.worker import results
from tests.released import released_spec
from vlmkernels.attention.select import KEPT_TOKENS, TILED_HEAD_DIMS
from vlmkernels.loss.op import CHUNK_BYTES, CUDA_CHUNK_BYTES, KEPT
from vlmtrain.core.config import FreezeSection, LoraSection
from vlmtrain.core.spec import ModelSpec
from vlmtrain.models.family import parse_spec
from vlmtrain.parallel.layout import make_layout
from vlmtrain.plan import memory

GRIDS = [[1, 32, 32], [2, 10, 14]]
ACTIVATIONS = {"tokens": 512, "grids": GRIDS}
PATCHES = sum(t * h * w for t, h, w in GRIDS)


def _case(family: str, world: int, rank: int, **more: Any) -> dict[str, Any]:
    case = {"family": family, "tied": False, "precision": "bf16", "layout": {}, "heads": 4}
    return {**case, "world": world, "rank": rank, **more}


LORA = {"rank": 8, "vision": True}
VISION = ["qkv", "proj", "fc1", "fc2", "q_proj", "o_proj"]
ROWS = {"rank": 3, "targets": ["q_proj", "o_proj", "gate_proj", "down_proj"]}
MLPS = ["selective", "selective"]
SHARED = {"pipeline": 2, "tensor": 2, "sequence": True, "expert": 2}
UNEVEN = {"pipeline": 4, "vision_layers": [2, 2, 0, 0], "text_layers": [0, 1, 2, 1]}
HALVES = {"pipeline": 2, "text_layers": [2, 2]}
EXPERTS = {"tensor": 2, "sequence": True, "expert": 4}
MULTIPLEXED = {"pipeline": 2, "multiplexed": True}
CASES = [
    _case("qwen2_5_vl", 1, 0, activations=ACTIVATIONS),
    _case("qwen2_vl", 1, 0, activations=ACTIVATIONS),
    _case("qwen2_5_vl", 1, 0, precision="fp32", activations=ACTIVATIONS),
    _case("qwen2_vl", 1, 0, precision="fp32", tied=True, activations=ACTIVATIONS),
    _case("qwen2_5_vl", 1, 0, recompute=["selective", "full"], activations=ACTIVATIONS),
    _case("qwen2_vl", 1, 0, recompute=["full", "selective"], activations=ACTIVATIONS),
    _case("qwen2_5_vl", 2, 1, layout={"tensor": 2}, activations=ACTIVATIONS),
    _case("qwen2_vl", 6, 4, layout={"tensor": 2, "sequence": True}, activations=ACTIVATIONS),
    _case("qwen3_vl", 1, 0, activations=ACTIVATIONS),
    _case("qwen3_vl", 1, 0, precision="fp32", tied=True, activations=ACTIVATIONS),
    _case("qwen3_vl", 2, 1, layout={"tensor": 2, "sequence": True}, activations=ACTIVATIONS),
    _case("qwen3_vl", 1, 0, recompute=["full", "selective"], activations=ACTIVATIONS),
    _case("qwen3_vl", 6, 3, layout={"pipeline": 2, "virtual_pipeline": 2}, bucket=40_000),
    _case("qwen3_vl_moe", 1, 0, activations=ACTIVATIONS),
    _case("qwen3_vl_moe", 1, 0, activations=ACTIVATIONS, lora={"rank": 8, "targets": ["o_proj"]}),
    _case("qwen3_vl_moe", 1, 0, precision="fp32", recompute=MLPS, activations=ACTIVATIONS),
    *(_case("qwen3_vl_moe", 8, rank, layout=SHARED, bucket=40_000) for rank in (2, 7)),
    _case("qwen3_vl", 8, 5, layout={"pipeline": 4, "multiplexed": True}),
    *(
        _case(family, 1, 0, precision=precision, activations=ACTIVATIONS, **what)
        for family, precision, what in (
            ("qwen2_5_vl", "bf16", {"freeze": {"vision": True}}),
            ("qwen3_vl", "fp32", {"freeze": {"vision": True}}),
            ("qwen3_vl", "bf16", {"freeze": {"language": True}}),
            ("qwen3_vl", "bf16", {"lora": LORA}),
            ("qwen2_vl", "fp32", {"freeze": {"vision": True, "merger": True}}),
            ("qwen2_vl", "bf16", {"freeze": {"language": True}}),
            ("qwen2_5_vl", "bf16", {"freeze": {"vision": True, "language": True}}),
            ("qwen2_5_vl", "bf16", {"lora": {"rank": 8}}),
            ("qwen2_vl", "fp32", {"lora": {"rank": 8, "vision": True, "targets": VISION}}),
            ("qwen2_5_vl", "fp32", {"lora": {"rank": 4, "targets": ["down_proj"]}}),
            ("qwen2_5_vl", "bf16", {"lora": LORA, "recompute": ["selective", "full"]}),
            ("qwen2_5_vl", "bf16", {"freeze": {"language": True}, "recompute": MLPS}),
        )
    ),
    _case("qwen2_5_vl", 6, 4, layout={"tensor": 2, "pipeline": 3}, lora=LORA),
    *(_case("qwen2_vl", 10, rank, layout={"tensor": 2}, lora=ROWS) for rank in (2, 7)),
    _case("qwen2_vl", 6, 3, layout={"tensor": 2, "sequence": True}, freeze={"vision": True}),
    _case("qwen2_vl", 8, 5, layout={"pipeline": 4, "multiplexed": True}),
    # overlapped reduction: buckets of each stage's first chunk, on the first pipeline rank alone
    *(_case("qwen2_vl", 6, rank, bucket=50_000, tied=True) for rank in (0, 4)),
    *(_case("qwen2_5_vl", 6, r, layout={"pipeline": 2}, bucket=70_000) for r in (1, 5)),
    _case("qwen2_5_vl", 6, 2, layout={"pipeline": 2, "virtual_pipeline": 2}, bucket=40_000),
    _case("qwen2_vl", 6, 5, layout={"pipeline": 2, "multiplexed": True}, bucket=30_000),
    _case("qwen2_vl", 2, 1, bucket=None),
    _case("qwen2_5_vl", 4, 1, layout={"pipeline": 2, "multiplexed": True}, lora=LORA),
    *(_case("qwen2_5_vl", 12, rank, layout=UNEVEN) for rank in (1, 5, 11)),
    *(_case("qwen3_vl", 12, rank, layout=UNEVEN) for rank in (1, 5)),
    *(_case("qwen2_vl", 12, rank, layout=UNEVEN, tied=True) for rank in (2, 10)),
    *(
        _case(family, 2, 1, layout={"tensor": 2, **how}, activations=ACTIVATIONS, **what)
        for family, how, what in (
            ("qwen3_vl_moe", {"sequence": True}, {}),
            ("qwen2_vl", {}, {"lora": {"rank": 16, "vision": True, "targets": VISION}}),
            *(
                ("qwen2_5_vl", {"sequence": True}, {"lora": {"rank": 16, "targets": [target]}})
                for target in ("q_proj", "o_proj", "gate_proj", "down_proj")
            ),
            ("qwen2_5_vl", {}, {"lora": {"rank": 16, "targets": ["gate_proj"]}}),
        )
    ),
    *(
        _case(family, 1, 0, activations=ACTIVATIONS, **what)
        for family, what in (
            ("qwen3_vl_moe balanced", {}),
            ("qwen2_vl", {"lora": {"rank": 8}, "recompute": MLPS}),
            ("qwen2_vl", {"freeze": {"merger": True, "language": True}}),
            ("qwen3_vl", {"freeze": {"merger": True}}),
        )
    ),
    # a tied table behind layers, a bucket that one weight fills, experts over five ranks
    *(_case("qwen2_vl", 6, r, layout=HALVES, tied=True) for r in (1, 2)),
    _case("qwen2_vl", 6, 0, bucket=256 * 96),
    _case("qwen3_vl_moe", 20, 19, layout=EXPERTS, bucket=20_000),
    _case("qwen3_vl_moe", 1, 0, freeze={"language": True}),
    *(_case("qwen3_vl", 4, 3, layout=MULTIPLEXED, freeze={p: True}) for p in ("vision", "merger")),
    *(
        _case(
            "qwen2_5_vl",
            20,
            rank,
            layout={"tensor": 2, "pipeline": 2, "virtual_pipeline": 2, "sequence": True},
            tied=tied,
        )
        for rank, tied in ((3, False), (19, True))
    ),
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results("megatron_worker", CASES, tmp_path_factory.mktemp("megatron"))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)))
def test_states_to_the_byte(number: int, measured: list[dict[str, Any]]) -> None:
    case, real = CASES[number], measured[number]
    spec = parse_spec(
        make_model(case["family"], vision_heads=4, tied=case["tied"]).config.to_dict()
    )
    layout = make_layout(spec, world_size=case["world"], **case["layout"])
    # tensor-parallel ranks are innermost, then data, then pipeline
    data_rank = case["rank"] // layout.tensor % layout.data
    pipeline_rank = case["rank"] // (layout.tensor * layout.data)
    stages = range(pipeline_rank, layout.stages, layout.pipeline)
    learning = {
        "freeze": FreezeSection(**case.get("freeze", {})),
        "lora": LoraSection(**case.get("lora", {})),
    }
    counts = [
        memory.stage_parameters(spec, layout, stage, **learning).count
        + memory.stage_experts(spec, layout, stage, **learning).count
        for stage in stages
    ]
    assert counts == real["parameters"]
    states = memory.model_states(
        spec,
        layout,
        pipeline_rank,
        data_rank,
        bf16=case["precision"] == "bf16",
        global_rank=case["rank"],
        overlap="bucket" in case,
        bucket=case.get("bucket"),
        **learning,
    )
    assert states.parameters == real["parameter_bytes"]
    assert states.gradients == real["gradient_bytes"]
    assert states.optimizer == real["optimizer_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [i for i, case in enumerate(CASES) if "activations" in case])
def test_activations_are_the_tensors_autograd_keeps(
    number: int, measured: list[dict[str, Any]]
) -> None:
    case = CASES[number]
    spec = parse_spec(make_model(case["family"], vision_heads=4).config.to_dict())
    layout = make_layout(spec, world_size=case["world"], **case["layout"])
    model = memory.ActivationModel(
        spec,
        tensor=layout.tensor,
        sequence=layout.sequence,
        element=2 if case["precision"] == "bf16" else 4,
        cuda=False,
        learning=memory.Learning.of(
            spec,
            FreezeSection(**case.get("freeze", {})),
            LoraSection(**case.get("lora", {})),
        ),
    )
    vision, text = case.get("recompute", ("none", "none"))
    per_token, per_patch = model.stages(layout, recompute_vision=vision, recompute_text=text)
    real = measured[number]["activations"]["bytes"]
    assert per_token[0] * 512 + per_patch[0] * PATCHES == pytest.approx(real, rel=0.01)


def test_shards_of_all_ranks_are_the_parameters() -> None:
    spec = parse_spec(make_model("qwen2_vl", tied=True).config.to_dict())
    layout = make_layout(spec, world_size=14, pipeline=2)
    for stage in range(2):
        sizes = memory.stage_parameters(spec, layout, stage)
        assert sum(sizes.shard(layout.data, rank) for rank in range(layout.data)) == sizes.count


@pytest.mark.parametrize(
    ("world", "bucket", "other"), [(36, 40_000_000, 36_000_000), (116, 116_000_000, 40_000_000)]
)
def test_the_usual_bucket_is_megatrons(world: int, bucket: int, other: int) -> None:
    """40 million elements, or a million for each data-parallel rank; for experts too, whose own
    group is a quarter of that."""

    def states(spec: ModelSpec, expert: int = 1, **more: Any) -> memory.ModelStates:
        layout = make_layout(spec, world_size=world, expert=expert)
        last = world - 1
        return memory.model_states(spec, layout, 0, last, global_rank=last, **more)

    seven, mixture = released_spec("qwen2_5_vl-7b"), released_spec("qwen3_vl_moe-30b")
    for spec, expert in ((seven, 1), (mixture, 4)):
        usual = states(spec, expert, overlap=True)
        assert usual == states(spec, expert, overlap=True, bucket=bucket)
        assert usual != states(spec, expert, overlap=True, bucket=other)
        # without overlap one buffer for all
        assert states(spec, expert) == states(spec, expert, overlap=True, bucket=10**12)
        assert states(spec, expert) == states(spec, expert, bucket=bucket) != usual


@pytest.mark.parametrize(("tensor", "sequence"), [(1, False), (2, False), (4, True)])
def test_what_stages_keep_on_cuda(tensor: int, sequence: bool) -> None:
    """By the shapes, in bf16; s ranks share rows out, t widths."""
    t, s = tensor, tensor if sequence else 1
    for name in ("qwen2_5_vl-7b", "qwen2_vl-7b"):
        spec = released_spec(name)
        h, q, kv, f = spec.hidden_size, 3584, 512, 18944
        w, g = spec.vision.hidden_size, spec.vision.intermediate_size
        model = memory.ActivationModel(spec, tensor, sequence)
        # two norms with what is read of them; queries and keys rotated beside the fused rows, and
        # what attention returns; sums of 28 heads; both halves of SwiGLU's input and its result
        text = 2 * (2 * 2 * h + 4) / s + (2 * (3 * q + 3 * kv) + 8 * 28 + 2 * 3 * f) / t
        assert model.text_layer().per_token == pytest.approx(text)
        # vision rotates as it reads; a LayerNorm keeps a mean too, GELU has no halves
        windows = name == "qwen2_5_vl-7b"
        number, wide = (4, 3 * g) if windows else (8, 2 * g)
        vision = 2 * (2 * 2 * w + number) / s + (2 * 4 * w + 8 * 16 + 2 * wide) / t
        assert model.vision_layer().per_patch == pytest.approx(vision)
        pixels = 2 * 3 * 2 * 14 * 14
        # every rank has all rows of the merger: its norm's, what the first product reads; GELU's
        # input and its result are split
        merger = 2 * 2 * w + number + 2 * 2 * w / t
        # norm, the loss's input and its gradient, statistics; the embedding's places
        head = (2 * h + 4) / s + 2 * 2 * h / s + 16 + 12
        layout = make_layout(spec, world_size=tensor, tensor=tensor, sequence=sequence)
        per_token, per_patch = model.stages(layout)
        assert per_token == pytest.approx([28 * text + head + 4 * 128])
        assert per_patch == pytest.approx([32 * vision + pixels + merger + 4 * 80])
        assert model.tower().per_patch == pytest.approx(per_patch[0] - 4 * 80)
        again = model.stages(layout, recompute_vision="full", recompute_text="selective")
        kept = text - 2 * 3 * f / t  # all but the MLP's
        assert again[0] == pytest.approx([28 * kept + head + 4 * 128])
        assert again[1] == pytest.approx([32 * 2 * w / s + pixels + merger])
        # the backward of an MLP: gradients of SwiGLU's input and result, of rows in and out
        short = model.layer_transient(vision=False), model.layer_transient(vision=True)
        assert short[0] == memory.Kept(per_token=2 * (3 * f / t + 2 * h))
        assert short[1] == memory.Kept(per_patch=2 * (3 * g / t + 2 * w))
        assert short[0] + short[1] == memory.Kept(short[0].per_token, short[1].per_patch)
        # logits of a few rows, and never more than the loss makes at once
        assert model.head_transient(100) == 2 * 152064 / t * 100
        assert model.head_transient(10**6) == 512 * 2**20


def test_windows_on_the_cpu_may_keep_probabilities() -> None:
    assert memory.KEPT_TOKENS == KEPT_TOKENS
    spec = parse_spec(make_model("qwen2_5_vl").config.to_dict())
    vision = replace(spec.vision, hidden_size=1280, patch_size=14, window_size=112, depth=32)
    vision = replace(vision, full_attention_layers=(7, 15, 23, 31))

    def kept(heads: int, window_size: int = 112, cuda: bool = False) -> float:
        changed = replace(vision, num_heads=heads, window_size=window_size)
        model = memory.ActivationModel(replace(spec, vision=changed), cuda=cuda)
        return model.vision_layer().per_patch

    assert kept(16) - kept(16, window_size=126) == 16 * 256 * 28 / 32
    assert kept(20) - kept(20, window_size=126) == 20 * 256 * 28 / 32  # head_dim 64
    assert kept(32) == kept(32, window_size=126)  # 40
    assert kept(16, cuda=True) == kept(16, window_size=126, cuda=True)


def test_vision_on_cuda_keeps_rotated_copies_only_where_no_kernel_rotates() -> None:
    assert memory.TILED_HEAD_DIMS == TILED_HEAD_DIMS
    assert memory.LOSS_BYTES == KEPT * CHUNK_BYTES
    assert memory.CUDA_LOSS_BYTES == KEPT * CUDA_CHUNK_BYTES
    spec = parse_spec(make_model("qwen2_5_vl").config.to_dict())

    def kept(heads: int, element: int) -> float:
        vision = replace(spec.vision, hidden_size=1280, num_heads=heads)
        model = memory.ActivationModel(replace(spec, vision=vision), element=element)
        return model.vision_layer().per_patch

    statistics = 8 * (40 - 16)  # heads of 32 and of 80
    assert kept(40, 2) - kept(16, 2) == 2 * 2 * 1280 + statistics
    assert kept(40, 4) - kept(16, 4) == statistics

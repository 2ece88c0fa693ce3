"""FLOP and parameter counts against torch's own counter and transformers' own modules."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.parity import reference
from tests.parity.matrix import FAMILIES
from tests.released import RELEASED, released_config, released_spec
from vlmtrain.core.config import FreezeSection
from vlmtrain.core.spec import ModelSpec
from vlmtrain.models import flops
from vlmtrain.models.family import parse_spec, table_of


def _spec(model: Any) -> ModelSpec:
    return parse_spec(model.config.to_dict())


def _sample(rng: random.Random, grids: list[list[int]]) -> torch.Tensor:
    """One sequence with the placeholders of every grid and some text around them."""
    ids = [rng.randrange(10, reference.VOCAB) for _ in range(rng.randrange(3, 9))]
    for t, h, w in grids:
        ids += [reference.START, *[reference.IMAGE] * (t * h * w // 4), reference.END]
        ids += [rng.randrange(10, reference.VOCAB) for _ in range(rng.randrange(1, 7))]
    return torch.tensor([ids])


def _freeze(model: Any, freeze: FreezeSection) -> None:
    for name, parameter in model.named_parameters():
        part = "merger" if "merger" in name else "vision" if ".visual." in name else "language"
        parameter.requires_grad_(not getattr(freeze, part))


def _measured(model: Any, ids: torch.Tensor, grids: list[list[int]]) -> int:
    """What torch counts in forward and backward, without the table of M-RoPE angles.

    transformers makes that table by a matrix product of inner size 1; this project does not.
    """
    pixels = torch.randn(sum(t * h * w for t, h, w in grids), 1176) if grids else None
    grid = torch.tensor(grids) if grids else None
    model.set_experts_implementation("eager")  # torch counts no grouped products
    counter = FlopCounterMode(display=False)
    with counter:
        output = model(
            input_ids=ids,
            pixel_values=pixels,
            image_grid_thw=grid,
            mm_token_type_ids=(ids == reference.IMAGE).int(),
        )
        if output.logits.requires_grad:
            output.logits.float().sum().backward()
    table = FlopCounterMode(display=False)
    with table:
        positions = torch.zeros(3, 1, ids.shape[1], dtype=torch.int64)
        model.model.language_model.rotary_emb(torch.zeros(1), positions)
    return counter.get_total_flops() - table.get_total_flops()


GRIDS = [[1, 8, 8], [1, 10, 14], [1, 4, 22], [1, 18, 2]]


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_torch_flop_counter(family: str, seed: int) -> None:
    rng = random.Random(seed)
    model = reference.make_model(family)
    spec = _spec(model)
    for grids in (GRIDS, rng.sample(GRIDS, 2), []):
        ids = _sample(rng, grids)
        work = flops.Work.of([ids.shape[1]], grids, spec.vision, targets=ids.shape[1], causal=False)
        counted = flops.count(spec, work)
        assert counted.total == _measured(model, ids, grids)


@pytest.mark.parametrize(
    "family", [*FAMILIES[:3], *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES[3:])]
)
@pytest.mark.parametrize("frozen", range(8))
def test_freezing_equals_torch_flop_counter(family: str, frozen: int, seed: int) -> None:
    rng = random.Random(seed)
    freeze = FreezeSection(bool(frozen & 1), bool(frozen & 2), bool(frozen & 4))
    model = reference.make_model(family)
    _freeze(model, freeze)
    spec = _spec(model)
    grids = rng.sample(GRIDS, 2)
    ids = _sample(rng, grids)
    work = flops.Work.of([ids.shape[1]], grids, spec.vision, targets=ids.shape[1], causal=False)
    assert flops.count(spec, work, freeze).total == _measured(model, ids, grids)


def test_causal_pairs_are_those_of_row_by_row_attention() -> None:
    """Every query times just the keys it sees, counted by torch."""
    lengths, heads, dim = [5, 1, 9], 3, 8
    spec = _spec(reference.make_model("qwen2_vl"))
    work = flops.Work.of(lengths, [], spec.vision, targets=0)
    counter = FlopCounterMode(display=False)
    with counter:
        for length in lengths:
            x = torch.randn(heads, length, dim)
            for i in range(length):
                scores = x[:, i : i + 1] @ x[:, : i + 1].transpose(1, 2)
                scores @ x[:, : i + 1]
    assert counter.get_total_flops() == 4 * heads * dim * work.causal_pairs


def test_windows_are_those_of_the_kernels(seed: int) -> None:
    from vlmkernels import VisionLayout

    rng = random.Random(seed)
    spec = _spec(reference.make_model("qwen2_5_vl"))
    grids = [
        [rng.randrange(1, 4), 2 * rng.randrange(1, 40), 2 * rng.randrange(1, 40)] for _ in range(50)
    ]
    layout = VisionLayout.from_grid(grids, window_size=spec.vision.window_size)
    assert layout.cu_window_seqlens is not None
    work = flops.Work.of([], grids, spec.vision, targets=0)
    assert work.patches == layout.num_patches
    assert work.frame_pairs == int((layout.cu_seqlens.long().diff() ** 2).sum())
    assert work.window_pairs == int((layout.cu_window_seqlens.long().diff() ** 2).sum())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_of_small_models(family: str, tied: bool) -> None:
    model = reference.make_model(family, tied=tied)
    real = sum(parameter.numel() for parameter in model.parameters())  # tied ones come once
    assert sum(flops.parameter_counts(_spec(model)).values()) == real


def test_padding_of_a_batch_does_not_count() -> None:
    from tests.plan.megatron_worker import make_batch

    spec = _spec(reference.make_model("qwen2_5_vl"))
    grids = [[1, 8, 12], [2, 4, 6]]
    batch = make_batch(spec, 100, grids)
    padded = batch.padded_to(130)
    wanted = flops.Work.of([100], grids, spec.vision, targets=100)
    assert flops.Work.of_batch(batch, spec.vision) == wanted
    assert flops.Work.of_batch(padded, spec.vision) == wanted
    tail = flops.Work(tokens=30, causal_pairs=30 * 31 // 2)
    assert flops.Work.of_batch(padded, spec.vision, padding=True) == wanted + tail


KINDS = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
KINDS["qwen3_vl_moe"] = "Qwen3VLMoe"


@pytest.mark.parametrize("name", RELEASED)
def test_parameters_of_released_sizes_on_the_meta_device(name: str) -> None:
    import transformers

    config = released_config(name)
    spec = parse_spec(config)
    text = {
        key: value
        for key, value in config.get("text_config", config).items()
        if key not in ("vision_config", "model_type") and not key.startswith("rope")
        if "token_id" not in key
    }
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [16, 24, 24]}
    kind = KINDS[spec.family]
    real_config = getattr(transformers, f"{kind}Config")(
        text_config=text,
        vision_config=config["vision_config"],
        tie_word_embeddings=config["tie_word_embeddings"],
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(real_config)
    model.tie_weights()
    visual, none = model.model.visual, torch.nn.Module()
    parts = {
        "patch_embed": [visual.patch_embed, getattr(visual, "pos_embed", none)],
        "vision": [visual.blocks],
        "merger": [visual.merger, getattr(visual, "deepstack_merger_list", none)],
        "embedding": [model.model.language_model.embed_tokens],
    }
    counts = flops.parameter_counts(spec)
    for part, modules in parts.items():
        assert counts[part] == sum(p.numel() for m in modules for p in m.parameters()), part
    assert sum(counts.values()) == sum(p.numel() for p in model.parameters())
    idle = sum(
        p.numel() // len(p) * (len(p) - spec.num_experts_per_tok)
        for name, p in model.named_parameters()
        if ".experts." in name
    )
    assert (idle > 0) == (spec.num_experts > 0)
    assert flops.active_parameters(spec) == sum(counts.values()) - idle


def test_figures_of_the_cost_model() -> None:
    """Published figures: 233.05M and 877.66M weights a layer, 57.6 GF per token at 7B."""
    small = released_spec("qwen2_vl-7b")
    large = released_spec("qwen2_vl-72b")
    assert round(table_of(small).text_layer.weights / 1e6, 2) == 233.05
    assert round(table_of(large).text_layer.weights / 1e6, 2) == 877.66
    work = flops.Work.of(
        [1478] * 5 + [802], [[1, 62, 62]] * 5, small.vision, targets=5 * 1478 + 802
    )
    assert flops.count(small, work).total / work.tokens == pytest.approx(57.6e9, rel=0.05)


def test_hardware_flops_add_what_is_recomputed() -> None:
    spec = released_spec("qwen2_5_vl-7b")
    work = flops.Work.of([900, 1100], [[1, 44, 60]], spec.vision, targets=700)
    counted = flops.count(spec, work)
    plain = flops.hardware_flops(counted, attention_recompute=False)
    assert plain == counted.total
    again = flops.hardware_flops(counted, recompute=["vision"], attention_recompute=False)
    assert again - plain == counted.forward["vision"]
    pairs = 4 * 28 * 28 * 128 * work.causal_pairs
    windows = 4 * 1280 * (28 * work.window_pairs + 4 * work.frame_pairs)
    assert flops.hardware_flops(counted) - plain == (pairs + windows) // 2
    frozen = flops.count(spec, work, FreezeSection(vision=True))
    assert flops.hardware_flops(frozen, recompute=["vision"]) - frozen.total == pairs // 2
    assert flops.utilization(counted.total, 0.5, 2, 989e12) == counted.total / 989e12

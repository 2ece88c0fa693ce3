"""Qwen3-VL's own parts against transformers': positions, their table, angles; and which of
DeepStack's sets travel where."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen3_vl import modeling_qwen3_vl as reference
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from tests.parity.reference import make_stream, pack, pack_length
from tests.released import released_spec
from vlmtrain.core.layout import Layout
from vlmtrain.core.spec import ModelSpec
from vlmtrain.models import message
from vlmtrain.models.common.positions import mrope_table
from vlmtrain.models.family import family_of
from vlmtrain.models.qwen3_vl.vision import interpolation
from vlmtrain.parallel.step_inputs import StepInputs

Grid = tuple[int, int, int]


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return released_spec("qwen3_vl-8b")


def test_the_table_of_positions_is_stretched_as_transformers_does(seed: int) -> None:
    rng = random.Random(seed)
    for side, merge in ((48, 2), (7, 2), (5, 3), (1, 1)):
        grids = [
            [rng.randint(1, 3), merge * rng.randint(1, 40), merge * rng.randint(1, 40)]
            for _ in range(5)
        ]
        grids.append([1, merge, merge])
        entries, weights = get_vision_interpolation_indices_and_weights(
            torch.tensor(grids), side, align_corners=True, spatial_merge_size=merge
        )
        ours = interpolation(grids, side, merge)
        assert torch.equal(ours[0], entries) and torch.equal(ours[1], weights), (side, grids)
    assert [len(x) for x in interpolation([], 48, 2)] == [0, 0]


@pytest.mark.parametrize("section", [(24, 20, 20), (1, 2, 3), (4, 0, 4)])
def test_angles_take_turns_as_in_transformers(
    section: tuple[int, int, int], spec: ModelSpec, seed: int
) -> None:
    from dataclasses import replace

    torch.manual_seed(seed)
    spec = replace(spec, mrope_section=section, head_dim=2 * sum(section))
    rope = dict(rope_type="default", rope_theta=spec.rope_theta, mrope_section=list(section))
    config = reference.Qwen3VLTextConfig(head_dim=spec.head_dim, rope_parameters=rope)
    positions = torch.randint(0, 5000, (3, 40))
    theirs = reference.Qwen3VLTextRotaryEmbedding(config)(torch.zeros(1), positions[:, None])
    for ours, want in zip(mrope_table(positions, spec).chunk(2, -1), theirs, strict=True):
        torch.testing.assert_close(ours, want[0, :, : spec.head_dim // 2], rtol=0, atol=1e-6)


def test_positions_are_those_of_transformers(spec: ModelSpec, seed: int) -> None:
    """Each frame pair of a video is a span of its own between texts."""
    rng = random.Random(seed)
    owner = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))
    )
    model = reference.Qwen3VLModel
    owner.get_vision_position_ids = lambda *a, **k: model.get_vision_position_ids(owner, *a, **k)
    for _ in range(50):
        ids, media = [1] * rng.randint(0, 9), []
        for _ in range(rng.randint(0, 4)):
            kind = rng.choice(["image", "video"])
            frames = rng.randint(1, 4) if kind == "video" else 1
            grid = (frames, 2 * rng.randint(1, 6), 2 * rng.randint(1, 6))
            media.append((kind, grid))
            place = spec.image_token_id if kind == "image" else spec.video_token_id
            for _ in range(frames):
                ids += [1] * rng.randint(0, 5)
                ids += [spec.vision_start_token_id, *[place] * (grid[1] * grid[2] // 4)]
                ids += [spec.vision_end_token_id]
            ids += [1] * rng.randint(0, 5)
        if not ids:
            continue
        sequence = torch.tensor(ids)
        types = (sequence == spec.image_token_id) + 2 * (sequence == spec.video_token_id).int()
        grids = [torch.tensor([g for k, g in media if k == kind]) for kind in ("image", "video")]
        expected, _ = model.get_rope_index(
            owner, sequence[None], types[None], *(g if len(g) else None for g in grids)
        )
        ours = family_of(spec).positions(
            sequence, [grid for _, grid in media], [kind for kind, _ in media], spec
        )
        assert torch.equal(ours, expected[:, 0]), media


def test_sets_travel_from_the_layer_that_makes_them_to_the_one_that_adds_them(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        stages, merger = 6, rng.randint(0, 5)
        vision = [rng.randint(1, 3) if i <= merger else 0 for i in range(stages)]
        text = [rng.randint(0, 2) if i >= merger else 0 for i in range(stages)]
        text[-1] += 3
        layout = Layout(1, 6, 1, False, 1, tuple(vision), tuple(text), merger, rng.random() < 0.2)
        layers = sorted(rng.sample(range(sum(vision)), min(3, sum(vision))))
        stage_of_layer = [i for i, n in enumerate(vision) for _ in range(n)]
        stage_of_text = [i for i, n in enumerate(text) for _ in range(n)]
        for stage in range(stages):
            want = [
                n
                for n, layer in enumerate(layers)
                if (layout.multiplexed or stage_of_layer[layer] <= stage)
                and stage < stage_of_text[n]
            ]
            assert layout.carried(layers, stage) == want, (vision, text, layers, stage)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_message_has_the_shape_that_both_ends_know(
    sequence: bool, spec: ModelSpec, seed: int
) -> None:
    samples = make_stream("mixed", seed, 0)
    packs = [pack(p, pack_length(samples)) for p in samples]
    layout = Layout(2, 3, 1, sequence, 1, (20, 7, 0), (0, 2, 34), 1)
    inputs = StepInputs.of(spec, layout, packs)
    for (number, batch), rank, stage in itertools.product(enumerate(packs), (0, 1), (0, 1)):
        parts = 2 if sequence else 1
        size = batch.length // parts
        index = batch.visual_index[rank % parts * size :][:size]
        rows = int((index >= 0).sum())
        groups = max(int(batch.grid_thw.prod(1).sum()) // 4, 1)
        patches = (groups + -groups % parts) * 4 // parts
        # set 0 and 1 are made on stage 0 and 1 added on stage 1; 2 is made on 1 and added on 2
        tensors = {
            0: [torch.randn(patches, 1, 1152), *(torch.randn(rows, 1, 4096) for _ in range(2))],
            1: [torch.randn(size, 1, 4096), torch.randn(rows, 1, 4096)],
        }[stage]
        joined = message.join(tensors)
        assert tuple(joined.shape) == inputs.message(stage, number, rank)
        sizes = [(t.shape[0], t.shape[2]) for t in tensors]
        for got, want in zip(message.split(joined, sizes), tensors, strict=True):
            assert torch.equal(got, want)

"""The peak of a step from its packs, by a walk over megatron-core's order; what makes it fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.step_plans import make_index
from tests.parity.reference import make_model
from vlmtrain.core.config import RecomputeSection, TrainConfig, TrainSection
from vlmtrain.core.errors import UserError
from vlmtrain.core.layout import Layout
from vlmtrain.data.packing.sampler import PlannedStep, Position
from vlmtrain.models.family import parse_spec
from vlmtrain.parallel.layout import make_layout
from vlmtrain.parallel.step_inputs import StepInputs
from vlmtrain.plan import memory, schedule
from vlmtrain.plan.peak import PeakModel
from vlmtrain.training.fit import fit, fullest
from vlmtrain.training.rehearsal import Loads, heaviest

SPEC = parse_spec(make_model("qwen2_5_vl", vision_heads=4).config.to_dict())
SECTION = TrainSection(pack_length=512, global_batch_packs=16, precision="bf16")
CONFIG = TrainConfig(Path("model"), "data", Path("output"), train=SECTION)


def loads(steps: int, replicas: int, packs: int) -> Loads:
    patches = np.random.default_rng(0).integers(0, 4096, (steps, replicas, packs)).astype(float)
    return Loads([Position(i) for i in range(steps)], patches, patches.max(2) / 2)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("pipeline", "virtual"), [(1, 1), (2, 1), (2, 2)])
def test_a_walk_over_the_order(pipeline: int, virtual: int, recompute: str) -> None:
    layout = make_layout(
        SPEC, world_size=2, pipeline=pipeline, virtual_pipeline=virtual, vision_layers="auto"
    )
    config = replace(CONFIG, recompute=RecomputeSection(recompute, recompute))
    of = loads(3, 1, 16 // layout.data).patches[:, 0]
    activations = memory.ActivationModel(SPEC, cuda=True)
    per_token, per_patch = activations.stages(
        layout, recompute_vision=recompute, recompute_text=recompute
    )
    for rank in range(pipeline):
        model = PeakModel(config, SPEC, layout, rank, cuda=True)
        found = model.peaks(of, of.max(1)) - model.states()
        for step, patches in enumerate(of):
            held, most = 0.0, 0.0
            for kind, chunk, number in schedule.order(pipeline, virtual, len(patches), rank):
                stage = layout.stage(rank, chunk)
                kept = per_token[stage] * 512 + per_patch[stage] * patches[number]
                if virtual > 1:
                    kept += (
                        activations.text_input().per_token * 512
                        if layout.text_layers[stage]
                        else activations.vision_input().per_patch * patches[number]
                    )
                short = [0.0]
                if layout.text_layers[stage]:
                    extra = activations.text_layer() if recompute != "none" else memory.Kept()
                    short.append((activations.layer_transient(vision=False) + extra).bytes(512, 0))
                if layout.vision_layers[stage]:
                    extra = activations.vision_layer() if recompute != "none" else memory.Kept()
                    short.append(
                        (activations.layer_transient(vision=True) + extra).bytes(0, patches[number])
                    )
                if stage == layout.stages - 1:
                    short.append(activations.head_transient(512))
                held += kept if kind == schedule.FORWARD else 0.0
                most = max(most, held + max(short))
                held -= kept if kind == schedule.BACKWARD else 0.0
            pixels = 2 * SPEC.vision.patch_dim * patches.sum() if rank == 0 else 0.0
            tokens = memory.batch_bytes(SPEC, 512 * len(patches), 0, pixels=False)
            assert found[step] == pytest.approx(most + pixels + tokens)
            assert set(model.window(patches)) <= set(range(len(patches)))


def test_the_heaviest_steps_of_each_replica() -> None:
    layout = make_layout(SPEC, world_size=4, pipeline=2)
    of = loads(50, 2, 8)
    models = [PeakModel(CONFIG, SPEC, layout, rank, cuda=True) for rank in range(2)]
    for replica, places in enumerate(heaviest(of, models)):
        for model in models:
            peaks = model.peaks(of.patches[:, replica], of.largest[:, replica])
            assert Position(int(peaks.argmax())) in places
        assert Position(int(of.patches[:, replica].sum(1).argmax())) in places
        assert len(places) == len(set(places)) <= 5


def test_what_makes_it_fit() -> None:
    """In its order: vision, then language, then offload; the least that does."""
    layout = make_layout(SPEC, world_size=2)
    of = loads(4, 2, 8)

    def peak(vision: str, language: str, offload: float = 0.0) -> float:
        config = replace(
            CONFIG,
            recompute=RecomputeSection(vision, language),  # type: ignore[arg-type]
            optimizer=replace(CONFIG.optimizer, offload_fraction=offload),
        )
        return fullest(config, SPEC, layout, of, True).bytes

    def tried(room: float, choice: str) -> tuple[TrainConfig, str]:
        config = replace(CONFIG, train=replace(SECTION, fit=choice))  # type: ignore[arg-type]

        def dealt(other: Layout) -> Loads:
            return loads(4, other.data, 16 // other.data)

        return fit(config, SPEC, layout, dealt, room, lambda *_: "a, b", True)

    assert tried(peak("none", "none"), "refuse")[1] == ""
    for vision, language, offload in [
        ("selective", "none", 0.0),
        ("full", "none", 0.0),
        ("full", "selective", 0.0),
        ("full", "full", 0.0),
        ("full", "full", 0.25),
        ("full", "full", 1.0),
    ]:
        room = peak(vision, language, offload)
        changed, said = tried(room, "auto")
        assert changed.recompute == RecomputeSection(vision, language)  # type: ignore[arg-type]
        assert changed.optimizer.offload_fraction == offload
        assert f"--recompute.vision {vision}" in said and "the packs at its peak hold a, b" in said
        with pytest.raises(UserError, match=f"--recompute.vision {vision}.*--train.fit auto"):
            tried(room, "refuse")
    with pytest.raises(UserError, match="no recomputation, offload or layout of 2 processes"):
        tried(1.0, "auto")


def test_what_each_rank_encodes() -> None:
    """Of packs with and without media, by the deal of multiplexed vision."""
    layout = make_layout(SPEC, world_size=4, pipeline=2, multiplexed=True)
    index = make_index(200)
    packs = [np.arange(i, i + 4) for i in range(0, 40, 4)]
    packs[3] = np.flatnonzero(np.diff(index.media_start) == 0)[:2]
    step = PlannedStep(Position(), Position(1), [packs[:5], packs[5:]], {})
    of = Loads.of([step], index, SPEC, layout)
    for replica, share in enumerate(step.dealt):
        inputs = StepInputs(SPEC, layout, [index.pack_grids(pack) for pack in share])
        whole = sum(sum(patches) for patches in inputs.patches)
        assert of.encoded is not None and of.encoded[0, replica].sum() == whole  # two ranks
        assert of.patches[0, replica].tolist() == [sum(patches) for patches in inputs.patches]

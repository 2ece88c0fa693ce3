"""The peak of a step from its packs, by a walk over megatron-core's order; what makes it fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.step_plans import make_index
from tests.parity.reference import make_model
from vlmtrain.core.config import RecomputeSection, TrainConfig, TrainSection
from vlmtrain.core.errors import UserError
from vlmtrain.core.layout import Layout
from vlmtrain.data.packing.sampler import PlannedStep, Position, Sampler
from vlmtrain.models.family import parse_spec
from vlmtrain.parallel.layout import make_layout
from vlmtrain.parallel.step_inputs import StepInputs
from vlmtrain.plan import memory, schedule
from vlmtrain.plan.heaviest import Loads, fullest, heaviest
from vlmtrain.plan.peak import PeakModel
from vlmtrain.training.fit import fit
from vlmtrain.training.rehearsal import RankPeak, correction

SPEC = parse_spec(make_model("qwen2_5_vl", vision_heads=4).config.to_dict())
SECTION = TrainSection(pack_length=512, global_batch_packs=16, precision="bf16")
CONFIG = TrainConfig(Path("model"), "data", Path("output"), train=SECTION)


def loads(steps: int, replicas: int, packs: int) -> Loads:
    rng = np.random.default_rng(0)
    patches = rng.integers(0, 4096, (steps, replicas, packs)).astype(float)
    tokens = rng.integers(100, 513, patches.shape).astype(float)
    targets = np.floor(tokens * rng.random(tokens.shape))
    places = [Position(i) for i in range(steps)]
    return Loads(places, tokens, targets, patches, patches.max(2) / 2)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("pipeline", "virtual"), [(1, 1), (2, 1), (2, 2)])
def test_a_walk_over_the_order(pipeline: int, virtual: int, recompute: str) -> None:
    layout = make_layout(
        SPEC, world_size=2, pipeline=pipeline, virtual_pipeline=virtual, vision_layers="auto"
    )
    config = replace(CONFIG, recompute=RecomputeSection(recompute, recompute))
    all_steps = loads(3, 1, 16 // layout.data)
    all_tokens, of = all_steps.tokens[:, 0], all_steps.patches[:, 0]
    activations = memory.ActivationModel(SPEC, cuda=True)
    per_token, per_patch = activations.stages(
        layout, recompute_vision=recompute, recompute_text=recompute
    )
    for rank in range(pipeline):
        model = PeakModel(config, SPEC, layout, rank, cuda=True)
        found = model.peaks(all_tokens, of, of.max(1)) - model.states()
        for step, (tokens, patches) in enumerate(zip(all_tokens, of, strict=True)):
            held, most = 0.0, 0.0
            alive: list[int] = []  # once for each chunk
            window: set[int] = set()
            for kind, chunk, number in schedule.order(pipeline, virtual, len(patches), rank):
                stage = layout.stage(rank, chunk)
                kept = per_token[stage] * tokens[number] + per_patch[stage] * patches[number]
                if virtual > 1:
                    kept += (
                        activations.text_input().per_token * tokens[number]
                        if layout.text_layers[stage]
                        else activations.vision_input().per_patch * patches[number]
                    )
                short = [0.0]
                if layout.text_layers[stage]:
                    extra = activations.text_layer() if recompute != "none" else memory.Kept()
                    extra += activations.layer_transient(vision=False)
                    short.append(extra.bytes(tokens[number], 0))
                if layout.vision_layers[stage]:
                    extra = activations.vision_layer() if recompute != "none" else memory.Kept()
                    short.append(
                        (activations.layer_transient(vision=True) + extra).bytes(0, patches[number])
                    )
                if stage == layout.stages - 1:
                    short.append(activations.head_transient(tokens[number]))
                if kind == schedule.FORWARD:
                    held += kept
                    alive.append(number)
                if held + max(short) > most:
                    most, window = held + max(short), set(alive)
                if kind == schedule.BACKWARD:
                    held -= kept
                    alive.remove(number)
            pixels = 2 * SPEC.vision.patch_dim * patches.sum() if rank == 0 else 0.0
            packs = memory.batch_bytes(tokens.sum())
            assert found[step] == pytest.approx(most + pixels + packs)
            assert model.window(tokens, patches) == sorted(window)


def test_the_heaviest_steps_of_each_replica() -> None:
    layout = make_layout(SPEC, world_size=4, pipeline=2)
    of = loads(50, 2, 8)
    models = [PeakModel(CONFIG, SPEC, layout, rank, cuda=True) for rank in range(2)]
    for replica, places in enumerate(heaviest(of, models)):
        for model in models:
            of_replica = (x[:, replica] for x in (of.tokens, of.patches, of.largest))
            assert Position(int(model.peaks(*of_replica).argmax())) in places
        for size in (of.tokens, of.targets, of.patches):
            assert Position(int(size[:, replica].sum(1).argmax())) in places
            assert Position(int(size[:, replica].max(1).argmax())) in places
        assert len(places) == len(set(places)) <= 9


def test_what_makes_it_fit() -> None:
    """In its order: vision, then language, then offload; the least that does."""
    deep = replace(SPEC, vision=replace(SPEC.vision, depth=12))  # where each step keeps less
    layout = make_layout(deep, world_size=2)
    of = loads(4, 2, 8)

    def peak(vision: str, language: str, offload: float = 0.0) -> float:
        config = replace(
            CONFIG,
            recompute=RecomputeSection(vision, language),  # type: ignore[arg-type]
            optimizer=replace(CONFIG.optimizer, offload_fraction=offload),
        )
        return fullest(config, deep, layout, of, True).bytes

    def tried(room: float, choice: str) -> tuple[TrainConfig, str]:
        config = replace(CONFIG, train=replace(SECTION, fit=choice))  # type: ignore[arg-type]

        def dealt(other: Layout) -> Loads:
            return loads(4, other.data, 16 // other.data)

        return fit(config, deep, layout, dealt, room, lambda *_: "a, b", True)

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


def test_what_a_schedule_brings_back_has_room() -> None:
    def states(fraction: float, *schedule: str) -> float:
        section = replace(CONFIG.optimizer, offload_fraction=fraction, offload_schedule=schedule)
        config = replace(CONFIG, optimizer=section)
        return PeakModel(config, SPEC, make_layout(SPEC, world_size=1), 0, cuda=True).states()

    assert states(1.0, "500:0.5", "800:0") == states(0.0) > states(1.0)
    assert states(0.0, "10:1") == states(0.0)


SAVING = replace(
    CONFIG,
    recompute=RecomputeSection("full", "full"),
    optimizer=replace(CONFIG.optimizer, offload_fraction=1.0),
)


def refused(layout: Layout, room: float, dealt: Callable[[Layout], Loads]) -> str:
    """What `--train.fit auto` says to a run that saves all it can without another result."""
    config = replace(SAVING, train=replace(SECTION, fit="auto"))
    with pytest.raises(UserError) as error:
        fit(config, SPEC, layout, dealt, room, lambda *_: "a, b", True)
    return str(error.value)


def test_smaller_pieces_are_named_and_not_set() -> None:
    """They change the order in which gradients are added."""

    def dealt(layout: Layout) -> Loads:
        of = loads(2, layout.data, 16 // layout.data)
        return replace(of, patches=16 * of.patches, largest=np.full_like(of.largest, 100.0))

    layout = make_layout(SPEC, world_size=2, pipeline=2, multiplexed=True)
    recomputed = replace(CONFIG, recompute=RecomputeSection("full", "none"))
    whole, again = (
        fullest(config, SPEC, layout, dealt(layout), True).bytes for config in (CONFIG, recomputed)
    )
    assert again < 0.95 * whole  # a piece is recomputed too; pixels and rows stay
    sizes = []
    for piece in (16384, 8192, 4096):
        config = replace(SAVING, parallel=replace(CONFIG.parallel, vision_piece=piece))
        sizes.append(fullest(config, SPEC, layout, dealt(layout), True).bytes)
    assert sizes[0] > sizes[1] > sizes[2]
    for room, piece in ((sizes[1], 8192), (sizes[2], 4096)):
        said = refused(layout, room, dealt)
        assert f"with --parallel.vision_piece {piece} it would be" in said
        assert "--train.fit auto" not in said


def test_another_layout_is_named_and_not_set() -> None:

    def dealt(layout: Layout) -> Loads:
        """Of text alone: the model's states are most of it."""
        of = loads(2, layout.data, 16 // layout.data)
        return replace(of, patches=0 * of.patches, largest=0 * of.largest)

    layout = make_layout(SPEC, world_size=2)
    other = make_layout(SPEC, world_size=2, pipeline=2, vision_layers="auto")
    needed = fullest(SAVING, SPEC, other, dealt(other), True).bytes
    said = refused(layout, needed, dealt)
    assert "with --parallel.tensor 1 --parallel.pipeline 2 --parallel.vision_layers auto" in said
    assert "--train.fit auto" not in said


@pytest.mark.parametrize(("packs", "named"), [(9, 6), (6, 3)])
def test_a_layout_that_is_named_deals_the_global_batch(packs: int, named: int) -> None:
    """Two replicas share 6 packs, but not 9."""
    deep = replace(SPEC, num_layers=6)
    section = replace(SECTION, fit="auto", global_batch_packs=packs)
    config = replace(SAVING, train=section)

    def dealt(layout: Layout) -> Loads:
        """Of text alone: the model's states are most of it."""
        of = loads(2, layout.data, packs // layout.data)
        return replace(of, patches=0 * of.patches, largest=0 * of.largest)

    layout, three = (
        make_layout(deep, world_size=6, pipeline=n, vision_layers="auto") for n in (2, 3)
    )
    room = fullest(config, deep, three, dealt(three), True).bytes
    with pytest.raises(UserError, match=f"--parallel.pipeline {named} "):
        fit(config, deep, layout, dealt, room, lambda *_: "a", True)


def test_what_a_rehearsal_has_measured_corrects_the_plan() -> None:
    """Of a step's memory, not of the states; on the rank that is furthest off."""
    layout = make_layout(SPEC, world_size=2, pipeline=2)
    of = loads(3, 1, 16)
    of_replica = of.tokens[:, 0], of.patches[:, 0], of.largest[:, 0]
    peaks = []
    for rank, off in ((0, 1.25), (1, 1.1)):
        model = PeakModel(CONFIG, SPEC, layout, rank, cuda=True)
        planned = float(model.peaks(*of_replica).max())
        states = model.states()
        measured = states + off * (planned - states)
        peaks.append(RankPeak(rank, rank, 7 + states, 7 + planned, 7 + measured, 1e9, 1, []))
    factor = correction(peaks)
    assert factor == pytest.approx(1.25)
    corrected = PeakModel(CONFIG, SPEC, layout, 0, cuda=True, factor=factor)
    found = corrected.peaks(*of_replica).max()
    assert found == pytest.approx(peaks[0].measured - 7)
    room = fullest(CONFIG, SPEC, layout, of, True).bytes
    config = replace(CONFIG, train=replace(SECTION, fit="auto"))
    same = (config, SPEC, layout, lambda _: of, room, lambda *_: "a", True)
    assert fit(*same) == (config, "")
    changed, _ = fit(*same, factor)
    assert changed.recompute.vision != "none"
    assert fullest(changed, SPEC, layout, of, True, factor).bytes <= room


@pytest.mark.parametrize(
    ("most", "seed", "where"), [(3, 3, (0, 0)), (3, 4, (0, 1)), (0, 3, (1, 1))]
)
def test_the_fullest_step_and_its_samples(most: int, seed: int, where: tuple[int, int]) -> None:
    """By all steps, replicas and ranks; samples have up to three media, or none."""
    rng, samples = np.random.default_rng(1), 300
    media = rng.integers(0, most + 1, samples)
    sides = 2 * rng.integers(2, 16, (int(media.sum()), 2))
    grids = np.concatenate([np.ones((len(sides), 1), dtype=np.int64), sides], axis=1)
    index = replace(
        make_index(samples),
        media_start=np.concatenate(([0], media.cumsum())),
        grids=grids,
        target_tokens=rng.integers(1, 20, samples),
    )
    layout = make_layout(SPEC, world_size=4, pipeline=2)
    shape = {"pack_length": index.pack_length, "global_batch": 8, "ranks": 2}
    sampler = Sampler(index, SPEC, "balanced", seed=seed, **shape)
    steps = list(sampler.steps(Position(), 4))
    of = Loads.of(steps, index)
    section = replace(SECTION, global_batch_packs=8)
    config = replace(CONFIG, train=section)
    found = []
    for i, step in enumerate(steps):
        for replica, share in enumerate(step.dealt):
            own = [[index.pack_grids(pack).prod(1) for pack in share]]
            patches = np.array([[each.sum() for each in own[0]]], dtype=float)
            largest = np.array([np.concatenate(own[0]).max(initial=0)], dtype=float)
            tokens = np.array([[index.lengths[pack].sum() for pack in share]], dtype=float)
            assert of.tokens[i, replica].tolist() == tokens[0].tolist()
            assert of.patches[i, replica].tolist() == patches[0].tolist()
            assert of.largest[i, replica] == largest[0]
            targets = [index.target_tokens[pack].sum() for pack in share]
            assert of.targets[i, replica].tolist() == targets
            for stage in range(2):
                model = PeakModel(config, SPEC, layout, stage, cuda=True, factor=1.5)
                window = model.window(tokens[0], patches[0])
                ids = [index.ids[n] for number in window for n in share[number]]
                peak = float(model.peaks(tokens, patches, largest)[0])
                found.append((peak, stage, 1 + i, (i, replica), ids))
    best = max(found, key=lambda one: one[0])
    actual = fullest(config, SPEC, layout, of, True, 1.5)
    assert (actual.bytes, actual.stage, actual.step, actual.place) == best[:4]
    assert actual.ids(sampler, of) == best[4]
    assert (actual.stage, actual.place[1]) == where


def test_each_ranks_heaviest_medium_and_share_are_rehearsed() -> None:
    """The step with the largest medium, and those in which a rank encodes most."""
    of = loads(30, 2, 8)
    rng = np.random.default_rng(2)
    of = replace(of, largest=rng.random((30, 2)), encoded=rng.random((30, 2, 3)))
    for replica, places in enumerate(heaviest(of, [])):
        assert of.encoded is not None
        for size in (of.largest[:, replica], *of.encoded[:, replica].T):
            assert Position(int(size.argmax())) in places


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

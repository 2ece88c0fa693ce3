"""Batches and the loader: pack invariants, exactly once, exact resume on any dp_size."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.data.helpers import IMAGE_LIMITS, conversation, no_media, open_loader, write_json
from vlmtrain.core.batch import PackedBatch
from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.builder import _FrameCache
from vlmtrain.data.errors import DataError
from vlmtrain.data.index import SampleIndex, scan_sources
from vlmtrain.data.loader import PackedLoader
from vlmtrain.data.packing.plan import POLICIES, Policy, plan_epoch
from vlmtrain.data.processor import Processor
from vlmtrain.models.common.positions import mrope_positions
from vlmtrain.parallel.layout import make_layout
from vlmtrain.parallel.step_inputs import StepInputs

PACK, MULTIPLE = 160, 16
SAMPLES = 23


@pytest.fixture(scope="session")
def records() -> list[dict[str, Any]]:
    """Relative paths, so that the hash of the index, and with it the plan, is always the same."""
    built = []
    for i in range(SAMPLES):
        words = " ".join(["word"] * (i % 7 + 1))
        picture = f"p{i % 4}.jpg"
        if i % 5 == 0:
            record = conversation(words, f"answer {i}", id=f"s{i}")
        elif i % 5 == 1:
            both = [picture, "p4.png"]
            record = conversation(f"<image>{words}<image>", f"two {i}", id=f"s{i}", images=both)
        elif i == 12:
            frames = {"frames": ["p0.jpg"] * 3, "fps": 2}
            record = conversation("<image><video>?", "v", id=f"s{i}", image=picture, video=frames)
        else:
            record = conversation(f"{words}<image>", f"one {i}", id=f"s{i}", image=picture)
        built.append(record)
    return built


@pytest.fixture(scope="session")
def index(
    records: list[dict[str, Any]],
    pictures: Path,
    processor: Processor,
    spec: ModelSpec,
    tmp_path_factory: pytest.TempPathFactory,
) -> SampleIndex:
    path = write_json(tmp_path_factory.mktemp("data") / "c.json", records)
    return scan_sources([path], processor, spec, PACK, media_root=pictures)


@pytest.fixture(scope="session")
def make(index: SampleIndex, processor: Processor, spec: ModelSpec) -> Any:
    def make_loader(**options: Any) -> PackedLoader:
        defaults: dict[str, Any] = {
            "pack_length": PACK,
            "token_multiple": MULTIPLE,
            "global_batch": 4,
            "prefetch": False,
            "threads": 1,
        }
        return open_loader(index, processor, spec, **{**defaults, **options})

    return make_loader


def check_invariants(batch: PackedBatch, spec: ModelSpec, length: int | None = None) -> None:
    if length is None:  # padded to what the layout needs, and no more
        length = batch.length
        assert length % MULTIPLE == 0 and 0 <= batch.pad_tokens < MULTIPLE <= length <= PACK
    assert batch.length == len(batch.labels) == len(batch.visual_index) == length
    assert batch.position_ids.shape == (3, length)
    dtypes = {
        "input_ids": torch.int64,
        "labels": torch.int64,
        "position_ids": torch.int64,
        "cu_seqlens": torch.int32,
        "visual_index": torch.int32,
        "pixel_values": torch.float32,  # the default
        "grid_thw": torch.int64,
    }
    for name, dtype in dtypes.items():
        assert getattr(batch, name).dtype == dtype, name
    offsets = batch.cu_seqlens.tolist()
    assert offsets[0] == 0 and offsets[-1] == length
    assert all(a < b for a, b in zip(offsets, offsets[1:], strict=False))
    assert len(batch.cu_seqlens) - 1 == len(batch.sample_ids) + (batch.pad_tokens > 0)
    visual = batch.visual_index >= 0
    pads = (batch.input_ids == spec.image_token_id) | (batch.input_ids == spec.video_token_id)
    assert torch.equal(visual, pads)
    rows = int(batch.grid_thw.prod(1).sum()) // 4
    assert batch.image_tokens == int(visual.sum()) == rows
    assert batch.visual_index[visual].tolist() == list(range(rows))
    assert batch.target_tokens == int((batch.labels != -100).sum())
    for a, b in zip(offsets, offsets[1:], strict=False):
        labels, ids = batch.labels[a:b], batch.input_ids[a:b]
        assert labels[-1] == -100, "the last token of a sample predicts the next sample's first"
        learned = labels[:-1] != -100
        assert torch.equal(labels[:-1][learned], ids[1:][learned])
        assert batch.position_ids[:, a].tolist() == [0, 0, 0]
    if batch.pad_tokens:
        tail = slice(length - batch.pad_tokens, length)
        assert offsets[-2] == tail.start
        assert set(batch.input_ids[tail].tolist()) == {batch.pad_token_id}
        assert set(batch.labels[tail].tolist()) == {-100}
        assert batch.position_ids[:, tail].tolist() == [list(range(batch.pad_tokens))] * 3


def test_pack_invariants_and_pixels(
    make: Any,
    index: SampleIndex,
    spec: ModelSpec,
    records: list[dict[str, Any]],
    pictures: Path,
) -> None:
    reference = Qwen2VLImageProcessorPil(**IMAGE_LIMITS)
    loader = make()
    by_id = {record["id"]: record for record in records}
    seen = 0
    for _ in range(loader.steps_per_epoch):
        for batch in loader.next_step():
            check_invariants(batch, spec)
            assert len(batch.pixel_values) == 4 * batch.image_tokens
            row = medium = 0
            for sample_id in batch.sample_ids:
                record = by_id[sample_id]
                paths = record.get("images") or [record[k] for k in ("image",) if k in record]
                for path in paths:
                    expected = reference(images=[Image.open(pictures / path)])
                    pixels = torch.from_numpy(np.asarray(expected["pixel_values"]))
                    assert batch.grid_thw[medium].tolist() == list(expected["image_grid_thw"][0])
                    assert torch.equal(batch.pixel_values[row : row + len(pixels)], pixels)
                    row, medium, seen = row + len(pixels), medium + 1, seen + 1
                if "video" in record:  # three equal frames: two equal slices
                    t, h, w = batch.grid_thw[medium].tolist()
                    assert t == 2
                    slices = batch.pixel_values[row : row + t * h * w].view(2, h * w, -1)
                    assert torch.equal(slices[0], slices[1])
                    row, medium = row + t * h * w, medium + 1
            assert row == len(batch.pixel_values) and medium == len(batch.grid_thw)
    assert seen >= len(index.grids) - 1  # every image of the epoch; one medium is the video


@pytest.mark.parametrize(("ranks", "global_batch"), [(1, 4), (2, 8), (2, 64)])
def test_once_is_every_sample_once(
    make: Any, index: SampleIndex, spec: ModelSpec, ranks: int, global_batch: int
) -> None:
    """What is left of the last step is empty packs: all ranks have as many, in the same shapes."""
    seen: Counter[str] = Counter()
    empty = 0
    for rank in range(ranks):
        options = {"global_batch": global_batch, "dp_rank": rank, "dp_size": ranks}
        loader = make(once=True, prefetch=True, **options)
        for _ in range(loader.steps_per_epoch):
            batches = loader.next_step()
            assert len(batches) == global_batch // ranks
            for batch in batches:
                seen.update(batch.sample_ids)
                if batch.sample_ids:
                    check_invariants(batch, spec)
                    continue
                empty += 1
                assert batch.cu_seqlens.tolist() == [0, MULTIPLE]
                assert batch.pad_tokens == MULTIPLE
                assert batch.target_tokens == batch.image_tokens == len(batch.pixel_values) == 0
                assert batch.pixel_values.dtype == torch.float32
                assert (batch.labels < 0).all() and (batch.visual_index < 0).all()
        loader.close()
    assert seen == Counter(index.ids)
    packs = len(make().sampler.epoch_plan(0))
    assert empty == -packs % global_batch > 0


def test_segments_are_the_samples_on_their_own(
    make: Any, index: SampleIndex, processor: Processor, spec: ModelSpec
) -> None:
    """A pack cut at its borders gives each sample's own ids, labels and positions."""
    for batch in make().next_step():
        offsets = batch.cu_seqlens.tolist()
        for sample_id, a, b in zip(batch.sample_ids, offsets, offsets[1:], strict=False):
            i = index.ids.index(sample_id)
            sample = index.load(i)
            layouts = processor.layouts(sample)
            alone = processor.encode(sample, layouts)
            assert torch.equal(batch.input_ids[a:b], alone.input_ids)
            assert torch.equal(batch.labels[a:b], alone.labels)
            expected = mrope_positions(
                alone.input_ids,
                [layout.grid for layout in layouts],
                [media.kind for media in sample.media],
                spec,
                [layout.seconds for layout in layouts],
            )
            assert torch.equal(batch.position_ids[:, a:b], expected)


def test_padded_to(make: Any, spec: ModelSpec) -> None:
    loader = make()
    batches = [b for _ in range(loader.steps_per_epoch) for b in loader.next_step()]
    batch = next(b for b in batches if b.pad_tokens > 0)
    longer = batch.padded_to(PACK + 9)
    check_invariants(longer, spec, PACK + 9)
    assert len(longer.cu_seqlens) == len(batch.cu_seqlens)  # the tail grew, no second tail
    assert longer.padded_to(PACK + 9) is longer
    real = batch.length - batch.pad_tokens
    full = dataclasses.replace(
        batch,
        input_ids=batch.input_ids[:real],
        labels=batch.labels[:real],
        position_ids=batch.position_ids[:, :real],
        visual_index=batch.visual_index[:real],
        cu_seqlens=batch.cu_seqlens[:-1],
        pad_tokens=0,
    )
    again = full.padded_to(batch.length)
    for field in dataclasses.fields(PackedBatch):
        ours, theirs = getattr(again, field.name), getattr(batch, field.name)
        assert torch.equal(ours, theirs) if torch.is_tensor(ours) else ours == theirs, field.name
    has = f"length is 3 but the pack already has {batch.length} tokens"
    with pytest.raises(ValueError, match=has):
        batch.padded_to(3)
    assert torch.equal(batch.to("cpu").input_ids, batch.input_ids)


def test_without_pixels(make: Any) -> None:
    for with_pixels, without in zip(
        make().next_step(), make(decodes=no_media).next_step(), strict=True
    ):
        assert without.pixel_values.shape == (0, 1176)
        for name in ("input_ids", "labels", "position_ids", "visual_index", "grid_thw"):
            assert torch.equal(getattr(without, name), getattr(with_pixels, name))


def test_ranks_decode_only_the_media_dealt_to_them(make: Any, spec: ModelSpec) -> None:
    """Multiplexed vision on 3 ranks: together they decode each medium once, none of them all."""
    ranks, steps = 3, 4
    calls: list[list[Any]] = [[] for _ in range(ranks)]

    one = make_layout(spec, world_size=1)
    layout = dataclasses.replace(one, pipeline=ranks, multiplexed=True)

    def decodes(rank: int) -> Any:
        return lambda grids: StepInputs(spec, layout, grids).decoded_by(rank)

    loaders = [make(decodes=decodes(rank), cache_bytes=0) for rank in range(ranks)]
    for rank, loader in enumerate(loaders):
        original = loader.builder.processor.frames

        def frames(media: Any, sample: Any, rank: int = rank, original: Any = original) -> Any:
            calls[rank].append(media.key)
            return original(media, sample)

        loader.builder.processor = copy.copy(loader.builder.processor)
        loader.builder.processor.frames = frames
    whole = make()
    media = 0
    for _ in range(steps):
        parts = [loader.next_step() for loader in loaders]
        for number, batch in enumerate(whole.next_step()):
            held = [part[number].has_pixels for part in parts]
            assert [sum(flags) for flags in zip(*held, strict=True)] == [1] * len(batch.grid_thw)
            media += len(batch.grid_thw)
            rows = batch.pixel_values.split(batch.grid_thw.prod(1).tolist())
            for part, here in zip(parts, held, strict=True):
                kept = (row for row, ours in zip(rows, here, strict=True) if ours)
                expected = torch.cat([batch.pixel_values[:0], *kept])
                assert torch.equal(part[number].pixel_values, expected)
                assert torch.equal(part[number].input_ids, batch.input_ids)
    decoded = [loader.decoded for loader in loaders]
    print(f"of {media} images and videos the ranks decoded {decoded}")
    assert [len(one) for one in calls] == decoded
    assert sum(decoded) == media == whole.decoded
    assert max(decoded) < media


def test_a_bad_sample_whose_pixels_lie_on_two_ranks(make: Any) -> None:
    """`without` zeroes exactly its media's rows, where a rank holds only some of a pack's media."""
    batch = next(b for b in make().next_step() if len(set(_owners(b))) > 1)
    owners = _owners(batch)
    some = [i % 2 == 0 for i in range(len(owners))]
    for bad, kept in itertools.product((owners[0], owners[-1]), ([True] * len(owners), some)):
        here = torch.tensor(kept)
        patches = batch.grid_thw.prod(1)
        ones = torch.ones(int(patches[here].sum()), 1176)
        part = dataclasses.replace(
            batch,
            has_pixels=tuple(kept),
            pixel_values=ones,
            **{
                name: getattr(batch, name).clone()
                for name in ("input_ids", "labels", "position_ids", "visual_index")
            },
        )
        zeroed = part.without(bad).pixel_values.sum(1) == 0
        expected = torch.tensor([owner == bad for owner in owners])[here]
        assert torch.equal(zeroed, expected.repeat_interleave(patches[here]))


def _owners(batch: PackedBatch) -> list[int]:
    """The segment of each medium."""
    first = batch.grid_thw.prod(1).cumsum(0) // 4 - batch.grid_thw.prod(1) // 4
    where = [int((batch.visual_index == row).nonzero()[0]) for row in first.tolist()]
    return torch.bucketize(torch.tensor(where), batch.cu_seqlens[1:].long(), right=True).tolist()


def ids_of(steps: list[list[PackedBatch]]) -> list[list[str]]:
    return [batch.sample_ids for step in steps for batch in step]


def run(loaders: list[PackedLoader], steps: int) -> list[list[list[str]]]:
    """The packs of each step, of all ranks, sorted: the composition of the global batch."""
    result = []
    for _ in range(steps):
        ranks = [loader.next_step() for loader in loaders]
        assert {len(batches) for batches in ranks} == {4 // len(loaders)}
        result.append(sorted(batch.sample_ids for batches in ranks for batch in batches))
    return result


def planned(index: SampleIndex, costs: np.ndarray, epoch: int, **options: Any) -> list[list[str]]:
    plan = plan_epoch(index.lengths, PACK, 0, epoch, index.content_hash, costs=costs, **options)
    return [[index.ids[i] for i in pack] for pack in plan]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_exactly_once_per_epoch(
    dp_size: int, policy: Policy, make: Any, index: SampleIndex
) -> None:
    """The global batches are cut from the plans, whoever gets which pack."""
    loaders = [
        make(dp_rank=r, dp_size=dp_size, decodes=no_media, packing=policy) for r in range(dp_size)
    ]
    stream: list[list[str]] = []
    for epoch in range(2):
        packs = planned(index, loaders[0].sampler.costs, epoch, policy=policy)
        assert Counter(i for pack in packs for i in pack) == Counter(index.ids)
        stream += packs
    steps = len(stream) // 4
    expected = [sorted(stream[4 * k : 4 * k + 4]) for k in range(steps)]
    assert run(loaders, steps) == expected


def test_metrics_by_hand(make: Any, index: SampleIndex) -> None:
    """Of the whole global batch, the same on every rank, from the costs of the samples."""
    loaders = [make(dp_rank=r, dp_size=2, decodes=no_media) for r in range(2)]
    cost = dict(zip(index.ids, loaders[0].sampler.costs.tolist(), strict=True))
    length = dict(zip(index.ids, index.lengths.tolist(), strict=True))
    for _ in range(loaders[0].steps_per_epoch):
        ranks = [[batch.sample_ids for batch in loader.next_step()] for loader in loaders]
        packs = [[sum(cost[i] for i in pack) for pack in rank] for rank in ranks]
        costs = packs[0] + packs[1]
        mean = sum(costs) / 4
        tokens = sum(length[i] for rank in ranks for pack in rank for i in pack)
        expected = {
            "fill": tokens / (4 * PACK),
            "rank_balance": max(sum(rank) for rank in packs) / (2 * mean),
            "microbatch_balance": max(costs) / mean,
            "skipped": 0.0,
        }
        assert loaders[0].metrics == loaders[1].metrics == pytest.approx(expected)


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_resume_at_random_points_on_other_dp_sizes(data: st.DataObject, make: Any) -> None:
    """However the run is cut and whatever the dp_size of each part, the stream is the same."""
    seed = data.draw(st.integers(0, 1000), label="seed")
    expected = run([make(decodes=no_media, seed=seed)], 9)
    state: dict[str, Any] | None = None
    got: list[list[list[str]]] = []
    while len(got) < 9:
        dp_size = data.draw(st.sampled_from([1, 2, 4]), label="dp_size")
        options = {"dp_size": dp_size, "decodes": no_media, "seed": seed}
        loaders = [make(dp_rank=r, **options) for r in range(dp_size)]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(dict(state))
        steps = data.draw(st.integers(1, 9 - len(got)), label="steps")
        got += run(loaders, steps)
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = states[0]
        assert loaders[0].step == len(got) == state["step"]
    assert got == expected


def test_resume_with_another_global_batch_continues_the_stream(make: Any) -> None:
    straight = make(decodes=no_media)
    expected = ids_of([straight.next_step() for _ in range(6)])
    first = make(decodes=no_media)
    got = ids_of([first.next_step() for _ in range(2)])
    second = make(decodes=no_media, global_batch=2)
    second.load_state_dict(first.state_dict())
    got += ids_of([second.next_step() for _ in range(8)])
    for k in range(6):  # inside a step the deal decides the order
        assert sorted(got[4 * k : 4 * k + 4]) == sorted(expected[4 * k : 4 * k + 4])


def test_prefetch_and_workers_change_nothing(make: Any) -> None:
    plain = make()
    with make(prefetch=True, threads=3) as ahead:
        for step in range(7):
            saved = ahead.state_dict()
            assert saved["step"] == step  # what was prefetched is not yet handed out
            for a, b in zip(plain.next_step(), ahead.next_step(), strict=True):
                for field in dataclasses.fields(PackedBatch):
                    x, y = getattr(a, field.name), getattr(b, field.name)
                    assert torch.equal(x, y) if torch.is_tensor(x) else x == y, field.name
        ahead.load_state_dict(saved)
        again = ids_of([ahead.next_step()])
        plain.load_state_dict(saved)
        assert again == ids_of([plain.next_step()])


def test_prefetch_overlaps(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the caller computes, the next step is being built on another thread."""
    loader = make(prefetch=True)
    built_on: list[str] = []
    original = PackedLoader._build

    def spy(self: PackedLoader, position: Any) -> list[PackedBatch]:
        built_on.append(threading.current_thread().name)
        return original(self, position)

    monkeypatch.setattr(PackedLoader, "_build", spy)
    with loader:
        loader.next_step()
        deadline = time.monotonic() + 20
        while len(built_on) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        loader.next_step()
    assert not built_on[0].startswith("prefetch")
    assert all(name.startswith("prefetch") for name in built_on[1:])


def test_a_file_that_vanishes_later_is_named_and_the_position_stays(
    tmp_path: Path, pictures: Path, processor: Processor, spec: ModelSpec
) -> None:
    (tmp_path / "p.jpg").write_bytes((pictures / "p0.jpg").read_bytes())
    path = write_json(tmp_path / "c.json", [conversation("<image>", "x", id="g", image="p.jpg")])
    index = scan_sources([path], processor, spec, PACK)
    options: dict[str, Any] = {"pack_length": PACK, "global_batch": 1, "cache_bytes": 0}
    for prefetch in (False, True):
        with open_loader(index, processor, spec, prefetch=prefetch, **options) as loader:
            (tmp_path / "p.jpg").rename(tmp_path / "away.jpg")
            with pytest.raises(DataError, match=r"sample 'g': the file .*p.jpg is missing"):
                loader.next_step()
            assert loader.step == 0
            (tmp_path / "away.jpg").rename(tmp_path / "p.jpg")
            assert loader.next_step()[0].sample_ids == ["g"]
    (tmp_path / "p.jpg").write_bytes((pictures / "p2.jpg").read_bytes())
    with (
        open_loader(index, processor, spec, **options) as loader,
        pytest.raises(DataError, match="sample 'g': p.jpg has another size than when it was scan"),
    ):
        loader.next_step()


def test_progress(make: Any, index: SampleIndex) -> None:
    loader = make(decodes=no_media)
    plans = [planned(index, loader.sampler.costs, e) for e in range(3)]
    assert loader.steps_per_epoch == loader.steps_for_epochs(1) == -(-len(plans[0]) // 4)
    total = sum(len(plan) for plan in plans)
    assert loader.steps_for_epochs(3) == -(-total // 4)
    assert loader.steps_for_epochs(0.5) == -(-len(plans[0]) // 8)
    # With another global batch from step 1 on only what is left takes other steps.
    with make(global_batch=4, prefetch=False) as first, make(global_batch=2) as second:
        first.next_step()
        second.load_state_dict(first.state_dict())
        assert second.steps_for_epochs(3) == 1 + -(-(total - 4) // 2)
        assert second.steps_per_epoch == -(-len(plans[0]) // 2)
        # Fewer epochs than were made: the end may lie inside the last step, not before it.
        second.next_step()  # 4 packs, then 2
        ends = [second.steps_for_epochs(packs / len(plans[0])) for packs in (6, 3.1, 2.9, 0)]
        assert ends == [2, 2, 1, 0]
        second.load_state_dict({**second.state_dict(), "step": 6})  # as of one pack, but the last
        assert [second.steps_for_epochs(packs / len(plans[0])) for packs in (4.1, 4)] == [6, 4]
    assert loader.epoch == 0
    loader.next_step()
    assert loader.epoch == 4 / len(plans[0]) and loader.step == 1


def test_refusals(make: Any) -> None:
    with pytest.raises(DataError, match="global_batch is 4; it must be a multiple of the 3 data-"):
        make(dp_size=3)
    with pytest.raises(ValueError, match="dp_rank is 2; it must be from 0 to dp_size - 1 = 1"):
        make(dp_rank=2, dp_size=2)
    with pytest.raises(DataError, match=r"sample 's\d+' has \d+ tokens and a pack holds 40"):
        make(pack_length=40)
    state = make().state_dict()
    for key, value, message in [
        ("seed", 5, r"another seed \(seed was 5 and is 0\)"),
        ("index_hash", "y", "other data, another share of it held out, or other image settings"),
        ("pack_length", 99, "another pack length"),
        ("version", 0, "another version of this program"),
        ("packing", "bucket", "another way of packing"),
    ]:
        with pytest.raises(DataError, match=message):
            make().load_state_dict({**state, key: value})


def test_frame_cache_is_bounded() -> None:
    cache = _FrameCache(100)
    frames = {name: np.full(40, i, dtype=np.uint8) for i, name in enumerate("abc")}
    for name in "ab":
        cache.put(name, frames[name])
    assert cache.get("a") is frames["a"]
    cache.put("c", frames["c"])  # b is the least recently used
    assert cache.get("b") is None and cache.get("a") is not None and cache.get("c") is not None
    assert cache.bytes == 80
    cache.put("big", np.zeros(101, dtype=np.uint8))
    assert cache.get("big") is None and cache.bytes == 80


def test_decoding_happens_once_for_a_small_set(
    make: Any, processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: Counter[str] = Counter()
    original = Processor.frames

    def spy(self: Processor, media: Any, sample: Any) -> np.ndarray:
        decoded[media.kind + media.name] += 1
        return original(self, media, sample)

    monkeypatch.setattr(Processor, "frames", spy)
    loader = make()
    for _ in range(3 * loader.steps_per_epoch):
        loader.next_step()
    assert decoded and set(decoded.values()) == {1}


def test_weights_of_turns(tmp_path: Path, processor: Processor, spec: ModelSpec) -> None:
    """Packed beside samples without weights, and padded: a factor for each target token."""
    texts = ("one", "two words", "three small words")
    for weights in ((1, 1, 1), (0.25, 1, 0), (2.0, 0.5, 1)):
        records = []
        for text, weight in zip(texts, weights, strict=True):
            turns = conversation("q", text, "q", text)["conversations"]
            turns[1]["weight"] = weight
            records.append({"conversations": turns})
        path = write_json(tmp_path / "c.json", records)
        index = scan_sources([path], processor, spec, PACK)
        with open_loader(
            index,
            processor,
            spec,
            pack_length=PACK,
            token_multiple=PACK,
            global_batch=1,
            prefetch=False,
        ) as loader:
            [pack] = loader.next_step()
        if weights == (1, 1, 1):
            assert pack.loss_weights is None
            continue
        assert pack.loss_weights is not None and pack.pad_tokens
        assert len(pack.labels) == len(pack.loss_weights) == PACK
        targets = 0
        for begin, end, name in zip(
            pack.cu_seqlens, pack.cu_seqlens[1:], pack.sample_ids, strict=False
        ):
            weight = weights[int(name.split(":")[1])]
            learned = [i for i in range(int(begin), int(end)) if pack.labels[i] != -100]
            half = len(learned) // 2 if weight else 0  # both answers are the same text
            expected = [weight] * half + [1] * (len(learned) - half)
            assert pack.loss_weights[learned].tolist() == expected
            targets += len(learned)
        assert targets == pack.target_tokens


@pytest.mark.parametrize(
    ("batch", "ranks", "said"),
    [
        (8, 1, "8 times; --train.global_batch_packs 1 fits"),
        (1, 1, None),
        (8, 2, "use fewer ranks, or"),
    ],
)
def test_a_batch_larger_than_the_data_is_said(
    batch: int, ranks: int, said: str | None, tmp_path: Path, processor: Processor, spec: ModelSpec
) -> None:
    records = [conversation("q", f"a {i}") for i in range(6)]
    index = scan_sources([write_json(tmp_path / "c.json", records)], processor, spec, 1000)
    lines: list[str] = []
    with open_loader(
        index, processor, spec, pack_length=1000, global_batch=batch, dp_size=ranks,
        prefetch=False, log=lines.append,
    ):  # fmt: skip
        assert len(lines) == (said is not None)
        assert said is None or said in lines[0]

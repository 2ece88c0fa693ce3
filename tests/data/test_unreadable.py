"""Samples that cannot be read while training: the policy, crashes of decoders, other ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.helpers import conversation, open_loader, write_json
from tests.ranks import run_ranks
from vlmtrain.core.batch import PackedBatch
from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.errors import DataError
from vlmtrain.data.index import SampleIndex, scan_sources
from vlmtrain.data.media import decoding
from vlmtrain.data.media.decoding import DecoderPool
from vlmtrain.data.processor import Processor
from vlmtrain.data.sample import FileRange, Media, MediaInfo, Sample

PACK = 96


@pytest.fixture
def index(tmp_path: Path, pictures: Path, processor: Processor, spec: ModelSpec) -> SampleIndex:
    for name in ("p0.jpg", "p1.jpg", "p3.jpg"):
        (tmp_path / name).write_bytes((pictures / name).read_bytes())
    records = [
        conversation("<image>?", "one", id="a", image="p0.jpg"),
        conversation("text", "two", id="b"),
        conversation("<image> and <image>", "three", id="c", images=["p3.jpg", "p1.jpg"]),
        conversation("<image>!", "four", id="d", image="p3.jpg"),
    ]
    return scan_sources([write_json(tmp_path / "c.json", records)], processor, spec, PACK)


def loader_of(index: SampleIndex, processor: Processor, spec: ModelSpec, **options: Any) -> Any:
    defaults: dict[str, Any] = {"pack_length": PACK, "global_batch": 1, "cache_bytes": 0}
    return open_loader(index, processor, spec, **{**defaults, **options})


def epoch_of(loader: Any) -> list[PackedBatch]:
    return [batch for _ in range(loader.steps_per_epoch) for batch in loader.next_step()]


@pytest.mark.parametrize("missing", ["pixels", "text"])
@pytest.mark.parametrize("prefetch", [False, True])
def test_skip_counts_for_nothing_and_changes_no_shape(
    missing: str, prefetch: bool, index: SampleIndex, processor: Processor, spec: ModelSpec
) -> None:
    options: dict[str, Any] = {"prefetch": prefetch, "unreadable": "skip"}
    with loader_of(index, processor, spec, **options) as loader:
        whole = epoch_of(loader)
    folder = Path(index.sources[0].path).parent
    if missing == "pixels":
        (folder / "p1.jpg").unlink()
    else:
        index.crc[2] += 1  # as if the record had been edited
    said: list[str] = []
    with loader_of(index, processor, spec, log=said.append, **options) as loader:
        holed = epoch_of(loader)
        assert loader.skipped == loader.metrics["skipped"] == 1
        assert loader.state_dict()["skipped"] == 1
        assert len(said) == 1 and said[0].startswith("skipped: ") and "sample 'c'" in said[0]
    actual = 0
    for before, after in zip(whole, holed, strict=True):
        assert before.sample_ids == after.sample_ids
        assert torch.equal(before.grid_thw, after.grid_thw)
        assert torch.equal(before.cu_seqlens, after.cu_seqlens)
        offsets = before.cu_seqlens.tolist()
        row = 0
        for segment, name in enumerate(before.sample_ids):
            part = slice(offsets[segment], offsets[segment + 1])
            rows = int((before.visual_index[part] >= 0).sum())
            pixels = slice(4 * row, 4 * (row + rows))
            row += rows
            index_before, index_after = before.visual_index[part], after.visual_index[part]
            if name != "c":
                assert torch.equal(index_before, index_after)
                assert torch.equal(before.input_ids[part], after.input_ids[part])
                assert torch.equal(before.labels[part], after.labels[part])
                assert torch.equal(before.position_ids[:, part], after.position_ids[:, part])
                assert torch.equal(before.pixel_values[pixels], after.pixel_values[pixels])
                continue
            actual += 1
            assert after.labels[part].tolist() == [-100] * (part.stop - part.start)
            assert index_after.tolist() == [
                *index_before[index_before >= 0].tolist(),
                *[-1] * (part.stop - part.start - rows),
            ]
            text = index_after < 0
            assert set(after.input_ids[part][text].tolist()) == {after.pad_token_id}
            assert set(after.input_ids[part][~text].tolist()) == {spec.image_token_id}
            assert rows and not after.pixel_values[pixels].any()
            learned = int((before.labels[part] != -100).sum())
            assert after.target_tokens == before.target_tokens - learned
        assert after.target_tokens == int((after.labels != -100).sum())
    assert actual == 1


def test_what_is_left_out_has_places_of_its_kinds(
    tmp_path: Path, pictures: Path, processor: Processor, spec: ModelSpec
) -> None:
    """Those of an image and of a video, by which they are counted."""
    media = {"image": "p3.jpg", "video": ["p0.jpg", "p0.jpg"]}
    records = [conversation("<image> and <video>?", "one", id="a", **media)]
    path = write_json(tmp_path / "c.json", records)
    index = scan_sources([path], processor, spec, PACK, media_root=pictures)
    ids = []
    for edited in (0, 1):
        index.crc[0] += edited
        with loader_of(index, processor, spec, unreadable="skip") as loader:
            (batch,) = loader.next_step()
            assert loader.skipped == edited
        ids.append(batch.input_ids[batch.visual_index >= 0].tolist())
    assert ids[0] == ids[1]
    assert set(ids[0]) == {spec.image_token_id, spec.video_token_id}


def test_the_limit(index: SampleIndex, processor: Processor, spec: ModelSpec) -> None:
    folder = Path(index.sources[0].path).parent
    (folder / "p3.jpg").unlink()  # of c and d
    with loader_of(index, processor, spec, unreadable="skip", skip_limit=2) as loader:
        epoch_of(loader)
        assert loader.skipped == 2
        state = loader.state_dict()
    with loader_of(index, processor, spec, unreadable="skip", skip_limit=2) as loader:
        loader.load_state_dict(state)  # the count goes on
        with pytest.raises(DataError, match="3 samples could not be read, more than the 2 that"):
            epoch_of(loader)
    with (
        loader_of(index, processor, spec) as loader,
        pytest.raises(DataError, match=r"sample '[cd]': the file .*p3.jpg is missing"),
    ):
        epoch_of(loader)


def test_a_sample_of_another_length_than_was_scanned(
    index: SampleIndex, processor: Processor, spec: ModelSpec
) -> None:
    index.lengths[1] += 1
    with (
        loader_of(index, processor, spec) as loader,
        pytest.raises(DataError, match="sample 'b': it has changed since it was scanned"),
    ):
        epoch_of(loader)


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_step_that_is_built_ahead_is_not_counted(
    prefetch: bool, index: SampleIndex, processor: Processor, spec: ModelSpec
) -> None:
    (Path(index.sources[0].path).parent / "p1.jpg").unlink()  # of c
    said: list[str] = []
    options: dict[str, Any] = {"prefetch": prefetch, "unreadable": "skip", "log": said.append}
    with loader_of(index, processor, spec, **options) as loader:
        while "c" not in loader.ids(loader.next)[0]:
            loader.next_step()
        (ahead,) = loader.build(loader.next)
        assert (loader.skipped, said) == (0, [])
        (made,) = loader.next_step()
        assert (loader.skipped, len(said)) == (1, 1)
        assert torch.equal(ahead.labels, made.labels) and "c" in made.sample_ids


def test_isolated_decoders_give_the_same_pixels(
    index: SampleIndex, processor: Processor, spec: ModelSpec
) -> None:
    with loader_of(index, processor, spec) as plain:
        expected = epoch_of(plain)
    with loader_of(index, processor, spec, workers=1) as loader:
        got = epoch_of(loader)
        assert loader.builder._pool is not None
        decoders = [decoder.process for decoder in loader.builder._pool._started]
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a.pixel_values, b.pixel_values) and a.sample_ids == b.sample_ids
    assert len(decoders) == 1 and all(process.poll() is not None for process in decoders)
    with loader_of(index, processor, spec, pixel_dtype=torch.bfloat16) as loader:
        for a, b in zip(expected, epoch_of(loader), strict=True):
            assert torch.equal(a.pixel_values.bfloat16(), b.pixel_values)


CRASH = """
import ctypes, os, signal, time
from vlmtrain.data.media import decoding
original = decoding.load_frames
def load(media, sample, *rest):
    if "segfault" in media.name: os.kill(os.getpid(), signal.SIGSEGV)
    if "oom" in media.name: os.kill(os.getpid(), signal.SIGKILL)
    if "memory" in media.name: raise MemoryError
    if "hang" in media.name: time.sleep(60)
    if "refused" in media.name: raise sample.fail("refused: for: a reason", "unreadable")
    print("noise on stdout must not matter")
    return original(media, sample, *rest)
decoding.load_frames = load
decoding.serve()
"""


def test_crashes_are_named_and_decoders_replaced(
    pictures: Path, processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = subprocess.Popen

    def popen(command: list[str], **options: Any) -> Any:
        return original([command[0], "-c", CRASH], **options)

    monkeypatch.setattr(decoding.subprocess, "Popen", popen)
    pool = DecoderPool(processor.images, processor.videos, time_limit=30)
    part = (FileRange(str(pictures / "p0.jpg")),)
    sample = Sample("s: 7", (), (), "c.json")
    good = Media("image", "good", part)
    expected = processor.frames(good, sample)
    for name, message in [
        ("segfault", r"the decoder crashed \(SIGSEGV\) while it read segfault"),
        ("oom", r"the decoder was killed \(out of memory\?\) while it read oom"),
        ("memory", "memory takes more than 16 GiB to decode"),
        ("hang", "hang was not decoded within 1 s"),
        ("refused", "refused: for: a reason$"),
    ]:
        pool._time_limit = 1 if name == "hang" else 30
        with pytest.raises(DataError, match=f"^c.json: sample 's: 7': {message}") as caught:
            pool.frames(Media("image", name, part), sample)
        assert caught.value.kind == "unreadable" and caught.value.sample_id == "s: 7"
        pool._time_limit = 30
        assert (pool.frames(good, sample) == expected).all()
    missing = Media("image", "gone", (FileRange("/none.jpg"),))
    with pytest.raises(DataError, match="^c.json: sample 's: 7': the file /none.jpg is missing"):
        pool.frames(missing, sample)
    process = pool._local.decoder.process
    pool.close()
    assert process.poll() is not None


def test_long_videos_have_more_time(processor: Processor, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(
        decoding._Decoder, "frames", lambda self, media, sample, limit: limits.append(limit)
    )
    pool = DecoderPool(processor.images, processor.videos)
    for info in (None, MediaInfo(4032, 3024), MediaInfo(1920, 1080, 108000, 30.0)):
        pool.frames(Media("video", "v", (), info=info), Sample("s", (), (), "c.json"))
    pool.close()
    assert limits[0] == 300 and limits[1] == pytest.approx(300, rel=0.001)
    assert limits[2] == pytest.approx(300 + 108000 * 1920 * 1080 / 1e8)  # an hour: at 48 a second


def test_decoders_end_with_their_parent(pictures: Path) -> None:
    """Killed hard, the parent leaves no process behind."""
    script = f"""
import time
from vlmtrain.data.media.decoding import DecoderPool
from vlmtrain.data.media.images import ImageSettings
from vlmtrain.data.sample import FileRange, Media, Sample
from vlmtrain.data.media.videos import VideoSettings
settings = ImageSettings()
pool = DecoderPool(settings, VideoSettings.default(settings))
media = Media("image", "a", (FileRange({str(pictures / "p0.jpg")!r}),))
pool.frames(media, Sample("a", (), (), ""))
print(pool._local.decoder.process.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    decoder = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.kill(decoder, 0)
            with open(f"/proc/{decoder}/stat") as file:
                if file.read().split()[2] == "Z":  # ended, waiting for its new parent
                    return
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.05)
    os.kill(decoder, signal.SIGKILL)
    pytest.fail("the decoder outlived its parent")


RANKS = """
import json, sys
from pathlib import Path
import torch.distributed as dist
from tests.data.helpers import no_media, open_loader
from tests.worker import one_rank
from vlmtrain.data.collective_errors import across_ranks
from vlmtrain.data.index import scan_sources
from vlmtrain.data.processor import Processor
from vlmtrain.core.errors import UserError
from vlmtrain.models.family import read_spec

folder, model = Path(sys.argv[1]), sys.argv[2]
spec = read_spec(model)
processor = Processor.from_folder(model, spec)
index = scan_sources([folder / "c.json"], processor, spec, 96)
results = {}
with one_rank() as backend:
    rank = dist.get_rank()
    if rank == 1:
        (folder / "p1.jpg").unlink()
    dist.barrier()
    for policy in ("skip", "raise"):
        # One replica of two pipeline stages: only rank 1 decodes.
        loader = open_loader(index, processor, spec, pack_length=96, global_batch=1,
            decodes=None if rank == 1 else no_media, unreadable=policy,
            agree=across_ranks(backend.device), cache_bytes=0)
        result = results[policy] = {"steps": []}
        try:
            for _ in range(loader.steps_per_epoch):
                (batch,) = loader.next_step()
                result["steps"].append(
                    [batch.sample_ids, batch.labels.tolist(), batch.input_ids.tolist()])
            result["skipped"] = loader.skipped
        except UserError as error:
            result["error"], result["prints"] = str(error), error.print_here
        loader.close()
(folder / f"rank-{rank}.json").write_text(json.dumps(results))
"""


@pytest.mark.slow
def test_all_ranks_hear_of_it(index: SampleIndex, model_folder: Path) -> None:
    """What one rank alone cannot read, both leave out, or both end by, said once."""
    folder = Path(index.sources[0].path).parent
    env = {"CUDA_VISIBLE_DEVICES": ""}
    for rank in run_ranks(["-c", RANKS, str(folder), str(model_folder)], 2, timeout=240, env=env):
        assert rank.code == 0, rank.output[-2000:]
    zero, one = (json.loads((folder / f"rank-{r}.json").read_text()) for r in range(2))
    assert zero["skip"] == one["skip"] and zero["skip"]["skipped"] == 1
    assert sum("c" in ids for ids, _, _ in zero["skip"]["steps"]) == 1
    zero, one = zero["raise"], one["raise"]
    assert zero["error"] == one["error"] and "sample 'c': the file" in zero["error"]
    assert zero["prints"] and not one["prints"]
    assert zero["steps"] == one["steps"]

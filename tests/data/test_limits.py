"""Sizes of media: the model folder's, the run's, what fits a pack; and what longer samples mean."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor

from tests.data.helpers import (
    IMAGE_LIMITS,
    conversation,
    open_loader,
    save_image,
    write_json,
    write_model_folder,
)
from tests.data.test_videos import reference_indices
from vlmtrain.core.config import MediaSection
from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.check import check
from vlmtrain.data.command import build_command
from vlmtrain.data.errors import DataError
from vlmtrain.data.formats.webdataset import build_shards
from vlmtrain.data.index import scan_sources
from vlmtrain.data.media.images import ImageSettings, smart_resize
from vlmtrain.data.media.limits import limited, write_settings
from vlmtrain.data.media.videos import TimedVideoSettings, VideoSettings
from vlmtrain.data.processor import MediaLayout, Processor
from vlmtrain.data.sample import Media, MediaInfo, Sample, Turn
from vlmtrain.models.family import read_spec

TOKEN = 28 * 28
RELEASED = ImageSettings(3136, 12845056)  # preprocessor_config.json of the released folders
VIDEOS = VideoSettings.default(RELEASED)
CLIP = Media("video", "v.mp4", ())


@pytest.mark.parametrize("pack", [1024, 2048, 8192, 32768, 131072])
def test_what_phones_take_fits_a_pack(pack: int) -> None:
    """12 megapixels, and videos of any length: each at most half a pack, on the defaults."""
    images, videos = limited(RELEASED, VIDEOS, MediaSection(), pack)
    _, h, w = images.grid(3024, 4032)
    expected = smart_resize(3024, 4032, 28, 3136, min(12845056, pack // 2 * TOKEN))
    assert (h * 14, w * 14) == expected
    assert h * w // 4 <= pack // 2
    for seconds in (1, 10, 60, 3600):
        (t, h, w), *_ = videos.layout(CLIP, MediaInfo(1920, 1080, 30 * seconds, 30.0))
        assert t * h * w // 4 <= pack // 2, (seconds, t, h, w)
    assert (videos.fps, videos.images.min_pixels) == (VIDEOS.fps, VIDEOS.images.min_pixels)


@pytest.mark.parametrize(("size", "share"), [((320, 240), 0.55), ((200, 2), 0.9)])
def test_small_frames_take_more(size: tuple[int, int], share: float) -> None:
    """They are enlarged to the fewest pixels and rounded up, as docs/data.md says."""
    _, videos = limited(RELEASED, VIDEOS, MediaSection(), 8192)
    (t, h, w), *_ = videos.layout(CLIP, MediaInfo(*size, 9000, 30.0))
    width, height = size
    grow = (videos.images.min_pixels / (height * width)) ** 0.5
    assert (h // 2, w // 2) == tuple(-(-side * grow // 28) for side in (height, width))
    assert 0.5 < t * h * w / 4 / 8192 <= share


@pytest.mark.parametrize("pack", [64, 1024, 8192, 131072])
def test_videos_whose_frames_share_the_bounds(pack: int) -> None:
    """Qwen3-VL's released settings."""
    images = ImageSettings(64 * 1024, 16384 * 1024, patch_size=16)
    timed = TimedVideoSettings.default(images, (4 * 1024, 24576 * 1024))
    _, videos = limited(images, timed, MediaSection(), pack)
    for seconds in (1, 60, 3600):
        (t, h, w), *_ = videos.layout(CLIP, MediaInfo(1920, 1080, 30 * seconds, 30.0))
        assert t * h * w // 4 <= pack // 2, (seconds, t, h, w)


def test_an_odd_number_of_frames_fits() -> None:
    """The last of three is repeated: two slices."""
    three = replace(VIDEOS, num_frames=3).within(1024, frames=True, pixels=True)
    (t, h, w), *_ = three.layout(CLIP, MediaInfo(1920, 1080, 300, 30.0))
    assert t == 2 and t * h * w // 4 <= 1024


@pytest.mark.parametrize("kind", [VideoSettings, TimedVideoSettings])
def test_lists_of_frames_fit_a_pack(kind: type[VideoSettings]) -> None:
    """All frames are used, or evenly max_frames of them, with their times."""
    media = Media("video", "frames", (), frame_list=True, fps=2.0)
    whole = kind.default(RELEASED)
    for count in (2, 5, 300, 768):
        assert whole.used(media, MediaInfo(640, 480, count, 2.0)) == list(range(count))
    limits = {VideoSettings: (3136, 602112), TimedVideoSettings: (4096, 25165824)}[kind]
    _, videos = limited(RELEASED, kind.default(RELEASED, limits), MediaSection(), 8192)
    for count in (10, 300, 3000):
        (t, h, w), seconds, times = videos.layout(media, MediaInfo(640, 480, count, 2.0))
        assert t * h * w // 4 <= 4096
        used = videos.used(media, MediaInfo(640, 480, count, 2.0))
        assert len(used) == min(count, videos.max_frames) and len(times) == t
        steps = {after - before for before, after in zip(used, used[1:], strict=False)}
        assert max(steps) - min(steps) <= 1
        assert times == tuple(
            (first + last) / 2 / 2.0 for first, last in zip(used[::2], used[1::2], strict=True)
        )
        assert seconds == pytest.approx(2 * count / len(used) / 2.0)
    few = videos.with_frames(10)
    assert len(few.used(media, MediaInfo(640, 480, 300, 2.0))) == 10


def test_what_the_run_sets() -> None:
    section = MediaSection(
        max_pixels=100 * TOKEN, video_max_pixels=50 * TOKEN, fps=1.0, max_frames=10
    )
    for pack in (None, 64, 8192):  # what is set is not lowered
        images, videos = limited(RELEASED, VIDEOS, section, pack)
        assert (images.min_pixels, images.max_pixels) == (3136, 100 * TOKEN)
        assert (videos.images.min_pixels, videos.images.max_pixels) == (50 * TOKEN, 50 * TOKEN)
        assert (videos.fps, videos.max_frames, videos.min_frames) == (1.0, 10, 4)
    assert limited(RELEASED, VIDEOS, MediaSection(), None) == (RELEASED, VIDEOS)
    counted = replace(VIDEOS, num_frames=6)  # the folder's, unless the run says otherwise
    for own, number in ((MediaSection(), 6), (MediaSection(fps=1.0), None)):
        assert limited(RELEASED, counted, own, None)[1].num_frames == number
    assert limited(RELEASED, counted, MediaSection(max_frames=8), None)[1].num_frames is None
    one, _ = limited(RELEASED, VIDEOS, MediaSection(min_pixels=20000 * TOKEN), None)
    assert one.min_pixels == one.max_pixels == 20000 * TOKEN
    _, half = limited(RELEASED, VIDEOS, MediaSection(video_max_pixels=256 * TOKEN), 8192)
    assert (half.max_frames, half.images.max_pixels) == (2 * 4096 // 256, 256 * TOKEN)
    least = ImageSettings(min_pixels=64 * TOKEN)
    assert least.lowered(8 * TOKEN).grid(224, 224) == (1, 16, 16)  # 64 tokens as they are
    with pytest.raises(DataError, match="--media.min_pixels 9 is above --media.max_pixels 8"):
        limited(RELEASED, VIDEOS, MediaSection(max_pixels=8, min_pixels=9), None)


@pytest.mark.parametrize("given", [{"fps": -1.0}, {"min_frames": 9, "max_frames": 4}])
def test_a_folder_that_samples_no_frames_is_named(given: dict[str, Any], tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    path = folder / "video_preprocessor_config.json"
    path.write_text(json.dumps(IMAGE_LIMITS | given))
    with pytest.raises(DataError, match="video_preprocessor_config.json: fps .* must be above 0 a"):
        Processor.from_folder(folder, read_spec(folder))


@pytest.mark.parametrize("files", ["old", "size", "nested", "none"])
def test_settings_go_with_the_model(files: str, tmp_path: Path) -> None:
    """A folder that the run leaves reads as the run did: here, and by transformers."""
    folder = write_model_folder(tmp_path / "model")
    spec = read_spec(folder)
    limits = {"min_pixels": 4 * TOKEN, "max_pixels": 64 * TOKEN}
    edges = {"size": {"shortest_edge": 4 * TOKEN, "longest_edge": 64 * TOKEN}}
    kind = {"image_processor_type": "Qwen2VLImageProcessor"}
    contents: dict[str, Any] = {
        "old": {"preprocessor_config.json": kind | limits},
        "size": {"preprocessor_config.json": kind | edges, "video_preprocessor_config.json": edges},
        "nested": {"processor_config.json": {"image_processor": kind | edges, "other": 1}},
        "none": {},
    }[files]
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (folder / name).unlink()
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))
    section = MediaSection(max_pixels=10 * TOKEN, video_max_pixels=6 * TOKEN, fps=1, max_frames=8)
    processor = Processor.from_folder(folder, spec, section=section)
    assert processor.differs == (True, False)
    processor.write_settings(folder)
    again = Processor.from_folder(folder, spec)
    assert (again.images, again.videos) == (processor.images, processor.videos)
    assert again.fingerprint() == processor.fingerprint() and again.differs == (False, False)
    if files == "nested":
        assert json.loads((folder / "processor_config.json").read_text())["other"] == 1
    if files in ("old", "size"):
        written = json.loads((folder / "preprocessor_config.json").read_text())
        # All that the image processor of transformers 4 looks at.
        assert (written["min_pixels"], written["max_pixels"]) == (4 * TOKEN, 10 * TOKEN)
        theirs = AutoImageProcessor.from_pretrained(folder, use_fast=False)
        assert theirs.size == {"shortest_edge": 4 * TOKEN, "longest_edge": 10 * TOKEN}


@pytest.mark.parametrize(
    "given", [{}, {"fps": 3.0}, {"num_frames": 6}, {"fps": 3.0, "num_frames": 6}]
)
@pytest.mark.parametrize("set_fps", [None, 2.0, 4.0])
def test_transformers_takes_the_frames_of_the_run(
    given: dict[str, Any], set_fps: float | None, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Where it samples. fps and num_frames together it refuses, so fps is written where a run
    or the folder has another than the default."""
    folder = write_model_folder(tmp_path / "model")
    path = folder / "video_preprocessor_config.json"
    path.write_text(json.dumps(IMAGE_LIMITS | given))
    section = MediaSection(fps=set_fps or 0.0)
    spec = read_spec(folder)
    processor = Processor.from_folder(folder, spec, section=section, pack_length=512)
    write_settings(folder, processor.images, processor.videos)
    theirs = json.loads(path.read_text())
    assert "do_sample_frames" not in theirs  # who hands over chosen frames goes on to do so
    fps, number = theirs.get("fps"), theirs.get("num_frames")
    assert number == (None if set_fps else given.get("num_frames"))
    if number:
        assert fps is None
    else:
        wanted = set_fps or given.get("fps", 2.0)
        assert (fps or 2.0) == wanted and ("fps" in theirs) == (wanted != 2.0 or "fps" in given)
    limits = theirs["min_frames"], theirs["max_frames"]
    for total in rng.integers(6, 2000, 20).tolist():
        rate = float(rng.choice([8.0, 24.0, 30000 / 1001]))
        if number:
            expected = torch.arange(0, total, total / 6).int().tolist()[:6]
        else:
            expected = reference_indices(total, rate, fps or 2.0, limits)
        assert processor.videos.sample(MediaInfo(72, 48, total, rate)) == expected


LONG = " ".join(["word"] * 60)


@pytest.fixture
def long_samples(tmp_path: Path) -> Path:
    save_image(tmp_path / "a.png", 112, 112)  # 16 tokens
    return write_json(
        tmp_path / "c.json",
        [
            conversation("q", "short", id="short"),
            conversation("<image>q", LONG, id="answer", image="a.png"),
            conversation(LONG, "a", id="question"),
            conversation(LONG + "<image>", "a", id="image", image="a.png"),
        ],
    )


def test_longer_samples(long_samples: Path, processor: Processor, spec: ModelSpec) -> None:
    pack, lines = 64, []
    with pytest.raises(DataError, match="'answer': it has .* --loader.too_long drop or truncate"):
        scan_sources([long_samples], processor, spec, pack, skip_limit=9)  # no unreadable sample
    index = scan_sources([long_samples], processor, spec, pack, too_long="drop", log=lines.append)
    assert index.ids == ["short"] and not index.skipped
    assert lines[0] == "3 samples are longer than a pack and dropped (--loader.too_long)"
    report = check([long_samples], model=None)
    assert report.ok


def test_text_is_cut_off(long_samples: Path, processor: Processor, spec: ModelSpec) -> None:
    """The first tokens of the whole sample, with their labels; never a part of an image."""
    records = json.loads(long_samples.read_text())
    write_json(long_samples, records[:2])
    whole = scan_sources([long_samples], processor, spec, 10000)
    cut = scan_sources([long_samples], processor, spec, 64, too_long="truncate")
    assert whole.lengths[1] > 64 and cut.lengths.tolist() == [whole.lengths[0], 64]
    build_shards(long_samples, long_samples.parent / "shards", processor=processor)
    of_shards = scan_sources(
        [long_samples.parent / "shards"], processor, spec, 64, too_long="truncate"
    )
    assert of_shards.lengths.tolist() == cut.lengths.tolist()
    assert of_shards.target_tokens.tolist() == cut.target_tokens.tolist()
    sample = whole.load(1)
    full = processor.encode(sample, processor.layouts(sample))
    options: dict[str, Any] = {"pack_length": 64, "global_batch": 2, "prefetch": False}
    with open_loader(cut, processor, spec, too_long="truncate", **options) as loader:
        packs = {pack.sample_ids[0]: pack for pack in loader.next_step()}
    pack = packs["answer"]
    assert torch.equal(pack.input_ids, full.input_ids[:64])
    assert torch.equal(pack.labels[:63], full.labels[:63]) and pack.labels[63] == -100
    assert torch.equal(pack.position_ids, full.position_ids[:, :64])
    assert pack.target_tokens == int((pack.labels != -100).sum()) == cut.target_tokens[1]
    for number, said in (
        (2, "of its [0-9]+ tokens the first 64 leave nothing to learn; raise --train.pack_length"),
        (3, "cannot be cut off after 64 tokens"),
    ):
        write_json(long_samples, records[number : number + 1])
        with pytest.raises(DataError, match=said) as caught:
            scan_sources([long_samples], processor, spec, 64, too_long="truncate", skip_limit=9)
        assert caught.value.kind == "too_long"  # and so no bad sample


def test_text_is_cut_off_up_to_the_last_token_that_must_stay(processor: Processor) -> None:
    """That of an image, and the first that is learnt."""
    text = (Turn("user", "q"), Turn("assistant", "one two"))
    picture = (*text, Turn("user", "<image>r"), Turn("assistant", "three"))
    sample = Sample("t", picture, (Media("image", "a.png", ()),), "c.json")
    layouts = [MediaLayout((1, 4, 4), 0.0)]
    last = int(np.flatnonzero(processor.encode(sample, layouts).visual_mask)[-1])
    with pytest.raises(DataError, match=f"cannot be cut off after {last} tokens") as caught:
        processor.encode(sample, layouts, max_length=last)
    assert caught.value.kind == "too_long"
    assert len(processor.encode(sample, layouts, max_length=last + 1).input_ids) == last + 1

    sample = Sample("t", text, (), "c.json")
    first = int(np.flatnonzero(processor.encode(sample, []).labels != -100)[0]) + 1
    with pytest.raises(DataError, match=f"the first {first} leave nothing to learn") as caught:
        processor.encode(sample, [], max_length=first)
    assert caught.value.kind == "too_long"
    assert processor.encode(sample, [], max_length=first + 1).target_tokens == 1


def test_long_lists_of_frames(tmp_path: Path, model_folder: Path, spec: ModelSpec) -> None:
    """Advice that helps; frames as the layout says; a layout of an older build is made anew."""
    for i in range(12):
        save_image(tmp_path / f"{i}.png", 112, 84, i)
    names = [f"{i}.png" for i in range(12)]
    path = write_json(tmp_path / "c.json", [conversation("<video>q", "a", id="v", video=names)])
    processor = Processor.from_folder(model_folder, spec)
    with pytest.raises(
        DataError, match="'v': it has .*, lower --media.video_max_pixels, or choose"
    ):
        scan_sources([path], processor, spec, 64)
    section = MediaSection(max_frames=6)
    six = Processor.from_folder(model_folder, spec, section=section)
    (media,) = scan_sources([path], six, spec, 200).load(0).media
    assert media.info is not None and media.info.frames == 12
    frames = six.frames(media, Sample("v", (), (media,), "c.json"))
    chosen = replace(media, parts=media.parts[::2], info=replace(media.info, frames=6))
    assert (frames == six.frames(chosen, Sample("v", (), (chosen,), "c.json"))).all()
    assert frames.shape[0] == 6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VideoSettings, "used", lambda *_: list(range(12)))
        build_shards(path, tmp_path / "old", processor=six)
    index = scan_sources([tmp_path / "old"], six, spec, 200)
    assert index.grids[:, 0].tolist() == [3] and index.infos[:, 2].tolist() == [12]


def test_a_pack_of_no_tokens(long_samples: Path, model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="pack_length must be at least 1, got -5"):
        build_command(long_samples, tmp_path / "s", model_folder, pack_length=-5)
    assert not (tmp_path / "s").exists()

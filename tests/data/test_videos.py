"""Videos: frame sampling, decoding, timing, broken files."""

from __future__ import annotations

import json
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.helpers import IMAGE_LIMITS, save_image
from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.errors import DataError
from vlmtrain.data.media.images import ImageSettings
from vlmtrain.data.media.videos import VideoSettings, load_video, probe_media
from vlmtrain.data.sample import FileRange, Media, MediaInfo, Sample

SAMPLE = Sample("clip", (), (), "videos.json")
SETTINGS = VideoSettings(ImageSettings(**IMAGE_LIMITS))


def write_video(path: Path, frames: int, fps: int = 8, size: tuple[int, int] = (72, 48)) -> Media:
    """A video whose frame i is a flat grey of value 8 i."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for i in range(frames):
            pixels = np.full((size[1], size[0], 3), 8 * i, dtype=np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return Media("video", path.name, (FileRange(str(path)),))


def reference_indices(total: int, video_fps: float, fps: float, limits: tuple[int, int]) -> list:
    """`Qwen2VLVideoProcessor.sample_frames`, which cannot be imported without torchvision."""
    least, most = limits
    most = min(most, total) // 2 * 2
    count = min(max(total / video_fps * fps, least), most, total)
    count = int(count // 2 * 2)
    # Rounding can make the reference's arange one too long, with an index past the end: drop it.
    return torch.arange(0, total, total / count).int().tolist()[:count]


@pytest.mark.parametrize("fps", [0.5, 1.0, 2.0, 3.0, 7.5])
def test_sampling_is_the_reference(fps: float) -> None:
    settings = VideoSettings(ImageSettings(), fps=fps)
    for total in [2, 3, 4, 5, 9, 17, 48, 100, 250, 999, 4001]:
        for video_fps in (8.0, 24.0, 30000 / 1001):
            info = MediaInfo(72, 48, total, video_fps)
            assert settings.sample(info) == reference_indices(total, video_fps, fps, (4, 768))


def test_the_folder_says_how_to_sample(tmp_path: Path, spec: ModelSpec) -> None:
    wanted = {"fps": 1.0, "num_frames": 6, "min_frames": 2, "max_frames": 9, "max_pixels": 200704}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(wanted))
    actual = VideoSettings.from_folder(tmp_path, ImageSettings(), spec.vision)
    assert (actual.fps, actual.num_frames, actual.min_frames, actual.max_frames) == (1.0, 6, 2, 9)
    assert actual.images.max_pixels == 200704
    assert VideoSettings.from_folder(tmp_path, ImageSettings(), spec.vision, fps=3).fps == 3


def test_sampling_by_number_and_of_tiny_videos() -> None:
    assert SETTINGS.sample(MediaInfo(72, 48, 1, 8.0)) == [0]
    three = VideoSettings(ImageSettings(), num_frames=3)
    assert three.sample(MediaInfo(72, 48, 10, 8.0)) == [0, 3, 6]
    assert three.sample(MediaInfo(72, 48, 2, 8.0)) == [0, 1]


@pytest.mark.parametrize("suffix", [".mp4", ".avi", ".mkv"])
def test_decodes_the_sampled_frames(suffix: str, tmp_path: Path) -> None:
    media = write_video(tmp_path / f"v{suffix}", frames=20, fps=8)
    for verify in (False, True):
        info = probe_media(media, SAMPLE, verify)
        assert info == MediaInfo(72, 48, 20, 8.0)
    # 20 frames at 8 a second, 2 a second wanted: 5, rounded down to the even 4.
    assert SETTINGS.sample(info) == [0, 5, 10, 15]
    frames = load_video(media, info, SETTINGS, SAMPLE)
    grid, seconds, times = SETTINGS.layout(media, info)
    assert grid == (2, 4, 6) and frames.shape == (4, 56, 84, 3)
    assert times == ((0 + 5) / 8 / 2, (10 + 15) / 8 / 2)
    assert seconds == 2 / (4 / 20 * 8)  # sampled at 1.6 frames a second, 2 frames a slice
    # mpeg4 is lossy: flat greys come back within a few values.
    means = frames.astype(float).mean(axis=(1, 2, 3))
    np.testing.assert_allclose(means, [0, 40, 80, 120], atol=4)


def test_frame_list_uses_every_frame(tmp_path: Path) -> None:
    parts = tuple(
        FileRange(str(save_image(tmp_path / f"{i}.png", 72, 48, seed=i))) for i in range(3)
    )
    media = Media("video", "clip", parts, frame_list=True, fps=4.0)
    info = probe_media(media, SAMPLE, True)
    assert SETTINGS.layout(media, info) == ((2, 4, 6), 0.5, (0.125, 0.5))
    frames = load_video(media, info, SETTINGS, SAMPLE)
    for i, frame in enumerate(frames):
        expected = Image.open(parts[i].path).resize((84, 56), Image.Resampling.BICUBIC)
        np.testing.assert_array_equal(frame, np.asarray(expected))
    other = FileRange(str(save_image(tmp_path / "odd.png", 60, 48)))
    with pytest.raises(DataError, match="different sizes"):
        probe_media(Media("video", "clip", (*parts, other), frame_list=True), SAMPLE, True)


@pytest.mark.parametrize("suffix", [".mp4", ".avi"])
@pytest.mark.parametrize("keep", [0.0, 0.4, 0.8])
def test_truncated_video_is_noticed(suffix: str, keep: float, tmp_path: Path) -> None:
    media = write_video(tmp_path / f"v{suffix}", frames=30)
    data = (tmp_path / f"v{suffix}").read_bytes()
    (tmp_path / f"v{suffix}").write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(DataError, match=r"videos.json: sample 'clip': .*v\.(mp4|avi) "):
        probe_media(media, SAMPLE, True)


def test_other_bad_videos(tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_text("no video at all")
    save_image(tmp_path / "none.png", 30, 30)
    for name, message in [
        ("text.mp4", "text.mp4 is not a video"),
        ("gone.mp4", "the file .*gone.mp4 is missing"),
    ]:
        media = Media("video", name, (FileRange(str(tmp_path / name)),))
        with pytest.raises(DataError, match=f"videos.json: sample 'clip': {message}"):
            probe_media(media, SAMPLE, True)

"""Videos: frame sampling, decoding, timing, broken files."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from tests.data.helpers import IMAGE_LIMITS, conversation, save_image, write_json
from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.errors import DataError
from vlmtrain.data.index import scan_sources
from vlmtrain.data.media.images import ImageSettings
from vlmtrain.data.media.videos import (
    TimedVideoSettings,
    VideoSettings,
    load_video,
    probe_media,
)
from vlmtrain.data.processor import Processor
from vlmtrain.data.sample import FileRange, Media, MediaInfo, Sample
from vlmtrain.generate.questions import check_media, question

SAMPLE = Sample("clip", (), (), "videos.json")
SETTINGS = VideoSettings(ImageSettings(**IMAGE_LIMITS))
# Sides are multiples of 1: no resize.
IDENTITY = VideoSettings(ImageSettings(1, 1 << 30, patch_size=1, merge_size=1))


def write_video(
    path: Path,
    frames: int,
    fps: int = 8,
    size: tuple[int, int] = (72, 48),
    pattern: Any = 0,
    *,
    codec: str = "mpeg4",
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
    times: list[int] | None = None,
    tick: Fraction = Fraction(1, 1000),
) -> Media:
    """A video whose frame i is a flat grey of value 8 i, and the pattern (uint8 [H, W, 3]).
    `times`: of each frame, in ticks."""
    with av.open(str(path), "w", options=container_options) as container:
        stream = container.add_stream(codec, rate=fps, options=options)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        if times is not None:
            stream.codec_context.time_base = tick
        for i in range(frames):
            value = 8 * i % 256
            pixels = np.full((size[1], size[0], 3), value, dtype=np.uint8) + np.uint8(pattern)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[i], tick
            for packet in stream.encode(frame):
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
    for total in [*range(2, 1000), *range(1000, 12000, 37)]:
        for video_fps in (8.0, 24.0, 25.0, 30000 / 1001, 30.0, 60.0):
            info = MediaInfo(72, 48, total, video_fps)
            assert settings.sample(info) == reference_indices(total, video_fps, fps, (4, 768))


def test_the_folder_says_how_to_sample(tmp_path: Path, spec: ModelSpec) -> None:
    wanted = {"fps": 1.0, "num_frames": 6, "min_frames": 2, "max_frames": 9, "max_pixels": 200704}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(wanted))
    actual = VideoSettings.from_folder(tmp_path, ImageSettings(), spec.vision)
    assert (actual.fps, actual.num_frames, actual.min_frames, actual.max_frames) == (1.0, 6, 2, 9)
    assert actual.images.max_pixels == 200704


def test_the_cap_of_pixels_per_frame(tmp_path: Path, spec: ModelSpec) -> None:
    """As `Qwen2VLVideoProcessor.resize` computes it, which needs torchvision, around their own
    smart_resize."""
    limits = {"shortest_edge": 100352, "longest_edge": 602112}
    for frames in (4, 48, 300, 768):
        grids = []
        for cap in (False, True):
            (tmp_path / "video_preprocessor_config.json").write_text(
                json.dumps({"size": limits, "cap_pixels_per_frame": cap, "num_frames": frames})
            )
            settings = VideoSettings.from_folder(tmp_path, ImageSettings(), spec.vision)
            media = Media("video", "v", ())
            grids.append(settings.layout(media, MediaInfo(1280, 720, 12600, 30.0))[0])
        share = int(128000 * 28 * 28 * 0.9) * 2 // frames
        most = max(min(602112, share), int(100352 * 1.05))
        for grid, pixels in zip(grids, (602112, most), strict=True):
            height, width = smart_resize(720, 1280, 28, 100352, pixels)
            assert grid == (frames // 2, height // 14, width // 14)


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


def test_a_file_and_a_list_of_it_are_kept_apart(
    tmp_path: Path, processor: Processor, spec: ModelSpec
) -> None:
    """An animation as a video, and as the one frame of another: neither is taken for the other."""
    frames = [Image.open(save_image(tmp_path / f"{i}.png", 60, 50, i)) for i in range(4)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    records = [conversation("<video>", "x", video=one) for one in ("a.gif", {"frames": ["a.gif"]})]
    path = write_json(tmp_path / "c.json", records)
    index = scan_sources([path], processor, spec, 512)
    assert index.grids[:, 0].tolist() == [2, 1]
    first, second = (index.load(i).media[0] for i in range(2))
    assert first.parts == second.parts and first.key != second.key
    lists = [conversation("<video>", "x", **{key: ["a.gif"]}) for key in ("video", "videos")]
    index = scan_sources([write_json(tmp_path / "l.json", lists)], processor, spec, 512)
    assert index.grids[:, 0].tolist() == [2, 2]
    frames[1].save(tmp_path / "b.gif", save_all=True, append_images=frames[2:])
    two = [conversation("<video> and <video>", "x", video=["a.gif", "b.gif"])]
    index = scan_sources([write_json(tmp_path / "t.json", two)], processor, spec, 512)
    assert index.infos[:, 2].tolist() == [4, 3]  # two videos
    one = [conversation("<video>", "x", video=["a.gif", "b.gif"])]
    with pytest.raises(DataError, match="1 <video> mark.* 2 video"):
        scan_sources([write_json(tmp_path / "o.json", one)], processor, spec, 512)


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
    unsaid = replace(media, fps=None)  # 2 frames a second, whatever files are sampled at
    info = probe_media(unsaid, SAMPLE, True)
    for settings in (SETTINGS, replace(SETTINGS, fps=0.5)):
        assert settings.layout(unsaid, info) == ((2, 4, 6), 1.0, (0.25, 1.0))
    other = FileRange(str(save_image(tmp_path / "odd.png", 60, 48)))
    with pytest.raises(DataError, match="different sizes"):
        probe_media(Media("video", "clip", (*parts, other), frame_list=True), SAMPLE, True)


def test_frames_that_an_edit_list_hides_are_not_counted(tmp_path: Path) -> None:
    """As in a clip that was trimmed without encoding it anew."""
    path = tmp_path / "trimmed.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25, options={"bf": "0", "g": "250"})
        stream.width, stream.height, stream.pix_fmt = 112, 84, "yuv420p"
        stream.time_base = stream.codec_context.time_base = tick = Fraction(1, 25)
        for i in range(60):
            frame = av.VideoFrame.from_ndarray(np.full((84, 112, 3), i, np.uint8), format="rgb24")
            frame.pts, frame.time_base = i - 23, tick
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with av.open(str(path)) as container:
        shown = sum(1 for _ in container.decode(video=0))
    assert shown < 60
    media = Media("video", path.name, (FileRange(str(path)),))
    for verify in (True, False):
        info = probe_media(media, SAMPLE, verify)
        assert info.frames == shown
    assert len(load_video(media, info, SETTINGS, SAMPLE)) == len(SETTINGS.sample(info))


def show(path: Path, first: int, count: int, fps: int) -> None:
    """Write into the edit list of an MP4 that it begins at a frame, and how many it shows."""
    with av.open(str(path)) as container:
        tick = container.streams.video[0].time_base
    data = bytearray(path.read_bytes())
    at = data.index(b"elst") + 4 + 4  # version 0
    scale = int.from_bytes(data[data.index(b"mvhd") + 16 :][:4], "big")
    edit = count * scale // fps, round(first / fps / tick)
    data[at : at + 12] = struct.pack(">Iii", 1, *edit)
    path.write_bytes(data)


@pytest.mark.parametrize("hides", ["start", "end", "both"])
def test_an_edit_list_that_hides_whole_groups(hides: str, tmp_path: Path, seed: int) -> None:
    """Of pictures, as where a phone trims a clip: the demuxer leaves them out."""
    if not hasattr(av.stream.Stream, "index_entries"):
        pytest.skip("this PyAV cannot tell; 17.0 and later can")
    rng = np.random.default_rng(seed)
    start = 0 if hides == "end" else int(rng.integers(10, 14))
    end = 30 if hides == "start" else int(rng.integers(17, 20))
    path, options = tmp_path / "v.mp4", {"g": "5", "bf": "0"}
    first = {"movflags": "faststart"}  # so that a file that is cut has its header
    media = write_video(path, 30, 10, codec="libx264", options=options, container_options=first)
    show(path, start, end - start, 10)
    with av.open(str(path)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
        assert len(packets) < container.streams.video[0].frames == 30
        last = packets[-1].pos
    for verify in (True, False):
        info = probe_media(media, SAMPLE, verify)
        assert info == MediaInfo(72, 48, end - start, 10.0)
    every = replace(IDENTITY, num_frames=30)
    greys = load_video(media, info, every, SAMPLE).mean(axis=(1, 2, 3))
    np.testing.assert_allclose(greys, [8 * i for i in range(start, end)], atol=4)
    path.write_bytes(path.read_bytes()[:last])
    said = f"v.mp4 is cut short: its header says {len(packets)} frames and it holds"
    for verify in (True, False):
        with pytest.raises(DataError, match=f"{said} {len(packets) - 1};"):
            probe_media(media, SAMPLE, verify)


def decoded(path: Path) -> list[float]:
    """The time of each frame."""
    with av.open(str(path)) as container:
        return [frame.time for frame in container.decode(video=0)]


@pytest.mark.parametrize(
    ("suffix", "codec"),
    [
        (".mkv", "libx264"),
        (".webm", "libvpx"),
        (".ts", "libx264"),
        (".flv", "flv1"),
        (".wmv", "wmv2"),
        (".avi", "mpeg4"),
    ],
)
def test_a_variable_rate_is_the_frames_own(suffix: str, codec: str, tmp_path: Path) -> None:
    """As a screen is recorded: 60 frames at 25 a second, then 20 at one."""
    times = [40 * i for i in range(60)] + [2400 + 1000 * i for i in range(20)]
    options = {"deadline": "realtime"} if codec == "libvpx" else None
    path = tmp_path / f"v{suffix}"
    media = write_video(path, 80, 25, codec=codec, options=options, times=times)
    own = decoded(path)
    assert own[-1] - own[0] == pytest.approx(21.4, abs=0.05)
    for verify in (True, False):
        info = probe_media(media, SAMPLE, verify)
        assert info.frames == 80
        assert info.fps == pytest.approx(79 / (own[-1] - own[0]), rel=1e-6)
    settings = TimedVideoSettings(ImageSettings(**IMAGE_LIMITS))
    _, _, slices = settings.layout(media, info)
    used = settings.sample(info)
    assert len(used) == 43  # 2 a second
    assert abs(slices[-1] - (own[used[-1]] - own[0])) < 0.5


@pytest.mark.parametrize("suffix", [".mkv", ".ts", ".flv", ".wmv", ".avi", ".mp4"])
def test_a_constant_rate_is_the_headers(suffix: str, tmp_path: Path) -> None:
    """Where times are rounded to milliseconds too."""
    codec = {".flv": "flv1", ".wmv": "wmv2"}.get(suffix, "mpeg4")
    media = write_video(tmp_path / f"v{suffix}", 40, 30, codec=codec)
    assert probe_media(media, SAMPLE, True).fps == 30.0


def test_files_that_were_joined(tmp_path: Path) -> None:
    """Their times begin again: the header's rate stands. Another size is noticed: by the scan, and
    at its step where none was."""
    for name, size in (("a", (72, 48)), ("b", (72, 48)), ("c", (96, 48))):
        write_video(tmp_path / f"{name}.ts", 20, 10, size, codec="mpeg2video")
    one, two, three = ((tmp_path / f"{name}.ts").read_bytes() for name in "abc")
    path = tmp_path / "joined.ts"
    media = Media("video", path.name, (FileRange(str(path)),))
    path.write_bytes(one + two)
    assert probe_media(media, SAMPLE, True) == MediaInfo(72, 48, 40, 10.0)
    path.write_bytes(one + three)
    said = (
        r"'clip': the frames of joined.ts have different sizes \(72x48 and 96x48 pixels\); encode"
    )
    for verify in (True, False):
        with pytest.raises(DataError, match=said):
            probe_media(media, SAMPLE, verify)
    with pytest.raises(DataError, match=said):
        load_video(media, MediaInfo(72, 48, 40, 10.0), SETTINGS, SAMPLE)
    parts = [FileRange(str(save_image(tmp_path / f"{w}.png", w, 40))) for w in (60, 60, 50)]
    media = Media("video", "list", tuple(parts), frame_list=True)
    with pytest.raises(DataError, match=r"list have different sizes \(60x40 and 50x40 pixels\)"):
        load_video(media, MediaInfo(60, 40, 3), SETTINGS, SAMPLE)


@pytest.mark.parametrize("suffix", [".ts", ".mkv", ".mp4"])
def test_clips_that_were_cut_between_keyframes(suffix: str, tmp_path: Path) -> None:
    """Without encoding them anew: the first packets have nothing to refer to."""
    whole, path = tmp_path / f"whole{suffix}", tmp_path / f"cut{suffix}"
    write_video(whole, 80, 25, codec="mpeg2video", options={"g": "15", "bf": "2"})
    with av.open(str(whole)) as source, av.open(str(path), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        packets = [packet for packet in source.demux(video=0) if packet.size]
        keys = [i for i, packet in enumerate(packets) if packet.is_keyframe]
        for packet in packets[keys[1] :]:  # of an open group: the next show frames before it
            packet.stream = stream
            target.mux(packet)
    frames = len(decoded(path))
    assert frames == len(packets) - keys[1] - 2
    media = Media("video", path.name, (FileRange(str(path)),))
    settings = TimedVideoSettings(ImageSettings(**IMAGE_LIMITS), fps=25)
    for verify in (True, False):
        info = probe_media(media, SAMPLE, verify)
        assert info.frames == frames
    assert len(load_video(media, info, settings, SAMPLE)) == frames  # to the last
    asked = question("What?", {"video": path.name}, media_root=tmp_path)
    assert check_media(asked).media[0].info == info


def test_frames_that_avi_dropped(tmp_path: Path) -> None:
    """Its header counts them, and no packet stands for them; a file that is cut is noticed."""
    path = tmp_path / "v.avi"
    for tick, step, promised in ((Fraction(1, 30), 3, 28), (Fraction(1, 1000), 100, 933)):
        media = write_video(path, 10, 30, times=[step * i for i in range(10)], tick=tick)
        with av.open(str(path)) as container:
            assert container.streams.video[0].frames == promised
        for verify in (True, False):
            info = probe_media(media, SAMPLE, verify)
            assert info == MediaInfo(72, 48, 10, pytest.approx(10.0))
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * 0.8)])
    with pytest.raises(DataError, match="v.avi is cut short: its header says 933 frames and it"):
        probe_media(media, SAMPLE, True)


def test_what_is_no_video_stream(tmp_path: Path) -> None:
    """The cover of a song is none; beside a film it is left out."""
    for name, film in (("song.m4a", False), ("film.mp4", True)):
        with av.open(str(tmp_path / name), "w", format="mp4") as container:
            cover = container.add_stream("mjpeg", rate=1)
            cover.width, cover.height, cover.pix_fmt = 64, 40, "yuvj420p"
            cover.disposition = av.stream.Disposition.attached_pic.value
            sound = container.add_stream("aac", rate=44100)
            if film:
                stream = container.add_stream("mpeg4", rate=8)
                stream.width, stream.height, stream.pix_fmt = 72, 48, "yuv420p"
            picture = av.VideoFrame.from_ndarray(np.zeros((40, 64, 3), np.uint8))
            for packet in [*cover.encode(picture.reformat(format="yuvj420p")), *cover.encode()]:
                container.mux(packet)
            samples = np.zeros((2, 4096), np.float32)
            silence = av.AudioFrame.from_ndarray(samples, format="fltp", layout="stereo")
            silence.rate = 44100
            container.mux([*sound.encode(silence), *sound.encode()])
            for i in range(6 * film):
                frame = av.VideoFrame.from_ndarray(np.full((48, 72, 3), i, np.uint8))
                container.mux(stream.encode(frame))
            if film:
                container.mux(stream.encode())
    song, film_ = (
        Media("video", name, (FileRange(str(tmp_path / name)),))
        for name in ("song.m4a", "film.mp4")
    )
    with pytest.raises(DataError, match="song.m4a has no video stream; is it a video"):
        probe_media(song, SAMPLE, True)
    assert probe_media(film_, SAMPLE, True) == MediaInfo(72, 48, 6, 8.0)


@pytest.mark.parametrize("suffix", [".mp4", ".avi"])
@pytest.mark.parametrize("keep", [0.0, 0.4, 0.8])
def test_truncated_video_is_noticed(suffix: str, keep: float, tmp_path: Path) -> None:
    media = write_video(tmp_path / f"v{suffix}", frames=30)
    data = (tmp_path / f"v{suffix}").read_bytes()
    (tmp_path / f"v{suffix}").write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(DataError, match=r"videos.json: sample 'clip': .*v\.(mp4|avi) "):
        probe_media(media, SAMPLE, True)


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
def test_damage_that_a_decoder_would_hide(codec: str, tmp_path: Path, seed: int) -> None:
    """Blocks of zeros in the file, as of a download with holes: frames come out all the same.
    One hole in some hundred is a valid H.264 stream by chance, hence several, in frames that do
    not refer to each other."""
    noise = np.random.default_rng(seed).integers(0, 60, (240, 320, 3), dtype=np.uint8)
    path, options = tmp_path / "v.mp4", {"g": "1", "b": "8M"}
    media = write_video(path, 30, size=(320, 240), pattern=noise, codec=codec, options=options)
    whole = path.read_bytes()
    assert probe_media(media, SAMPLE, True).frames == 30
    with av.open(str(path)) as container:
        places = [packet.pos + 3000 for packet in container.demux(video=0) if packet.size]
    damaged = bytearray(whole)
    for place in places[:20:4]:
        damaged[place : place + 400] = bytes(400)
    path.write_bytes(damaged)
    assert len(decoded(path)) == 30
    with pytest.raises(DataError, match="'clip': v.mp4 is not a video, or is damaged or cut short"):
        probe_media(media, SAMPLE, True)


def test_a_gif_without_its_end_is_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "v.gif"
    frames = [Image.new("RGB", (40, 30), (9 * i, 0, 0)) for i in range(9)]
    frames[0].save(path, save_all=True, append_images=frames[1:])
    media = Media("video", path.name, (FileRange(str(path)),))
    assert probe_media(media, SAMPLE, True).frames == 9
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(DataError, match="v.gif is cut short"):
        probe_media(media, SAMPLE, True)
    path.write_bytes(data + b"\n")  # some programs write more behind it
    assert probe_media(media, SAMPLE, True).frames == 9


def test_a_clip_that_refers_to_what_was_cut_off_is_whole(tmp_path: Path) -> None:
    """From a keyframe on at which H.264 may still refer to frames before: harmless, as the frames
    that do are not shown, but an error to a strict decoder."""
    whole, path = tmp_path / "whole.mp4", tmp_path / "cut.mp4"
    options = {"x264-params": "open-gop=1:keyint=15:bframes=2"}
    write_video(whole, 80, 25, codec="libx264", options=options)
    with av.open(str(whole)) as source, av.open(str(path), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        packets = [packet for packet in source.demux(video=0) if packet.size]
        keys = [i for i, packet in enumerate(packets) if packet.is_keyframe]
        for packet in packets[keys[1] :]:
            packet.stream = stream
            target.mux(packet)
    media = Media("video", path.name, (FileRange(str(path)),))
    assert probe_media(media, SAMPLE, True).frames == len(decoded(path)) > 50


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


ONE = 1 << 16
TURNS = {  # (a, b, c, d): (x, y) of a frame is shown at (a x + c y, b x + d y)
    "as it is": (1, 0, 0, 1),
    "90": (0, 1, -1, 0),  # a phone held upright
    "180": (-1, 0, 0, -1),
    "270": (0, -1, 1, 0),
    "mirrored": (-1, 0, 0, 1),
    "90, mirrored": (0, 1, 1, 0),
}


def set_matrix(path: Path, matrix: tuple[float, float, float, float]) -> None:
    """Write the display matrix into the track header of an MP4."""
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 4 + 4 + 20 + 16  # version 0
    a, b, c, d = (round(value * ONE) for value in matrix)
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)


@pytest.mark.parametrize("name", TURNS)
def test_phones_videos_stand_upright(name: str, tmp_path: Path) -> None:
    """The display matrix is applied, pixel by pixel as QuickTime defines it."""
    media = write_video(tmp_path / "v.mp4", frames=4)
    quarter = np.zeros((48, 72, 3), dtype=np.uint8)
    quarter[:16, :24], quarter[:16, 24:] = 220, 90
    with av.open(str(tmp_path / "v.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 72, 48, "yuv420p"
        for packet in [*stream.encode(av.VideoFrame.from_ndarray(quarter)), *stream.encode()]:
            container.mux(packet)
    still = load_video(media, MediaInfo(72, 48, 1), IDENTITY, SAMPLE)[0]
    a, b, c, d = TURNS[name]
    set_matrix(tmp_path / "v.mp4", TURNS[name])
    height, width = (48, 72) if a else (72, 48)
    expected = np.zeros((height, width, 3), dtype=np.uint8)
    for y in range(48):
        for x in range(72):
            # Modulo the size, as flipped coordinates count from the other end: -1 is the last.
            to_x, to_y = a * x + c * y, b * x + d * y
            to_x -= (a + c) < 0
            to_y -= (b + d) < 0
            expected[to_y, to_x] = still[y, x]
    for verify in (False, True):
        info = probe_media(media, SAMPLE, verify)
        assert (info.width, info.height, info.frames) == (width, height, 1)
    np.testing.assert_array_equal(load_video(media, info, IDENTITY, SAMPLE)[0], expected)


def test_a_cameras_mjpeg_with_exif_data(tmp_path: Path) -> None:
    """Frames that are photographs with EXIF data stand as Pillow turns them."""
    picture = np.zeros((48, 72, 3), dtype=np.uint8)
    picture[:16, :24], picture[16:, 24:] = 220, 90
    exif = Image.Exif()
    exif[0x0112] = 6  # the orientation: a quarter to the right
    Image.fromarray(picture).save(tmp_path / "p.jpg", exif=exif, quality=95, subsampling=0)
    path = tmp_path / "v.avi"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mjpeg", rate=5)
        stream.width, stream.height, stream.pix_fmt = 72, 48, "yuvj444p"
        for i in range(3):
            packet = av.Packet((tmp_path / "p.jpg").read_bytes())
            packet.stream, packet.pts, packet.dts = stream, i, i
            packet.time_base, packet.is_keyframe = Fraction(1, 5), True
            container.mux(packet)
    media = Media("video", "v.avi", (FileRange(str(path)),))
    info = probe_media(media, SAMPLE, True)
    assert (info.width, info.height, info.frames) == (48, 72, 3)
    with Image.open(tmp_path / "p.jpg") as image:
        expected = np.asarray(ImageOps.exif_transpose(image)).astype(int)
    found = load_video(media, info, IDENTITY, SAMPLE)
    assert np.abs(found - expected).max() <= 4  # two decoders of JPEG


def test_another_angle_is_refused(tmp_path: Path) -> None:
    media = write_video(tmp_path / "v.mp4", frames=4)
    set_matrix(tmp_path / "v.mp4", (0.866, 0.5, -0.5, 0.866))
    with pytest.raises(DataError, match="'clip': .*is no multiple of 90 degrees; encode it again"):
        probe_media(media, SAMPLE, False)


def test_a_cap_that_is_off_is_no_part_of_what_a_video_becomes() -> None:
    """Data sets that were built before there was one are still theirs."""
    off = VideoSettings.default(ImageSettings())
    assert off.identity() == replace(off, max_video_tokens=1).identity()
    assert not {"cap_pixels_per_frame", "max_video_tokens"} & off.identity().keys()
    on = replace(off, cap_pixels_per_frame=True)
    assert on.identity() != replace(on, max_video_tokens=1).identity() != off.identity()

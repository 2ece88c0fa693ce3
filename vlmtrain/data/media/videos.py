"""Videos to frames: PyAV decoding, frame sampling as in transformers, times of slices."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from vlmtrain.data.errors import DataError
from vlmtrain.data.media.images import (
    MAX_FILE_PIXELS,
    ImageSettings,
    load_image,
    probe_image,
    read_config,
    resize,
    smart_resize,
)
from vlmtrain.data.sample import Media, MediaInfo, Sample
from vlmtrain.models.common.family import MediaDefaults


@dataclass(frozen=True)
class VideoSettings:
    """How frames are chosen, and how each becomes patches.

    Defaults are the released models' own: 2 frames a second, 4 to 768 frames, 128 to 768 language
    tokens a frame (`Qwen2VLVideoProcessor`, qwen-vl-utils).
    """

    images: ImageSettings
    fps: float = 2.0
    num_frames: int | None = None  # sample exactly this many (or all, where there are fewer)
    min_frames: int = 4
    max_frames: int = 768

    @classmethod
    def default(
        cls, images: ImageSettings, pixels: tuple[int, int] = MediaDefaults.video_pixels
    ) -> VideoSettings:
        """The defaults: bounds of a frame's `pixels`, mean, std and patch sizes of `images`."""
        return cls(replace(images, min_pixels=pixels[0], max_pixels=pixels[1]))

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        images: ImageSettings,
        vision: Any,
        pixels: tuple[int, int] = MediaDefaults.video_pixels,
        **overrides: Any,
    ) -> VideoSettings:
        """Read video_preprocessor_config.json (or `video_processor` in processor_config.json).

        A folder without either gets the defaults above: the image processor's own max_pixels,
        which transformers falls back to, would allow 16,384 tokens a frame.
        """
        config, where = read_config(folder, "video_processor", "video_preprocessor_config.json")
        frames = ImageSettings.from_config(
            config, vision, cls.default(images, pixels).images, where
        )
        keys = [field.name for field in fields(cls) if field.name != "images"]
        options = {key: config[key] for key in keys if config.get(key)}
        options |= {key: value for key, value in overrides.items() if value is not None}
        settings = cls(images=frames, **options)
        if settings.fps <= 0 or not 0 < settings.min_frames <= settings.max_frames:
            raise DataError(
                f"{where}: fps {settings.fps} must be above 0 and min_frames "
                f"{settings.min_frames} from 1 to max_frames {settings.max_frames}"
            )
        if settings.num_frames is not None and settings.num_frames < 1:
            raise DataError(f"num_frames must be at least 1, got {settings.num_frames}")
        return settings

    def sample(self, info: MediaInfo) -> list[int]:
        """Which frames of a file are used, ascending.

        Source: `Qwen2VLVideoProcessor.sample_frames`; `num_frames` is not rounded to an even
        number, since an odd last frame is repeated, and a video of one frame gives that frame.
        """
        total = info.frames
        if self.num_frames is not None:
            count = min(self.num_frames, total)
        else:
            step = self.images.temporal_patch_size
            most = math.floor(min(self.max_frames, total) / step) * step
            count_wanted = total / (info.fps or self.fps) * self.fps
            count_wanted = min(max(count_wanted, self.min_frames), most, total)
            count = max(math.floor(count_wanted / step) * step, 1)
        return [min(int(i * (total / count)), total - 1) for i in range(count)]

    def resized(self, height: int, width: int, frames: int) -> tuple[int, int]:
        """(height, width) of each of the sampled frames. Raises ValueError as `smart_resize`."""
        return self.images.resized(height, width)

    def layout(
        self, media: Media, info: MediaInfo
    ) -> tuple[tuple[int, int, int], float, tuple[float, ...]]:
        """The grid (t, h, w), the seconds each of its t slices stands for, and the second of the
        file at which each slice stands: the mean of its first and last frame's.

        An odd last frame is repeated, so t is rounded up.

        Raises ValueError as `smart_resize`.
        """
        if media.frame_list:
            indices, fps = list(range(info.frames)), media.fps or info.fps or self.fps
        else:
            indices, fps = self.sample(info), info.fps or self.fps
        step, patch, count = self.images.temporal_patch_size, self.images.patch_size, len(indices)
        height, width = self.resized(info.height, info.width, count)
        times = [index / fps for index in indices + [indices[-1]] * (-count % step)]
        pairs = zip(times[::step], times[step - 1 :: step], strict=True)
        return (
            (len(times) // step, height // patch, width // patch),
            step / (count / info.frames * fps),
            tuple((first + last) / 2 for first, last in pairs),
        )


@dataclass(frozen=True)
class TimedVideoSettings(VideoSettings):
    """Those of Qwen3-VL: frames evenly from the first to the last, and bounds of the pixels of all
    frames together (`Qwen3VLVideoProcessor`)."""

    cap_pixels_per_frame: bool = False  # no frame above max_video_tokens or its share of max_pixels
    max_video_tokens: int = 768

    def sample(self, info: MediaInfo) -> list[int]:
        total = info.frames
        if self.num_frames is not None:
            count = min(self.num_frames, total)
        else:
            count = int(total / (info.fps or self.fps) * self.fps)
            count = min(max(count, self.min_frames), self.max_frames, total)
        return np.linspace(0, total - 1, count).round().astype(int).tolist()

    def resized(self, height: int, width: int, frames: int) -> tuple[int, int]:
        images, factor = self.images, self.images.factor
        least, most, step = images.min_pixels, images.max_pixels, images.temporal_patch_size
        if frames < step:
            raise ValueError(
                f"the video has {frames} frame and this model's needs {step}; give it as an image"
            )
        if self.cap_pixels_per_frame:
            share = min(self.max_video_tokens * factor**2, most // frames)
            most = max(share, int(least * 1.05)) * frames
        if 0 < min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        return smart_resize(height, width, factor, least, most, frames, step)


def video_settings(media: MediaDefaults) -> type[VideoSettings]:
    """The class of a family's settings."""
    return TimedVideoSettings if media.timed_videos else VideoSettings


def probe_media(media: Media, sample: Sample, verify: bool) -> MediaInfo:
    """Size, frames and rate of a medium, taken from where they are known already if possible.

    Args:
        media: the image or video.
        sample: its sample; for messages.
        verify: decode all of it, so that a file that is cut short is noticed.

    Raises:
        DataError: missing or broken file, naming it and the sample.
    """
    if media.info is not None:
        return media.info
    return (probe_image if media.kind == "image" else probe_video)(media, sample, verify)


def probe_video(media: Media, sample: Sample, verify: bool) -> MediaInfo:
    """Frame size, frame count and rate of a video; `verify` decodes all of it.

    Raises:
        DataError: missing, no video, no frames, cut short, or frames of different sizes.
    """
    if media.frame_list:
        sizes = [
            probe_image(Media("image", _name(media, i), (part,)), sample, verify)
            for i, part in enumerate(media.parts)
        ]
        if len(set(sizes)) != 1:
            raise sample.fail(
                f"the frames of {media.name} have different sizes "
                f"({sizes[0].width}x{sizes[0].height} and others); make them equal",
                "unreadable",
            )
        return replace(sizes[0], frames=len(sizes), fps=media.fps)
    with _VideoFile(media, sample) as video:
        promised = video.stream.frames  # 0 in formats that do not say
        packets, count = video.count(decode=verify)
        if count == 0:
            raise sample.fail(
                f"the video {media.name} holds no frames; replace it or drop it", "unreadable"
            )
        # Packets, not frames: an edit list may rightly hide some of the frames.
        if packets < promised:
            raise sample.fail(
                f"the video {media.name} is cut short: its header says {promised} frames and it "
                f"holds {packets}; replace it or drop it",
                "unreadable",
            )
        rate = video.stream.average_rate or video.stream.guessed_rate
        context = video.stream.codec_context
        return MediaInfo(context.width, context.height, count, float(rate) if rate else None)


def load_video(
    media: Media, info: MediaInfo, settings: VideoSettings, sample: Sample
) -> np.ndarray:
    """Decode and resize the sampled frames. Returns uint8 [T, H, W, 3].

    Raises:
        DataError: as `probe_video`.
    """

    def resized(frame: np.ndarray) -> np.ndarray:
        height, width = frame.shape[:2]
        return resize(frame, settings.images, settings.resized(height, width, len(wanted)))

    if media.frame_list:
        wanted = list(range(len(media.parts)))
        images = (load_image(media.parts[i], sample, _name(media, i)) for i in wanted)
        return np.stack([resized(np.asarray(image)) for image in images])
    wanted = settings.sample(info)
    frames: list[np.ndarray] = []
    with _VideoFile(media, sample) as video:
        for position, frame in video.frames():
            if len(frames) < len(wanted) and position == wanted[len(frames)]:
                frames.append(resized(video.pixels(frame)))
            if len(frames) == len(wanted):
                break
    if len(frames) < len(wanted):
        raise sample.fail(
            f"the video {media.name} ended after {len(frames)} of {len(wanted)} sampled frames; "
            "has the file changed since it was scanned?",
            "unreadable",
        )
    return np.stack(frames)


def load_frames(
    media: Media, sample: Sample, images: ImageSettings, videos: VideoSettings
) -> np.ndarray:
    """Decode and resize an image or a video. Returns uint8 [T, H, W, 3]; T is 1 for an image.

    Raises:
        DataError: the file is missing or broken.
    """
    if media.kind == "image":
        image = load_image(media.parts[0], sample, media.name)
        try:
            return resize(image, images)[None]
        except ValueError as error:
            raise sample.fail(f"{media.name}: {error}", "unreadable") from None
    return load_video(media, probe_media(media, sample, verify=False), videos, sample)


class _VideoFile:
    """An open video; every failure inside becomes a DataError that names the sample."""

    def __init__(self, media: Media, sample: Sample) -> None:
        self.media, self.sample = media, sample

    def __enter__(self) -> _VideoFile:
        import av

        part = self.media.parts[0]
        try:
            data = part.read()
        except FileNotFoundError:
            raise self.sample.fail(
                f"the file {part.path} is missing; put it there or correct the path in the sample",
                "unreadable",
            ) from None
        except OSError as error:
            raise self.sample.fail(
                f"{self.media.name} cannot be read: {error}", "unreadable"
            ) from None
        try:
            self.container: Any = av.open(io.BytesIO(data))
        except (av.error.FFmpegError, ValueError) as error:
            raise self._broken(error) from None
        if not self.container.streams.video:
            self.container.close()
            raise self.sample.fail(
                f"{self.media.name} has no video stream; is it a video?", "unreadable"
            )
        self.stream = self.container.streams.video[0]
        context = self.stream.codec_context
        if context is None or not 0 < context.width * context.height <= MAX_FILE_PIXELS:
            self.container.close()
            size = "unknown size" if context is None else f"{context.width}x{context.height} pixels"
            raise self.sample.fail(
                f"the frames of {self.media.name} have {size}; at least 1 and at most "
                f"{MAX_FILE_PIXELS} are read",
                "unreadable",
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.container.close()

    def frames(self) -> Iterator[tuple[int, Any]]:
        """Yield (position, frame) in presentation order."""
        import av

        try:
            yield from enumerate(self.container.decode(self.stream))
        except (av.error.FFmpegError, ValueError) as error:
            raise self._broken(error) from None

    def pixels(self, frame: Any) -> np.ndarray:
        """uint8 [height, width, 3]"""
        import av

        try:
            return frame.to_ndarray(format="rgb24")
        except (av.error.FFmpegError, ValueError) as error:
            raise self._broken(error) from None

    def count(self, decode: bool) -> tuple[int, int]:
        """(packets, frames); without decoding the packets stand for the frames."""
        import av

        packets = frames = 0
        try:
            for packet in self.container.demux(self.stream):
                packets += packet.size > 0
                if decode:
                    frames += len(packet.decode())
        except (av.error.FFmpegError, ValueError) as error:
            raise self._broken(error) from None
        return packets, frames if decode else packets

    def _broken(self, error: Exception) -> DataError:
        return self.sample.fail(
            f"{self.media.name} is not a video or is cut short ({error}); replace it or drop it",
            "unreadable",
        )


def _name(media: Media, index: int) -> str:
    return f"frame {index} of {media.name} ({Path(media.parts[index].path).name})"

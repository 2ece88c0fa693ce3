"""Videos to frames: sampled as in transformers, resized, with the times of their slices."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from vlmtrain.data.errors import DataError
from vlmtrain.data.media.images import (
    ImageSettings,
    load_image,
    probe_image,
    read_config,
    resize,
    smart_resize,
)
from vlmtrain.data.media.video_file import VideoFile, check_same_size, is_concealed
from vlmtrain.data.sample import Media, MediaInfo, Sample
from vlmtrain.models.common.family import MediaDefaults

_TIME_TOKENS = 16  # at most, of "<3599.9 seconds>" between the marks of a slice and its neighbours
_SLICE_TOKENS = 64


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
    # With it no frame has more pixels than an even share of 0.9 max_video_tokens.
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 128000
    shared_pixels: ClassVar[bool] = False  # whether bounds of pixels are of all frames together

    def identity(self) -> dict[str, Any]:
        """What decides what a video becomes. A cap that is off is left out, as in data sets that
        were built before there was one."""
        settings = asdict(self)
        if not self.cap_pixels_per_frame and not self.shared_pixels:
            del settings["cap_pixels_per_frame"], settings["max_video_tokens"]
        return settings

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
    ) -> VideoSettings:
        """Read video_preprocessor_config.json (or `video_processor` in processor_config.json).

        A folder without either gets the defaults above: the image processor's own max_pixels,
        which transformers falls back to, would allow 16,384 tokens a frame.
        """
        config, where = read_config(folder, "video_processor", "video_preprocessor_config.json")
        if cls.shared_pixels and config.get("size"):  # the only bounds Qwen3VLVideoProcessor reads
            config = {**config, "min_pixels": None, "max_pixels": None}
        frames = ImageSettings.from_config(
            config, vision, cls.default(images, pixels).images, where
        )
        keys = [field.name for field in fields(cls) if field.name != "images"]
        options = {key: config[key] for key in keys if config.get(key)}
        settings = cls(images=frames, **options)
        if settings.fps <= 0 or not 0 < settings.min_frames <= settings.max_frames:
            raise DataError(
                f"{where}: fps {settings.fps} must be above 0 and min_frames "
                f"{settings.min_frames} from 1 to max_frames {settings.max_frames}"
            )
        if settings.num_frames is not None and settings.num_frames < 1:
            raise DataError(f"num_frames must be at least 1, got {settings.num_frames}")
        return settings

    def with_frames(self, most: int) -> VideoSettings:
        """The settings with at most so many frames."""
        return replace(self, max_frames=most, min_frames=min(self.min_frames, most))

    def within(self, tokens: int, *, frames: bool, pixels: bool) -> VideoSettings:
        """The settings under which no video takes more tokens, where their least values allow it.
        Small frames may: they are enlarged to min_pixels and their sides then rounded up.

        Args:
            frames: whether max_frames may be lowered: to as many frames as fit with the fewest
                pixels that are allowed.
            pixels: whether max_pixels may be: to what these frames leave.
        """
        settings, token = self, self.images.factor**2
        step = self.images.temporal_patch_size
        least = self.images.min_pixels if pixels else self.images.max_pixels
        if frames and self.num_frames is None:
            slices = max(tokens * token // max(least, token), 1)
            if slices * step < self.max_frames:
                settings = self.with_frames(slices * step)
        if pixels:
            most = tokens // settings.most_slices * token
            settings = replace(settings, images=self.images.lowered(most))
        return settings

    @property
    def most_slices(self) -> int:
        """Of a video: t of its grid."""
        return -(-(self.num_frames or self.max_frames) // self.images.temporal_patch_size)

    def used(self, media: Media, info: MediaInfo) -> list[int]:
        """Which frames of a video are used, ascending: of a file what `sample` says; of a list,
        which was sampled by whoever made it, all, or evenly as many as are allowed."""
        if not media.frame_list:
            return self.sample(info)
        return replace(self, num_frames=self.num_frames or self.max_frames).sample(info)

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
        # The reference's torch.arange rounds to float32 before it cuts off. (Eight at a time, so
        # that in videos of more than 12,000 frames a few are the frame beside.)
        places = (np.arange(count) * (total / count)).astype(np.float32).astype(int)
        return np.minimum(places, total - 1).tolist()

    def resized(self, height: int, width: int, frames: int) -> tuple[int, int]:
        """(height, width) of each of the sampled frames. Raises ValueError as `smart_resize`."""
        images = self.images
        if self.cap_pixels_per_frame:
            step, token = images.temporal_patch_size, images.factor**2
            share = int(0.9 * self.max_video_tokens * token) * step // frames
            most = max(min(images.max_pixels, share), int(1.05 * images.min_pixels))
            images = replace(images, max_pixels=most)
        return images.resized(height, width)

    def layout(
        self, media: Media, info: MediaInfo
    ) -> tuple[tuple[int, int, int], float, tuple[float, ...]]:
        """The grid (t, h, w), the seconds each of its t slices stands for, and the second of the
        file at which each slice stands: the mean of its first and last frame's.

        An odd last frame is repeated, so t is rounded up.

        Raises ValueError as `smart_resize`.
        """
        indices = self.used(media, info)
        # A list of frames has its own rate, whatever is set for files; 2.0 is qwen-vl-utils'.
        fps = media.fps or info.fps or (VideoSettings.fps if media.frame_list else self.fps)
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

    max_video_tokens: int = 768  # of a frame, which is capped at its share of max_pixels too
    shared_pixels: ClassVar[bool] = True

    def within(self, tokens: int, *, frames: bool, pixels: bool) -> VideoSettings:
        """As there; of the tokens, a slice's time in the text takes _TIME_TOKENS. max_frames is
        lowered to as many as have _SLICE_TOKENS for each slice."""
        settings: VideoSettings = self
        step, token = self.images.temporal_patch_size, self.images.factor**2
        if frames and self.num_frames is None:
            most = max(tokens // _SLICE_TOKENS, 1) * step
            settings = self.with_frames(min(most, self.max_frames))
        if pixels:
            slices = settings.most_slices
            left = max(tokens - slices * _TIME_TOKENS, slices) * step * token
            settings = replace(settings, images=self.images.lowered(left))
        return settings

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
        for info in sizes:
            check_same_size(
                media, sample, (sizes[0].width, sizes[0].height), (info.width, info.height)
            )
        return replace(sizes[0], frames=len(sizes), fps=media.fps)
    if verify:
        try:
            with VideoFile(media, sample, {"err_detect": "explode"}) as video:
                return video.scan(verify)
        except DataError:
            if is_concealed(media, sample):
                raise
    with VideoFile(media, sample) as video:
        return video.scan(verify)


def load_video(
    media: Media, info: MediaInfo, settings: VideoSettings, sample: Sample
) -> np.ndarray:
    """Decode and resize the sampled frames. Returns uint8 [T, H, W, 3].

    Raises:
        DataError: as `probe_video`.
    """
    wanted = settings.used(media, info)
    frames: list[np.ndarray] = []

    def resized(frame: np.ndarray) -> np.ndarray:
        height, width = frame.shape[:2]
        return resize(frame, settings.images, settings.resized(height, width, len(wanted)))

    if media.frame_list:
        first = None
        for i in wanted:
            image = load_image(media.parts[i], sample, _name(media, i))
            first = first or image.size
            check_same_size(media, sample, first, image.size)
            frames.append(resized(np.asarray(image)))
        return np.stack(frames)
    with VideoFile(media, sample) as video:
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
        DataError: the file is missing or broken, or has another size than `media` says.
    """
    info = probe_media(media, sample, verify=False)
    try:
        if media.kind == "image":
            frames = resize(load_image(media.parts[0], sample, media.name), images)[None]
            size = images.resized(info.height, info.width)
        else:
            frames = load_video(media, info, videos, sample)
            size = videos.resized(info.height, info.width, len(frames))
    except ValueError as error:
        raise sample.fail(f"{media.name}: {error}", "unreadable") from None
    if frames.shape[1:3] != size:  # as many patches, perhaps, and other positions
        raise sample.fail(
            f"{media.name} has another size than when it was scanned (resized {frames.shape[2]}x"
            f"{frames.shape[1]} pixels, and {size[1]}x{size[0]} then); start the run again",
            "unreadable",
        )
    return frames


def _name(media: Media, index: int) -> str:
    return f"frame {index} of {media.name} ({Path(media.parts[index].path).name})"

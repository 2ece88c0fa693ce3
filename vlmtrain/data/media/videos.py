"""Videos to frames: PyAV decoding, frame sampling as in transformers, times of slices."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

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

_TIME_TOKENS = 16  # at most, of "<3599.9 seconds>" between the marks of a slice and its neighbours
_SLICE_TOKENS = 64
_CONCEALING = ("h264", "mpeg4")  # decoders that fill what is damaged from other frames


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
            _same_size(media, sample, (sizes[0].width, sizes[0].height), (info.width, info.height))
        return replace(sizes[0], frames=len(sizes), fps=media.fps)
    if verify:
        try:
            with _VideoFile(media, sample, {"err_detect": "explode"}) as video:
                return video.scan(verify)
        except DataError:
            if _is_concealed(media, sample):
                raise
    with _VideoFile(media, sample) as video:
        return video.scan(verify)


def _is_concealed(media: Media, sample: Sample) -> bool:
    """Whether the decoder fills something that is damaged from other frames: those that it gives
    are other ones than without. A strict one refuses what is harmless too (a clip that was cut
    refers to frames before it, a camera's side information is malformed)."""
    try:
        concealing, plain = {"ec": "guess_mvs+deblock"}, {"ec": "0"}
        with (
            _VideoFile(media, sample, concealing) as one,
            _VideoFile(media, sample, plain) as other,
        ):
            pairs = itertools.zip_longest(one.frames(), other.frames())
            return any(a is None or b is None or _differ(a[1], b[1]) for a, b in pairs)
    except DataError:
        return False  # what is wrong will be said


def _differ(one: Any, other: Any) -> bool:
    return any(bytes(a) != bytes(b) for a, b in zip(one.planes, other.planes, strict=True))


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
            _same_size(media, sample, first, image.size)
            frames.append(resized(np.asarray(image)))
        return np.stack(frames)
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


class _Orientation(NamedTuple):
    """How the display matrix of a video (a phone held upright) moves a frame's pixels."""

    transposed: bool = False
    down: int = 1  # step through the rows; -1: from the last
    across: int = 1  # through the columns

    @classmethod
    def of(cls, frame: Any) -> _Orientation:
        """Raises ValueError for an angle that is not a multiple of 90 degrees."""
        for data in frame.side_data:
            if data.type.name == "DISPLAYMATRIX":
                # (x, y) goes to (a x + c y, b x + d y), in units of 1/65536.
                matrix = np.frombuffer(data, dtype=np.int32)[[0, 1, 3, 4]] / 65536
                a, b, c, d = np.rint(matrix).astype(int).tolist()
                exact = np.abs(matrix - [a, b, c, d]).max() < 0.01
                if exact and abs(a * d) == 1 and b == c == 0:
                    return cls(False, d, a)
                if exact and abs(b * c) == 1 and a == d == 0:
                    return cls(True, b, c)
                raise ValueError(
                    f"its display matrix {matrix.round(3).tolist()} is no multiple of 90 degrees; "
                    "encode it again"
                )
        return cls()

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """The upright frame of uint8 [height, width, 3]."""
        pixels = pixels.transpose(1, 0, 2) if self.transposed else pixels
        return np.ascontiguousarray(pixels[:: self.down, :: self.across])


def _gif_is_cut(data: bytes) -> bool:
    """Whether a GIF ends inside one of its blocks."""

    def table(flags: int) -> int:
        return 3 << (flags & 7) + 1 if flags & 0x80 else 0

    try:
        at = 13 + table(data[10])
        while at < len(data) and data[at] in b"!,":
            at += 2 if data[at] == 0x21 else 11 + table(data[at + 9])  # extension, image
            while data[at]:  # sub-blocks
                at += 1 + data[at]
            at += 1
    except IndexError:
        return True
    return False


class _VideoFile:
    """An open video; every failure inside becomes a DataError that names the sample.

    options: of the decoders that conceal damage (_CONCEALING).
    """

    def __init__(self, media: Media, sample: Sample, options: dict[str, str] | None = None) -> None:
        self.media, self.sample, self.options = media, sample, options
        # Of the first decoded frame: width and height in the file, and how it stands.
        self.size: tuple[int, int] | None = None
        self.orientation = _Orientation()

    def __enter__(self) -> _VideoFile:
        import av

        part = self.media.parts[0]
        try:
            self.data = part.read()
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
            self.container: Any = av.open(io.BytesIO(self.data))
        except (av.error.FFmpegError, ValueError) as error:
            raise self._broken(error) from None
        streams = [one for one in self.container.streams.video if not _is_cover(one)]
        if not streams:
            self.container.close()
            raise self.sample.fail(
                f"{self.media.name} has no video stream; is it a video?", "unreadable"
            )
        self.stream = streams[0]
        context = self.stream.codec_context
        if context is None or not 0 < context.width * context.height <= MAX_FILE_PIXELS:
            self.container.close()
            said = f"have {context.width}x{context.height} pixels" if context else ""
            if context is None or not context.width * context.height:
                said = "have no size (an animated WebP's, say; convert it to MP4 or GIF)"
            raise self.sample.fail(
                f"the frames of {self.media.name} {said}; at least 1 and at most "
                f"{MAX_FILE_PIXELS} pixels are read",
                "unreadable",
            )
        if self.options and context.name in _CONCEALING:
            context.options = self.options
            context.thread_count, context.thread_type = 1, "NONE"  # a thread's error is lost
        return self

    def __exit__(self, *_: object) -> None:
        self.container.close()

    def frames(self) -> Iterator[tuple[int, Any]]:
        """Yield (position, frame) in presentation order."""
        yield from enumerate(frame for packet in self._packets() for frame in self._decode(packet))

    def pixels(self, frame: Any) -> np.ndarray:
        """uint8 [height, width, 3], upright"""
        import av

        try:
            return _Orientation.of(frame)(frame.to_ndarray(format="rgb24"))
        except (av.error.FFmpegError, ValueError) as error:
            raise self._broken(error) from None

    def scan(self, verify: bool) -> MediaInfo:
        """What `probe_video` gives, and its errors.

        Where no header says how many frames there are, all are decoded to be counted. Elsewhere,
        without `verify`, those up to the second keyframe are, since a clip that was cut between
        keyframes begins with some that cannot be; of the others the packets are counted, but for
        those that an edit list hides.
        """
        promised = self._promised
        packets = keys = 0
        times: list[int | None] = []  # of each frame, in the stream's time base
        clock: list[int] = []  # of each packet, as they are decoded
        for packet in self._packets():
            if packet.size:
                packets += 1
                keys += packet.is_keyframe
                if packet.dts is not None:
                    clock.append(packet.dts)
            if verify or not promised or keys < 2 or not times or not packet.size:
                times += [frame.pts for frame in self._decode(packet)]
            elif not packet.is_discard:
                times.append(packet.pts)
        name = self.media.name
        if self.size is None:
            raise self.sample.fail(
                f"the video {name} holds no frames; replace it or drop it", "unreadable"
            )
        # Packets, not frames: an edit list may rightly hide some of the frames. AVI counts those
        # that were dropped when it was recorded, too.
        if packets < promised and (not self._is_avi or _ends_early(self.data)):
            raise self.sample.fail(
                f"the video {name} is cut short: its header says {promised} frames and it holds "
                f"{packets}; replace it or drop it",
                "unreadable",
            )
        if verify and self.container.format.name == "gif" and _gif_is_cut(self.data):
            raise self.sample.fail(
                f"the GIF {name} is cut short in its frame {packets - 1}; replace it or drop it",
                "unreadable",
            )
        width, height = self.size[::-1] if self.orientation.transposed else self.size
        return MediaInfo(width, height, len(times), self._rate(times, clock))

    def _rate(self, times: list[int | None], clock: list[int]) -> float | None:
        """Frames a second on average. The header of MP4, MOV and GIF says that; in other formats
        it names a nominal rate, which the frames' own times replace where they say another."""
        header = self.stream.average_rate or self.stream.guessed_rate
        nominal = float(header) if header else None
        known = [time for time in times if time is not None]
        if self.stream.frames and not self._is_avi or len(known) < max(len(times), 2):
            return nominal
        seconds = (max(known) - min(known)) * float(self.stream.time_base or 0)
        if seconds == 0 or clock != sorted(clock):  # files joined, each with times from 0
            return nominal
        rate = (len(known) - 1) / seconds
        # Times are rounded, to milliseconds in MKV.
        return nominal if nominal and abs(rate / nominal - 1) < 0.02 else rate

    @property
    def _promised(self) -> int:
        """How many packets there should be, 0 in formats that do not say. The index of MP4 and MOV,
        which PyAV gives since 17.0, lacks those that an edit list hides."""
        is_mov = self.container.format.name.startswith("mov,")
        index = getattr(self.stream, "index_entries", ()) if is_mov else ()
        return min(self.stream.frames, len(index) or self.stream.frames)

    @property
    def _is_avi(self) -> bool:
        return bool(self.container.format.name == "avi")

    def _packets(self) -> Iterator[Any]:
        import av

        try:
            yield from self.container.demux(self.stream)
        except (av.error.FFmpegError, ValueError) as error:
            raise self._broken(error) from None

    def _decode(self, packet: Any) -> list[Any]:
        """The frames that are complete with a packet, all of one size."""
        import av

        try:
            frames: list[Any] = packet.decode()
            if frames and self.size is None:
                self.size = frames[0].width, frames[0].height
                self.orientation = _Orientation.of(frames[0])
        except (av.error.FFmpegError, ValueError) as error:
            raise self._broken(error) from None
        for frame in frames:
            _same_size(self.media, self.sample, self.size, (frame.width, frame.height))
        return frames

    def _broken(self, error: Exception) -> DataError:
        return self.sample.fail(
            f"{self.media.name} is not a video, or is damaged or cut short ({error}); replace it "
            "or drop it",
            "unreadable",
        )


def _is_cover(stream: Any) -> bool:
    """Whether a stream is the picture of a song or a film, which PyAV tells since 14.1."""
    import av

    kinds = getattr(av.stream, "Disposition", None)
    return kinds is not None and bool(stream.disposition & kinds.attached_pic)


def _ends_early(avi: bytes) -> bool:
    """Whether a file has fewer bytes than its RIFF chunks say."""
    end = 0
    while avi[end : end + 4] == b"RIFF":
        end += 8 + int.from_bytes(avi[end + 4 : end + 8], "little")
    return end > len(avi)


def _same_size(
    media: Media, sample: Sample, first: tuple[int, int] | None, size: tuple[int, int]
) -> None:
    """Raise DataError where a frame's width and height are not the first one's."""
    if first is not None and size != first:
        cure = "make them equal" if media.frame_list else "encode it again in one size"
        raise sample.fail(
            f"the frames of {media.name} have different sizes ({first[0]}x{first[1]} and "
            f"{size[0]}x{size[1]} pixels); {cure}",
            "unreadable",
        )


def _name(media: Media, index: int) -> str:
    return f"frame {index} of {media.name} ({Path(media.parts[index].path).name})"

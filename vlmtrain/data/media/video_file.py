"""A video file, read by PyAV: its frames, what it says of them, and whether it is whole."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from vlmtrain.data.errors import DataError
from vlmtrain.data.media.images import MAX_FILE_PIXELS
from vlmtrain.data.sample import Media, MediaInfo, Sample

_CONCEALING = ("h264", "mpeg4")  # decoders that fill what is damaged from other frames


class VideoFile:
    """An open video; every failure inside becomes a DataError that names the sample.

    options: of the decoders that conceal damage (_CONCEALING).
    """

    def __init__(self, media: Media, sample: Sample, options: dict[str, str] | None = None) -> None:
        self.media, self.sample, self.options = media, sample, options
        # Of the first decoded frame: width and height in the file, and how it stands.
        self.size: tuple[int, int] | None = None
        self.orientation = _Orientation()

    def __enter__(self) -> VideoFile:
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
            check_same_size(self.media, self.sample, self.size, (frame.width, frame.height))
        return frames

    def _broken(self, error: Exception) -> DataError:
        return self.sample.fail(
            f"{self.media.name} is not a video, or is damaged or cut short ({error}); replace it "
            "or drop it",
            "unreadable",
        )


class _Orientation(NamedTuple):
    """How the display matrix of a video (a phone held upright) moves a frame's pixels."""

    transposed: bool = False
    down: int = 1  # step through the rows; -1: from the last
    across: int = 1  # through the columns

    @classmethod
    def of(cls, frame: Any) -> _Orientation:
        """Raises ValueError for an angle that is not a multiple of 90 degrees."""
        data = _side_data(frame).get("DISPLAYMATRIX")
        if data is None:
            return cls()
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

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """The upright frame of uint8 [height, width, 3]."""
        pixels = pixels.transpose(1, 0, 2) if self.transposed else pixels
        return np.ascontiguousarray(pixels[:: self.down, :: self.across])


def _side_data(frame: Any) -> Any:
    """What a frame has beside its pixels. FFmpeg knows more kinds of it (a photograph's EXIF data
    in MJPEG, the cameras of a spatial video) than PyAV before 19, which raises ValueError for
    every frame that has one: those get a name here, as PyAV 19 does it."""
    from av.sidedata import sidedata

    kinds: Any = sidedata.Type

    def unknown(kind: Any, value: int) -> Any:
        member = object.__new__(kind)
        member._name_, member._value_ = f"UNKNOWN_{value}", value
        return kind._value2member_map_.setdefault(value, member)

    if "_missing_" not in vars(kinds):
        kinds._missing_ = classmethod(unknown)
    return frame.side_data


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


def is_concealed(media: Media, sample: Sample) -> bool:
    """Whether the decoder fills something that is damaged from other frames: those that it gives
    are other ones than without. A strict one refuses what is harmless too (a clip that was cut
    refers to frames before it, a camera's side information is malformed)."""
    try:
        concealing, plain = {"ec": "guess_mvs+deblock"}, {"ec": "0"}
        with (
            VideoFile(media, sample, concealing) as one,
            VideoFile(media, sample, plain) as other,
        ):
            pairs = itertools.zip_longest(one.frames(), other.frames())
            return any(a is None or b is None or _differ(a[1], b[1]) for a, b in pairs)
    except DataError:
        return False  # what is wrong will be said


def _differ(one: Any, other: Any) -> bool:
    return any(bytes(a) != bytes(b) for a, b in zip(one.planes, other.planes, strict=True))


def _is_cover(stream: Any) -> bool:
    """Whether a stream is the picture of a song or a film."""
    import av

    return bool(stream.disposition & av.stream.Disposition.attached_pic)


def _ends_early(avi: bytes) -> bool:
    """Whether a file has fewer bytes than its RIFF chunks say."""
    end = 0
    while avi[end : end + 4] == b"RIFF":
        end += 8 + int.from_bytes(avi[end + 4 : end + 8], "little")
    return end > len(avi)


def check_same_size(
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

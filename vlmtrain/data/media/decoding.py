"""Decoding in processes of their own, so that a decoder's crash costs one sample and not the run.

A decoder is a small Python process (no torch) that reads requests from its standard input and
answers with frames. One that dies, runs out of memory or hangs is reported with the sample it
was reading, and replaced.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
from typing import IO, Any

import numpy as np

from vlmtrain.data.errors import DataError
from vlmtrain.data.media.images import ImageSettings
from vlmtrain.data.media.videos import VideoSettings, load_frames
from vlmtrain.data.sample import Media, Sample

MEMORY_LIMIT = 16 << 30  # bytes of address space of one decoder
TIME_LIMIT = 300.0  # seconds for one image or video,
PIXELS_A_SECOND = 100e6  # and for those of a video's frames, all of which are decoded: the slowest
_LENGTH = struct.Struct("<Q")


class DecoderPool:
    """One decoder process for each thread that asks; close it to end them."""

    def __init__(
        self, images: ImageSettings, videos: VideoSettings, time_limit: float = TIME_LIMIT
    ) -> None:
        self._settings = images, videos
        self._time_limit = time_limit
        self._local = threading.local()
        self._lock = threading.Lock()
        self._started: list[_Decoder] = []

    def frames(self, media: Media, sample: Sample) -> np.ndarray:
        """`load_frames` in this thread's process. Raises DataError naming the sample."""
        decoder: _Decoder | None = getattr(self._local, "decoder", None)
        if decoder is None or decoder.ended:
            decoder = self._local.decoder = _Decoder(*self._settings)
            with self._lock:
                self._started = [one for one in self._started if not one.ended] + [decoder]
        limit, info = self._time_limit, media.info
        if info is not None:
            limit += info.frames * info.width * info.height / PIXELS_A_SECOND
        return decoder.frames(media, sample, limit)

    def close(self) -> None:
        with self._lock:
            for decoder in self._started:
                decoder.end()
            self._started = []


class _Decoder:
    def __init__(self, images: ImageSettings, videos: VideoSettings) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from vlmtrain.data.media.decoding import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # The same packages as here, however they were found.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._requests, self._answers = self.process.stdin, self.process.stdout
        self.ended = False
        self._greeting = pickle.dumps((images, videos))

    def frames(self, media: Media, sample: Sample, time_limit: float) -> np.ndarray:
        try:
            if self._greeting:
                _send(self._requests, self._greeting)
                self._greeting = b""
            _send(self._requests, pickle.dumps((media, Sample(sample.id, (), (), sample.source))))
            if not select.select([self._answers], [], [], time_limit)[0]:
                self.end()
                raise sample.fail(
                    f"{media.name} was not decoded within {time_limit:.0f} s; replace it or drop "
                    "it",
                    "unreadable",
                )
            answer = pickle.loads(_receive(self._answers))
            if isinstance(answer, DataError):
                problem = answer.args[0].removeprefix(sample.fail("").args[0])
                raise sample.fail(problem, answer.kind)
            frames = np.empty(answer, dtype=np.uint8)
            _receive_into(self._answers, frames.data.cast("B"))
            return frames
        except (OSError, EOFError, pickle.UnpicklingError):
            self.end()
            raise sample.fail(
                f"the decoder {_cause(self.process.returncode)} while it read {media.name}; "
                "replace it or drop it",
                "unreadable",
            ) from None

    def end(self) -> None:
        """Also reaps the process."""
        self.ended = True
        if self.process.poll() is None:
            try:  # a decoder that is ending by itself has the better reason
                self.process.wait(0.2)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        self._requests.close()
        self._answers.close()


def serve() -> None:
    """The decoder's side: runs until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever a library prints must not end up among the answers
    requests = sys.stdin.buffer
    _limit_memory()
    try:
        images, videos = pickle.loads(_receive(requests))
        while True:
            media, sample = pickle.loads(_receive(requests))
            try:
                frames = np.ascontiguousarray(load_frames(media, sample, images, videos))
            except DataError as error:
                _send(answers, pickle.dumps(error))
            except MemoryError:
                _send(
                    answers,
                    pickle.dumps(
                        sample.fail(
                            f"{media.name} takes more than {MEMORY_LIMIT >> 30} GiB to decode; "
                            "make it smaller or drop it",
                            "unreadable",
                        )
                    ),
                )
            else:
                _send(answers, pickle.dumps(frames.shape))
                _write(answers, frames.data.cast("B"))
    except (EOFError, BrokenPipeError):
        pass


def _limit_memory() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    except (ImportError, ValueError, OSError):  # not this system's way, or a lower limit stands
        pass


def _cause(code: int) -> str:
    if code == -9:
        return "was killed (out of memory?)"
    if code < 0:
        return f"crashed ({signal.Signals(-code).name})"
    return f"ended with code {code}"


def _send(pipe: IO[bytes], data: bytes) -> None:
    _write(pipe, memoryview(_LENGTH.pack(len(data)) + data))


def _write(pipe: Any, view: memoryview) -> None:
    while len(view):
        view = view[pipe.write(view) :]


def _receive(pipe: IO[bytes]) -> bytearray:
    head = bytearray(_LENGTH.size)
    _receive_into(pipe, memoryview(head))
    data = bytearray(_LENGTH.unpack(head)[0])
    _receive_into(pipe, memoryview(data))
    return data


def _receive_into(pipe: Any, view: memoryview) -> None:
    while len(view):
        count = pipe.readinto(view)
        if not count:
            raise EOFError
        view = view[count:]

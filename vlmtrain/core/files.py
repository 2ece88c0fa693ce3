"""Files that are whole or absent: write beside, sync, rename. And their checksums."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlmtrain.core.errors import UserError

# Checksums and copies go in pieces of this size: large enough for full speed, and small enough
# that another thread never waits long.
PIECE_BYTES = 1 << 23
INCOMPLETE = ".incomplete"
OLD = ".vlmtrain-replaced"  # of no folder that people make: it is removed
REMOVED = ".vlmtrain-removed"  # and a number
MANIFEST = "manifest.json"


class CheckpointError(UserError):
    """A checkpoint or model folder that can't be found, read or written; the message names it."""


def exists(path: str | Path) -> bool:
    """As Path.exists before Python 3.14, as are the next two: what may not be looked at, or can't
    because a disk or server fails, is OSError, where a later Python says that it is not there."""
    return _mode(path) is not None


def is_file(path: str | Path) -> bool:
    return stat.S_ISREG(_mode(path) or 0)


def is_dir(path: str | Path) -> bool:
    return stat.S_ISDIR(_mode(path) or 0)


def _mode(path: str | Path) -> int | None:
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a null byte
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link to itself
            return None
        raise


def fsync_path(path: Path) -> None:
    """Flush one file or folder entry to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_tree(folder: Path) -> None:
    """Flush a folder and everything below it to disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            fsync_path(Path(root) / name)
        fsync_path(Path(root))


def replace_folder(work: Path, target: Path) -> None:
    """Give a finished folder its name; what had the name before goes away last."""
    old = target.with_name(target.name + OLD)
    remove(old)
    if exists(target) or target.is_symlink():
        os.rename(target, old)
    os.rename(work, target)
    fsync_path(target.parent)
    remove(old)


def remove(path: Path) -> None:
    """A folder with all in it; a file; of a link the link. It goes under another name, so that what
    is left of it is taken for nothing; what stays, as on NFS where a file is open, is said."""
    if not (path.is_symlink() or exists(path)):
        return
    start = path.name.removesuffix(OLD) + REMOVED
    left = [one for one in path.parent.glob(f"*{REMOVED}*") if one.name.startswith(start)]
    numbers = [0, *(int(n) for one in left if (n := one.name[len(start) :]).isdecimal())]
    left.append(path.with_name(f"{start}{max(numbers) + 1}"))
    os.rename(path, left[-1])
    for one in left:
        with contextlib.suppress(OSError):
            if one.is_symlink() or is_file(one):
                one.unlink()
            else:
                shutil.rmtree(one, ignore_errors=True)
        if one.is_symlink() or exists(one):
            print(f"{one} can't be removed; it is not needed", file=sys.stderr, flush=True)


def start_folder(target: Path) -> Path:
    """An empty folder beside `target` to work in; `replace_folder` gives it the name.

    What an interrupted run left there goes away; a folder that it had already moved aside to
    put its own in place comes back.
    """
    old = target.with_name(target.name + OLD)
    if exists(old) and not exists(target):
        os.rename(old, target)
    work = target.with_name(target.name + INCOMPLETE)
    remove(work)
    work.mkdir(parents=True)
    return work


def write_text(path: Path, text: str) -> None:
    """As `write_bytes`, of text in UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically: readers see the old content or the new, never a part."""
    work = path.with_name(path.name + INCOMPLETE)
    try:
        with open(work, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(work, path)
    except OSError:
        with contextlib.suppress(OSError):
            work.unlink()
        raise
    fsync_path(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


@contextlib.contextmanager
def writing(
    what: Path | str,
    note: str = "",
    raises: type[UserError] = UserError,
    caught: tuple[type[Exception], ...] = (OSError,),
) -> Iterator[None]:
    """Inside, a disk that is full or fails becomes one sentence that names `what`.

    Raises:
        UserError: the operating system refused a write.
    """
    try:
        yield
    except caught as error:
        reason = getattr(error, "strerror", None) or error
        raise raises(f"{what} can't be written: {reason}{note}") from error


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[None]:
    """As `writing`, of a folder that is written beside `target` and then takes its place.

    Raises:
        CheckpointError: the operating system refused a write.
    """
    with writing(target, "; nothing was replaced by it", CheckpointError):
        yield


class SummedFile:
    """A new file that knows its length and checksum while it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        self.crc32 = 0
        self._file = open(path, "wb", buffering=0)

    def write(self, data: Any) -> int:
        """Append bytes (anything with the buffer protocol, C-contiguous)."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            self.crc32 = zlib.crc32(piece, self.crc32)
            while len(piece):
                piece = piece[self._file.write(piece) or 0 :]
        self.bytes += len(view)
        return len(view)

    def close(self) -> dict[str, int]:
        """Flush to disk; returns the file's entry in a manifest."""
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()
        return {"bytes": self.bytes, "crc32": self.crc32}

    def abandon(self) -> None:
        self._file.close()


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with open(path, "rb") as handle:
        while block := handle.read(PIECE_BYTES):
            value = zlib.crc32(block, value)
    return value


def manifest_of(folder: Path, known: dict[str, dict[str, int]] | None = None) -> dict[str, Any]:
    """Size and checksum of every file below `folder`; `known` ones are not read again."""
    return {
        name: known[name]
        if known and name in known
        else {"bytes": (folder / name).stat().st_size, "crc32": checksum(folder / name)}
        for name in _names(folder)
    }


def _names(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if is_file(path) and path.name != MANIFEST:
            yield str(path.relative_to(folder))


def verify_manifest(folder: Path, hint: str = "") -> None:
    """Compare a folder with its manifest.

    Raises:
        CheckpointError: names the file that is missing, cut short or changed; `hint` says what
            to do instead.
    """
    path = folder / MANIFEST
    try:
        entries = json.loads(path.read_text())
    except (FileNotFoundError, ValueError) as error:
        raise CheckpointError(f"{path} is missing or damaged{hint}") from error
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    for name, want in entries.items():
        file = folder / name
        size = file.stat().st_size if is_file(file) else None
        if size != want["bytes"]:
            got = "missing" if size is None else f"{size} bytes"
            raise CheckpointError(
                f"{file} is {got}, {want['bytes']} bytes were written; the checkpoint is "
                f"damaged{hint}"
            )
        if checksum(file) != want["crc32"]:
            raise CheckpointError(
                f"{file} has changed since it was written (checksum); the checkpoint is "
                f"damaged{hint}"
            )

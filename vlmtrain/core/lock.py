"""One run at a time in an output folder.

Two at once would cut each other's metrics.jsonl and clear away each other's unfinished
checkpoints. The lock is the operating system's and goes with the process, however it ends. Not by
filelock, which torch brings: it does not tell who holds a lock, its older releases even empty the
file that says so, and where a file system has no locks a run must go on.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import IO

from vlmtrain.core.errors import UserError
from vlmtrain.core.files import writing

NAME = ".lock"
_PATIENCE = 5.0  # seconds: ranks whose launcher was killed end by themselves within two
_HELD = (errno.EWOULDBLOCK, errno.EACCES)


class FolderLock:
    """Held from `acquire` to `release`, or to the end of the process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Take the lock of an existing folder.

        Raises:
            UserError: another run holds it, or its file can't be written.
        """
        with writing(f"--output {self.folder}"):
            file = open(self.folder / NAME, "a+", encoding="utf-8")
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in _HELD:
                    file.close()
                    print(
                        f"--output {self.folder} can't be locked ({error.strerror}): see that no "
                        "other run writes there",
                        flush=True,
                    )
                    return
                if time.monotonic() < end:
                    time.sleep(0.2)
                    continue
                file.seek(0)
                holder = file.read().strip() or "another process"
                file.close()
                raise UserError(
                    f"--output {self.folder} is in use by {holder}; wait until that run ends, "
                    "stop it, or name another folder"
                ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self._file = file

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

"""Does what the pages say, in the current folder and in this one process: start-up is paid once.

    python follow.py RESULTS.json

writes a list of [page, command, exit code expected, exit code, output].
"""

from __future__ import annotations

import json
import os
import runpy
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.docs.pages import PATH, blocks  # noqa: E402


@contextmanager
def caught() -> Iterator[list[str]]:
    """What this process and those that it starts print, at the level of file descriptors."""
    actual: list[str] = []
    kept = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile("w+") as file:
        sys.stdout.flush()
        sys.stderr.flush()
        for target in (1, 2):
            os.dup2(file.fileno(), target)
        try:
            yield actual
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for target, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, target)
                os.close(copy)
            file.seek(0)
            actual.append(file.read())


def run(command: str) -> int:
    """One line of a shell block; returns its exit code."""
    words = shlex.split(command)
    if words[0] == "vlmtrain":
        from vlmtrain import cli

        return ended(lambda: cli.main(words[1:]))
    if words[:2] != ["python", "-m"]:
        raise ValueError(f"{command!r} is neither vlmtrain nor python -m: mark it as not run")
    return ended(lambda: runpy.run_module(words[2], run_name="__main__") and 0)


def ended(work: Callable[[], int]) -> int:
    try:
        return work() or 0
    except SystemExit as end:
        return int(end.code or 0)
    except Exception:  # what a reader would see as a traceback
        traceback.print_exc()
        return 70


def main(results: Path) -> None:
    actual = []
    for page in PATH:
        names: dict[str, object] = {}
        for block in blocks(page):
            if block.skipped is not None:
                continue
            if block.file is not None:
                Path(block.file).write_text(block.body, encoding="utf-8")
            elif block.language == "python":
                with caught() as output:
                    code = ended(lambda: exec(block.body, names) or 0)  # noqa: B023
                actual.append((page, block.body, 0, code, output[0]))
            elif block.language == "sh":
                for command, expected in block.commands:
                    with caught() as output:
                        code = run(command)
                    actual.append((page, command, expected, code, output[0]))
    results.write_text(json.dumps(actual))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

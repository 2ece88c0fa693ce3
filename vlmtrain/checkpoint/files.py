"""Files that are whole or absent: write beside, sync, rename."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any


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
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(work, target)
    fsync_path(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: readers see the old content or the new, never a part."""
    work = path.with_name(path.name + ".incomplete")
    with open(work, "w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(work, path)
    fsync_path(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")

"""What the --output folder of a run holds: checkpoints, and the model when it has ended."""

from __future__ import annotations

import re
from pathlib import Path

from vlmtrain.core.errors import UserError
from vlmtrain.core.files import exists, is_dir, is_file

_NAME = re.compile(r"step-(\d{8})$")


def name_of(step: int) -> str:
    """The folder of a checkpoint."""
    return f"step-{step:08d}"


def complete(folder: Path) -> list[int]:
    """Steps of the checkpoints in OUTPUT/checkpoints that have their final name, oldest first."""
    if not is_dir(folder):
        return []
    return sorted(int(m[1]) for p in folder.iterdir() if (m := _NAME.match(p.name)))


def pointed_at(pointer: Path) -> Path | None:
    """The checkpoint that `latest` or `best` names, if both are there."""
    named = pointer.read_text(encoding="utf-8").strip() if is_file(pointer) else ""
    path = pointer.parent / named
    return path if _NAME.fullmatch(named) and is_dir(path) else None


def history_in(folder: Path) -> list[int]:
    """Of `complete` those of the run that `latest` belongs to, as the file `history` names them.
    Of a run that was gone back from there are none."""
    file = folder / "history"
    names = file.read_text(encoding="utf-8").split() if is_file(file) else None
    return [step for step in complete(folder) if names is None or name_of(step) in names]


def newest_in(folder: Path) -> Path | None:
    """Of OUTPUT/checkpoints the one that `latest` names, or where that is gone the one before."""
    steps = history_in(folder)
    return pointed_at(folder / "latest") or (folder / name_of(steps[-1]) if steps else None)


def model_of(folder: Path) -> Path:
    """`folder`, or, where it is the --output of a run, the Hugging Face folder that the run wrote.

    Raises:
        UserError: the run has not ended.
    """
    if exists(folder / "config.json") or not exists(folder / "run.json"):
        return folder
    if exists(folder / "hf" / "config.json"):
        return folder / "hf"
    newest = newest_in(folder / "checkpoints")
    other = "" if newest is None else f", take {newest}"
    raise UserError(
        f"--model {folder} is a run that has no hf/ yet; name the model that it began from{other}, "
        "or let it end first"
    )

"""Any folder that holds a model, as a Hugging Face folder that transformers loads."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlmtrain.checkpoint.convert import to_hf
from vlmtrain.checkpoint.hf.files import ModelFiles
from vlmtrain.checkpoint.megatron.source import MegatronSource
from vlmtrain.checkpoint.megatron.torch_dist import is_checkpoint
from vlmtrain.checkpoint.merge import base_of, from_peft, is_adapter
from vlmtrain.core.files import CheckpointError, is_file
from vlmtrain.core.run_folder import model_of, newest_in
from vlmtrain.models.family import read_spec


def newest(folder: Path) -> Path:
    """`folder`, or of OUTPUT its hf/, of OUTPUT/checkpoints the newest checkpoint in it, of
    OUTPUT/checkpoints/best the one that it names."""
    folder = model_of(folder)
    if is_file(folder / "config.json") or is_adapter(folder):
        return folder  # `latest` may stand beside it: DeepSpeed's
    if folder.name == "best" and is_file(folder):
        return folder.parent / folder.read_text(encoding="utf-8").strip()
    return newest_in(folder) or folder


def described(model: Path) -> Path:
    """The folder whose config.json describes a model: of an adapter its base model's.

    Raises:
        WeightError: as `base_of`.
    """
    model = newest(model)
    return newest(base_of(model)) if is_adapter(model) else model


def needs_merging(model: Path) -> bool:
    """Whether a model is weights with LoRA adapters apart: a peft folder, or a checkpoint."""
    model = newest(model)
    if is_checkpoint(model):
        return MegatronSource(model, read_spec(model)).has_adapters
    return is_adapter(model)


@contextmanager
def as_hf(model: Path, work: Path | None = None) -> Iterator[Path]:
    """`model` as a Hugging Face folder, for as long as the context lasts.

    Args:
        model: a Hugging Face folder (yielded as it is), a Megatron or training checkpoint (LoRA
            adapters in it are merged), OUTPUT/checkpoints (the newest one), or a LoRA adapter
            (merged into the base model that it names).
        work: folder for the converted weights, which go away afterwards; default: the system's
            temporary folder (TMPDIR). They take as much room as the model.

    Raises:
        UserError: the folder holds no model, or what it holds does not fit together.
    """
    model = newest(Path(model))
    if not is_adapter(model) and not is_checkpoint(model):
        yield model
        return
    folder = Path(tempfile.mkdtemp(prefix="vlmtrain-weights-", dir=work))
    with _removed_at_the_end(folder):
        if is_checkpoint(model):
            to_hf(model, folder / "hf")
        else:
            base = newest(base_of(model))
            if is_adapter(base):
                raise CheckpointError(f"{model}: its base model {base} is an adapter itself")
            to_hf(from_peft(model, base), folder / "hf")
            ModelFiles(model).write_processor(folder / "hf")
        yield folder / "hf"


@contextmanager
def _removed_at_the_end(folder: Path) -> Iterator[None]:
    """Also where SIGTERM or SIGHUP ends the process, if nothing else handles them."""

    def end(number: int, _: object) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    handled = []
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, end)
                handled.append(number)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for number in handled:
            signal.signal(number, signal.SIG_DFL)

"""Weights wherever they lie: a Hugging Face folder or a Megatron checkpoint, read by the piece.

Both kinds of source answer the same two questions: what is one tensor-parallel rank's piece of a
Megatron tensor, and what are the Hugging Face tensors of a row of the table. Training and the
offline converter ask them alike, so a run starts from either kind of folder.
"""

from __future__ import annotations

from pathlib import Path

from vlmtrain.checkpoint.hf.source import HFSource
from vlmtrain.checkpoint.mapping import WeightError
from vlmtrain.checkpoint.megatron.source import MegatronSource
from vlmtrain.checkpoint.megatron.torch_dist import is_checkpoint
from vlmtrain.core.files import CheckpointError
from vlmtrain.core.spec import ModelSpec

Source = HFSource | MegatronSource


def open_weights(folder: str | Path, spec: ModelSpec) -> Source:
    """The weights in a folder, whichever kind it is; not checked yet (`check`)."""
    folder = Path(folder)
    return MegatronSource(folder, spec) if is_checkpoint(folder) else HFSource(folder, spec)


def check_weights(folder: str | Path, spec: ModelSpec) -> None:
    """Raise WeightError unless a folder holds exactly the weights that its config asks for."""
    try:
        open_weights(folder, spec).check()
    except CheckpointError as error:
        raise WeightError(str(error)) from error

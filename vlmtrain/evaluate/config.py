"""The options of `vlmtrain evaluate`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vlmtrain.core.config import (
    Count,
    LoaderSection,
    MediaSection,
    ParallelSection,
    Positive,
    check_ranges,
)
from vlmtrain.core.errors import UserError
from vlmtrain.core.files import exists, is_dir

# Of --loader; the others (template, system, media_root, max_samples, ignore_keys) hold for --tasks.
_DATA_ONLY = ("packing", "unreadable", "too_long", "skip_limit", "workers", "verify")


@dataclass
class EvaluateConfig:
    """Measure a model: --data gives loss and perplexity, --tasks scores; both may be given."""

    model: Path
    """Hugging Face folder, a run's OUTPUT, training checkpoint (also OUTPUT/checkpoints: the
    newest), or LoRA adapter folder."""
    tasks: Path | None = None
    """JSONL file of questions with right answers (docs/evaluation.md)."""
    data: str = ""
    """Held-out conversations, in all forms that training takes."""
    output: Path = Path("evaluate_out")
    """Folder for scores.json and answers.jsonl; those of an earlier run are replaced."""
    nproc: Count = 0
    """Processes to start on this machine; 0: join the launcher's (torchrun, Slurm, MPI)."""
    pack_length: Positive = 8192
    """Tokens that a pack holds at most; with --data."""
    global_batch_packs: Count = 0
    """Packs computed together; with --data. 0: as few as the layout needs."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """auto: bf16 on a GPU, fp32 on the CPU."""
    max_new_tokens: Positive = 512
    """Longest answer; with --tasks."""
    kernels: bool = True
    """With --tasks: run vlmkernels in transformers' model; --no_kernels: its own code alone."""
    parallel: ParallelSection = field(default_factory=ParallelSection)
    loader: LoaderSection = field(default_factory=LoaderSection)
    media: MediaSection = field(default_factory=MediaSection)

    def validate(self) -> None:
        """Raise UserError for options that can't be used."""
        if self.tasks is None and not self.data:
            raise UserError("nothing to measure; pass --data, --tasks or both")
        check_ranges(self)
        for name in _DATA_ONLY:
            value = getattr(self.loader, name)
            if not self.data and value != getattr(LoaderSection, name):
                raise UserError(
                    f"--loader.{name} is {value}, which says how --data is read; for --tasks it "
                    "means nothing: leave it out"
                )
        if exists(self.output) and not is_dir(self.output):
            raise UserError(f"--output {self.output} is a file; name a folder")

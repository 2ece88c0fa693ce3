"""The configuration of a run: typed sections, read from TOML and from the command line.

The dataclasses are the whole truth: the command line is made from them, and a recipe (a TOML
file or a function that returns a `TrainConfig`) fills the same fields.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vlmtrain.errors import UserError


class ConfigError(UserError):
    """A setting that can't be used; the message names it, its value and what is valid."""


@dataclass
class TrainSection:
    """How long and on what."""

    steps: int = 0
    """Optimizer steps; 0: as many as `epochs` take."""
    epochs: float = 1.0
    """Passes over the data, where `steps` is 0."""
    pack_length: int = 8192
    """Tokens per pack (one pack is one microbatch)."""
    global_batch: int = 8
    """Packs per optimizer step, over all data-parallel ranks."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Type of parameters and activations; optimizer state is float32 in both."""
    seed: int = 0
    """Seed of the data order and of freshly initialised values."""
    log_every: int = 1
    """Steps between two progress lines; metrics.jsonl has every step."""


@dataclass
class OptimizerSection:
    """AdamW with linear warm-up and cosine decay."""

    lr: float = 1e-5
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the cosine."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices; vectors (biases, norms) are not decayed."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    offload_fraction: float = 0.0
    """Share of the optimizer state kept in host memory."""


@dataclass
class ParallelSection:
    """How the model is spread over processes."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    sequence: bool = False
    """Sequence parallelism inside the tensor-parallel group."""
    vision_layers: tuple[int, ...] = ()
    """Vision layers per stage, e.g. 32 0 0 0; empty: all on the first stage."""
    text_layers: tuple[int, ...] = ()
    """Language layers per stage, e.g. 1 10 10 7; empty: balanced by FLOPs."""
    vision: Literal["pipelined", "multiplexed"] = "pipelined"
    """Where images are encoded: on the first stages, or on every rank."""


@dataclass
class FreezeSection:
    """Parts of the model that keep their weights."""

    vision: bool = False
    merger: bool = False
    language: bool = False


@dataclass
class LoraSection:
    """Low-rank adapters."""

    rank: int = 0
    """0: train the weights themselves."""
    alpha: float = 32.0
    targets: tuple[str, ...] = ()


@dataclass
class CheckpointSection:
    """Resumable checkpoints in OUTPUT/checkpoints."""

    every: int = 0
    """Steps between checkpoints; 0: only at the end."""
    keep: int = 2
    """Newest checkpoints to keep."""
    resume: str = "none"
    """latest, a step number, or none."""


@dataclass
class TrainConfig:
    """Everything `vlmtrain train` needs."""

    model: Path
    """Hugging Face folder: config.json, *.safetensors, tokenizer."""
    data: str
    """Conversation files (.json, .jsonl) or WebDataset folders, comma-separated."""
    output: Path
    """Folder for metrics.jsonl, checkpoints/ and hf/."""
    nproc: int = 0
    """Processes to start on this machine; 0: join the launcher's (torchrun, Slurm, MPI)."""
    train: TrainSection = field(default_factory=TrainSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    freeze: FreezeSection = field(default_factory=FreezeSection)
    lora: LoraSection = field(default_factory=LoraSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)

    def validate(self) -> None:
        """Raise ConfigError for the first setting that can't be used."""
        for name, smallest in (
            ("train.steps", 0),
            ("train.epochs", 0),
            ("train.pack_length", 1),
            ("train.global_batch", 1),
            ("train.log_every", 1),
            ("optimizer.lr", 0),
            ("optimizer.min_lr", 0),
            ("optimizer.warmup_steps", 0),
            ("optimizer.weight_decay", 0),
            ("optimizer.clip", 0),
            ("checkpoint.every", 0),
            ("checkpoint.keep", 1),
            ("nproc", 0),
        ):
            value = self._get(name)
            if not value >= smallest:
                raise ConfigError(f"--{name} is {value}; it must be at least {smallest}")
        if self.optimizer.min_lr > self.optimizer.lr:
            raise ConfigError(
                f"--optimizer.min_lr {self.optimizer.min_lr} is above --optimizer.lr "
                f"{self.optimizer.lr}"
            )
        resume = self.checkpoint.resume
        if resume not in ("latest", "none") and not resume.isdigit():
            raise ConfigError(
                f"--checkpoint.resume is {resume!r}; use latest, none or a step number"
            )
        self._refuse_what_is_not_built()

    def _refuse_what_is_not_built(self) -> None:
        """Accepted by the command line's fixed surface, not available in this version."""
        refused = {
            "--optimizer.offload_fraction": self.optimizer.offload_fraction != 0,
            "--parallel.vision multiplexed": self.parallel.vision != "pipelined",
            "--lora.rank": self.lora.rank != 0,
        }
        for name, asked in refused.items():
            if asked:
                raise ConfigError(f"{name} is not available in this version; leave it out")

    def _get(self, dotted: str) -> Any:
        value: Any = self
        for part in dotted.split("."):
            value = getattr(value, part)
        return value


def from_toml(path: Path, base: TrainConfig) -> TrainConfig:
    """`base` with the settings of a TOML recipe laid over it.

    Raises:
        ConfigError: unreadable file, unknown key (with the valid ones), or a value of the
            wrong type; the message names the file and the key.
    """
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef]
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--config {path} is not valid TOML: {error}") from error
    return _overlay(base, table, f"{path}: ")


def _overlay(section: Any, table: dict[str, Any], where: str) -> Any:
    known = {f.name: f for f in dataclasses.fields(section)}
    changes: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"{where}unknown key {key!r}; valid keys are {', '.join(known)}")
        current = getattr(section, key)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, dict):
                raise ConfigError(f"{where}{key} must be a table, it is {value!r}")
            changes[key] = _overlay(current, value, f"{where}{key}.")
        else:
            changes[key] = _convert(current, value, f"{where}{key}")
    return dataclasses.replace(section, **changes)


def _convert(current: Any, value: Any, where: str) -> Any:
    if isinstance(current, Path) and isinstance(value, str):
        return Path(value)
    if isinstance(current, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(current, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not type(current):
        raise ConfigError(f"{where} must be of type {type(current).__name__}, it is {value!r}")
    return value


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Plain values, for run records."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, (tuple, list)):
            return [plain(v) for v in value]
        return str(value) if isinstance(value, Path) else value

    return plain(dataclasses.asdict(config))

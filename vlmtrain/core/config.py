"""The configuration of a run: typed sections, read from TOML and from the command line.

The dataclasses are the whole truth: the command line is made from them, and a recipe (a TOML
file or a function that returns a `TrainConfig`) fills the same fields.
"""

from __future__ import annotations

import dataclasses
import math
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from vlmtrain.core.errors import UserError
from vlmtrain.core.options import answer_to, option_names, options_called, say_renamed
from vlmtrain.core.toml import read_toml

# Former names of options, and those of today.
RENAMED = {"train.global_batch": "train.global_batch_packs"}


class ConfigError(UserError):
    """A setting that can't be used; the message names it, its value and what is valid."""


@dataclass(frozen=True)
class Range:
    """Which values of a number are valid, besides being finite.

    Our own, in twenty lines: tyro checks no ranges, and pydantic's errors are paragraphs that name
    fields, not options.
    """

    least: float = 0
    below: float = math.inf
    most: float = math.inf


Count = Annotated[int, Range()]
Positive = Annotated[int, Range(1)]
NonNegative = Annotated[float, Range()]
BelowOne = Annotated[float, Range(below=1)]
Share = Annotated[float, Range(most=1)]
Seed = Annotated[int, Range(below=1 << 32)]
Interval = Annotated[int | Literal["epoch"], Range()]


@dataclass
class TrainSection:
    """How long and on what."""

    steps: Count = 0
    """Optimizer steps; 0: as many as `epochs` take."""
    epochs: Annotated[float, Range(most=10_000)] = 1.0
    """Passes over the data, where `steps` is 0."""
    pack_length: Positive = 8192
    """Tokens that a pack holds at most (one pack is one microbatch)."""
    global_batch_packs: Positive = 8
    """Packs (not samples) per optimizer step, over all data-parallel ranks."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Type of parameters and activations; optimizer state is float32 in both."""
    seed: Seed = 0
    """Seed of the data order and of freshly initialised values."""
    log_every: Positive = 1
    """Steps between two progress lines; metrics.jsonl has every step."""
    tensorboard: bool = True
    """Write metrics for TensorBoard into OUTPUT/tensorboard as well."""
    wandb: str = ""
    """Weights & Biases project to log to as well; empty: none."""
    rehearse: bool = True
    """Make the heaviest steps of the run before step 1, to see that they fit; changes nothing."""
    fit: Literal["refuse", "auto", "ignore"] = "refuse"
    """Where the heaviest step will not fit: say what would; recompute and offload; or try."""
    on_spike: Literal["stop", "skip"] = "stop"
    """Gradients that are not finite, or 100 times the usual: end, or leave out that update."""
    timeout: Annotated[float, Range(most=1e6)] = 10.0
    """Minutes without progress after which all ranks say where they are and end; 0: never."""


@dataclass
class OptimizerSection:
    """AdamW, its learning rate warmed up linearly from 0, then decayed."""

    lr: NonNegative = 1e-5
    """Peak learning rate."""
    vision_lr: Annotated[float | None, Range()] = None
    """That of the vision tower without the merger; none: --optimizer.lr. It follows the same
    schedule, scaled."""
    merger_lr: Annotated[float | None, Range()] = None
    """That of the merger (aligner, projector)."""
    vision_layer_decay: Annotated[float, Range(0.01, most=1)] = 1.0
    """Factor of the learning rate from each of the tower's layers to the one before, as BEiT's."""
    lr_scheduler_type: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """What follows the warm-up; wsd: constant, and a decay at the end (warmup-stable-decay)."""
    min_lr: NonNegative = 0.0
    """Learning rate at the end of the decay."""
    warmup_steps: Count = 0
    """Steps of linear warm-up from 0."""
    warmup_ratio: Share = 0.0
    """The same as a share of all steps."""
    decay_ratio: Share = 0.1
    """With wsd: share of all steps, the last ones, in which the learning rate decays."""
    decay_type: Literal["linear", "cosine", "1-sqrt"] = "linear"
    """With wsd: how."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay of matrices; vectors (biases, norms) are not decayed."""
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    eps: Annotated[float, Range(1e-30)] = 1e-8
    clip: NonNegative = 1.0
    """Largest global gradient norm; 0: no clipping."""
    offload_fraction: Share = 0.0
    """Share of the optimizer state kept in host memory."""
    offload_schedule: tuple[str, ...] = ()
    """STEP:FRACTION ...: other shares from those steps on, while training goes on."""


@dataclass
class ParallelSection:
    """How the model is spread over processes."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    sequence: bool = False
    """Sequence parallelism inside the tensor-parallel group."""
    expert: int = 1
    """Tensor- and data-parallel ranks that share the experts of a mixture of experts."""
    vision_layers: tuple[int, ...] | Literal["auto"] = ()
    """Vision layers per stage, e.g. 32 0 0 0; auto: balanced by FLOPs; empty: all on the first."""
    text_layers: tuple[int, ...] | Literal["auto"] = ()
    """Language layers per stage, e.g. 1 10 10 7; auto or empty: balanced by FLOPs."""
    vision: Literal["pipelined", "multiplexed"] = "pipelined"
    """Where images are encoded: on the first stages, or on every rank."""
    vision_piece: Positive = 16384
    """Patches that a rank of multiplexed vision encodes at once: less takes less memory."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over data-parallel ranks while the backward pass goes on."""
    overlap_param_gather: bool = False
    """Gather updated weights from them while the next forward pass goes on."""
    tensor_overlap: bool = False
    """Exchange gradients of activations over tensor-parallel ranks during the weights' products."""


@dataclass
class FreezeSection:
    """Parts of the model that keep their weights."""

    vision: bool = False
    merger: bool = False
    language: bool = False


@dataclass
class LoraSection:
    """Low-rank adapters."""

    rank: Count = 0
    """0: train the weights themselves."""
    alpha: float = 32.0
    """Adapters are scaled by alpha / rank."""
    dropout: float = 0.0
    targets: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Linears that get adapters, by their Hugging Face names; the tower's are qkv, proj,
    fc1, fc2 (Qwen2-VL), linear_fc1, linear_fc2 (Qwen3-VL), gate_proj, up_proj, down_proj
    (Qwen2.5-VL)."""
    vision: bool = False
    """Adapters on those of the vision tower's linears that targets names as well."""


Recompute = Literal["none", "selective", "full"]


@dataclass
class RecomputeSection:
    """Activations that are computed again in the backward pass instead of kept."""

    vision: Recompute = "none"
    """selective: the MLPs, where most of a layer's activations are; full: whole layers."""
    language: Recompute = "none"


@dataclass
class CheckpointSection:
    """Resumable checkpoints in OUTPUT/checkpoints."""

    every: Interval = 0
    """Steps between checkpoints, or epoch: at the end of each; 0: only at the end."""
    keep: Positive = 2
    """Newest checkpoints to keep."""
    keep_every: Count = 0
    """Checkpoints of steps that this divides are kept for good; 0: none."""
    keep_best: bool = False
    """Save at each evaluation with the lowest held-out loss so far, and keep the last of these."""
    hf: bool = False
    """In each checkpoint also a Hugging Face folder, hf/ (with LoRA merged, and adapter/)."""
    resume: str = "none"
    """latest, best, a step number, or none."""


@dataclass
class EvaluateSection:
    """Loss on held-out conversations while training goes on; it changes nothing in training."""

    every: Interval = 0
    """Steps between two evaluations, or epoch: at the end of each; 0: only at the end."""
    data: str = ""
    """Held-out conversations, as --data; empty: no evaluation."""
    split_ratio: Annotated[float, Range(below=1)] = 0.0
    """Instead: share of --data that is held out, chosen by the samples' checksums."""


@dataclass
class MediaSection:
    """How large images and videos become. 0: as the model folder says, and in training at most so
    large that one takes half a pack."""

    max_pixels: Count = 0
    """Largest area of an image; a token is 28 x 28 pixels (of Qwen3-VL 32 x 32)."""
    min_pixels: Count = 0
    """Smallest area of an image; smaller ones are enlarged."""
    video_max_pixels: Count = 0
    """Largest area of a frame, of Qwen3-VL of all frames; a token is 28 x 28 pixels of two."""
    fps: NonNegative = 0.0
    """Frames a second taken from videos."""
    max_frames: Count = 0
    """Frames taken from a video, at most; longer ones are sampled at a lower rate."""


@dataclass
class LoaderSection:
    """How `--data` is read, packed and dealt out."""

    packing: Literal["balanced", "best_fit", "bucket", "in_order", "none"] = "balanced"
    """balanced: full packs of even cost, dealt to the ranks by cost; the others for comparison."""
    unreadable: Literal["raise", "skip"] = "raise"
    """What a bad sample means: the end, or a line in the log and one sample less. Samples longer
    than a pack: too_long."""
    too_long: Literal["error", "drop", "truncate"] = "error"
    """What a sample longer than a pack means: the end, one sample less, or its text cut off."""
    skip_limit: Count = 100
    """With `unreadable skip`: bad samples allowed at the start, and again during the run."""
    workers: Count = 2
    """Decoder processes of each rank that needs pixels; 0: threads of the rank itself."""
    verify: bool = True
    """Decode all media of files that are not shards once at the start, to find broken ones."""
    max_samples: Count = 0
    """Of each source only the first so many; 0: all."""
    media_root: str = ""
    """Folder that relative media paths start from; default: the data file's own."""
    template: str = ""
    """File with a Jinja chat template, instead of the model's own."""
    system: str = ""
    """System prompt of conversations that have none, instead of the template's own."""
    ignore_keys: tuple[str, ...] = ()
    """Keys and marks of records that are not looked at; others that are not read are errors."""


@dataclass
class TrainConfig:
    """Everything `vlmtrain train` needs."""

    model: Path
    """Hugging Face folder: config.json, *.safetensors, tokenizer; or a run's OUTPUT."""
    data: str
    """Files (.json, .jsonl, .parquet, .tar), folders of these or of shards, comma-separated; path:2
    counts twice; or a .toml list."""
    output: Path
    """Folder for metrics.jsonl, checkpoints/ and hf/."""
    nproc: Count = 0
    """Processes to start on this machine; 0: join the launcher's (torchrun, Slurm, MPI)."""
    train: TrainSection = field(default_factory=TrainSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    freeze: FreezeSection = field(default_factory=FreezeSection)
    lora: LoraSection = field(default_factory=LoraSection)
    recompute: RecomputeSection = field(default_factory=RecomputeSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    evaluate: EvaluateSection = field(default_factory=EvaluateSection)
    loader: LoaderSection = field(default_factory=LoaderSection)
    media: MediaSection = field(default_factory=MediaSection)

    def validate(self) -> None:
        """Raise ConfigError for the first setting that can't be used."""
        check_ranges(self)
        offload_fractions(self.optimizer)
        self._check_learning_rates()
        if self.parallel.overlap_param_gather and not self.parallel.overlap_grad_reduce:
            raise ConfigError(
                "--parallel.overlap_param_gather needs --parallel.overlap_grad_reduce; turn both on"
            )
        self._check_evaluation()
        resume = self.checkpoint.resume
        if resume not in ("latest", "best", "none") and not resume.isdecimal():
            raise ConfigError(
                f"--checkpoint.resume is {resume!r}; use latest, best, none or a step number"
            )

    def _check_evaluation(self) -> None:
        section = self.evaluate
        if section.data and section.split_ratio:
            raise ConfigError(
                f"--evaluate.data {section.data} and --evaluate.split_ratio {section.split_ratio} "
                "both say what is held out; set one of them"
            )
        for option, value in (
            ("--evaluate.every", section.every),
            ("--checkpoint.keep_best", self.checkpoint.keep_best),
        ):
            if value and not (section.data or section.split_ratio):
                raise ConfigError(
                    f"{option} {value} needs held-out conversations: --evaluate.data, or "
                    "--evaluate.split_ratio of the training data"
                )

    def _check_learning_rates(self) -> None:
        section = self.optimizer
        if section.min_lr > section.lr:
            raise ConfigError(
                f"--optimizer.min_lr {section.min_lr} is above --optimizer.lr {section.lr}; lower "
                "the first or raise the second"
            )
        if section.warmup_steps and section.warmup_ratio:
            raise ConfigError(
                f"--optimizer.warmup_steps {section.warmup_steps} and --optimizer.warmup_ratio "
                f"{section.warmup_ratio} both say how long the warm-up is; set one of them"
            )
        lora = self.lora.rank > 0
        tower = self.lora.vision if lora else not self.freeze.vision
        merger = not (lora or self.freeze.merger)
        for name, learns in (
            ("vision_lr", tower),
            ("vision_layer_decay", tower),
            ("merger_lr", merger),
        ):
            value = getattr(section, name)
            if value == getattr(OptimizerSection, name):
                continue
            if not learns:
                raise ConfigError(
                    f"--optimizer.{name} is {value}, but that part keeps its weights (--freeze, or "
                    "LoRA without adapters there); leave the option out"
                )
            if not section.lr:
                raise ConfigError(
                    f"--optimizer.{name} is {value}, a multiple of --optimizer.lr, which is 0; "
                    "keep the other parts' weights with --freeze instead"
                )


def check_ranges(section: Any, prefix: str = "--") -> None:
    """Raise ConfigError for the first number, also of nested sections, outside its Range."""
    for name, kind in get_type_hints(type(section), include_extras=True).items():
        value, option = getattr(section, name), prefix + name
        if dataclasses.is_dataclass(value):
            check_ranges(value, f"{option}.")
        for limit in getattr(kind, "__metadata__", ()) if isinstance(value, int | float) else ():
            if not limit.least <= value < math.inf:
                finite = " and finite" if value == math.inf else ""
                raise ConfigError(f"{option} is {value}; it must be at least {limit.least}{finite}")
            if value >= limit.below:
                raise ConfigError(f"{option} is {value}; it must be below {limit.below}")
            if value > limit.most:
                raise ConfigError(f"{option} is {value}; it must be at most {limit.most}")


def offload_fractions(section: OptimizerSection) -> dict[int, float]:
    """Shares of the optimizer state in host memory by the step (from 1) from which they count.

    Raises:
        ConfigError: an entry of the schedule that can't be used.
    """
    fractions, last = {1: section.offload_fraction}, 0
    for entry in section.offload_schedule:
        step, _, fraction = entry.partition(":")
        try:
            first, share = int(step), float(fraction)
        except ValueError:
            first, share = 0, 0.0
        if first < 1 or not 0 <= share <= 1 or first <= last:
            raise ConfigError(
                f"--optimizer.offload_schedule has {entry!r}; an entry is STEP:FRACTION, a step "
                "from 1 that is above the entry's before and a share from 0 to 1, as in 100:0.5"
            )
        fractions[first], last = share, first
    return fractions


def from_toml(path: Path, base: TrainConfig) -> TrainConfig:
    """`base` with the settings of a TOML recipe laid over it.

    Raises:
        ConfigError: unreadable file, unknown key (with the valid ones), or a value of the
            wrong type; the message names the file and the key.
    """
    if path.suffix in (".yaml", ".yml", ".json"):
        raise ConfigError(
            f"--config {path}: a recipe is a TOML file; docs/coming-from.md has its names"
        )
    table = read_toml(Path(path), f"--config {path}", ConfigError)
    return _overlay(base, table, f"{path}: ")


def _overlay(section: Any, table: dict[str, Any], file: str, prefix: str = "") -> Any:
    kinds = get_type_hints(type(section))
    where = file + prefix
    for key in [key for key in table if prefix + key in RENAMED]:
        now = RENAMED[prefix + key]
        say_renamed(where + key, now)
        table = {now.removeprefix(prefix) if k == key else k: v for k, v in table.items()}
    if unknown := [key for key in table if key not in kinds]:
        raise ConfigError("\n  ".join(_unknown(where, key, list(kinds)) for key in unknown))
    changes: dict[str, Any] = {}
    for key, value in table.items():
        current = getattr(section, key)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, dict):
                raise ConfigError(f"{where}{key} must be a table, it is {value!r}")
            changes[key] = _overlay(current, value, file, f"{prefix}{key}.")
        else:
            changes[key] = _convert(kinds[key], value, f"{where}{key}")
    return dataclasses.replace(section, **changes)


def _unknown(where: str, key: str, valid: list[str]) -> str:
    options = option_names(TrainConfig)
    if answer := answer_to(key, options):
        return f"{where}{key}: {answer}"
    if meant := options_called(key, options):
        return f"{where}{key} stands elsewhere: {' or '.join(meant)}"
    return f"{where}unknown key {key!r}; valid keys are {', '.join(valid)}"


def _convert(kind: Any, value: Any, where: str) -> Any:
    """A TOML value as a field's type has it; nothing that the command line would refuse passes."""
    either = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    for one in either:
        if get_origin(one) is Literal and isinstance(value, str) and value in get_args(one):
            return value
        if get_origin(one) is tuple and isinstance(value, list):
            if where.endswith(_PER_STAGE) and any(isinstance(row, list) for row in value):
                value = list(_in_stage_order(value, where))
            entry = get_args(one)[0]
            return tuple(_convert(entry, item, f"{where}[{i}]") for i, item in enumerate(value))
        if one is Path and isinstance(value, str):
            return Path(value)
        if one is float and type(value) is int:
            return float(value)
        if type(value) is one:
            return value
    raise ConfigError(f"{where} must be {' or '.join(map(_called, either))}, it is {value!r}")


def _called(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return f"of type {getattr(get_origin(kind) or kind, '__name__', kind)}"


_PER_STAGE = ("parallel.vision_layers", "parallel.text_layers")


def _in_stage_order(rows: list[Any], where: str) -> tuple[int, ...]:
    """Layers per pipeline rank and virtual chunk, [rank][chunk], in the order of the stages."""
    if len({len(row) if isinstance(row, list) else -1 for row in rows}) != 1:
        raise ConfigError(
            f"{where} must be one flat list, or for each pipeline rank a list with a number for "
            f"each of its virtual chunks; it is {rows!r}"
        )
    return tuple(row[chunk] for chunk in range(len(rows[0])) for row in rows)


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Plain values, for run records."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, (tuple, list)):
            return [plain(v) for v in value]
        return str(value) if isinstance(value, Path) else value

    return plain(dataclasses.asdict(config))

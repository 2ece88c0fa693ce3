"""Are two folders the same model? Every tensor bitwise, and the logits of a fixed input."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmtrain.checkpoint.mapping import Row, rows
from vlmtrain.checkpoint.megatron.source import MegatronSource
from vlmtrain.checkpoint.weights import Source, open_weights
from vlmtrain.core.errors import UserError
from vlmtrain.core.spec import ModelSpec, first_difference
from vlmtrain.models.family import family_of, read_spec

# Logits are computed in float32 by two implementations: equal up to the order of sums.
LOGITS_BOUND = 1e-4
# Larger models are not run: two copies in float32 have to fit beside everything else.
LARGEST_TO_RUN = 600_000_000


@dataclass
class Group:
    """Tensors of one part of the model."""

    tensors: int = 0
    bytes: int = 0
    different: list[str] = field(default_factory=list)
    largest: float = 0.0  # largest absolute difference


@dataclass
class Comparison:
    """What `compare` found."""

    source: str
    target: str
    groups: dict[str, Group]
    logits: float | None = None  # |source - target| / |source|; None: not run
    logits_note: str = ""

    @property
    def equal(self) -> bool:
        same = all(not group.different for group in self.groups.values())
        return same and (self.logits is None or self.logits <= LOGITS_BOUND)

    def table(self) -> Any:
        """A rich table."""
        from rich.table import Table

        table = Table(title=f"{self.source}  against  {self.target}", title_justify="left")
        for name, justify in (
            ("part", "left"),
            ("tensors", "right"),
            ("GB", "right"),
            ("different", "right"),
            ("largest difference", "right"),
        ):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        for name, g in self.groups.items():
            table.add_row(
                name,
                str(g.tensors),
                f"{g.bytes / 1e9:.3f}",
                str(len(g.different)),
                f"{g.largest:.3g}" if g.different else "bitwise equal",
            )
        if self.logits is None:
            table.add_row("logits", "", "", "", self.logits_note)
        else:
            off = self.logits > LOGITS_BOUND
            table.add_row("logits", "", "", str(int(off)), f"{self.logits:.2g} relative")
        return table


def part_of(row: Row) -> str:
    """The part of the model that a row of the table belongs to."""
    name = row.megatron
    if name.startswith("vision."):
        return "vision layers" if ".layers." in name else "patch embedding, merger"
    return "language layers" if ".layers." in name else "embedding, head, norm"


def compare(source: Path, target: Path, progress: Any = None) -> Comparison:
    """Compare all tensors under their Hugging Face names, one at a time.

    Raises:
        UserError: a folder is not readable, or the two describe different models.
    """
    spec, other = read_spec(source), read_spec(target)
    if spec != other:
        raise UserError(
            f"{source} and {target} describe different models: {first_difference(spec, other)}"
        )
    left, right = open_weights(source, spec), open_weights(target, spec)
    left.check()
    right.check()
    groups: dict[str, Group] = {}
    jobs = list(rows(spec))
    total = sum(_bytes(left, row) for row in jobs)
    report = progress(total) if progress else None
    done = 0
    for row in jobs:
        group = groups.setdefault(part_of(row), Group())
        for name, a, b in zip(row.hf, left.hf(row), right.hf(row), strict=True):
            group.tensors += 1
            group.bytes += a.numel() * a.element_size()
            difference = _difference(a, b)
            if difference is not None:
                group.different.append(name)
                group.largest = max(group.largest, difference)
        done += _bytes(left, row)
        if report:
            report(done)
    names = [f"{folder} ({weights.kind})" for folder, weights in ((source, left), (target, right))]
    return Comparison(names[0], names[1], groups)


def _bytes(weights: Source, row: Row) -> int:
    sizes = zip(weights.hf_shapes(row), weights.dtypes(row), strict=True)
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in sizes)


def _difference(a: Tensor, b: Tensor) -> float | None:
    """None where two tensors are bitwise equal, else the largest difference (inf: of another
    shape, or not a number)."""
    if a.shape != b.shape:
        return math.inf
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    a, b = a.contiguous(), b.contiguous()
    if a.dtype == b.dtype and torch.equal(a.view(bits[a.itemsize]), b.view(bits[b.itemsize])):
        return None
    largest = (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
    return math.inf if math.isnan(largest) else largest


def parameters(spec: ModelSpec, weights: Source) -> int:
    """Weights of a model, counted once where they are tied."""
    return sum(math.prod(s) for row in rows(spec) for s in weights.hf_shapes(row))


def compare_logits(comparison: Comparison, source: Path, target: Path, *, force: bool) -> None:
    """Add the logits of a fixed input (text, one image) in float32, if the model is small.

    A Hugging Face folder is run by transformers, a Megatron checkpoint by this project's model.
    """
    spec = read_spec(source)
    size = parameters(spec, open_weights(source, spec))
    if size > LARGEST_TO_RUN and not force:
        comparison.logits_note = f"not run: {size / 1e9:.1f} G weights (--logits yes)"
        return
    inputs = _fixed_input(spec)
    a, b = (_logits(folder, spec, inputs) for folder in (source, target))
    comparison.logits = ((a - b).norm() / a.norm()).item()


def _fixed_input(spec: ModelSpec) -> dict[str, Tensor]:

    generator = torch.Generator().manual_seed(0)
    grid = (1, 2 * spec.vision.spatial_merge_size, 3 * spec.vision.spatial_merge_size)
    special = {spec.image_token_id, spec.video_token_id, spec.vision_start_token_id}
    words = [i for i in torch.randint(spec.vocab_size, (40,), generator=generator).tolist()]
    words = [i for i in words if i not in special and i != spec.vision_end_token_id][:16]
    image = [spec.image_token_id] * (grid[1] * grid[2] // spec.vision.merge_unit)
    ids = torch.tensor(
        [*words[:5], spec.vision_start_token_id, *image, spec.vision_end_token_id, *words[5:]]
    )
    return {
        "input_ids": ids,
        "position_ids": family_of(spec).positions(ids, [grid], ["image"], spec),
        "grid": torch.tensor([grid]),
        "pixels": torch.randn(math.prod(grid), spec.vision.patch_dim, generator=generator),
    }


@torch.no_grad()
def _logits(folder: Path, spec: ModelSpec, inputs: dict[str, Tensor]) -> Tensor:
    """float32 [S, vocabulary]."""
    if isinstance(open_weights(folder, spec), MegatronSource):
        return _our_logits(folder, spec, inputs)
    from vlmtrain.generate.model import load_transformers

    model = load_transformers(folder, torch.float32)
    model.set_attn_implementation("eager")
    return model(
        input_ids=inputs["input_ids"][None],
        # Without it 4.57 takes position ids that begin anew for packed samples.
        attention_mask=torch.ones_like(inputs["input_ids"])[None],
        position_ids=inputs["position_ids"][:, None],
        pixel_values=inputs["pixels"],
        image_grid_thw=inputs["grid"],
        use_cache=False,
    ).logits[0]


def _our_logits(folder: Path, spec: ModelSpec, inputs: dict[str, Tensor]) -> Tensor:
    import torch.distributed as dist
    from megatron.core import parallel_state

    from vlmkernels import visual_index
    from vlmtrain.checkpoint.load import load_weights
    from vlmtrain.core import device, launch
    from vlmtrain.core.batch import PackedBatch
    from vlmtrain.parallel.layout import make_layout
    from vlmtrain.training.engine import Engine

    ids = inputs["input_ids"]
    batch = PackedBatch(
        input_ids=ids,
        labels=torch.full_like(ids, -100),
        position_ids=inputs["position_ids"],
        cu_seqlens=torch.tensor([0, len(ids)], dtype=torch.int32),
        visual_index=visual_index(ids, spec.image_token_id),
        pixel_values=inputs["pixels"],
        grid_thw=inputs["grid"],
        sample_ids=["fixed"],
        target_tokens=0,
        image_tokens=int((ids == spec.image_token_id).sum()),
        pad_tokens=0,
    )
    backend = device.setup(0)
    launch.connect(launch.Process(0, 1, 0), backend.process_group)
    try:
        engine = Engine(spec, make_layout(spec, world_size=1), backend, dtype=torch.float32)
        load_weights(engine.stages, spec, folder)
        logits = engine.stages[0](batch.to(backend.device), logits=True)[0]
        return logits[:, : spec.vocab_size].float().cpu()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()

"""One training step (forward, backward, clipping, AdamW) beside the same model and the same samples
in plain transformers, one process, the same number of cores, or one GPU. train_sizes.py has the
models and samples, train_peers.py what transformers does and what each side holds in memory.

The ceiling: the products of the step's tokens, patches and targets with the model's weights and
their gradients, by torch or the faster kernel of vlmkernels.product, and the multiply-adds of its
attention at the processor's peak; behind the last layer's attention of the targets alone, as ours.
No implementation of these needs less, so the ratio can't come above the ratio shown divided by this
share.
"""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from timeit import timeit
from typing import Any

import numpy as np
import torch

from benchmarks import embedding, train_peers, train_sizes
from benchmarks.ceilings import adam, arithmetic
from benchmarks.harness import AS_IT_COMES, Ceiling, Comparison, Context, Row, compare, say
from benchmarks.loss import available
from benchmarks.train_peers import BETAS, CLIP, DECAY, EPS, LR, Plain
from benchmarks.train_sizes import Size
from vlmkernels.product import mm
from vlmtrain.core.batch import PackedBatch
from vlmtrain.models import flops
from vlmtrain.models.family import table_of

SIZES: dict[str, Callable[[], Size]] = {
    "demo": train_sizes.demo,
    "demo in one pack": partial(train_sizes.demo, packs=1),
    "100M": train_sizes.hundred_million,
    "350M": train_sizes.real_vocabulary,
    "mixed": train_sizes.mixed,
}
#: On a GPU, in bfloat16.
CUDA_SIZES: dict[str, Callable[[], Size]] = {"3B, a quarter": train_sizes.quarter_of_3b}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: Bytes a parameter of both models in one process.
HELD = {"float32": 32, "bfloat16": 38}

#: Sizes whose samples differ in length.
MIXED = ("mixed", "3B, a quarter")
#: Rows of one product of the ceiling: more at a time make it no faster on a CPU.
LARGEST_PRODUCT = 2048
#: Floats of an array of the ceiling's optimizer: the four are twice as large as a last cache.
LARGEST_ARRAY = 2**25


def our_step(
    folder: Path, size: Size, dtype: torch.dtype
) -> tuple[Any, list[PackedBatch], Callable[[], float]]:
    """The engine of one process with weights from the folder, its packs, and its step over them."""
    import torch.distributed as dist

    from vlmtrain.checkpoint.load import load_weights
    from vlmtrain.core import device, launch
    from vlmtrain.core.config import OptimizerSection
    from vlmtrain.models.family import read_spec
    from vlmtrain.parallel.layout import make_layout
    from vlmtrain.training.engine import Engine

    backend = device.setup()
    if not dist.is_initialized():
        launch.connect(launch.Process(0, 1, 0), backend.process_group)
    spec = read_spec(folder)
    layout = make_layout(spec, world_size=1, microbatches=len(size.packs))
    engine = Engine(spec, layout, backend, dtype=dtype)
    load_weights(engine.stages, spec, folder)
    engine.prepare(
        OptimizerSection(
            lr=LR,
            min_lr=LR,
            weight_decay=DECAY,
            beta1=BETAS[0],
            beta2=BETAS[1],
            eps=EPS,
            clip=CLIP,
        )
    )
    packs = size.batches()
    if backend.is_cuda:
        packs = [pack.pin_memory() for pack in packs]
    return engine, packs, lambda: engine.step(packs, LR).loss


def ways(size: Size) -> dict[str, list[train_peers.Batch]]:
    """How transformers may take the samples; padded batches as Size says."""
    samples, everything = size.samples, range(len(size.samples))
    chosen = {"one by one": [[i] for i in everything]}
    if size.name in MIXED:
        by_length = np.argsort([len(s.input_ids) for s in samples], kind="stable").tolist()
        for name, order in (("sorted by length", by_length), ("as they come", everything)):
            cut = train_peers.batches(samples, order, size.padded_tokens or size.pack_length)
            chosen[f"padded batches, {name}"] = cut
    else:
        chosen["padded batch"] = size.packs
        if len(size.packs) > 1:
            chosen["one padded batch a step"] = [list(everything)]
    made = {
        name: [train_peers.padded([samples[i] for i in batch]) for batch in batches]
        for name, batches in chosen.items()
    }
    made["block-diagonal mask"] = [
        train_peers.packed([samples[i] for i in pack]) for pack in size.packs
    ]
    return made


def ceilings(
    engine: Any, packs: list[PackedBatch], dtype: torch.dtype, context: Context
) -> dict[str, Ceiling]:
    """Every product of a linear layer, forward and backward, of all real tokens of a step; and as
    many multiply-adds as their attention needs, at the processor's peak."""
    patches = sum(int(pack.grid_thw.prod(1).sum()) for pack in packs)
    tokens = sum(pack.length - pack.pad_tokens for pack in packs)
    targets = sum(pack.target_tokens for pack in packs)
    merged = patches // engine.spec.vision.merge_unit
    layer = table_of(engine.spec).text_layer
    last = layer.megatron.format(i=engine.spec.num_layers - 1)
    ends = {f"{last}{linear.name}.weight" for linear in layer.behind_attention}
    shapes: Counter[tuple[int, int, int, bool]] = Counter()  # rows, outputs, inputs, dx too
    for name, weight in engine.stages[0].named_parameters():
        if weight.dim() != 2 or ("embedding" in name and not engine.spec.tie_word_embeddings):
            continue
        rows = tokens
        if name in ends and engine.spec.ends_on_targets:
            rows = targets
        elif "output_layer" in name or "embedding" in name:
            rows = targets
        elif "vision" in name:
            rows = merged if "merger" in name else patches
        outs, ins = weight.shape
        shapes[rows, outs, ins, "patch_embed" not in name] += 1  # pixels need no gradient
    cases, largest = [], LARGEST_PRODUCT if context.device == "cpu" else max(tokens, patches)
    for (rows, outs, ins, backward), count in shapes.items():
        part = min(rows, largest)
        kind: dict[str, Any] = {"dtype": dtype, "device": context.device}
        x, out = torch.randn(part, ins, **kind), torch.empty(part, outs, **kind)
        w, dx = torch.randn(outs, ins, **kind), torch.empty_like(x)
        dw = torch.empty_like(w)
        cases.append((rows, count, backward, x, w, out, dx, dw))
    work = sum(2e-9 * n * o * i * c * (2 + b) for (n, o, i, b), c in shapes.items())

    def run() -> None:
        for rows, count, backward, x, w, out, dx, dw in cases:
            for _ in range(count):
                for start in range(0, rows, largest):
                    end = min(largest, rows - start)
                    mm(x[:end], w.t(), out=out[:end])
                    mm(out[:end].t(), x[:end], out=dw)
                    if backward:
                        mm(out[:end], w, out=dx[:end])

    def untouched() -> None:
        with torch._C.DisableTorchFunction():
            run()

    pairs = sum((flops.Work.of_batch(pack, engine.spec.vision) for pack in packs), flops.Work())
    counted = flops.count(engine.spec, pairs)
    attention = sum(counted.attention_forward.values()) + sum(counted.attention_backward.values())
    peaks = arithmetic(attention, dtype, context)
    if not peaks:
        return {"products": Ceiling(untouched, 1.0, work, "GFLOP/s")}
    parts = [_fastest(peaks)]
    work += int(parts[0].scale) * parts[0].work
    name = "products and attention"
    if context.device == "cpu":
        learns = sum(p.numel() for p in engine.stages[0].parameters() if p.requires_grad)
        parts.append(_fastest(_optimizer(learns, context)))
        name = "products, attention and optimizer"

    def whole() -> None:
        untouched()
        for part in parts:
            for _ in range(int(part.scale)):
                part.run()

    return {name: Ceiling(whole, 1.0, work, "GFLOP/s")}


def _fastest(found: dict[str, Ceiling]) -> Ceiling:
    return min(found.values(), key=lambda x: x.scale * timeit(x.run, number=3))


def _optimizer(parameters: int, context: Context) -> dict[str, Ceiling]:
    """What AdamW reads and writes of as many parameters: 28 bytes each, in float32 as in bfloat16
    with masters; the same four arrays again where these would be large."""
    times = -(-parameters // LARGEST_ARRAY)
    size = -(-parameters // times)
    arrays = torch.ones(size), torch.ones(size), torch.ones(size), torch.ones(size)
    return adam(arrays, 28.0 * size * times, context)


def _same_loss(theirs: float, ours: float) -> str | None:
    """First calls: every contestant has made a few small steps by then, on the same samples."""
    if not abs(theirs - ours) <= 0.02 * abs(ours):
        return f"its loss is {theirs:.4f}, ours {ours:.4f}"
    return None


def comparison(size: Size, dtype: str, folder: Path, context: Context) -> Comparison:
    """The row of one size; its engine stays alive as long as the row does.

    Raises:
        MemoryError: both models do not fit.
    """
    parameters = size.write_model(folder)
    # Four times the largest batch's logits, and 3 GB for activations and torch.
    needed = HELD[dtype] * parameters + 16 * size.pack_length * size.vocabulary + 3e9
    if (missing := needed - available(context.device)) > 0:
        raise MemoryError(f"left out, {missing / 1e9:.1f} GB of memory are missing")
    engine, packs, ours = our_step(folder, size, DTYPES[dtype])
    targets = sum(pack.target_tokens for pack in packs)
    plain = Plain(folder, targets, DTYPES[dtype], context.device)
    tokens = sum(len(s.input_ids) for s in size.samples)
    visual = sum(pack.image_tokens for pack in packs)
    count = f"{len(packs)} {'pack' if len(packs) == 1 else 'packs'} of {size.pack_length}"
    if size.name in MIXED:
        count = f"{len(size.samples)} mixed samples, {count}"
    return Comparison(
        op="training step",
        shape=(
            f"Qwen2.5-VL of {parameters / 1e6:.1f}M, {count}, "
            f"{tokens} tokens, {visual / tokens:.0%} visual"
        ),
        dtype=dtype,
        ours=ours,
        peers={
            f"transformers, {way}{form}": step
            for way, batches in ways(size).items()
            for form, step in plain.steps(batches).items()
        },
        ceilings=ceilings(engine, packs, DTYPES[dtype], context),
        check=_same_loss,
        tokens=tokens,
        bar=None if context.quick else size.bar,
        results_bytes=0 if size.name in MIXED else None,
    )


def _missing() -> str | None:
    absent = [name for name in ("megatron", "transformers") if find_spec(name) is None]
    return f"{' and '.join(absent)} not installed" if absent else None


def _quiet() -> None:
    """No progress bars, and no warnings of packages that we don't need."""
    warnings.filterwarnings("ignore")
    from transformers.utils import logging

    logging.disable_progress_bar()


def parts(context: Context) -> list[str | None]:
    """A process each: an engine stays for good. As memory comes only: nobody trains with glibc's
    fault-free settings."""
    if context.device == "cpu" and context.memory != AS_IT_COMES:
        return []
    if context.device != "cpu":
        return [f"{name}, bfloat16" for name in CUDA_SIZES]
    sizes = ("demo", "demo in one pack") if context.quick else SIZES
    return [f"{name}, {dtype}" for name in sizes for dtype in DTYPES]


def rows(context: Context) -> Iterator[Row]:
    if why := _missing():
        say(f"training step skipped: {why}")
        return
    _quiet()
    for part in [context.part] if context.part else parts(context):
        yield from _rows_of(str(part), context)


def _rows_of(part: str, context: Context) -> Iterator[Row]:
    name, dtype = part.rsplit(", ", 1)
    size = (SIZES | CUDA_SIZES)[name]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            case = comparison(size, dtype, Path(folder), context)
        except MemoryError as error:
            say(f"training step, {part}: {error}")
            return
        step = compare(case, context)
    yield step
    if name in ("demo", "demo in one pack", "100M") and dtype == "float32":
        yield _embedding_share(size, step.ours_ms, context)


def _embedding_share(size: Size, step_ms: float, context: Context) -> Row:
    """The embeddings of that step by themselves, before and after; their share in its last column:
    before, the step is longer by what is saved."""
    row = compare(
        embedding.in_a_step(
            [(pack.input_ids, pack.visual_index) for pack in size.batches()],
            size.vocabulary,
            size.text["hidden_size"],
        ),
        context,
    )
    before = row.best_peer_ms or 0.0
    longer = step_ms - row.ours_ms + before
    shares = f"{before / longer:.2%} of it before, {row.ours_ms / step_ms:.2%} after"
    return replace(row, ceiling=f"a step of {step_ms:.1f} ms: {shares}")


#: Of torch's operators, what they are for; all others are element-wise.
GROUPS = {
    "products": (
        *("mm", "addmm", "bmm", "baddbmm", "addmm_", "mv", "addmv", "convolution"),
        *("_Product", "_ProductBackward"),  # vlmtrain's linears, whose products torch does not see
    ),
    "attention": ("attention", "attn"),
    "loss": ("cross_entropy", "nll_loss", "log_softmax"),
    "optimizer": ("adam", "Optimizer"),
}


def _group(operator: str) -> str:
    name = operator.split("::")[-1]
    for group, words in GROUPS.items():
        if name in words or (group != "products" and any(word in operator for word in words)):
            return group
    return "element-wise, copies and the rest"


def profile(part: str, repetitions: int = 5, rows_shown: int = 30) -> str:
    """Where the step of a part goes, in ours and in each way of transformers that is worth rounds:
    milliseconds a step inside torch's operators by what they are for, the rest of the time (Python,
    megatron-core, autograd), and torch.profiler's table by the time inside each operator."""
    import time

    from torch.profiler import ProfilerActivity

    _quiet()
    name, dtype = part.split(", ") if ", " in part else (part, "float32")
    out = []
    with tempfile.TemporaryDirectory() as folder:
        case = comparison(SIZES[name](), dtype, Path(folder), Context())
        runs = {"ours": case.ours, **case.peers}
        walls = {}
        for label, run in runs.items():
            run()
            start = time.perf_counter()
            for _ in range(repetitions):
                run()
            walls[label] = (time.perf_counter() - start) / repetitions * 1e3
        best = min((label for label in runs if label != "ours"), key=lambda label: walls[label])
        for label in ("ours", best):
            with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
                for _ in range(repetitions):
                    runs[label]()
            averages = profiler.key_averages()
            spent: Counter[str] = Counter()
            for entry in averages:
                spent[_group(entry.key)] += entry.self_cpu_time_total / repetitions / 1e3
            groups = ", ".join(f"{group} {ms:.1f}" for group, ms in spent.most_common())
            table = averages.table(
                sort_by="self_cpu_time_total", row_limit=rows_shown, max_name_column_width=50
            )
            rest = walls[label] - sum(spent.values())
            out.append(
                f"==== {label}: {walls[label]:.1f} ms a step without a profiler; {groups}, "
                f"outside {rest:.1f} ====\n{table}"
            )
    return "\n".join(out)

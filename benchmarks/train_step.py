"""One training step (forward, backward, clipping, AdamW) beside the same model and the same samples
in plain transformers: sdpa attention, torch's fused AdamW, the same number of cores, one process.

transformers has no packing on a CPU, so it may take the samples in the way that suits it best: one
by one, as a right-padded batch of each pack or of the whole step (no mask is needed: causal
attention never looks at the padding), or packed with a block-diagonal mask.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import embedding
from benchmarks.harness import AS_IT_COMES, Comparison, Context, Row, compare, say
from tests.parity import reference
from tests.parity.reference import Sample

LR, BETAS, EPS, DECAY, CLIP = 1e-5, (0.9, 0.95), 1e-8, 0.01, 1.0

#: Parts of a sample: text tokens, or an image of (1, rows, columns) patches.
Parts = list[Any]


@dataclass(frozen=True)
class Size:
    """A model and the packs of one step."""

    name: str
    text: dict[str, Any]
    vision: dict[str, Any]
    vocabulary: int
    mrope_section: list[int]
    packs: list[list[Parts]]
    pack_length: int

    def config(self) -> dict[str, Any]:
        """config.json as released Qwen2.5-VL folders have it."""
        return {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            **self.text,
            "vocab_size": self.vocabulary,
            "rope_theta": 1e6,
            "rope_scaling": {"type": "mrope", "mrope_section": self.mrope_section},
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": reference.PAD,
            "image_token_id": reference.IMAGE,
            "video_token_id": reference.VIDEO,
            "vision_start_token_id": reference.START,
            "vision_end_token_id": reference.END,
            "vision_config": {
                **self.vision,
                "model_type": "qwen2_5_vl",
                "hidden_act": "silu",
                "out_hidden_size": self.text["hidden_size"],
            },
        }

    def samples(self) -> list[list[Sample]]:
        generator = torch.Generator().manual_seed(0)
        return [
            [reference.make_sample(parts, generator, learn=parts[-1] // 2) for parts in pack]
            for pack in self.packs
        ]


def demo_size(packs: int = 4) -> Size:
    """The model of `make demo` and samples like its, short and with a photograph each, in four
    packs as the demo has them, or the same samples in one pack."""
    from vlmtrain.demo import tiny_model

    photographs = ((10, 8, 42), (8, 10, 49), (10, 6, 37))  # rows, columns, text tokens after it
    four = [[[14, ("image", (1, h, w)), text] for h, w, text in photographs]] * 4
    return Size(
        name="demo",
        text=tiny_model.TEXT,
        vision=tiny_model.VISION,
        vocabulary=tiny_model.VOCAB_SIZE,
        mrope_section=tiny_model.MROPE_SECTION,
        packs=four if packs == 4 else [sum(four, [])],
        pack_length=1024 // packs,
    )


def hundred_million() -> Size:
    """About 100 million parameters with real head sizes (64 in text, 80 in vision), 66% visual."""
    from vlmtrain.demo import tiny_model

    return Size(
        name="100M",
        text={
            **tiny_model.TEXT,
            "hidden_size": 640,
            "intermediate_size": 1792,
            "num_hidden_layers": 12,
            "num_attention_heads": 10,
            "num_key_value_heads": 2,
        },
        vision={
            **tiny_model.VISION,
            "depth": 8,
            "hidden_size": 640,
            "num_heads": 8,
            "intermediate_size": 1728,
            "fullatt_block_indexes": [1, 3, 5, 7],
        },
        vocabulary=8192,
        mrope_section=[8, 12, 12],
        packs=[
            [
                [20, ("image", (1, 24, 24)), 80],
                [15, ("image", (1, 32, 20)), 70],
                [12, ("image", (1, 20, 24)), ("image", (1, 16, 16)), 60],
                [10, ("image", (1, 26, 28)), 60],
            ]
        ],
        pack_length=1024,
    )


# ---- plain transformers --------------------------------------------------------------------------


class Plain:
    """The same model and step in transformers and torch.optim."""

    def __init__(self, folder: Path, packs: list[list[Sample]]) -> None:
        import transformers

        self.model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).train()
        self.params = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.params if p.dim() > 1], "weight_decay": DECAY},
                {"params": [p for p in self.params if p.dim() == 1], "weight_decay": 0.0},
            ],
            lr=LR,
            betas=BETAS,
            eps=EPS,
            fused=True,
        )
        self.packs = packs
        self.targets = sum(int((s.labels >= 0).sum()) for pack in packs for s in pack)

    def one_by_one(self) -> float:
        return self._step([_padded([s]) for pack in self.packs for s in pack])

    def padded_packs(self) -> float:
        return self._step([_padded(pack) for pack in self.packs])

    def padded_step(self) -> float:
        return self._step([_padded([s for pack in self.packs for s in pack])])

    def masked_packs(self) -> float:
        return self._step([_packed(pack) for pack in self.packs])

    def _step(self, batches: list[tuple[dict[str, Any], Tensor]]) -> float:
        # Megatron's stand-in for CUDA, where it is installed, is not the peer's to pay for.
        with torch._C.DisableTorchFunction():
            self.optimizer.zero_grad()
            total = 0.0
            for inputs, labels in batches:
                logits = self.model(**inputs, use_cache=False).logits
                loss = F.cross_entropy(
                    logits.float().flatten(0, 1), labels.flatten(), reduction="sum"
                )
                (loss / self.targets).backward()
                total += float(loss.detach())
            torch.nn.utils.clip_grad_norm_(self.params, CLIP)
            self.optimizer.step()
        return total / self.targets


def _media(samples: list[Sample]) -> dict[str, Tensor]:
    media = [m for s in samples for m in s.media]
    if not media:
        return {}
    return {
        "pixel_values": torch.cat([m[2] for m in media]),
        "image_grid_thw": torch.tensor([m[1] for m in media]),
    }


def _padded(samples: list[Sample]) -> tuple[dict[str, Any], Tensor]:
    """A right-padded batch: input_ids [B, L], position_ids [3, B, L], labels [B, L]."""
    longest = max(len(s.input_ids) for s in samples)

    def stack(rows: list[Tensor], value: int) -> Tensor:
        return torch.stack([F.pad(r, (0, longest - r.shape[-1]), value=value) for r in rows], -2)

    inputs = {
        "input_ids": stack([s.input_ids for s in samples], reference.PAD),
        "position_ids": stack([s.position_ids for s in samples], 0),
        **_media(samples),
    }
    return inputs, stack([s.labels for s in samples], -100)


def _packed(samples: list[Sample]) -> tuple[dict[str, Any], Tensor]:
    """One sequence with a causal block-diagonal mask [1, 1, S, S]."""
    lengths = torch.tensor([len(s.input_ids) for s in samples])
    segment = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    same = segment[:, None] == segment[None, :]
    inputs = {
        "input_ids": torch.cat([s.input_ids for s in samples])[None],
        "position_ids": torch.cat([s.position_ids for s in samples], 1)[:, None],
        "attention_mask": same.tril()[None, None],
        **_media(samples),
    }
    return inputs, torch.cat([s.labels for s in samples])[None]


# ---- ours ----------------------------------------------------------------------------------------


def our_step(folder: Path, size: Size, packs: list[list[Sample]]) -> Callable[[], float]:
    """The engine's step on one process, weights loaded from the same folder."""
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
    engine = Engine(spec, layout, backend, dtype=torch.float32)
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
    batches = [reference.pack(pack, size.pack_length) for pack in packs]
    return lambda: engine.step(batches, LR).loss


def _same_loss(theirs: float, ours: float) -> str | None:
    """First calls: every contestant has made a few steps of 1e-5 by then, on the same samples."""
    if not abs(theirs - ours) <= 0.05 * abs(ours):
        return f"its loss is {theirs:.4f}, ours {ours:.4f}"
    return None


def write_model(size: Size, folder: Path) -> int:
    """Random weights as a Hugging Face folder; returns the number of parameters."""
    import json

    import transformers

    config = size.config()
    torch.manual_seed(0)
    model = transformers.Qwen2_5_VLForConditionalGeneration(transformers.Qwen2_5_VLConfig(**config))
    model.float().save_pretrained(folder)
    # That of the released folders, which every transformers reads.
    (folder / "config.json").write_text(json.dumps(config))
    return sum(p.numel() for p in model.parameters())


def comparison(size: Size, folder: Path) -> Comparison:
    """The row of one size; its engine stays alive as long as the row does."""
    parameters = write_model(size, folder)
    packs = size.samples()
    plain = Plain(folder, packs)
    tokens = sum(len(s.input_ids) for pack in packs for s in pack)
    visual = sum(int((s.input_ids == reference.IMAGE).sum()) for pack in packs for s in pack)
    peers: dict[str, Callable[[], float]] = {
        "transformers, one by one": plain.one_by_one,
        "transformers, padded batch": plain.padded_packs,
        "transformers, block-diagonal mask": plain.masked_packs,
    }
    if len(packs) > 1:
        peers["transformers, one padded batch a step"] = plain.padded_step
    return Comparison(
        op="training step",
        shape=(
            f"Qwen2.5-VL of {parameters / 1e6:.1f}M, "
            f"{len(packs)} {'pack' if len(packs) == 1 else 'packs'} of {size.pack_length}, "
            f"{tokens} tokens, {visual / tokens:.0%} visual"
        ),
        dtype="float32",
        ours=our_step(folder, size, packs),
        peers=peers,
        check=_same_loss,
        tokens=tokens,
        bar=1.0,
    )


def _missing() -> str | None:
    absent = [name for name in ("megatron", "transformers") if find_spec(name) is None]
    return f"{' and '.join(absent)} not installed" if absent else None


def _quiet() -> None:
    """No progress bars, and no warnings of packages that we don't need."""
    warnings.filterwarnings("ignore")
    from transformers.utils import logging

    logging.disable_progress_bar()


def _sizes(context: Context) -> list[Size]:
    demo = [demo_size(), demo_size(packs=1)]
    return demo if context.quick else [*demo, hundred_million()]


def rows(context: Context) -> Iterator[Row]:
    """As it comes only: nobody trains with glibc's fault-free settings."""
    if context.device != "cpu":
        say("training step on CUDA skipped: its rows are of the CPU so far")
        return
    if context.memory != AS_IT_COMES:
        return
    if why := _missing():
        say(f"training step skipped: {why}")
        return
    _quiet()
    from megatron.core import parallel_state

    for size in _sizes(context):
        with tempfile.TemporaryDirectory() as folder:
            step = compare(comparison(size, Path(folder)), context)
            yield step
        parallel_state.destroy_model_parallel()
        yield _embedding_share(size, step.ours_ms, context)


def _embedding_share(size: Size, step_ms: float, context: Context) -> Row:
    """The embeddings of that step by themselves, before and after; their share in its last column:
    before, the step is longer by what is saved."""
    packs = [reference.pack(pack, size.pack_length) for pack in size.samples()]
    row = compare(
        embedding.in_a_step(
            [(pack.input_ids, pack.visual_index) for pack in packs],
            size.vocabulary,
            size.text["hidden_size"],
        ),
        context,
    )
    before = row.best_peer_ms or 0.0
    longer = step_ms - row.ours_ms + before
    shares = f"{before / longer:.2%} of it before, {row.ours_ms / step_ms:.2%} after"
    return replace(row, ceiling=f"a step of {step_ms:.1f} ms: {shares}")


def profile(name: str, repetitions: int = 3, rows_shown: int = 25) -> str:
    """Where a step of size `name` ("demo" or "100M") goes, in ours and in transformers: two tables
    of torch.profiler, by the time inside each operator, and the wall seconds of a step."""
    import time

    from torch.profiler import ProfilerActivity

    _quiet()
    size = {s.name: s for s in (demo_size(), hundred_million())}[name]
    out = []
    with tempfile.TemporaryDirectory() as folder:
        case = comparison(size, Path(folder))
        runs = {"ours": case.ours, **case.peers}
        for label in ("ours", "transformers, one by one", "transformers, padded batch"):
            runs[label]()
            start = time.perf_counter()
            for _ in range(repetitions):
                runs[label]()
            wall = (time.perf_counter() - start) / repetitions
            with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
                for _ in range(repetitions):
                    runs[label]()
            table = profiler.key_averages().table(
                sort_by="self_cpu_time_total", row_limit=rows_shown, max_name_column_width=50
            )
            out.append(f"==== {label}: {wall * 1e3:.1f} ms a step ====\n{table}")
    return "\n".join(out)

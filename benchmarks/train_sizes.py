"""Models and samples of the rows of benchmarks/train_step.py."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.parity import reference
from tests.parity.reference import Sample
from vlmtrain.core.batch import PackedBatch
from vlmtrain.data.packing.plan import plan_epoch
from vlmtrain.demo import tiny_model

#: Parts of a sample: text tokens, or an image of (1, rows, columns) patches. The answer, whose
#: tokens have a loss, is the second half of the last text.
Parts = list[Any]


@dataclass(frozen=True)
class Size:
    """A model and the samples of one step."""

    name: str
    text: dict[str, Any]
    vision: dict[str, Any]
    vocabulary: int
    mrope_section: list[int]
    drawn: list[Parts]  # the samples, in the order in which they are drawn
    packs: list[list[int]]  # of ours: positions in `drawn`
    pack_length: int  # tokens that a pack holds at most
    bar: float  # how many times as long the best peer must take
    tied: bool = False
    padded_tokens: int | None = None  # that a padded batch holds at most; None: as a pack

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
            "tie_word_embeddings": self.tied,
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

    @cached_property
    def samples(self) -> list[Sample]:
        generator = torch.Generator().manual_seed(0)
        return [reference.make_sample(x, generator, learn=x[-1] // 2) for x in self.drawn]

    def batches(self) -> list[PackedBatch]:
        """The packs, as long as their samples."""
        chosen = [[self.samples[i] for i in pack] for pack in self.packs]
        return [reference.pack(x, sum(len(s.input_ids) for s in x)) for x in chosen]

    def write_model(self, folder: Path) -> int:
        """Random weights as a Hugging Face folder; returns the number of parameters."""
        import transformers

        config = self.config()
        torch.manual_seed(0)
        model = transformers.Qwen2_5_VLForConditionalGeneration(
            transformers.Qwen2_5_VLConfig(**config)
        )
        model.float().save_pretrained(folder)
        # That of the released folders, which every transformers reads.
        (folder / "config.json").write_text(json.dumps(config))
        return sum(p.numel() for p in model.parameters())


def demo(packs: int = 4) -> Size:
    """The model of `make demo` and samples like its, short and with a photograph each, in four
    packs as the demo has them, or the same samples in one pack."""
    photographs = ((10, 8, 42), (8, 10, 49), (10, 6, 37))  # rows, columns, text tokens after it
    return Size(
        name="demo" if packs == 4 else "demo in one pack",
        text=tiny_model.TEXT,
        vision=tiny_model.VISION,
        vocabulary=tiny_model.VOCAB_SIZE,
        mrope_section=tiny_model.MROPE_SECTION,
        drawn=[[14, ("image", (1, h, w)), text] for h, w, text in photographs] * 4,
        packs=np.arange(12).reshape(packs, -1).tolist(),
        pack_length=1024 // packs,
        bar=1.0,
    )


#: About 1,000 tokens, two thirds of them visual.
_PHOTOGRAPHS: list[Parts] = [
    [20, ("image", (1, 24, 24)), 80],
    [15, ("image", (1, 32, 20)), 70],
    [12, ("image", (1, 20, 24)), ("image", (1, 16, 16)), 60],
    [10, ("image", (1, 26, 28)), 60],
]


def _tower(width: int, heads: int, inner: int, depth: int) -> dict[str, Any]:
    """Every other layer attends to the whole image."""
    return {
        **tiny_model.VISION,
        "depth": depth,
        "hidden_size": width,
        "num_heads": heads,
        "intermediate_size": inner,
        "fullatt_block_indexes": list(range(1, depth, 2)),
    }


def _text(width: int, heads: int, inner: int, layers: int) -> dict[str, Any]:
    """Two key/value heads."""
    return {
        **tiny_model.TEXT,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
    }


def hundred_million() -> Size:
    """112 million parameters with real head sizes (64 in text, 80 in vision)."""
    return Size(
        name="100M",
        text=_text(640, 10, 1792, 12),
        vision=_tower(640, 8, 1728, 8),
        vocabulary=8192,
        mrope_section=[8, 12, 12],
        drawn=_PHOTOGRAPHS,
        packs=[[0, 1, 2, 3]],
        pack_length=1024,
        bar=1.5,
    )


def real_vocabulary() -> Size:
    """Layers as wide as those of Qwen2.5-0.5B and its tied table of 151,936 words, 12 of its 24
    layers: with them both models, their gradients and their moments (38 bytes a parameter in
    bfloat16) and transformers' logits fit in 20 GB."""
    text = _text(896, 14, 4864, 12)
    return replace(hundred_million(), name="350M", text=text, vocabulary=151936, tied=True)


def _draw(
    samples: int,
    images: tuple[int, ...],
    rows: tuple[int, int],
    columns: tuple[int, int],
    answer: tuple[float, float],
    longer: tuple[int, int],
) -> list[Parts]:
    """Samples as users have them, always the same. images: how often 0, 1, .. 4 of them; rows and
    columns: of an image, in units of two patches, from and to; answer: median of the tokens and the
    deviation of their logarithm; longer: by how many tokens one in ten is."""
    draw = random.Random(0)
    drawn: list[Parts] = []
    for _ in range(samples):
        number = draw.choices(range(5), images)[0]
        parts: Parts = [draw.randint(5, 40)]
        for _ in range(number):
            height, width = 2 * draw.randint(*rows), 2 * draw.randint(*columns)
            parts.append(("image", (1, height, width)))
        median, deviation = answer
        tokens = median * math.exp(draw.gauss(0, deviation))
        tokens += (draw.random() < 0.1) * draw.randint(*longer)
        drawn.append([*parts, max(4, round(tokens))])
    return drawn


def mixed(samples: int = 64) -> Size:
    """What users have: texts, photographs of all shapes, several of them in a sample, short and
    long answers, in the order in which they are drawn; packed by vlmtrain's own planner.

    Text lengths have a median of 60 tokens and a long tail, as instruction data has; images have 35
    to 288 tokens, so that a round of a small model takes seconds.

    A padded batch of 2,048 tokens, which has logits, needs at least as much memory as a pack of
    3,584: the row measures both.
    """
    drawn = _draw(samples, (20, 60, 10, 6, 4), (7, 16), (5, 18), (60, 0.8), (300, 700))
    length = 3584
    plan = plan_epoch(np.array([_tokens(x) for x in drawn]), length, 0, 0, "mixed")
    return Size(
        name="mixed",
        text=_text(256, 4, 704, 4),
        vision=_tower(160, 2, 432, 4),
        vocabulary=8192,
        mrope_section=[8, 12, 12],
        drawn=drawn,
        packs=[pack.tolist() for pack in plan],
        pack_length=length,
        bar=2.0,
        padded_tokens=2048,
    )


def quarter_of_3b(samples: int = 16) -> Size:
    """For a GPU: layers as wide as those of Qwen2.5-VL-3B, 9 of its 36 and 8 of the tower's 32, and
    its tied table: ours and transformers' together have room in 80 GB. Photographs of 144 to 1,296
    tokens, short and long answers, packed by vlmtrain's own planner."""
    drawn = _draw(samples, (15, 65, 10, 6, 4), (12, 36), (12, 36), (80, 0.9), (300, 900))
    length = 4096
    plan = plan_epoch(np.array([_tokens(x) for x in drawn]), length, 0, 0, "mixed")
    return Size(
        name="3B, a quarter",
        text=_text(2048, 16, 11008, 9),
        vision={
            **_tower(1280, 16, 3420, 8),
            "window_size": 112,
            "fullatt_block_indexes": [1, 3, 5, 7],
        },
        vocabulary=151936,
        mrope_section=[16, 24, 24],
        drawn=drawn,
        packs=[pack.tolist() for pack in plan],
        pack_length=length,
        bar=1.5,
        tied=True,
    )


def _tokens(parts: Parts) -> int:
    """An image has a token for four patches and one at either end."""
    return sum(x if isinstance(x, int) else math.prod(x[1]) // 4 + 2 for x in parts)

"""A tiny model folder (byte-level BPE with Qwen's special tokens), pictures and conversations."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlmtrain.core.config import LoaderSection
from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.index import SampleIndex
from vlmtrain.data.loader import LoaderRank, PackedLoader
from vlmtrain.data.processor import Processor
from vlmtrain.demo.tiny_model import SPECIAL_TOKENS, train_tokenizer

CORPUS = [
    "You are a helpful assistant. What is in the picture? A red cup of coffee on a wooden table.",
    "system user assistant Describe both photographs, please. The cat sleeps; the rocket flies!",
    "Größe, naïve, 日本語, emoji 🚀 and numbers 1234567890.\n\n  indented\ttext\n",
    "a\n\nb\n\nc\n\nd\n\n",  # so that two newlines become one token
]
IMAGE_LIMITS = {"min_pixels": 4 * 28 * 28, "max_pixels": 24 * 28 * 28}


def config(family: str, ids: dict[str, int], vocab_size: int) -> dict[str, Any]:
    """A config.json with odd small sizes."""
    vision: dict[str, Any] = {"depth": 2, "num_heads": 3, "patch_size": 14}
    rope: dict[str, Any] = {"type": "mrope", "mrope_section": [4, 6, 6]}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 48, "hidden_size": 192}
    elif family == "qwen3_vl":
        vision |= {"patch_size": 16, "hidden_size": 48, "out_hidden_size": 192}
        vision |= {"intermediate_size": 68, "num_position_embeddings": 9}
        vision |= {"deepstack_visual_indexes": [0]}
        rope = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    else:
        vision |= {"hidden_size": 48, "out_hidden_size": 192, "tokens_per_second": 2}
        vision |= {"intermediate_size": 68, "fullatt_block_indexes": [1]}
    return {
        "model_type": family,
        "hidden_size": 192,
        "num_attention_heads": 6,
        "head_dim": 32,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "vocab_size": vocab_size,
        "rope_scaling": rope,
        "tie_word_embeddings": False,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_config": vision,
    }


def write_model_folder(folder: Path, family: str = "qwen2_5_vl") -> Path:
    """Config, tokenizer and preprocessor files of a model without weights."""
    tokenizer = train_tokenizer(CORPUS, 400)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    files = {
        "config.json": config(family, ids, 448),
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "additional_special_tokens": SPECIAL_TOKENS[1:],
        },
        "preprocessor_config.json": IMAGE_LIMITS,
        "video_preprocessor_config.json": IMAGE_LIMITS,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def save_image(path: Path, width: int, height: int, seed: int = 0, **options: Any) -> Path:
    """A picture with smooth and sharp parts."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([x * 3 + y, y * 5, (x * y) // 7], axis=-1) % 256
    pixels = (pixels + generator.integers(0, 40, pixels.shape)) % 256
    Image.fromarray(pixels.astype(np.uint8)).save(path, **options)
    return path


def conversation(*turns: str, **record: Any) -> dict[str, Any]:
    """A record with human and gpt turns in alternation."""
    names = ("human", "gpt")
    return {
        **record,
        "conversations": [{"from": names[i % 2], "value": text} for i, text in enumerate(turns)],
    }


def write_json(path: Path, records: list[Any]) -> Path:
    path.write_text(json.dumps(records, ensure_ascii=False), encoding="utf-8")
    return path


def open_loader(
    index: SampleIndex, processor: Processor, spec: ModelSpec, **options: Any
) -> PackedLoader:
    """From flat options: of LoaderSection (threads decode unless told otherwise), of LoaderRank,
    and the loader's own."""
    parts: list[Any] = []
    for cls, values in ((LoaderSection, {"workers": 0}), (LoaderRank, {})):
        names = [field.name for field in dataclasses.fields(cls)]
        parts.append(cls(**values | {name: options.pop(name) for name in names if name in options}))
    return PackedLoader(index, processor, spec, *parts, **options)


def no_media(grids: Sequence[np.ndarray]) -> list[tuple[bool, ...]]:
    """`decodes` of a rank without the vision tower."""
    return [(False,) * len(grid) for grid in grids]

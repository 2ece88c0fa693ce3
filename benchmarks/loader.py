"""Loading beside Megatron-Energon and a torch DataLoader: photographs on disk to tensors.

Everyone works in this process, on one thread, without worker processes: samples a second are then
samples a second and core, and nobody works while another is measured. Photographs: those in the
wheels of scikit-image and scikit-learn, at their own sizes as JPEG; one conversation each. Energon
reads the same shards. It and the DataLoader use transformers' image processor (PIL), tokenizer and
chat template; they make no labels, positions or packs, which ours does. Nobody keeps images.
"""

from __future__ import annotations

import importlib.util
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from benchmarks.harness import Comparison, Context, Row, compare
from vlmtrain.core.config import LoaderSection
from vlmtrain.data.formats.webdataset import build_shards
from vlmtrain.data.index import scan_sources
from vlmtrain.data.loader import LoaderRank, PackedLoader
from vlmtrain.data.processor import Processor
from vlmtrain.demo import photographs, tiny_model
from vlmtrain.demo.command import training_texts
from vlmtrain.models.family import read_spec

PACK = 2048  # the largest photograph has 1,280 tokens


def write_data(folder: Path, long_side: int) -> tuple[Path, Path, int]:
    """A conversation file with one sample a photograph, shards of it, and the number of samples."""
    path = photographs.export(folder / "photographs", long_side)
    samples: dict[str, Any] = {}
    for sample in json.loads(path.read_text(encoding="utf-8")):
        if isinstance(sample.get("image"), str):
            samples.setdefault(sample["image"], sample)
    path.write_text(json.dumps(list(samples.values())), encoding="utf-8")
    build_shards(path, folder / "shards", workers=1)
    return path, folder / "shards", len(samples)


class Reference:
    """A record and its image's bytes to (token ids, patch rows), all by transformers."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoTokenizer
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.images: Any = Qwen2VLImageProcessorPil.from_pretrained(model)

    def __call__(self, turns: list[tuple[str, str]], image: bytes) -> tuple[Any, Any]:
        """Args: turns of (role, text), with one <image> mark; the image's file."""
        found = self.images(images=[Image.open(io.BytesIO(image))], return_tensors="pt")
        t, h, w = found["image_grid_thw"][0].tolist()
        messages = [{"role": role, "content": _parts(text)} for role, text in turns]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        pads = "<|image_pad|>" * (t * h * w // self.images.merge_size**2)
        ids = self.tokenizer(text.replace("<|image_pad|>", pads), return_tensors="pt").input_ids
        return ids[0], found["pixel_values"]


def _parts(text: str) -> list[dict[str, str]]:
    before, mark, after = text.partition("<image>")
    return [
        *([{"type": "text", "text": before}] if before else []),
        *([{"type": "image"}] if mark else []),
        *([{"type": "text", "text": after}] if after else []),
    ]


def ours(shards: Path, model: Path) -> Callable[[], tuple[int, int]]:
    spec = read_spec(model)
    processor = Processor.from_folder(model, spec)
    index = scan_sources([shards], processor, spec, PACK)
    loader = PackedLoader(
        index,
        processor,
        spec,
        LoaderSection(workers=0),
        LoaderRank(),
        pack_length=PACK,
        global_batch=1,
        prefetch=False,
        threads=1,
        cache_bytes=0,
    )
    start = loader.state_dict()

    def epoch() -> tuple[int, int]:
        loader.load_state_dict(start)
        tokens = rows = 0
        for _ in range(loader.steps_per_epoch):
            (batch,) = loader.next_step()
            tokens += batch.length - batch.pad_tokens
            rows += len(batch.pixel_values)
        return tokens, rows

    return epoch


def data_loader(path: Path, model: Path) -> Callable[[], tuple[int, int]]:
    encode = Reference(model)
    samples = json.loads(path.read_text(encoding="utf-8"))
    roles = {"human": "user", "gpt": "assistant"}

    class Samples(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(samples)

        def __getitem__(self, place: int) -> tuple[Any, Any]:
            turns = [(roles[t["from"]], t["value"]) for t in samples[place]["conversations"]]
            return encode(turns, (path.parent / samples[place]["image"]).read_bytes())

    loader: Any = torch.utils.data.DataLoader(Samples(), shuffle=True, batch_size=None)

    def epoch() -> tuple[int, int]:
        sizes = [(len(ids), len(pixels)) for ids, pixels in loader]
        return sum(t for t, _ in sizes), sum(r for _, r in sizes)

    return epoch


def energon(shards: Path, model: Path, count: int) -> Callable[[], tuple[int, int]]:
    from megatron import energon as energon_

    encode = Reference(model)

    @energon_.stateless
    def cook(sample: dict[str, Any]) -> dict[str, Any]:
        turns = [(turn["role"], turn["content"]) for turn in _record(sample)["messages"]]
        ids, pixels = encode(turns, sample["0.jpg"])
        return dict(**energon_.basic_sample_keys(sample), ids=ids, pixels=pixels)

    class Encoder(energon_.DefaultTaskEncoder):
        decoder = None  # the files as they are: transformers opens them
        cookers = [energon_.Cooker(cook, has_subflavors={"format": "vlmtrain"})]

        def batch(self, samples: list[Any]) -> Any:
            return samples

        def encode_batch(self, batch: Any) -> Any:
            return batch

    dataset = energon_.get_train_dataset(
        shards,
        worker_config=energon_.WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=1,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=Encoder(),
    )
    stream = iter(energon_.get_loader(dataset))

    def epoch() -> tuple[int, int]:
        sizes = [
            (len(s["ids"]), len(s["pixels"])) for batch in islice(stream, count) for s in batch
        ]
        return sum(t for t, _ in sizes), sum(r for _, r in sizes)

    return epoch


def _record(sample: dict[str, Any]) -> dict[str, Any]:
    found = sample["json"]
    return found if isinstance(found, dict) else json.loads(found)


def _same(theirs: tuple[int, int], mine: tuple[int, int]) -> str | None:
    return None if theirs == mine else f"(tokens, patches) {theirs} instead of {mine}"


def rows(context: Context) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, shards, count = write_data(folder, 300 if context.quick else 4000)
        model = tiny_model.write_folder(folder / "model", training_texts())
        peers = {"torch DataLoader": data_loader(path, model)}
        skipped = {}
        if importlib.util.find_spec("megatron.energon") is None:
            skipped["energon"] = "megatron-energon is not installed"
        else:
            peers["energon"] = energon(shards, model, count)
        comparison = Comparison(
            op="loader, no workers, 1 core",
            shape=f"{count} photographs with questions",
            dtype="float32",
            ours=ours(shards, model),
            peers=peers,
            check=_same,
            skipped=skipped,
        )
        yield compare(comparison, context)

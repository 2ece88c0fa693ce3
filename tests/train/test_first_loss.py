"""The first loss of a run on other trainers' records, against transformers' own processor, chat
template and model: nothing of vlmtrain's data code on their side."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen2
from transformers.models.qwen3_vl.video_processing_qwen3_vl import (
    Qwen3VLVideoProcessor,
    smart_resize,
)
from transformers.video_utils import VideoMetadata

from tests.data.helpers import IMAGE_LIMITS, save_image, write_model_folder
from tests.data.test_videos import reference_indices, write_video
from tests.train.conftest import losses
from vlmtrain import cli
from vlmtrain.data.template import QWEN_TEMPLATE

Turns = list[tuple[str, Any]]
# Of the images, and of the video: of Qwen3-VL all frames together.
SIZES = {
    family: {**IMAGE_LIMITS, "patch_size": 14, "image_mean": OPENAI_CLIP_MEAN,
             "image_std": OPENAI_CLIP_STD}
    for family in ("qwen2_vl", "qwen2_5_vl")
} | {
    "qwen3_vl": {"min_pixels": 4 * 1024, "max_pixels": 24 * 1024, "patch_size": 16,
                 "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
}  # fmt: skip
PROCESSORS = {
    "qwen2_vl": transformers.Qwen2VLProcessor,
    "qwen2_5_vl": transformers.Qwen2_5_VLProcessor,
    "qwen3_vl": transformers.Qwen3VLProcessor,
}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def records(box: str) -> list[tuple[dict[str, Any], Turns, list[float]]]:
    """Each as its trainer writes it; the same as transformers' messages; weights of the answers.

    box: what stands in the text for the box (40, 30, 120, 60) on a.png.
    """
    image = {"type": "image"}
    llama_factory = {
        "messages": [
            {"content": "<image>Who are they?", "role": "user"},
            {"content": "They're Kane and Gretzka.", "role": "assistant"},
            {"content": "What are they doing?<image>", "role": "user"},
            {"content": "They are celebrating.", "role": "assistant"},
        ],
        "images": ["a.png", "b.png"],
    }
    v1 = {
        "messages": [
            {"role": "user", "loss_weight": 0.0, "content": [
                {"type": "image_url", "value": "b.png"}, {"type": "text", "value": "And this?"}]},
            {"role": "assistant", "loss_weight": 0.5, "content": [
                {"type": "text", "value": "A cup."}]},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "No.", "loss": False},
            {"role": "user", "content": "Well?"},
            {"role": "assistant", "content": "A cat."},
        ]
    }  # fmt: skip
    swift = {
        "messages": [
            {"role": "system", "content": "Be exact."},
            {"role": "user", "content": "<image>Find the dog"},
            {"role": "assistant", "content": "It is at <bbox>."},
        ],
        "images": ["a.png"],
        "objects": {"ref": [], "bbox": [[40, 30, 120, 60]]},
    }
    film = {
        "messages": [
            {"role": "user", "content": "<video>What happens in <image>?"},
            {"role": "assistant", "content": "It gets lighter."},
        ],
        "videos": ["v.mp4"],
        "images": ["b.png"],
    }
    alpaca = {"instruction": "Say", "input": "hello", "output": "Hello!", "history": [["a", "b"]]}
    return [
        (llama_factory, [
            ("user", [image, text("Who are they?")]), ("assistant", "They're Kane and Gretzka."),
            ("user", [text("What are they doing?"), image]), ("assistant", "They are celebrating."),
        ], [1, 1]),
        (v1, [
            ("user", [image, text("And this?")]), ("assistant", "A cup."), ("user", "Sure?"),
            ("assistant", "No."), ("user", "Well?"), ("assistant", "A cat."),
        ], [0.5, 0, 1]),
        (swift, [
            ("system", "Be exact."), ("user", [image, text("Find the dog")]),
            ("assistant", f"It is at {box}."),
        ], [1]),
        (film, [
            ("user", [{"type": "video"}, text("What happens in "), image, text("?")]),
            ("assistant", "It gets lighter."),
        ], [1]),
        (alpaca, [
            ("user", "a"), ("assistant", "b"), ("user", "Say\nhello"), ("assistant", "Hello!"),
        ], [1, 1]),
    ]  # fmt: skip


class Videos:
    """transformers' video processors without torchvision, which is not installed: their sampling,
    sizes and patches, and Pillow's resize."""

    model_input_names = ("pixel_values_videos", "video_grid_thw")
    merge_size = temporal_patch_size = 2
    fps, min_frames, max_frames = 2, 4, 768

    def __init__(self, family: str, path: Path) -> None:
        self.timed, self.sizes = family == "qwen3_vl", SIZES[family]
        with av.open(str(path)) as container:
            self.rate = float(container.streams.video[0].average_rate or 0)
            self.frames = [frame.to_image() for frame in container.decode(video=0)]

    def __call__(self, videos: Any, **_: Any) -> dict[str, Any]:
        meta = VideoMetadata(total_num_frames=len(self.frames), fps=self.rate)
        limits = self.sizes["min_pixels"], self.sizes["max_pixels"]
        (width, height), patch = self.frames[0].size, self.sizes["patch_size"]
        if self.timed:
            meta.frames_indices = Qwen3VLVideoProcessor.sample_frames(self, meta)
            of_all = len(meta.frames_indices), height, width
            height, width = smart_resize(*of_all, 2, 2 * patch, *limits)
        else:
            bounds = self.min_frames, self.max_frames
            meta.frames_indices = reference_indices(len(self.frames), self.rate, self.fps, bounds)
            height, width = qwen2.smart_resize(height, width, 2 * patch, *limits)
        frames = [
            np.asarray(self.frames[i].resize((width, height), Image.Resampling.BICUBIC))
            for i in meta.frames_indices
        ]
        values = (np.stack(frames) / 255 - self.sizes["image_mean"]) / self.sizes["image_std"]
        pixels = torch.from_numpy(values).float().permute(0, 3, 1, 2)[None]
        patches, *grid = Qwen3VLVideoProcessor.patchify(None, pixels, patch, 2, 2)
        return {
            "pixel_values_videos": patches[0],
            "video_grid_thw": torch.tensor([grid]),
            "video_metadata": [meta],
        }


def reference(folder: Path, family: str, data: Any) -> float:
    """The mean over the answers' tokens, each weighted."""
    tokenizer = AutoTokenizer.from_pretrained(folder)

    class OurVideos(PROCESSORS[family]):  # type: ignore[misc, name-defined]
        def check_argument_for_proper_class(self, name: str, argument: Any) -> type:
            return type(argument)

    videos = Videos(family, folder.parent / "v.mp4")
    processor = OurVideos(
        image_processor=qwen2.Qwen2VLImageProcessorPil(**SIZES[family]),
        tokenizer=tokenizer,
        video_processor=videos,
        chat_template=QWEN_TEMPLATE,
    )
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    header = tokenizer("<|im_start|>assistant\n")["input_ids"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    total, count = 0.0, 0
    for record, turns, weights in data:
        messages = [{"role": role, "content": content} for role, content in turns]
        rendered = processor.apply_chat_template(messages, tokenize=False)
        names = re.findall(r'"(\w\.png)"', json.dumps(record))
        inputs = processor(
            text=[rendered],
            images=[Image.open(folder.parent / name) for name in names] or None,
            videos=[np.zeros((2, 8, 8, 3), np.uint8)] if "videos" in record else None,
            return_tensors="pt",
        )
        ids = inputs["input_ids"][0].tolist()
        with torch.no_grad():
            logits = model(**inputs).logits[0].double()
        starts = [i for i in range(len(ids)) if ids[i : i + len(header)] == header]
        for start, weight in zip(starts, weights, strict=True):
            first = start + len(header)
            after = ids.index(end, first) + 2  # <|im_end|> and the newline
            if weight:
                scores = logits[first - 1 : after - 1].log_softmax(-1)
                right = torch.tensor(ids[first:after])[:, None]
                total -= weight * scores.gather(1, right).sum().item()
                count += after - first
    return total / count


@pytest.mark.parametrize(
    ("family", "box"),
    [
        # 200x90 becomes 196x84; Qwen2-VL writes thousandths.
        ("qwen2_5_vl", "[39, 28, 118, 56]"),
        pytest.param(
            "qwen2_vl", "<|box_start|>(200,333),(600,667)<|box_end|>", marks=pytest.mark.slow
        ),
        pytest.param("qwen3_vl", "[200, 333, 600, 667]", marks=pytest.mark.slow),
    ],
)
def test_first_loss(family: str, box: str, tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model", family)
    (folder / "chat_template.jinja").write_text(QWEN_TEMPLATE)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (folder / name).write_text(json.dumps(SIZES[family]))
    torch.manual_seed(5)
    if family == "qwen3_vl":  # transformers reads no sizes of the text from beside text_config
        given = json.loads((folder / "config.json").read_text())
        text = {name: value for name, value in given.items() if name != "vision_config"}
        text |= {"model_type": "qwen3_vl_text", "head_dim": 32}
        text["rope_parameters"] = text.pop("rope_scaling") | {"rope_theta": 1e6}
        (folder / "config.json").write_text(json.dumps({**given, "text_config": text}))
    config = AutoConfig.from_pretrained(folder)
    assert config.text_config.hidden_size == 192
    model = AutoModelForImageTextToText.from_config(config)
    for weight in model.parameters():  # so that attention tells positions from one another
        weight.data *= 4 if weight.ndim > 1 else 1
    model.float().save_pretrained(folder)
    save_image(tmp_path / "a.png", 200, 90, 1)
    save_image(tmp_path / "b.png", 57, 131, 2)
    pattern = np.asarray(Image.open(save_image(tmp_path / "c.png", 72, 48, 3))) // 3
    write_video(tmp_path / "v.mp4", frames=20, pattern=pattern)
    data = records(box)
    (tmp_path / "c.json").write_text(json.dumps([record for record, _, _ in data]))
    output = tmp_path / "run"
    arguments = [
        "train", f"--model={folder}", f"--data={tmp_path / 'c.json'}", f"--output={output}",
        "--train.pack_length=1024", "--train.global_batch_packs=1", "--train.steps=1",
        "--train.precision=fp32", "--loader.workers=0",
        f"--media.video_max_pixels={SIZES[family]['max_pixels']}",
    ]  # fmt: skip
    assert cli.main(arguments) == 0
    [loss] = losses(output)
    torch.testing.assert_close(loss, reference(folder, family, data), rtol=1e-5, atol=0)

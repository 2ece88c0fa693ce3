"""The first loss of a run on other trainers' records, against transformers' own processor, chat
template and model: nothing of vlmtrain's data code on their side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

from tests.data.helpers import IMAGE_LIMITS, save_image, write_model_folder
from tests.train.conftest import losses
from vlmtrain import cli
from vlmtrain.data.template import QWEN_TEMPLATE

Turns = list[tuple[str, Any]]


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
        (alpaca, [
            ("user", "a"), ("assistant", "b"), ("user", "Say\nhello"), ("assistant", "Hello!"),
        ], [1, 1]),
    ]  # fmt: skip


class WithoutVideo(Qwen2VLProcessor):
    """The video processor needs torchvision, which is not installed."""

    def check_argument_for_proper_class(self, name: str, argument: Any) -> type:
        return type(argument)


def reference(folder: Path, data: Any, images: list[list[str]]) -> float:
    """The mean over the answers' tokens, each weighted."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = WithoutVideo(
        image_processor=Qwen2VLImageProcessorPil(**IMAGE_LIMITS),
        tokenizer=tokenizer,
        chat_template=QWEN_TEMPLATE,
    )
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    header = tokenizer("<|im_start|>assistant\n")["input_ids"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    total, count = 0.0, 0
    for (_, turns, weights), names in zip(data, images, strict=True):
        messages = [{"role": role, "content": content} for role, content in turns]
        rendered = processor.apply_chat_template(messages, tokenize=False)
        pictures = [Image.open(folder.parent / name) for name in names]
        inputs = processor(text=[rendered], images=pictures or None, return_tensors="pt")
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
    ],
)
def test_first_loss(family: str, box: str, tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model", family)
    (folder / "chat_template.jinja").write_text(QWEN_TEMPLATE)
    torch.manual_seed(5)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    model.float().save_pretrained(folder)
    save_image(tmp_path / "a.png", 200, 90, 1)
    save_image(tmp_path / "b.png", 57, 131, 2)
    data = records(box)
    images = [["a.png", "b.png"], ["b.png"], ["a.png"], []]
    (tmp_path / "c.json").write_text(json.dumps([record for record, _, _ in data]))
    output = tmp_path / "run"
    arguments = [
        "train", f"--model={folder}", f"--data={tmp_path / 'c.json'}", f"--output={output}",
        "--train.pack_length=512", "--train.global_batch_packs=1", "--train.steps=1",
        "--train.precision=fp32", "--loader.workers=0",
    ]  # fmt: skip
    assert cli.main(arguments) == 0
    [loss] = losses(output)
    torch.testing.assert_close(loss, reference(folder, data, images), rtol=1e-5, atol=0)

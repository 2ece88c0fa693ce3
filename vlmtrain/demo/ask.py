"""Asks a trained Hugging Face folder the demo's questions: inputs and model are transformers'.

That is the point of the demo: what `vlmtrain train` leaves must answer in somebody else's code.
(`vlmtrain generate` is the way to ask with our own inputs and kernels.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from vlmtrain.demo.photographs import MARK, image_names
from vlmtrain.generate.model import load_transformers


@dataclass(frozen=True)
class Answer:
    """One question of the training data, the answer it was trained on, the answer given."""

    id: str
    photographs: tuple[str, ...]  # file names
    question: str
    expected: str
    given: str

    @property
    def right(self) -> bool:
        """Word for word, blanks and punctuation included."""
        return self.given == self.expected


def _image_processor(folder: Path) -> Any:
    """Qwen's image processor on PIL; the default class of transformers 5 needs torchvision."""
    try:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil as Processor,
        )
    except ImportError:  # transformers 4: the PIL class has the plain name
        from transformers import Qwen2VLImageProcessor as Processor
    return Processor.from_pretrained(folder)


def _messages(question: str) -> list[dict[str, Any]]:
    """A user message whose parts follow the `<image>` marks, the text between them verbatim."""
    content: list[dict[str, str]] = []
    for number, text in enumerate(question.split(MARK)):
        if number:
            content.append({"type": "image"})
        if text:
            content.append({"type": "text", "text": text})
    return [{"role": "user", "content": content}]


class Model:
    """A Hugging Face folder loaded by transformers, in float32 on the CPU.

    Raises:
        UserError: `from_pretrained` found a missing, unexpected or mismatched key, that is, a part
            of the model would have stayed at random values.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.model: Any = load_transformers(folder, torch.float32)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.images: Any = _image_processor(folder)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def answer(self, question: str, photographs: Iterable[Path], max_new_tokens: int = 64) -> str:
        """The greedy answer to `question`, with an `<image>` mark for each of `photographs`."""
        prompt = self.tokenizer.apply_chat_template(
            _messages(question), tokenize=False, add_generation_prompt=True
        )
        pictures = [Image.open(path).convert("RGB") for path in photographs]
        inputs: dict[str, Any] = {}
        if pictures:
            inputs.update(self.images(images=pictures, return_tensors="pt"))
            # Each placeholder becomes one token for each 2 x 2 patches.
            before, *after = prompt.split("<|image_pad|>")
            for (t, h, w), text in zip(inputs["image_grid_thw"].tolist(), after, strict=True):
                before += "<|image_pad|>" * (t * h * w // self.images.merge_size**2) + text
            prompt = before
        ids = self.tokenizer(prompt, return_tensors="pt").input_ids
        inputs.update(input_ids=ids, attention_mask=torch.ones_like(ids))
        if "mm_token_type_ids" in inspect.signature(self.model.forward).parameters:
            inputs["mm_token_type_ids"] = (ids == self.model.config.image_token_id).int()
        with torch.no_grad():
            out = self.model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
        given: str = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        return given


def ask_all(
    model: Model,
    samples: Iterable[dict[str, Any]],
    photographs: Path,
    say: Callable[[Answer], None] = lambda answer: None,
) -> list[Answer]:
    """Ask every sample's question (one question, one answer each); `photographs` is the folder of
    the image files, `say` is called after each answer."""
    answers = []
    for sample in samples:
        question, expected = (turn["value"] for turn in sample["conversations"])
        names = image_names(sample)
        answer = Answer(
            id=sample["id"],
            photographs=tuple(names),
            question=question.replace(MARK, "").strip(),
            expected=expected,
            given=model.answer(question, [photographs / name for name in names]),
        )
        say(answer)
        answers.append(answer)
    return answers

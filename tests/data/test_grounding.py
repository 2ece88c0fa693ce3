"""Boxes against Qwen's own conversion, written again here on transformers' smart_resize."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from tests.data.helpers import IMAGE_LIMITS, save_image, write_json, write_model_folder
from vlmtrain.data.errors import DataError
from vlmtrain.data.formats.sources import SourceSpec
from vlmtrain.data.index import scan_sources
from vlmtrain.data.processor import Processor
from vlmtrain.models.family import read_spec

SIZES = [(200, 90), (131, 57), (640, 480)]


def qwen2_5(box: list[float], width: int, height: int) -> list[int]:
    """`convert_to_qwen25vl_format` of Qwen's process_bbox.ipynb."""
    new_height, new_width = smart_resize(height, width, 28, **IMAGE_LIMITS)
    sides = [(width, new_width), (height, new_height)] * 2
    return [
        max(0, min(round(x * (new / old)), new - 1))
        for x, (old, new) in zip(box, sides, strict=False)
    ]


def qwen2(box: list[float], width: int, height: int) -> list[int]:
    """`convert_to_qwen2vl_format`: thousandths."""
    sides = [width, height] * 2
    return [max(0, min(round(x / side * 1000), 1000)) for x, side in zip(box, sides, strict=False)]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_boxes_follow_the_resize(family: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """ms-swift's objects in the text of a model that writes thousandths or pixels."""
    write_model_folder(tmp_path / "model", family)
    spec = read_spec(tmp_path / "model")
    processor = Processor.from_folder(tmp_path / "model", spec)
    boxes, images, expected = [], [], []
    for number, (width, height) in enumerate(SIZES):
        save_image(tmp_path / f"{number}.png", width, height)
        corners = np.sort(rng.uniform(0, 1, (20, 2, 2)), axis=1) * [width, height]
        for box in [*corners.round(2).reshape(20, 4).tolist(), [width, height], [0, 0]]:
            boxes.append(box)
            images.append(number)
            values = (qwen2 if family == "qwen2_vl" else qwen2_5)(box, width, height)
            points = [f"({x},{y})" for x, y in zip(values[::2], values[1::2], strict=True)]
            expected.append(
                f"<|box_start|>{','.join(points)}<|box_end|>"
                if family == "qwen2_vl"
                else json.dumps(values)
            )
    name = "<|object_ref_start|>dog<|object_ref_end|>" if family == "qwen2_vl" else "dog"
    answer = " ".join(["<bbox>"] * len(boxes))
    record = {
        "messages": [
            {"role": "user", "content": "<image>" * len(SIZES) + "Find the <ref-object>"},
            {"role": "assistant", "content": answer},
        ],
        "images": [f"{number}.png" for number in range(len(SIZES))],
        "objects": {"ref": ["dog"], "bbox": boxes, "image_id": images, "bbox_type": "real"},
    }
    relative = [
        [x / side for x, side in zip(box, SIZES[image] * 2, strict=False)]
        for box, image in zip(boxes, images, strict=True)
    ]
    second = {**record, "objects": {**record["objects"], "bbox": relative, "bbox_type": "norm1"}}
    path = write_json(tmp_path / "c.json", [record, second])
    index = scan_sources([path], processor, spec, 20000)
    texts = []
    for position in range(2):
        sample = index.load(position)
        encoded = processor.encode(sample, processor.layouts(sample))
        assert len(encoded.input_ids) == index.lengths[position]
        texts.append(processor.template.tokenizer.decode(encoded.input_ids[~encoded.visual_mask]))
    assert f"Find the {name}<|im_end|>" in texts[0]
    assert texts[0].split("assistant\n")[1] == " ".join(expected) + "<|im_end|>\n"
    # A part of a side times the side is the same number but for its last bit.
    differing = sum(a != b for a, b in zip(texts[0], texts[1], strict=False))
    assert differing <= 2


@pytest.mark.parametrize(
    ("objects", "said"),
    [
        ({"bbox": [[0, 0, 250, 50]]}, r"lies outside of its image of 200x90 pixels; .* pixels of"),
        ({"bbox": [[0, 0, 201.5, 50]]}, "lies outside of its image of 200x90 pixels"),
        ({"bbox": [[-1.5, 0, 20, 50]]}, "lies outside of its image of 200x90 pixels"),
        ({"bbox": [[0, 0, 0.5, 50]], "bbox_type": "norm1"}, "boxes are 0 to 1"),
        ({"bbox": [[0, 0, 5, 5]], "image_id": [1]}, "a box is on image 1, and it has 1"),
    ],
)
def test_boxes_that_fit_no_image(
    objects: dict, said: str, tmp_path: Path, processor: Processor
) -> None:
    save_image(tmp_path / "a.png", 200, 90)
    turns = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "<bbox>"}]
    record = {"id": "s", "messages": turns, "image": "a.png", "objects": objects}
    path = write_json(tmp_path / "c.json", [record])
    with pytest.raises(DataError, match=f"c.json: sample 's': .*{said}"):
        scan_sources([path], processor, processor.spec, 2000)


def test_a_box_may_stand_out_by_a_pixel(tmp_path: Path, processor: Processor) -> None:
    """It is cut off at the sides."""
    save_image(tmp_path / "a.png", 200, 90)
    turns = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "<bbox>"}]
    record = {"messages": turns, "image": "a.png", "objects": {"bbox": [[-1, -1, 201, 91]]}}
    path = write_json(tmp_path / "c.json", [record])
    sample = scan_sources([path], processor, processor.spec, 2000).load(0)
    ids = processor.encode(sample, processor.layouts(sample)).input_ids
    height, width = smart_resize(90, 200, 28, **IMAGE_LIMITS)
    said = f"[0, 0, {width - 1}, {height - 1}]<|im_end|>"
    assert said in processor.template.tokenizer.decode(ids)


def test_marks_of_boxes_kept_as_text_beside_names(tmp_path: Path, processor: Processor) -> None:
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<bbox> <ref-object>"},
    ]
    record = {"messages": turns, "objects": {"ref": ["dog"]}}
    path = write_json(tmp_path / "c.json", [record])
    index = scan_sources(
        [SourceSpec(str(path), ignored=("<bbox>",))], processor, processor.spec, 99
    )
    ids = processor.encode(index.load(0), ()).input_ids
    assert "assistant\n<bbox> dog<|im_end|>" in processor.template.tokenizer.decode(ids)

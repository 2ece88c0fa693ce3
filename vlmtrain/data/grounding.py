"""Names and boxes of objects as the models write them.

Qwen2-VL: special tokens, coordinates in 1/1000 of the image's sides. Qwen2.5-VL: a JSON list,
pixels of the resized image. A family's MediaDefaults say which. The arithmetic is that of Qwen's
conversion (qwen-vl-finetune/tools/process_bbox.ipynb).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vlmtrain.data.errors import DataError
from vlmtrain.data.sample import BOX_MARK, REF_MARK, Box, MediaInfo, Sample
from vlmtrain.models.common.family import MediaDefaults

_SLACK = 1.0  # pixels that a box may stand out of its image: annotations are rounded


def ground(
    sample: Sample,
    infos: Sequence[MediaInfo],
    resized: Sequence[tuple[int, int]],
    style: MediaDefaults,
) -> Sample:
    """The sample with names and boxes written in place of their marks.

    Args:
        sample: with or without objects.
        infos: of each of its media, with the sizes of the files.
        resized: (height, width) of each of its media as the model sees it.
        style: the model's way of writing boxes.

    Raises:
        DataError: a box lies outside of its image, or names an image that is not there.
    """
    if sample.objects is None:
        return sample
    images = [i for i, media in enumerate(sample.media) if media.kind == "image"]
    boxes = []
    for box in sample.objects.boxes:
        if box.image >= len(images):
            raise sample.fail(f"a box is on image {box.image}, and it has {len(images)}")
        medium = images[box.image]
        info = infos[medium]
        height, width = resized[medium]
        boxes.append(box_text(_pixels(box, info, sample), info, (width, height), style))
    names = [
        f"<|object_ref_start|>{name}<|object_ref_end|>" if style.box_tokens else name
        for name in sample.objects.names
    ]
    # A mark without values is one that is kept as text.
    pending = {mark: iter(v) for mark, v in ((REF_MARK, names), (BOX_MARK, boxes)) if v}
    turns = []
    for turn in sample.turns:
        text = turn.text
        for mark, values in pending.items():
            first, *rest = text.split(mark)
            text = first + "".join(next(values) + piece for piece in rest)
        turns.append(replace(turn, text=text))
    return replace(sample, turns=tuple(turns), objects=None)


def box_text(
    corners: Sequence[float], info: MediaInfo, resized: tuple[int, int], style: MediaDefaults
) -> str:
    """A box or point, in pixels of the file, as text for the model.

    Args:
        corners: x, y, and for a box a second x, y.
        info: the file's size.
        resized: (width, height) as the model sees it.
        style: the model's way of writing boxes.
    """
    values = []
    for i, value in enumerate(corners):
        side, new = ((info.width, resized[0]), (info.height, resized[1]))[i % 2]
        if style.box_scale is None:
            values.append(max(0, min(round(value * (new / side)), new - 1)))
        else:
            values.append(max(0, min(round(value / side * style.box_scale), style.box_scale)))
    if not style.box_tokens:
        return str(values)
    points = [f"({values[i]},{values[i + 1]})" for i in range(0, len(values), 2)]
    return f"<|box_start|>{','.join(points)}<|box_end|>"


def _pixels(box: Box, info: MediaInfo, sample: Sample) -> list[float]:
    sides = (info.width, info.height)
    values = [
        value * sides[i % 2] if box.relative else value for i, value in enumerate(box.corners)
    ]
    for i, value in enumerate(values):
        if not -_SLACK <= value <= sides[i % 2] + _SLACK:
            raise _outside(box, info, sample)
    return values


def _outside(box: Box, info: MediaInfo, sample: Sample) -> DataError:
    unit = "0 to 1 (norm1)" if box.relative else "pixels of the file"
    return sample.fail(
        f"the box {list(box.corners)} lies outside of its image of {info.width}x{info.height} "
        f"pixels; boxes are {unit}: is 'bbox_type' right?"
    )

"""`objects` of a record: names and boxes for its <ref-object> and <bbox> marks."""

from __future__ import annotations

import math
from typing import Any

from vlmtrain.data.formats.fields import RecordContext, is_empty, loads
from vlmtrain.data.sample import BOX_MARK, MARKS, REF_MARK, Box, Objects


def parse_objects(value: Any, texts: list[str], context: RecordContext) -> Objects | None:
    """Read `{"ref": [...], "bbox": [[x1, y1, x2, y2], ...], "bbox_type": "real" or "norm1",
    "image_id": [...]}`.

    Raises:
        DataError: another form, or marks that do not match names and boxes.
    """
    try:
        value = loads(value) if isinstance(value, str) and value else value
    except (ValueError, RecursionError):
        value = 0
    if is_empty(value):
        value = {}
    if not isinstance(value, dict):
        raise context.fail("'objects' must be an object with the lists 'ref' and 'bbox'")
    fields = context.fields(value, "'objects'")
    refs, boxes = (_listed(fields.take(key), key, context) for key in ("ref", "bbox"))
    kind = fields.take("bbox_type")
    if kind not in (None, "real", "norm1"):
        raise context.fail(f"'bbox_type' is {kind!r}; it must be real (pixels) or norm1 (0 to 1)")
    images = _listed(fields.take("image_id"), "image_id", context)
    fields.finish()
    for mark, have in ((REF_MARK, refs), (BOX_MARK, boxes)):
        marks = sum(text.count(mark) for text in texts if mark not in context.ignored)
        if marks != len(have):
            raise context.fail(
                f"it has {marks} {mark} mark{'s' * (marks != 1)} and {len(have)} in 'objects'; "
                f"put one {mark} in the text for each",
                "marks",
            )
    marks_of_all = (*MARKS, REF_MARK, BOX_MARK)
    if not all(isinstance(r, str) and r and not any(m in r for m in marks_of_all) for r in refs):
        raise context.fail("'ref' must be a list of texts without marks")
    if images and len(images) != len(boxes):
        raise context.fail(f"'image_id' has {len(images)} entries and 'bbox' {len(boxes)}")
    return (
        Objects(
            tuple(context.text(ref, "'ref'") for ref in refs),
            tuple(
                _box(box, images[i] if images else 0, kind == "norm1", context)
                for i, box in enumerate(boxes)
            ),
        )
        if refs or boxes
        else None
    )


def _listed(value: Any, key: str, context: RecordContext) -> list[Any]:
    if not isinstance(value, (list, type(None))):
        raise context.fail(f"'{key}' of 'objects' must be a list")
    return value or []


def _box(value: Any, image: Any, relative: bool, context: RecordContext) -> Box:
    numbers = isinstance(value, list) and all(
        isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) for x in value
    )
    if not numbers or len(value) not in (2, 4):
        raise context.fail(f"the box {str(value)[:80]} must be [x, y] or [x1, y1, x2, y2]")
    if len(value) == 4 and not (value[0] <= value[2] and value[1] <= value[3]):
        raise context.fail(
            f"the box {value} must be [x1, y1, x2, y2] with x1 <= x2 and y1 <= y2; is it x, y, "
            "width, height?"
        )
    if not isinstance(image, int) or isinstance(image, bool) or image < 0:
        raise context.fail(f"'image_id' {image!r} must count the images from 0")
    return Box(tuple(map(float, value)), image, relative)

"""How large images and videos become: the model folder's settings, the run's, and what fits a pack;
and the files of a model folder that keep them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmtrain.core.config import MediaSection
from vlmtrain.core.files import is_file
from vlmtrain.data.errors import DataError
from vlmtrain.data.media.images import ImageSettings, read_config
from vlmtrain.data.media.videos import VideoSettings
from vlmtrain.data.sample import MediaKind

# So many of the largest media fit in a pack, or one fewer with its text.
_PER_PACK = 2


def limited(
    images: ImageSettings, videos: VideoSettings, section: MediaSection, pack_length: int | None
) -> tuple[ImageSettings, VideoSettings]:
    """The settings of a run.

    Args:
        images, videos: the model folder's.
        section: what is set there replaces them.
        pack_length: what is not set is lowered so that one image, and one video of any length,
            takes at most half of so many tokens (`VideoSettings.within`: small frames may take
            more). None: nothing is lowered.

    Raises:
        DataError: min_pixels above max_pixels, or fewer max_frames than a slice of Qwen3-VL has.
    """
    images = _bounded(images, section.min_pixels, section.max_pixels)
    videos = replace(
        videos,
        images=_bounded(videos.images, 0, section.video_max_pixels),
        fps=section.fps or videos.fps,
    )
    if section.fps or section.max_frames:
        videos = replace(videos, num_frames=None)
    if section.max_frames:
        least = videos.images.temporal_patch_size if videos.shared_pixels else 1
        if section.max_frames < least:
            raise DataError(
                f"--media.max_frames is {section.max_frames}; videos of this model need {least} or "
                "more"
            )
        videos = videos.with_frames(section.max_frames)
    if pack_length is not None:
        tokens = pack_length // _PER_PACK
        if not section.max_pixels:
            images = images.lowered(tokens * images.factor**2)
        videos = videos.within(
            tokens,
            frames=not section.max_frames,
            pixels=not section.video_max_pixels,
        )
    return images, videos


def _bounded(settings: ImageSettings, least: int, most: int) -> ImageSettings:
    """The settings with bounds that are given (not 0); one gives way to the other that is."""
    if least and most and least > most:
        raise DataError(
            f"--media.min_pixels {least} is above --media.max_pixels {most}; lower the "
            "first or raise the second"
        )
    low = least or min(settings.min_pixels, most or settings.min_pixels)
    high = most or max(settings.max_pixels, least)
    return replace(settings, min_pixels=low, max_pixels=high)


def smaller(kinds: Iterable[MediaKind]) -> str:
    """The advice that makes such media smaller."""
    options = {"image": "--media.max_pixels", "video": "--media.video_max_pixels"}
    return "lower " + " and ".join(options[kind] for kind in dict.fromkeys(kinds))


def describe_sizes(images: ImageSettings, videos: VideoSettings) -> str:
    """A line on what a run with other settings than the model folder's does."""
    each = "in all" if videos.shared_pixels else "each"
    return (
        f"images have {images.min_pixels:,} to {images.max_pixels:,} pixels "
        f"({images.max_pixels // images.factor**2:,} tokens), videos up to {videos.max_frames} "
        f"frames of {videos.images.max_pixels:,} pixels {each} (--media.max_pixels, max_frames, "
        "video_max_pixels)"
    )


def write_settings(folder: Path, images: ImageSettings, videos: VideoSettings) -> None:
    """Put the settings into a model folder's processor files, where transformers reads them."""
    sampling: dict[str, Any] = {"min_frames": videos.min_frames, "max_frames": videos.max_frames}
    sampling["num_frames"] = videos.num_frames
    for nested, name, settings, more in (
        ("image_processor", "preprocessor_config.json", images, {}),
        ("video_processor", "video_preprocessor_config.json", videos.images, sampling),
    ):
        config, where = read_config(folder, nested, name)
        path = Path(where) if is_file(where) else folder / name
        config = {**config, **more}
        if nested == "video_processor" and videos.fps != (config.get("fps") or VideoSettings.fps):
            config["fps"] = videos.fps
        if config.get("num_frames"):  # transformers refuses both
            config["fps"] = None
        bounds = {"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels}
        if config.get("size") or (nested == "video_processor" and videos.shared_pixels):
            config["size"] = bounds  # Qwen3-VL's video processor reads no other
        # The image processor of transformers 4 looks at nothing but these.
        both = nested == "image_processor" or "min_pixels" in config or "max_pixels" in config
        if both or not config.get("size"):
            config |= {"min_pixels": settings.min_pixels, "max_pixels": settings.max_pixels}
        config.setdefault("patch_size", settings.patch_size)
        config.setdefault("temporal_patch_size", settings.temporal_patch_size)
        config.setdefault("merge_size", settings.merge_size)
        config.setdefault("image_mean", list(settings.mean))
        config.setdefault("image_std", list(settings.std))
        if path.name == "processor_config.json":
            config = {**json.loads(path.read_text(encoding="utf-8")), nested: config}
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

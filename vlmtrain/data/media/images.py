"""Images to patch rows, equal to transformers' Qwen2-VL image processor (PIL) to the last bit.

Legend: T frames, H and W pixels, t, h, w patches in time, height, width.

The work per pixel is: bicubic resize (`vlmkernels.resize`, bitwise PIL's), then ((x / 255) - mean)
/ std and the gather into patch rows, which `vlmkernels.patchify` does in one pass.
"""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps
from PIL.TiffImagePlugin import TiffImageFile

from vlmtrain.core.files import is_file
from vlmtrain.core.spec import VisionSpec
from vlmtrain.data.errors import DataError
from vlmtrain.data.media import native
from vlmtrain.data.sample import FileRange, Media, MediaInfo, Sample
from vlmtrain.models.common.family import MediaDefaults

if TYPE_CHECKING:
    from torch import Tensor

MAX_ASPECT_RATIO = 200  # the reference refuses more
MAX_FILE_PIXELS = 2 * 89_478_485  # where PIL speaks of a decompression bomb and refuses
_TOO_LARGE = f"{{}} has more than {MAX_FILE_PIXELS} pixels; make it smaller"
_EXIF_ORIENTATION = 0x0112
_TIFF_WIDTH, _TIFF_HEIGHT = 0x0100, 0x0101


def smart_resize(
    height: int,
    width: int,
    factor: int,
    min_pixels: int,
    max_pixels: int,
    frames: int = 1,
    temporal_factor: int = 1,
) -> tuple[int, int]:
    """The size an image is resized to: multiples of `factor`, area within the two bounds.

    `frames` of a video share the bounds; their number is compared in multiples of
    `temporal_factor`.

    Source: `smart_resize` of transformers' Qwen2-VL image and Qwen3-VL video processors.

    Raises:
        ValueError: one side is more than 200 times the other, or a side is below 1.
    """
    if min(height, width) < 1:
        raise ValueError(f"the image is {width}x{height} pixels; both sides must be at least 1")
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise ValueError(
            f"the image is {width}x{height} pixels; one side may be at most {MAX_ASPECT_RATIO} "
            "times the other: crop it or drop it"
        )
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    area = round(frames / temporal_factor) * temporal_factor * new_height * new_width
    if area > max_pixels:
        shrink = math.sqrt(frames * height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif area < min_pixels:
        grow = math.sqrt(min_pixels / (frames * height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


@dataclass(frozen=True)
class ImageSettings:
    """How pixels become patch rows; also used for the frames of a video."""

    min_pixels: int = MediaDefaults.image_pixels[0]
    max_pixels: int = MediaDefaults.image_pixels[1]
    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    mean: tuple[float, ...] = MediaDefaults.mean
    std: tuple[float, ...] = MediaDefaults.std
    rescale_factor: float = 1 / 255
    resample: int = int(Image.Resampling.BICUBIC)

    @classmethod
    def of(cls, media: MediaDefaults) -> ImageSettings:
        """A family's own settings."""
        return cls(*media.image_pixels, mean=media.mean, std=media.std)

    @classmethod
    def from_config(
        cls, config: dict[str, Any], vision: VisionSpec, default: ImageSettings, where: str
    ) -> ImageSettings:
        """Read a preprocessor_config.json; keys it lacks come from `default`.

        Raises:
            DataError: a step of the processor is switched off, or a size contradicts the model's.
        """
        for step in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            if config.get(step, True) is False:
                raise DataError(f"{where}: {step} is false, which is not supported; set it to true")
        model_sizes = {
            "patch_size": vision.patch_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "merge_size": vision.spatial_merge_size,
        }
        for key, value in model_sizes.items():
            if config.get(key) not in (None, value):
                raise DataError(
                    f"{where}: {key} is {config[key]} but config.json says {value}; make them agree"
                )
        size = config.get("size") or {}
        # min_pixels beside size wins, as in the reference's constructor.
        least = _first(config.get("min_pixels"), size.get("shortest_edge"), size.get("min_pixels"))
        most = _first(config.get("max_pixels"), size.get("longest_edge"), size.get("max_pixels"))
        settings = cls(
            min_pixels=int(_first(least, default.min_pixels)),
            max_pixels=int(_first(most, default.max_pixels)),
            mean=tuple(config.get("image_mean") or default.mean),
            std=tuple(config.get("image_std") or default.std),
            rescale_factor=float(_first(config.get("rescale_factor"), default.rescale_factor)),
            resample=int(_first(config.get("resample"), default.resample)),
            **model_sizes,
        )
        if not 0 < settings.min_pixels <= settings.max_pixels:
            raise DataError(
                f"{where}: min_pixels {settings.min_pixels} must be above 0 and not above "
                f"max_pixels {settings.max_pixels}"
            )
        return settings

    def lowered(self, max_pixels: int) -> ImageSettings:
        """The settings with at most so many pixels, but not fewer than min_pixels."""
        return replace(self, max_pixels=max(self.min_pixels, min(self.max_pixels, max_pixels)))

    @property
    def factor(self) -> int:
        """Sides of a resized image are multiples of this (28)."""
        return self.patch_size * self.merge_size

    @property
    def patch_dim(self) -> int:
        """Length of a patch row (1176)."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) after the resize. Raises ValueError as `smart_resize`."""
        return smart_resize(height, width, self.factor, self.min_pixels, self.max_pixels)

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """(t, h, w) in patches of an image."""
        new_height, new_width = self.resized(height, width)
        return 1, new_height // self.patch_size, new_width // self.patch_size

    def tokens(self, grid: tuple[int, int, int]) -> int:
        """Language tokens of a grid: t*h*w / merge_size^2."""
        return grid[0] * grid[1] * grid[2] // self.merge_size**2


def read_config(folder: str | Path, nested: str, *files: str) -> tuple[dict[str, Any], str]:
    """The processor settings of a model folder, and the file they came from.

    As in transformers 5, `processor_config.json` with the key `nested` goes first, then `files`.
    No file at all gives an empty dict: the defaults hold.
    """
    for name, key in [("processor_config.json", nested), *((file, None) for file in files)]:
        path = Path(folder) / name
        if not is_file(path):
            continue
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path} is not valid JSON: {error}") from None
        except OSError as error:
            raise DataError(f"{path} can't be read: {error.strerror}") from None
        if key is None and isinstance(config, dict):
            return config, str(path)
        if key is not None and isinstance(config, dict) and isinstance(config.get(key), dict):
            return config[key], str(path)
    return {}, str(folder)


def probe_image(media: Media, sample: Sample, verify: bool) -> MediaInfo:
    """The size of an image after EXIF orientation; `verify` decodes it to notice a cut file.

    Raises:
        DataError: missing, not an image, truncated, or too large to be meant seriously.
    """
    image = _open(media.parts[0], sample, media.name)
    width, height = image.size
    try:
        if isinstance(image, TiffImageFile):  # from Pillow 11 on its size is upright already
            width, height = image.tag_v2[_TIFF_WIDTH], image.tag_v2[_TIFF_HEIGHT]
        if image.getexif().get(_EXIF_ORIENTATION, 1) in (5, 6, 7, 8):
            width, height = height, width
        if verify:
            # Reads every byte; for JPEG the scaled decode skips most of the arithmetic.
            image.draft("RGB", (1, 1))
            image.load()
    except Exception as error:  # PIL's plugins raise OSError, ValueError, SyntaxError, struct.error
        raise _broken(sample, media.name, error) from None
    return MediaInfo(width, height)


def load_image(part: FileRange, sample: Sample, name: str) -> Image.Image:
    """Decode to RGB as transformers does: EXIF orientation applied, transparency onto white.

    `transformers.image_utils.load_image` turns the picture upright, and the processor's
    `convert_to_rgb` puts transparent pixels on white.

    Raises:
        DataError: missing, not an image, or truncated.
    """
    image = _open(part, sample, name)
    try:
        image = ImageOps.exif_transpose(image) or image
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, (255, 255, 255, 255))
            image = Image.alpha_composite(white, image)
        return image.convert("RGB")
    except Exception as error:  # see probe_image
        raise _broken(sample, name, error) from None


def resize(
    image: Image.Image | np.ndarray, settings: ImageSettings, size: tuple[int, int] | None = None
) -> np.ndarray:
    """Resize an RGB image, or uint8 [H, W, 3], to its patch grid, or to `size` (height, width).
    Returns uint8 [H, W, 3].

    Raises:
        ValueError: as `smart_resize`.
    """
    if isinstance(image, np.ndarray):
        pixels = image
    elif settings.resample == Image.Resampling.BICUBIC:  # PIL's own layout: copied, not packed
        data = image.tobytes("raw", "RGBX")
        pixels = np.frombuffer(data, dtype=np.uint8).reshape(image.height, image.width, 4)
    else:
        pixels = np.asarray(image)
    height, width = size or settings.resized(*pixels.shape[:2])
    if settings.resample == Image.Resampling.BICUBIC:
        return native.resize(pixels, height, width)
    return np.asarray(Image.fromarray(pixels).resize((width, height), settings.resample))


def patchify(frames: np.ndarray, settings: ImageSettings, out: Tensor | None = None) -> Tensor:
    """Normalise and gather frames into patch rows (`vlmkernels.patchify`).

    Args:
        frames: uint8 [T, H, W, 3], H and W multiples of `settings.factor`; the last frame is
            repeated where T is no multiple of temporal_patch_size (a single image fills two).
        settings: mean, std and sizes.
        out: [t*h*w, patch_dim] to write into, float32 or bfloat16.

    Returns:
        [t*h*w, patch_dim]: rows in the order (t, h/2, w/2, 2, 2), so that four consecutive rows
        are one language token; inside a row (channel, frame, y, x).

    Raises:
        ValueError: `out` is not of that shape.
    """
    import torch  # decoder processes import this file and get along without it

    from vlmkernels import patchify as native

    if not frames.flags.writeable:  # torch has no read-only tensors
        frames = frames.copy()
    return native(
        torch.from_numpy(frames),
        mean=settings.mean,
        std=settings.std,
        rescale_factor=settings.rescale_factor,
        patch_size=settings.patch_size,
        temporal_patch_size=settings.temporal_patch_size,
        merge_size=settings.merge_size,
        out=out,
    )


def _open(part: FileRange, sample: Sample, name: str) -> Image.Image:
    try:
        data = part.read()
    except FileNotFoundError:
        raise sample.fail(
            f"the file {part.path} is missing; put it there or correct the path in the sample",
            "unreadable",
        ) from None
    except OSError as error:
        raise sample.fail(f"{name} cannot be read: {error}", "unreadable") from None
    try:
        image = Image.open(io.BytesIO(data))
    except Image.DecompressionBombError:
        raise sample.fail(_TOO_LARGE.format(name), "unreadable") from None
    except Exception as error:  # see probe_image
        if isinstance(error, Image.UnidentifiedImageError):
            error = Exception(f"{len(data)} bytes that no image format begins with")
        raise _broken(sample, name, error) from None
    if image.width * image.height > MAX_FILE_PIXELS:  # PIL's own check can be switched off
        raise sample.fail(_TOO_LARGE.format(name), "unreadable")
    if image.mode == "F" or image.mode.startswith("I"):  # to RGB, PIL cuts off what is above 255
        raise sample.fail(
            f"{name} has more than 8 bits a pixel of grey (mode {image.mode}), and nearly all of "
            "them would become white; save it with 8 bits, scaled to 0 to 255",
            "unreadable",
        )
    return image


def _broken(sample: Sample, name: str, error: Exception) -> DataError:
    return sample.fail(
        f"{name} is not an image or is cut short ({error}); replace it or drop it", "unreadable"
    )


def _first(*values: Any) -> Any:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)

"""Pixels: bitwise against transformers' PIL image processor; broken files."""

from __future__ import annotations

import inspect
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as reference

from tests.data.helpers import IMAGE_LIMITS, save_image
from tests.data.test_videos import write_video
from vlmtrain.core.spec import MediaKind, ModelSpec
from vlmtrain.data.errors import DataError
from vlmtrain.data.media.images import (
    ImageSettings,
    load_image,
    patchify,
    probe_image,
    smart_resize,
)
from vlmtrain.data.media.images import resize as resize_image
from vlmtrain.data.media.videos import VideoSettings, load_frames, probe_media
from vlmtrain.data.processor import Processor
from vlmtrain.data.sample import FileRange, Media, MediaInfo, Sample

SAMPLE = Sample("s7", (), (), "conversations.json")
SMALL = ImageSettings(**IMAGE_LIMITS)


def ours(path: Path, settings_: ImageSettings) -> tuple[np.ndarray, tuple[int, int, int]]:
    image = load_image(FileRange(str(path)), SAMPLE, path.name)
    return (
        patchify(resize_image(image, settings_)[None], settings_).numpy(),
        settings_.grid(image.height, image.width),
    )


def theirs(path: Path, **limits: int) -> tuple[np.ndarray, tuple[int, int, int]]:
    image = ImageOps.exif_transpose(Image.open(path))
    output = reference.Qwen2VLImageProcessorPil(**limits)(images=[image])
    return output["pixel_values"], tuple(output["image_grid_thw"][0].tolist())


def assert_same(path: Path, settings_: ImageSettings, **limits: int) -> None:
    pixels, grid = ours(path, settings_)
    expected, expected_grid = theirs(path, **limits)
    assert grid == expected_grid
    assert pixels.dtype == np.float32 and pixels.shape == expected.shape
    np.testing.assert_array_equal(pixels, expected)


@pytest.mark.parametrize("size", [(80, 60), (57, 131), (28, 28), (1, 1), (400, 3), (301, 299)])
def test_equals_transformers(size: tuple[int, int], tmp_path: Path) -> None:
    path = save_image(tmp_path / "a.png", *size)
    assert_same(path, SMALL, **IMAGE_LIMITS)


@pytest.mark.parametrize("resample", [1, 2, 3])  # Lanczos and bilinear by PIL, bicubic natively
def test_the_folders_filter_is_used(resample: int, tmp_path: Path) -> None:
    path = save_image(tmp_path / "a.png", 150, 97)
    filtered = ImageSettings(**IMAGE_LIMITS, resample=resample)
    assert_same(path, filtered, **IMAGE_LIMITS, resample=resample)
    array = np.asarray(Image.open(path).convert("RGB"))  # as a video's frames come
    expected = resize_image(Image.open(path).convert("RGB"), filtered)
    np.testing.assert_array_equal(resize_image(array, filtered), expected)


def test_equals_transformers_with_default_limits(tmp_path: Path) -> None:
    assert_same(save_image(tmp_path / "a.jpg", 333, 211, quality=90), ImageSettings())


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "CMYK", "PA"])
def test_every_colour_mode_equals_transformers(mode: str, tmp_path: Path) -> None:
    from transformers import image_transforms

    if mode in ("LA", "RGBA", "PA") and "alpha" not in inspect.getsource(
        image_transforms.convert_to_rgb
    ):
        pytest.skip("this transformers drops transparency; newer ones lay it on white, as we do")
    base = Image.open(save_image(tmp_path / "base.png", 90, 61)).convert("RGB")
    path = tmp_path / ("a.tif" if mode in ("CMYK", "PA") else "a.png")
    if mode in ("LA", "RGBA"):
        base = base.convert(mode)
        base.putalpha(Image.linear_gradient("L").resize(base.size))
        base.save(path)
    elif mode == "PA":  # a palette with a transparent entry
        path = tmp_path / "a.png"
        base.convert("P").save(path, transparency=3)
    else:
        base.convert(mode).save(path)
    assert_same(path, SMALL, **IMAGE_LIMITS)


def test_a_transparent_colour_of_a_palette_is_white(tmp_path: Path) -> None:
    places = np.random.randint(0, 4, (20, 30), dtype=np.uint8)
    colours = np.random.randint(0, 256, (4, 3), dtype=np.uint8)
    image = Image.fromarray(places, "P")
    image.putpalette(colours.tobytes())
    image.save(tmp_path / "a.png", transparency=2)
    colours[2] = 255
    loaded = load_image(FileRange(str(tmp_path / "a.png")), SAMPLE, "a.png")
    np.testing.assert_array_equal(np.asarray(loaded), colours[places])


def test_the_folders_scale_mean_and_spread_are_used(tmp_path: Path, spec: ModelSpec) -> None:
    options = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "rescale_factor": 0.01}
    config = {**IMAGE_LIMITS, **options}
    settings_ = ImageSettings.from_config(config, spec.vision, ImageSettings(), "here")
    path = save_image(tmp_path / "a.png", 80, 60)
    pixels, _ = ours(path, settings_)
    output = reference.Qwen2VLImageProcessorPil(**config)(images=[Image.open(path)])
    np.testing.assert_array_equal(pixels, output["pixel_values"])
    for step in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        with pytest.raises(DataError, match=f"here: {step} is false, which is not supported"):
            ImageSettings.from_config({step: False}, spec.vision, ImageSettings(), "here")


def test_animated_gif_gives_its_first_frame(tmp_path: Path) -> None:
    frames = [Image.open(save_image(tmp_path / f"{i}.png", 60, 50, i)) for i in range(3)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert_same(tmp_path / "a.gif", SMALL, **IMAGE_LIMITS)


def test_the_content_says_what_a_file_is(tmp_path: Path) -> None:
    path = save_image(tmp_path / "a.png", 57, 40).rename(tmp_path / "a.jpg")
    actual = load_image(FileRange(str(path)), SAMPLE, "a.jpg")
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(Image.open(path)))


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
@pytest.mark.parametrize("orientation", [1, 3, 5, 6, 7, 8])
def test_exif_orientation_is_applied_as_load_image_does(
    suffix: str, orientation: int, tmp_path: Path
) -> None:
    from transformers.image_utils import load_image as reference_load

    path = tmp_path / f"a.{suffix}"
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.open(save_image(tmp_path / "b.png", 90, 50)).save(path, exif=exif)
    ours = load_image(FileRange(str(path)), SAMPLE, path.name)
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(reference_load(str(path))))
    upright = (90, 50) if orientation in (1, 3) else (50, 90)
    assert ours.size == upright
    for verify in (True, False):
        info = probe_image(Media("image", path.name, (FileRange(str(path)),)), SAMPLE, verify)
        assert info == MediaInfo(*upright)


@pytest.mark.parametrize("suffix", ["jpg", "mp4"])
def test_a_file_of_another_size_than_was_scanned(suffix: str, tmp_path: Path) -> None:
    """As many patches in another grid: the rows fit, their positions would not."""
    path = tmp_path / f"a.{suffix}"
    if suffix == "jpg":
        save_image(path, 84, 56)
    else:
        write_video(path, 4, size=(84, 56))
    kind: MediaKind = "image" if suffix == "jpg" else "video"
    media = Media(kind, path.name, (FileRange(str(path)),))
    videos = VideoSettings(SMALL)
    info = probe_media(media, SAMPLE, verify=False)
    assert load_frames(replace(media, info=info), SAMPLE, SMALL, videos).shape[1:3] == (56, 84)
    turned = replace(info, width=info.height, height=info.width)
    with pytest.raises(DataError, match=rf"sample 's7': a.{suffix} has another size .*84x56 .*56x"):
        load_frames(replace(media, info=turned), SAMPLE, SMALL, videos)


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 40), st.integers(0, 400))
@settings(max_examples=300, deadline=None)
def test_smart_resize_is_the_reference(height: int, width: int, least: int, extra: int) -> None:
    limits = (28, least * 784, (least + extra) * 784)
    try:
        expected = reference.smart_resize(height, width, *limits)
    except ValueError:
        with pytest.raises(ValueError, match="at most 200 times"):
            smart_resize(height, width, *limits)
        return
    assert smart_resize(height, width, *limits) == expected


def test_patch_rows_by_the_written_formula(rng: np.random.Generator) -> None:
    """The transpose of SEMANTICS: (t, 2, C, h/2, 2, 14, w/2, 2, 14) -> (0,3,6,4,7,2,1,5,8)."""
    frames = rng.integers(0, 256, (5, 56, 84, 3), dtype=np.uint8)
    padded = np.concatenate([frames, frames[-1:]])  # the odd last frame is repeated
    values = (padded.astype(np.float64) / 255 - SMALL.mean) / SMALL.std
    expected = (
        values.transpose(0, 3, 1, 2)
        .reshape(3, 2, 3, 2, 2, 14, 3, 2, 14)
        .transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
        .reshape(3 * 4 * 6, 1176)
    )
    rows = patchify(frames, SMALL).numpy()
    # Three float32 roundings of values below 3: each at most 2^-24 relative, doubled by cancelling.
    np.testing.assert_allclose(rows, expected, rtol=0, atol=3 * 2**-22)


def test_settings_come_from_the_folder(model_folder: Path, spec: ModelSpec, tmp_path: Path) -> None:
    def read(files: dict[str, object]) -> ImageSettings:
        for path in tmp_path.glob("*.json"):
            path.unlink()
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            (tmp_path / name).write_bytes((model_folder / name).read_bytes())
        for name, content in files.items():
            (tmp_path / name).write_text(json.dumps(content))
        return Processor.from_folder(tmp_path, spec).images

    assert read({}) == ImageSettings()
    old = {"preprocessor_config.json": {"min_pixels": 3136, "max_pixels": 12845056}}
    assert read(old).max_pixels == 12845056
    size = {"size": {"shortest_edge": 6272, "longest_edge": 9408}, "image_mean": [0.5, 0.5, 0.5]}
    new = read({"preprocessor_config.json": size})
    assert (new.min_pixels, new.max_pixels, new.mean) == (6272, 9408, (0.5, 0.5, 0.5))
    both = {"min_pixels": 3136, "max_pixels": 12544, "size": dict(size["size"])}
    new = read({"preprocessor_config.json": both})
    edges = reference.Qwen2VLImageProcessorPil(**both).size  # type: ignore[arg-type]
    assert (new.min_pixels, new.max_pixels) == (edges["shortest_edge"], edges["longest_edge"])
    nested = read({**old, "processor_config.json": {"image_processor": size}})
    assert nested.max_pixels == 9408
    for bad, message in [
        ({"do_resize": False}, "do_resize is false"),
        ({"patch_size": 16}, "patch_size is 16 but config.json says 14"),
        ({"min_pixels": 9, "max_pixels": 8}, "min_pixels 9"),
    ]:
        with pytest.raises(DataError, match=f"preprocessor_config.json: {message}"):
            read({"preprocessor_config.json": bad})
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(DataError, match="preprocessor_config.json is not valid JSON"):
        Processor.from_folder(tmp_path, spec)


def _bytes(kind: str) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(1).integers(0, 256, (120, 130, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("keep", [0.0, 0.3, 0.95])
def test_truncated_file_is_noticed_and_named(kind: str, keep: float, tmp_path: Path) -> None:
    path = tmp_path / "cut.img"
    whole = _bytes(kind)
    path.write_bytes(whole)
    media = Media("image", "cut.img", (FileRange(str(path)),))
    assert probe_image(media, SAMPLE, verify=True) == MediaInfo(130, 120)
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(DataError, match="conversations.json: sample 's7': cut.img is not an image"):
        probe_image(media, SAMPLE, verify=True)
    with pytest.raises(DataError, match="conversations.json: sample 's7': cut.img is not an image"):
        load_image(media.parts[0], SAMPLE, "cut.img")


def test_other_bad_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(name: str) -> None:
        probe_image(Media("image", name, (FileRange(str(tmp_path / name)),)), SAMPLE, verify=True)

    with pytest.raises(DataError, match=r"sample 's7': the file .*none.jpg is missing; put it"):
        probe("none.jpg")
    (tmp_path / "text.jpg").write_text("this is no picture")
    with pytest.raises(DataError, match="text.jpg is not an image or is cut short"):
        probe("text.jpg")
    with pytest.raises(ValueError, match="at most 200 times"):
        SMALL.grid(10, 30000)
    save_image(tmp_path / "big.png", 60, 60)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(DataError, match="big.png has more than"):
        probe("big.png")

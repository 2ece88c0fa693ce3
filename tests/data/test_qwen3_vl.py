"""Qwen3-VL's media against transformers: pixels, frames, text with times, ids and positions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import (
    Qwen3VLVideoProcessor,
    smart_resize,
)
from transformers.video_utils import VideoMetadata

from tests.data.helpers import save_image, write_model_folder
from tests.data.test_images import theirs
from tests.data.test_videos import SAMPLE, write_video
from vlmtrain.core.config import MediaSection
from vlmtrain.data.errors import DataError
from vlmtrain.data.media.images import ImageSettings, load_image, patchify, resize
from vlmtrain.data.media.limits import describe_sizes, limited
from vlmtrain.data.media.videos import TimedVideoSettings, load_video, probe_media
from vlmtrain.data.processor import Processor
from vlmtrain.data.sample import MARK_PATTERN, MARKS, FileRange, Media, MediaInfo, Sample, Turn
from vlmtrain.data.template import ChatTemplate
from vlmtrain.models.family import read_spec

SIZES = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
NORMS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
IMAGES = {"size": {"shortest_edge": 4 * 1024, "longest_edge": 24 * 1024}, **SIZES, **NORMS}
VIDEOS = {"size": {"shortest_edge": 8 * 1024, "longest_edge": 60 * 1024}, **SIZES, **NORMS}
# The released models that think, in short: the header of an answer opens a thought, and thoughts
# are left out before the last question.
THINK = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model_folder(tmp_path_factory.mktemp("qwen3"), "qwen3_vl")
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEOS))
    return folder


@pytest.fixture(scope="module")
def processor(folder: Path) -> Processor:
    return Processor.from_folder(folder, read_spec(folder))


def their_videos(settings: TimedVideoSettings) -> SimpleNamespace:
    """What methods of Qwen3VLVideoProcessor read; the class itself needs torchvision."""
    limits = settings.images.min_pixels, settings.images.max_pixels
    return SimpleNamespace(
        **{name: getattr(settings, name) for name in ("fps", "min_frames", "max_frames")},
        cap_pixels_per_frame=settings.cap_pixels_per_frame,
        max_video_tokens=settings.max_video_tokens,
        size=dict(zip(("shortest_edge", "longest_edge"), limits, strict=True)),
        **SIZES,
    )


class ReferenceVideos:
    """Stands in for Qwen3VLVideoProcessor: its own sampling and sizes, without pixels."""

    model_input_names = ("pixel_values_videos", "video_grid_thw")
    merge_size = temporal_patch_size = 2

    def __init__(self, settings: TimedVideoSettings, infos: list[MediaInfo]) -> None:
        self.settings, self.infos = their_videos(settings), infos

    def __call__(self, videos: Any, **_: Any) -> dict[str, Any]:
        grids, metadata = [], []
        for info in self.infos:
            meta = VideoMetadata(total_num_frames=info.frames, fps=info.fps)
            meta.frames_indices = Qwen3VLVideoProcessor.sample_frames(self.settings, meta)
            height, width = smart_resize(
                len(meta.frames_indices),
                info.height,
                info.width,
                factor=32,
                min_pixels=self.settings.size["shortest_edge"],
                max_pixels=self.settings.size["longest_edge"],
            )
            grids.append([-(-len(meta.frames_indices) // 2), height // 16, width // 16])
            metadata.append(meta)
        return {"video_grid_thw": torch.tensor(grids), "video_metadata": metadata}


def marks(turns: list[tuple[str, str]]) -> int:
    return len(kinds_of(turns))


def kinds_of(turns: list[tuple[str, str]]) -> list[Any]:
    return [MARKS[mark] for _, text in turns for mark in MARK_PATTERN.findall(text)]


class ReferenceProcessor(Qwen3VLProcessor):
    def check_argument_for_proper_class(self, name: str, argument: Any) -> type:
        return type(argument)


@pytest.mark.parametrize("size", [(80, 60), (57, 131), (32, 32), (1, 1), (400, 3), (301, 299)])
def test_images_equal_transformers(size: tuple[int, int], processor: Processor, tmp_path) -> None:
    path = save_image(tmp_path / "a.png", *size)
    image = load_image(FileRange(str(path)), SAMPLE, "a.png")
    expected, grid = theirs(path, **IMAGES)
    assert processor.images.grid(image.height, image.width) == grid
    ours = patchify(resize(image, processor.images)[None], processor.images).numpy()
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, expected)


@given(
    st.integers(2, 900),
    st.integers(1, 2000),
    st.integers(1, 2000),
    st.integers(1, 200),
    st.integers(0, 40000),
    st.booleans(),
)
def test_video_sizes_equal_transformers(
    frames: int, height: int, width: int, least: int, extra: int, cap: bool
) -> None:
    images = ImageSettings(least * 1024, (least + extra) * 1024, patch_size=16)
    settings = TimedVideoSettings(images, cap_pixels_per_frame=cap, max_video_tokens=20)
    theirs = their_videos(settings)
    try:
        expected = Qwen3VLVideoProcessor.get_num_of_video_patches(theirs, frames, height, width)
    except ValueError:
        with pytest.raises(ValueError, match="at most 200 times"):
            settings.resized(height, width, frames)
        return
    new_height, new_width = settings.resized(height, width, frames)
    assert (new_height % 32, new_width % 32) == (0, 0)
    assert -(-frames // 2) * (new_height // 16) * (new_width // 16) == expected


@given(st.integers(2, 4000), st.sampled_from([1.0, 8.0, 24.0, 30000 / 1001]), st.floats(0.1, 40))
def test_frames_equal_transformers(total: int, rate: float, fps: float) -> None:
    settings = TimedVideoSettings(ImageSettings(patch_size=16), fps=fps)
    meta = VideoMetadata(total_num_frames=total, fps=rate)
    expected = Qwen3VLVideoProcessor.sample_frames(their_videos(settings), meta)
    assert settings.sample(MediaInfo(64, 64, total, rate)) == expected.tolist()


CONVERSATIONS: list[list[tuple[str, str]]] = [
    [("user", "<video>What happens?"), ("assistant", "A rocket flies.")],
    [("system", "Be brief."), ("user", "Look <video>, <image> and <video>!"), ("assistant", "No")],
    [("user", "<image><image>"), ("assistant", "Two cups."), ("user", "and <video>"),
     ("assistant", "see <video>")],
    [("user", "Größe?"), ("assistant", "No\n\nmedia 🚀")],
]  # fmt: skip


@pytest.mark.parametrize("turns", CONVERSATIONS)
def test_encoding_equals_transformers(
    turns: list[tuple[str, str]], processor: Processor, rng: np.random.Generator
) -> None:
    """Text with times, ids, types and positions, with odd numbers of frames too."""
    spec, template = processor.spec, processor.template
    media = []
    for kind in kinds_of(turns):
        width, height = (int(n) for n in rng.integers(20, 300, 2))
        frames = int(rng.integers(2, 60)) if kind == "video" else 1
        rate = float(rng.choice([3.0, 24.0, 30000 / 1001])) if kind == "video" else None
        media.append(Media(kind, kind, (), info=MediaInfo(width, height, frames, rate)))
    sample = Sample("s", tuple(Turn(*turn) for turn in turns), tuple(media), "s.json")
    encoded = processor.encode(sample, processor.layouts(sample))

    infos = {kind: [m.info for m in media if m.kind == kind] for kind in ("image", "video")}
    theirs = ReferenceProcessor(
        image_processor=Qwen2VLImageProcessorPil(**IMAGES),
        tokenizer=template.tokenizer,
        video_processor=ReferenceVideos(processor.videos, infos["video"]),
    )
    expected = theirs(
        text=[template.render(template.messages(sample))],
        images=[Image.new("RGB", (i.width, i.height)) for i in infos["image"]] or None,
        videos=[np.zeros((2, 8, 8, 3), np.uint8)] * len(infos["video"]) or None,
    )
    ids = encoded.input_ids.tolist()
    assert ids == expected["input_ids"][0]
    text = template.tokenizer.decode(ids)
    assert text.startswith("<|im_start|>" + turns[0][0])  # no system prompt of the template's own
    assert text.count(" seconds><|vision_start|>") == sum(
        grid[0] for grid in expected.get("video_grid_thw", [])
    )
    types = np.array(expected["mm_token_type_ids"][0])
    np.testing.assert_array_equal(encoded.visual_mask.numpy(), types > 0)

    owner = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))
    )
    owner.get_vision_position_ids = lambda *a, **k: Qwen3VLModel.get_vision_position_ids(
        owner, *a, **k
    )
    grids = [
        torch.as_tensor(np.array(expected[name])) if name in expected else None
        for name in ("image_grid_thw", "video_grid_thw")
    ]
    positions, _ = Qwen3VLModel.get_rope_index(
        owner, encoded.input_ids[None], torch.from_numpy(types)[None], *grids
    )
    assert torch.equal(encoded.position_ids, positions[:, 0])

    learned = encoded.labels[encoded.labels != -100]
    assert not torch.isin(learned, torch.tensor([spec.image_token_id, spec.video_token_id])).any()
    question = Sample("q", sample.turns[:-1], tuple(media[: marks(turns[:-1])]), "s.json")
    asked = processor.encode(question, processor.layouts(question), question=True).input_ids
    assert torch.equal(asked, encoded.input_ids[: len(asked)])  # the prompt of training


def test_decodes_the_sampled_frames(processor: Processor, tmp_path: Path) -> None:
    """An odd number of frames, each resized as all together allow."""
    media = write_video(tmp_path / "v.mp4", frames=21, fps=8)
    info = probe_media(media, SAMPLE, verify=True)
    settings = processor.videos
    assert settings.sample(info) == [0, 5, 10, 15, 20]
    grid, _, times = settings.layout(media, info)
    assert times == (2.5 / 8, 12.5 / 8, 20 / 8)  # the last frame is repeated
    frames = load_video(media, info, settings, SAMPLE)
    assert grid == (3, 4, 4) and frames.shape == (5, 64, 64, 3)
    np.testing.assert_allclose(frames.mean((1, 2, 3)), [0, 40, 80, 120, 160], atol=4)
    rows = patchify(frames, settings.images)
    values = (torch.from_numpy(frames).double() / 255).float()
    normal = ((values - 0.5) / 0.5).permute(0, 3, 1, 2)[None]
    expected, *_ = Qwen3VLVideoProcessor.patchify(None, normal, **SIZES)
    assert torch.equal(rows, expected[0])


def test_settings(folder: Path, processor: Processor, tmp_path: Path) -> None:
    spec, settings = processor.spec, processor.videos
    assert isinstance(settings, TimedVideoSettings)
    assert (settings.images.min_pixels, settings.images.max_pixels) == (8 * 1024, 60 * 1024)
    released = Processor(processor.template, spec)  # of a folder without these files
    assert released.images.max_pixels == 16777216 and released.images.mean == (0.5,) * 3
    limits = released.videos.images.min_pixels, released.videos.images.max_pixels
    assert limits == (4096, 25165824)
    (tmp_path / "video_preprocessor_config.json").write_text(
        json.dumps({**VIDEOS, "cap_pixels_per_frame": True, "fps": 1})
    )
    capped = TimedVideoSettings.from_folder(tmp_path, processor.images, spec.vision)
    assert (capped.cap_pixels_per_frame, capped.fps, capped.max_video_tokens) == (True, 1, 768)
    # Of two bounds those that Qwen3VLVideoProcessor reads.
    two = {"min_pixels": 16 * 1024, "max_pixels": 20 * 1024}
    for config, limits in (
        (VIDEOS | two, (8 * 1024, 60 * 1024)),
        (two, (16 * 1024, 20 * 1024)),
    ):
        (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(config))
        videos = TimedVideoSettings.from_folder(tmp_path, processor.images, spec.vision)
        assert (videos.images.min_pixels, videos.images.max_pixels) == limits
    one = Media("video", "v.mp4", (), info=MediaInfo(64, 64, 1, 8.0))
    with pytest.raises(DataError, match=r"v.mp4: the video has 1 frame .* give it as an image"):
        processor.layouts(Sample("s", (), (one,), "s.json"))


def test_a_template_that_thinks(processor: Processor) -> None:
    """The thought's first tag is given with the header; the rest of it is learned."""
    template = ChatTemplate(processor.template.tokenizer, processor.spec, THINK)
    turns = [Turn("user", "x"), Turn("assistant", "A cup.")]
    tokens = template.tokens(Sample("s", tuple(turns), (), "s.json"))
    decode = template.tokenizer.decode
    assert decode(tokens.ids[tokens.weights > 0]) == "</think>\n\nA cup.<|im_end|>\n"
    assert decode(tokens.ids[tokens.weights == 0]).endswith("<|im_start|>assistant\n<think>\n\n")
    with pytest.raises(DataError, match="renders turn 1 differently when other turns follow"):
        template.tokens(Sample("s", (*turns, *turns), (), "s.json"))


@pytest.mark.parametrize("pack", [1024, 8192, 131072])
def test_videos_of_any_length_fit_a_pack(pack: int, processor: Processor) -> None:
    """With their times in the text, at most half of it."""
    released = Processor(processor.template, processor.spec)
    images, videos = limited(released.images, released.videos, MediaSection(), pack)
    assert images.max_pixels == min(16777216, pack // 2 * 1024)
    for seconds in (1, 10, 60, 3600):
        media = Media("video", "v.mp4", ())
        (t, h, w), _, times = videos.layout(media, MediaInfo(1920, 1080, 30 * seconds, 30.0))
        text = processor.template.tokenizer(f"<{times[-1]:.1f} seconds>")["input_ids"]
        assert t * h * w // 4 + t * min(len(text) + 2, 16) <= pack // 2, (seconds, t, h, w)
    assert videos.max_frames == min(768, pack // 64) and "in all" in describe_sizes(images, videos)


def test_sizes_of_a_run_go_with_the_model(folder: Path, processor: Processor, tmp_path) -> None:
    target = Path(shutil.copytree(folder, tmp_path / "model"))
    (target / "video_preprocessor_config.json").unlink()
    section = MediaSection(video_max_pixels=50 * 1024, max_frames=8)
    of_run = Processor.from_folder(target, processor.spec, section=section)
    of_run.write_settings(target)
    assert Processor.from_folder(target, processor.spec).videos == of_run.videos
    written = json.loads((target / "video_preprocessor_config.json").read_text())
    assert written["size"] == {"shortest_edge": 4096, "longest_edge": 50 * 1024}


def test_fewer_frames_than_a_slice_has(processor: Processor) -> None:
    one = MediaSection(max_frames=1)
    with pytest.raises(DataError, match="max_frames is 1; videos of this model need 2 or more"):
        limited(processor.images, processor.videos, one, None)


@pytest.mark.parametrize("before", ["", "See "])
def test_times_are_never_learned(before: str, processor: Processor) -> None:
    """In a text and in an answer: what stands for a video is given, all around it is learned."""
    video = Media("video", "v", (), info=MediaInfo(64, 64, 40, 10.0))
    text = f"{before}<video>A rocket."
    for turns in ([("assistant", text)], [("user", "What?"), ("assistant", text)]):
        sample = Sample("s", tuple(Turn(*turn) for turn in turns), (video,), "s.json")
        encoded = processor.encode(sample, processor.layouts(sample))
        learned = processor.template.tokenizer.decode(encoded.labels[encoded.labels != -100])
        learned = learned.replace("<|vision_start|>", "").replace("<|vision_end|>", "")
        assert "seconds" not in learned and (not before or learned.startswith(("See", "ee")))
        assert "A rocket.<|im_end|>" in learned

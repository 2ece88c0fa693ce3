"""One sample to tensors: chat template, placeholder expansion, labels, positions, pixels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vlmtrain.core.batch import IGNORE, EncodedSample
from vlmtrain.core.config import MediaSection
from vlmtrain.core.spec import MediaKind, ModelSpec
from vlmtrain.data.errors import DataError
from vlmtrain.data.grounding import ground
from vlmtrain.data.media.images import ImageSettings, patchify, read_config
from vlmtrain.data.media.limits import limited, smaller, write_settings
from vlmtrain.data.media.videos import VideoSettings, load_frames, video_settings
from vlmtrain.data.sample import Media, MediaInfo, Sample
from vlmtrain.data.template import VIDEO_PAD, ChatTemplate, write_template
from vlmtrain.models.family import family_of


@dataclass(frozen=True)
class MediaLayout:
    """What one medium becomes: its grid in patches, the seconds per temporal slice, and the second
    of the file at which each slice of a video stands."""

    grid: tuple[int, int, int]
    seconds: float
    times: tuple[float, ...] = ()


@dataclass(frozen=True)
class Measure:
    """A sample in numbers: all that packing needs."""

    id: str
    kinds: tuple[MediaKind, ...]
    infos: tuple[MediaInfo, ...]
    layouts: tuple[MediaLayout, ...]
    length: int  # tokens
    target_tokens: int
    image_tokens: int  # tokens of images and videos


class Processor:
    """Everything a model folder says about turning samples into tensors.

    Args:
        template: tokenizer and chat template.
        spec: the model's shape.
        images: how images become patches.
        videos: how videos become patches.
    """

    def __init__(
        self,
        template: ChatTemplate,
        spec: ModelSpec,
        images: ImageSettings | None = None,
        videos: VideoSettings | None = None,
    ) -> None:
        self.template, self.spec = template, spec
        media = family_of(spec).media
        self.images = images or ImageSettings.from_config(
            {}, spec.vision, ImageSettings.of(media), "defaults"
        )
        settings = video_settings(media)
        self.videos = videos or settings.default(self.images, media.video_pixels)
        self.differs = (False, False)  # from the model folder: sizes of media, chat template
        self._fingerprint: str | None = None

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        spec: ModelSpec,
        *,
        section: MediaSection | None = None,
        pack_length: int | None = None,
        template: str | Path | None = None,
        system: str = "",
    ) -> Processor:
        """Read tokenizer, chat template and processor settings of a Hugging Face folder.

        Args:
            folder: the model folder.
            spec: `read_spec(folder)`.
            section: sizes of images and videos instead of the folder's.
            pack_length: sizes that `section` does not set are lowered to fit (`limited`).
            template: file with a Jinja chat template, instead of the folder's.
            system: system prompt of conversations that have none; it becomes part of the template.

        Raises:
            DataError: no tokenizer, settings that contradict config.json, a pack_length below 1, or
                what `limited` refuses.
        """
        if pack_length is not None and pack_length < 1:
            raise DataError(f"pack_length must be at least 1, got {pack_length}")
        config, where = read_config(folder, "image_processor", "preprocessor_config.json")
        media = family_of(spec).media
        images = ImageSettings.from_config(config, spec.vision, ImageSettings.of(media), where)
        videos = video_settings(media).from_folder(folder, images, spec.vision, media.video_pixels)
        of_run = limited(images, videos, section or MediaSection(), pack_length)
        result = cls(ChatTemplate.from_folder(folder, spec, template, system), spec, *of_run)
        result.differs = of_run != (images, videos), bool(template or system)
        return result

    def write_settings(self, folder: Path) -> None:
        """Put what differs from the model folder (sizes of media, chat template) into a copy of
        it, so that the model is later asked in the form it was trained in."""
        sizes, template = self.differs
        if sizes:
            write_settings(folder, self.images, self.videos)
        if template:
            write_template(folder, self.template.template)

    @property
    def pad_token_id(self) -> int:
        return self.template.pad_token_id

    def fingerprint(self) -> str:
        """A hash of everything that changes what a sample becomes: vocabulary, chat template,
        image and video settings."""
        if self._fingerprint is None:
            settings: list[object] = [self.template.template, self.template.vocabulary_hash()]
            settings += [asdict(self.images), self.videos.identity()]
            if self.videos.shared_pixels:  # since then the times of a video's slices are given
                settings.append("times are not learned")
            text = json.dumps(settings, sort_keys=True)
            self._fingerprint = hashlib.sha256(text.encode()).hexdigest()
        return self._fingerprint

    def layouts(self, sample: Sample) -> tuple[MediaLayout, ...]:
        """What a sample's media become, which must carry their infos. Raises DataError for an
        impossible size."""
        layouts = []
        for media in sample.media:
            info = media.info
            assert info is not None
            try:
                if media.kind == "image":
                    layouts.append(MediaLayout(self.images.grid(info.height, info.width), 0.0))
                else:
                    layouts.append(MediaLayout(*self.videos.layout(media, info)))
            except ValueError as error:
                raise sample.fail(f"{media.name}: {error}") from None
        return tuple(layouts)

    def measure(
        self, sample: Sample, infos: Sequence[MediaInfo], max_length: int | None = None
    ) -> Measure:
        """Encode a sample only to count. Raises DataError as `layouts` and `encode`, and where
        there is nothing to learn."""
        sample = sample.with_infos(infos)
        layouts = self.layouts(sample)
        encoded = self.encode(sample, layouts, max_length=max_length)
        targets = encoded.target_tokens
        if targets == 0:
            raise sample.fail(
                "it has no token to learn; give the assistant's turns some text, and not all of "
                "them the weight 0"
            )
        return Measure(
            sample.id,
            tuple(media.kind for media in sample.media),
            tuple(infos),
            layouts,
            len(encoded.input_ids),
            targets,
            int(encoded.visual_mask.sum()),
        )

    def encode(
        self,
        sample: Sample,
        layouts: Sequence[MediaLayout],
        *,
        question: bool = False,
        max_length: int | None = None,
    ) -> EncodedSample:
        """Token ids, labels and positions of a sample.

        Args:
            sample: the conversation; with boxes of objects its media must know their sizes.
            layouts: one per medium, in the order of `sample.media`.
            question: the conversation waits for an answer: its header ends the ids.
            max_length: text after so many tokens is cut off. None: nothing is.

        Raises:
            DataError: as `ChatTemplate.tokens`; or an image, a video or all there is to learn would
                be cut off.
        """
        if sample.objects is not None:
            sample = self._grounded(sample, layouts)
        family, pad_ids = family_of(self.spec), self.template.pad_ids
        videos: list[str] = []  # what stands in the text for each
        runs: list[int] = []  # tokens for each placeholder
        for media, layout in zip(sample.media, layouts, strict=False):
            count = 1
            if media.kind == "video":
                videos.append(family.video_placeholders(layout.times))
                count = videos[-1].count(VIDEO_PAD)
            runs += [self.images.tokens(layout.grid) // count] * count
        template = self.template
        tokens = template.question(sample, videos) if question else template.tokens(sample, videos)
        placeholders = np.flatnonzero(np.isin(tokens.ids, list(pad_ids.values())))
        if len(placeholders) != len(runs):
            raise sample.fail(
                f"the chat template wrote {len(placeholders)} placeholders for {len(layouts)} "
                "images and videos; it must write <|image_pad|> or <|video_pad|> once for each"
            )
        repeats = np.ones(len(tokens.ids), dtype=np.int64)
        repeats[placeholders] = runs
        visual: np.ndarray = np.zeros(len(tokens.ids), dtype=bool)
        visual[placeholders] = True
        ids: np.ndarray = np.repeat(tokens.ids, repeats)
        visual = np.repeat(visual, repeats)
        of_tokens = np.where(visual, 0, np.repeat(tokens.weights, repeats))
        if max_length is not None and len(ids) > max_length:
            if visual[max_length:].any():
                raise sample.fail(
                    f"its text cannot be cut off after {max_length} tokens, where its images and "
                    f"videos go up to token {int(np.flatnonzero(visual)[-1]) + 1}; "
                    f"{smaller(media.kind for media in sample.media)}, or choose "
                    "--loader.too_long drop",
                    "too_long",
                )
            if of_tokens[1:].any() and not of_tokens[1:max_length].any():
                raise sample.fail(
                    f"of its {len(ids)} tokens the first {max_length} leave nothing to learn; "
                    "raise --train.pack_length (outside of training --pack_length), or choose "
                    "--loader.too_long drop",
                    "too_long",
                )
            ids, visual, of_tokens = (part[:max_length] for part in (ids, visual, of_tokens))
        weights = np.zeros(len(ids), dtype=np.float32)  # of the next token
        weights[:-1] = of_tokens[1:]
        labels = np.full(len(ids), IGNORE, dtype=np.int64)
        labels[:-1] = np.where(weights[:-1] > 0, ids[1:], IGNORE)
        input_ids = torch.from_numpy(ids)
        positions = family.positions(
            input_ids,
            [layout.grid for layout in layouts],
            [media.kind for media in sample.media],
            self.spec,
            [layout.seconds for layout in layouts],
        )
        return EncodedSample(
            sample.id,
            input_ids,
            torch.from_numpy(labels),
            positions,
            torch.from_numpy(visual),
            None if np.isin(weights, (0, 1)).all() else torch.from_numpy(weights),
        )

    def _grounded(self, sample: Sample, layouts: Sequence[MediaLayout]) -> Sample:
        infos = [media.info for media in sample.media if media.info is not None]
        assert len(infos) == len(sample.media), "boxes follow sizes: probe the media first"
        patch = self.images.patch_size
        sizes = [(layout.grid[1] * patch, layout.grid[2] * patch) for layout in layouts]
        return ground(sample, infos, sizes, family_of(self.spec).media)

    def frames(self, media: Media, sample: Sample) -> np.ndarray:
        """Decode and resize one medium. Returns uint8 [T, H, W, 3]; T is 1 for an image.

        Raises:
            DataError: the file is missing or broken.
        """
        return load_frames(media, sample, self.images, self.videos)

    def pixels(self, media: Media, frames: np.ndarray, out: Tensor) -> None:
        """Normalised patch rows of `frames` into `out`, [t*h*w, patch_dim], its dtype."""
        patchify(frames, self.images if media.kind == "image" else self.videos.images, out)

"""A Hugging Face folder that answers: transformers generates, our code prepares what it reads.

Images, videos, chat template and M-RoPE positions are those of training (vlmtrain.data), so a
model is asked exactly as it was taught, whatever the installed transformers makes of videos.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vlmtrain.core.config import MediaSection
from vlmtrain.core.errors import UserError
from vlmtrain.data.media.videos import probe_media
from vlmtrain.data.processor import MediaLayout, Processor
from vlmtrain.data.sample import Sample
from vlmtrain.models.family import read_spec

Stream = Callable[[str], None]  # called with each piece of text as it is decided
_CPU = torch.device("cpu")
_KEYS = ("missing_keys", "unexpected_keys", "mismatched_keys")


def load_transformers(folder: Path, dtype: torch.dtype) -> Any:
    """The model in `folder`, by transformers' `from_pretrained`, in evaluation mode, its weights
    in `dtype`. (Cast after loading, the frequencies of its rotary embeddings would be rounded.)

    Raises:
        UserError: it can't be loaded, or `from_pretrained` found a missing, unexpected or
            mismatched key, that is, a part of the model would have stayed at random values.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model, report = AutoModelForImageTextToText.from_pretrained(
            folder, output_loading_info=True, local_files_only=True, dtype=dtype
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        if isinstance(error, KeyError):
            reason = f"a file of it has no {reason}"
        raise UserError(f"{folder}: transformers can't load it: {reason}") from error
    for what in _KEYS:
        if report.get(what):
            raise UserError(f"{folder}: transformers reports {what}: {sorted(report[what])}")
    return model.eval()


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    max_new_tokens: int = 512
    temperature: float = 0.0
    """0: the likeliest token (greedy), the same text every time."""
    top_p: float = 1.0
    """Above temperature 0: draw from the likeliest tokens that hold this share."""
    repetition_penalty: float = 1.0
    """Above 1: tokens that have come before become less likely (CTRL, arXiv 1909.05858)."""

    def check(self) -> None:
        """Raise UserError for a setting that can't be used."""
        for name, good, need in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            (
                "temperature",
                self.temperature == 0 or self.temperature >= 1e-6,
                "0, or at least 1e-6",
            ),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
        ):
            if not good:
                raise UserError(f"--{name} is {getattr(self, name)}; it must be {need}")


@dataclass(frozen=True)
class Answer:
    """What a model said."""

    text: str  # as it was taught, marks of boxes included; never an end mark or a vision token
    ids: tuple[int, ...]  # tokens made, the end mark included
    finished: bool  # False: cut off at max_new_tokens


class Answerer:
    """A model that answers samples, one at a time, so that no answer depends on another.

    Args:
        folder: Hugging Face folder.
        precision: of weights and activations; "auto": bf16 on a GPU, fp32 on the CPU.
        kernels: enable vlmkernels in the model (`vlmkernels.integrations.transformers`).
        section: sizes of images and videos instead of the folder's.
        template, system: as `Processor.from_folder`.

    Raises:
        UserError: as `load_transformers` and `Processor.from_folder`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        precision: Literal["auto", "bf16", "fp32"] = "auto",
        kernels: bool = True,
        section: MediaSection | None = None,
        template: str | Path | None = None,
        system: str = "",
    ) -> None:
        import transformers
        from transformers import GenerationConfig

        self.folder = folder
        self.spec = read_spec(folder)
        self.processor = Processor.from_folder(
            folder, self.spec, section=section, template=template, system=system
        )
        self.tokenizer: Any = self.processor.template.tokenizer
        cuda = torch.cuda.is_available()
        # Under torchrun each process has made its own GPU the current one.
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else _CPU
        wanted = precision if precision != "auto" else ("bf16" if cuda else "fp32")
        self.dtype = torch.bfloat16 if wanted == "bf16" else torch.float32
        self.model = load_transformers(folder, self.dtype).to(self.device)
        self._ends = _ends(self.model.generation_config.eos_token_id, self.tokenizer)
        vision = self.processor.template.vision_tokens.values()
        self._silent = {*self._ends, self.tokenizer.pad_token_id, *vision}  # no part of a text
        # Or `generate` would take from it what `answer` leaves open: beams, stop strings, ...
        self.model.generation_config = GenerationConfig()
        if kernels:
            from vlmkernels.integrations import transformers as hf

            try:
                hf.enable(self.model, loss=False)
            except ValueError as error:
                raise UserError(
                    f"{folder}: the kernels don't serve transformers {transformers.__version__} "
                    f"({error}); install a later one, or pass --no_kernels"
                ) from error
        self._positions: Tensor | None = None
        self._asked = False
        self.model.model.get_rope_index = self._rope_index

    def prepare(self, sample: Sample) -> dict[str, Tensor]:
        """What transformers' `generate` takes for a conversation that waits for an answer.

        Raises:
            DataError: a medium can't be read, or the chat template refuses the conversation.
        """
        sample, layouts = self._sized(sample)
        encoded = self.processor.encode(sample, layouts, question=True)
        ids = encoded.input_ids[None].to(self.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for kind, pixels, grid in (
            ("image", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        ):
            chosen = [i for i, media in enumerate(sample.media) if media.kind == kind]
            if chosen:
                inputs[pixels] = self._pixels(sample, layouts, chosen)
                inputs[grid] = torch.tensor([layouts[i].grid for i in chosen], device=self.device)
        if "mm_token_type_ids" in inspect.signature(self.model.forward).parameters:
            image, video = ids == self.spec.image_token_id, ids == self.spec.video_token_id
            inputs["mm_token_type_ids"] = image.int() + 2 * video.int()
        self._positions = encoded.position_ids[:, None].to(self.device)  # [3, 1, S]
        return inputs

    def check(self, sample: Sample) -> None:
        """Raise DataError for a conversation that can't be asked; of media the sizes are read."""
        self.processor.template.question(sample)
        self._sized(sample)

    def _sized(self, sample: Sample) -> tuple[Sample, Sequence[MediaLayout]]:
        """The sample with what its media are, and the grids that follow."""
        infos = [probe_media(media, sample, verify=False) for media in sample.media]
        sample = sample.with_infos(infos)
        return sample, self.processor.layouts(sample)

    def _pixels(self, sample: Sample, layouts: Sequence[MediaLayout], chosen: list[int]) -> Tensor:
        """Patch rows [P, patch_dim] of some of the media, in order."""
        counts = [t * h * w for t, h, w in (layouts[i].grid for i in chosen)]
        out = torch.empty(sum(counts), self.spec.vision.patch_dim, dtype=self.dtype)
        for i, part in zip(chosen, out.split(counts), strict=True):
            media = sample.media[i]
            self.processor.pixels(media, self.processor.frames(media, sample), part)
        return out.to(self.device)

    def _rope_index(self, input_ids: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Replaces the model's own `get_rope_index`: training's positions [3, 1, S] of the prompt
        that was prepared last, and how far the next token's position is from its index [1, 1]."""
        assert self._positions is not None and input_ids.shape[1] == self._positions.shape[2]
        self._asked = True
        delta = self._positions.max() + 1 - input_ids.shape[1]
        return self._positions, delta.view(1, 1)

    @torch.no_grad()
    def answer(
        self, sample: Sample, sampling: Sampling | None = None, stream: Stream | None = None
    ) -> Answer:
        """Answer a conversation whose last turn is the user's.

        Sampling draws from torch's global generator: seed it to draw the same again.

        Raises:
            DataError: as `prepare`.
        """
        from transformers import GenerationConfig

        sampling = sampling or Sampling()
        inputs = self.prepare(sample)
        drawn = sampling.temperature > 0
        chance = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        config = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            do_sample=drawn,
            repetition_penalty=sampling.repetition_penalty,
            eos_token_id=self._ends,
            pad_token_id=self.processor.pad_token_id,
            **(chance if drawn else {}),
        )
        streamer = None if stream is None else _streamer(self.tokenizer, self._silent, stream)
        self._asked = not sample.media  # text alone needs no M-RoPE positions
        out = self.model.generate(**inputs, generation_config=config, streamer=streamer)
        if not self._asked:
            raise RuntimeError("this transformers does not ask the model for M-RoPE positions")
        made = out[0, inputs["input_ids"].shape[1] :].tolist()
        text = self.tokenizer.decode([token for token in made if token not in self._silent])
        return Answer(text, tuple(made), made[-1] in self._ends)


def _ends(eos: int | list[int] | None, tokenizer: Any) -> list[int]:
    """Ids that end an answer: the folder's generation config's, and the template's own."""
    ends = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    end = tokenizer.get_vocab().get("<|im_end|>", tokenizer.eos_token_id)
    return sorted(ends | ({end} if end is not None else set()))


def _streamer(tokenizer: Any, silent: Collection[int], stream: Stream) -> Any:
    """A transformers streamer that hands over pieces of text as soon as they can't change, without
    the tokens in `silent`."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True)

        def put(self, value: Tensor) -> None:
            tokens = [token for token in value.flatten().tolist() if token not in silent]
            super().put(torch.tensor(tokens, dtype=torch.int64))

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                stream(text)

    return Streamer()

"""`vlmtrain generate`: one question, a chat, or a file of questions."""

from __future__ import annotations

import json
import sys
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

import tyro

from vlmtrain.core.config import MediaSection, Seed, check_ranges
from vlmtrain.core.errors import UserError
from vlmtrain.core.files import exists, is_dir, writing
from vlmtrain.core.options import spelled
from vlmtrain.core.progress import progress

CHAT = "Ask; /image FILE and /video FILE add a medium to the next question; Ctrl-D ends."


@dataclass
class GenerateConfig:
    """Ask a model about images and videos. Without --prompt and --input it is a chat."""

    model: Path
    """Hugging Face folder, a run's OUTPUT, training checkpoint (also OUTPUT/checkpoints: the
    newest), or LoRA adapter folder."""
    prompt: str | None = None
    """The question; <image> and <video> say where the media stand, else they come first."""
    image: tuple[Path, ...] = ()
    """Image files, in the order of their marks."""
    video: tuple[Path, ...] = ()
    """Video files, or folders of frames."""
    system: str = ""
    """System prompt, instead of the chat template's own."""
    input: Path | None = None
    """JSONL file of questions: objects with prompt and image, images, video, videos; or messages
    as in training data."""
    output: Path | None = None
    """With --input: file to write, one object a line in the same order, with 'answer' added; one
    that the line had becomes its 'reference'."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of --input's objects that are not looked at, and marks that are kept as text."""
    max_new_tokens: int = 512
    """Longest answer."""
    temperature: float = 0.0
    """0: the likeliest token, the same answer every time; above: draw."""
    top_p: float = 1.0
    """With a temperature: draw from the likeliest tokens that hold this share."""
    repetition_penalty: float = 1.0
    """Above 1: what has been said before becomes less likely."""
    seed: Seed = 0
    """With a temperature: another seed, another answer."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """auto: bf16 on a GPU, fp32 on the CPU."""
    kernels: bool = True
    """Run vlmkernels in transformers' model; --no_kernels: its own code alone."""
    media: MediaSection = field(default_factory=MediaSection)

    def validate(self) -> None:
        """Raise UserError for options that contradict each other."""
        check_ranges(self)
        if self.input is not None:
            for name in ("prompt", "image", "video", "system"):
                if getattr(self, name) not in (None, "", ()):
                    raise UserError(f"--{name} does not go with --input; write it in the file")
            if self.output is None:
                raise UserError("--input needs --output, the file to write the answers to")
            if exists(self.output):
                raise UserError(f"--output {self.output} exists; name another file")
            if not is_dir(self.output.absolute().parent):
                raise UserError(f"--output {self.output}: there is no such folder")
        elif self.output is not None:
            raise UserError("--output goes with --input; a single answer is printed")


def main(arguments: list[str]) -> int:
    arguments = spelled(arguments, GenerateConfig)
    config = tyro.cli(
        GenerateConfig, prog="vlmtrain generate", args=arguments, use_underscores=True
    )
    warnings.filterwarnings("ignore")
    return run(config)


def run(config: GenerateConfig, typed: TextIO | None = None) -> int:
    """Answer; text goes to stdout as it is made. `typed`: where a chat reads from (stdin).

    Raises:
        UserError: what the user can mend, before anything is loaded where that is possible.
    """
    from vlmtrain.generate.questions import check_media, question, read_questions

    config.validate()
    if config.input is not None:
        questions = read_questions(config.input, config.ignore_keys)
        with _answerer(config) as (answerer, sampling):
            _batch(questions, answerer, sampling, config)
        return 0
    media = {
        "images": [str(path) for path in config.image],
        "videos": [str(path) for path in config.video],
    }
    if config.prompt is not None:
        ignored = config.ignore_keys
        sample = question(config.prompt, media, system=config.system, ignored=ignored)
        sample = check_media(sample)
        with _answerer(config) as (answerer, sampling):
            _say(answerer, sampling, sample)
        return 0
    with _answerer(config) as (answerer, sampling):
        _chat(config, media, answerer, sampling, typed or sys.stdin)
    return 0


@contextmanager
def _answerer(config: GenerateConfig) -> Iterator[tuple[Any, Any]]:
    """The model, and how it is to choose its words."""
    from vlmtrain.checkpoint.model_folder import as_hf
    from vlmtrain.generate.model import Answerer, Sampling

    sampling = Sampling(
        config.max_new_tokens, config.temperature, config.top_p, config.repetition_penalty
    )
    sampling.check()
    with as_hf(config.model) as folder:
        import torch

        answerer = Answerer(
            folder, precision=config.precision, kernels=config.kernels, section=config.media
        )
        torch.manual_seed(config.seed)
        yield answerer, sampling


def _say(answerer: Any, sampling: Any, sample: Any) -> str:
    """Print an answer as it is made; returns its text."""
    answer = answerer.answer(sample, sampling, lambda text: print(text, end="", flush=True))
    print(flush=True)
    if not answer.finished:
        print(
            f"vlmtrain: cut off after {len(answer.ids)} tokens; raise --max_new_tokens",
            file=sys.stderr,
            flush=True,
        )
    return answer.text


def _batch(questions: list[Any], answerer: Any, sampling: Any, config: GenerateConfig) -> None:
    import torch

    from vlmtrain.generate.questions import ANSWER, REFERENCE

    output = config.output
    assert output is not None
    for _, sample in questions:
        answerer.check(sample)
    cut = 0
    with (
        progress("generate", "answers") as update,
        writing(f"--output {output}"),
        open(output, "x", encoding="utf-8") as file,
    ):
        for number, (record, sample) in enumerate(questions):
            update(number, len(questions))
            # what a line draws does not depend on how much those before it drew; of a seed, torch's
            # generator on the CPU takes the lowest 32 bits
            torch.manual_seed(zlib.crc32(f"{config.seed} {number}".encode()))
            answer = answerer.answer(sample, sampling)
            cut += not answer.finished
            known = {REFERENCE: record[ANSWER]} if ANSWER in record else {}
            row = {**record, **known, ANSWER: answer.text}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()  # what was answered is there, whatever comes
    note = f" ({cut} cut off at --max_new_tokens {sampling.max_new_tokens})" if cut else ""
    print(f"{len(questions)} answers{note}: {output}")


def _chat(
    config: GenerateConfig,
    media: dict[str, list[str]],
    answerer: Any,
    sampling: Any,
    typed: TextIO,
) -> None:
    """Turn after turn until the input ends. A turn at fault is told and asked again."""
    from vlmtrain.generate.questions import answered, check_media, question, then

    terminal = typed.isatty()
    if terminal:
        print(CHAT, flush=True)
    conversation: Any = None
    while True:
        if terminal:
            print("> ", end="", flush=True)
        line = typed.readline()
        if not line:
            break
        line = line.strip()
        word, _, rest = line.partition(" ")
        if word in ("/image", "/video"):
            media[word[1:] + "s"].append(rest.strip())
            continue
        if not line:
            continue
        try:
            sample = question(
                line,
                media,
                system=config.system,
                source="this turn",
                ignored=config.ignore_keys,
            )
            sample = check_media(sample)
            longer = sample if conversation is None else then(conversation, sample)
            conversation = answered(longer, _say(answerer, sampling, longer))
        except UserError as error:
            again = "; add its images and videos again" if any(media.values()) else ""
            print(f"vlmtrain: {error}{again}", file=sys.stderr, flush=True)
        media = {"images": [], "videos": []}
    if terminal:
        print(flush=True)

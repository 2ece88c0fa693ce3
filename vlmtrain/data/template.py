"""Conversations to token ids, with the assistant's part found by the chat template itself.

The template renders every prefix of the conversation: the text between "everything before the
turn, plus the header that asks for an answer" and "everything including the turn" is what the
model must learn to write (content, <|im_end|>, newline). No token id is searched for, so neither
an <|im_end|> inside a text nor a different template can move the borders.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlmtrain.core.spec import MediaKind, ModelSpec
from vlmtrain.data.errors import DataError
from vlmtrain.data.sample import MARK_PATTERN, MARKS, Sample
from vlmtrain.models.family import family_of

VIDEO_PAD = "<|video_pad|>"
# Used where a folder has no template: ChatML with vision marks, the released models' layout.
_SYSTEM = (
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}"
)
QWEN_TEMPLATE = (
    "{% for message in messages %}" + _SYSTEM + "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Tokens:
    """A sample's ids before the placeholders are expanded."""

    ids: np.ndarray  # int64 [n]: one placeholder per medium
    learned: np.ndarray  # bool [n]: tokens the assistant must produce


class ChatTemplate:
    """A tokenizer with its chat template.

    Args:
        tokenizer: a transformers tokenizer.
        spec: placeholder ids that the tokenizer must agree with.
        template: Jinja source; default: the tokenizer's own, else Qwen's.
        where: the folder it came from; for messages.

    Raises:
        DataError: the tokenizer's special tokens contradict the model's config.json.
    """

    def __init__(
        self, tokenizer: Any, spec: ModelSpec, template: str | None = None, where: str = "tokenizer"
    ) -> None:
        self.tokenizer = tokenizer
        model_template = tokenizer.chat_template
        usual = (
            QWEN_TEMPLATE if family_of(spec).system_prompt else QWEN_TEMPLATE.replace(_SYSTEM, "")
        )
        self.template: str = (
            template or (model_template if isinstance(model_template, str) else None) or usual
        )
        self.pad_ids: dict[MediaKind, int] = {
            "image": spec.image_token_id,
            "video": spec.video_token_id,
        }
        expected = {
            "<|image_pad|>": spec.image_token_id,
            VIDEO_PAD: spec.video_token_id,
            "<|vision_start|>": spec.vision_start_token_id,
            "<|vision_end|>": spec.vision_end_token_id,
        }
        vocabulary = tokenizer.get_vocab()
        for token, token_id in expected.items():
            vocabulary_id = vocabulary.get(token)
            if vocabulary_id != token_id:
                raise DataError(
                    f"{where}: the tokenizer gives {token} the id {vocabulary_id} but config.json "
                    f"says {token_id}; use the tokenizer that belongs to the model"
                )
        largest = max(vocabulary.values())
        if largest >= spec.vocab_size:
            raise DataError(
                f"{where}: the tokenizer has ids up to {largest} but config.json's vocab_size is "
                f"{spec.vocab_size}; use the tokenizer that belongs to the model"
            )
        self.vision_tokens = tuple(expected)
        self._special = tuple(str(token) for token in tokenizer.get_added_vocab())
        self._headers: dict[str, list[int]] = {}
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:  # as transformers itself does before every call
            self._backend.no_truncation()
            self._backend.no_padding()
        # Templates of text-only tokenizers print lists as they are: give those plain strings.
        self._takes_parts = "vision_start" in self.template or "image_pad" in self.template

    @classmethod
    def from_folder(
        cls, folder: str | Path, spec: ModelSpec, file: str | Path | None = None
    ) -> ChatTemplate:
        """Load the tokenizer and the template of a Hugging Face model folder.

        The template is looked for where transformers' processor does: chat_template.jinja,
        chat_template.json, then the tokenizer's own. `file` replaces all of these.

        Raises:
            DataError: `file` cannot be read, the folder has no usable tokenizer, or it contradicts
                config.json.
        """
        from transformers import AutoTokenizer

        folder = Path(folder)
        names = ("tokenizer.json", "vocab.json", "tokenizer_config.json")
        if not any((folder / name).is_file() for name in names):
            raise DataError(f"{folder}: no tokenizer.json; copy the model's tokenizer files there")
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # transformers raises many kinds here, even bare Exception
            reason = " ".join(str(error).split())[:200]
            raise DataError(f"{folder}: the tokenizer cannot be loaded: {reason}") from error
        template = None
        if file is not None and str(file):
            try:
                template = Path(file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"{file}: the chat template cannot be read: {error}") from None
        elif (folder / "chat_template.jinja").is_file():
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        elif (folder / "chat_template.json").is_file():
            try:
                content = json.loads((folder / "chat_template.json").read_text(encoding="utf-8"))
                template = content["chat_template"]
            except (ValueError, KeyError, TypeError):
                raise DataError(
                    f"{folder / 'chat_template.json'} has no readable 'chat_template'"
                ) from None
        return cls(tokenizer, spec, template, str(folder))

    @property
    def pad_token_id(self) -> int:
        """The id that fills a pack's tail; never learned and never looked at by a sample."""
        for token_id in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token_id is not None:
                return int(token_id)
        return 0

    def vocabulary_hash(self) -> str:
        """A hash of everything that turns text into ids."""
        if self._backend is not None:
            text = self._backend.to_str()
        else:
            text = json.dumps(sorted(self.tokenizer.get_vocab().items()))
        return hashlib.sha256(text.encode()).hexdigest()

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = False,
        videos: Sequence[str] = (),
    ) -> str:
        """The conversation as text; `videos`: what stands there for each <|video_pad|>."""
        text = self.tokenizer.apply_chat_template(
            list(messages),
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
        placeholders = iter(videos)
        return re.sub(re.escape(VIDEO_PAD), lambda pad: next(placeholders, pad[0]), text)

    def messages(self, sample: Sample) -> list[dict[str, Any]]:
        """The sample as the `messages` that chat templates take.

        Raises:
            DataError: a text holds one of the vision tokens, which only media may bring.
        """
        result: list[dict[str, Any]] = []
        for turn in sample.turns:
            for token in self.vision_tokens:
                if token in turn.text:
                    raise sample.fail(
                        f"a text holds the reserved token {token}; write <image> or <video> where "
                        "a medium belongs, and remove it elsewhere"
                    )
            pieces = [piece for piece in MARK_PATTERN.split(turn.text) if piece]
            if not self._takes_parts:
                text = "".join(
                    f"<|vision_start|><|{MARKS[piece]}_pad|><|vision_end|>"
                    if piece in MARKS
                    else piece
                    for piece in pieces
                )
                result.append({"role": turn.role, "content": text})
            elif any(piece in MARKS for piece in pieces):
                parts = [
                    {"type": MARKS[piece]} if piece in MARKS else {"type": "text", "text": piece}
                    for piece in pieces
                ]
                result.append({"role": turn.role, "content": parts})
            else:
                result.append({"role": turn.role, "content": turn.text})
        return result

    def tokens(self, sample: Sample, videos: Sequence[str] = ()) -> Tokens:
        """Ids of the whole conversation and which of them the assistant must produce.

        `videos`: what stands in the text for each video, instead of one <|video_pad|>.

        The ids equal `tokenizer.apply_chat_template(messages)`. A token that begins in the header
        and ends in the answer (a newline joined with the answer's own first newline) is not
        learned: the header is given when the model answers.

        Raises:
            DataError: the template cannot render the sample, or changes earlier turns when later
                ones follow, so that no span of text belongs to one turn.
        """
        messages = self.messages(sample)
        try:
            text = self.render(messages, videos=videos)
            spans = [
                (len(head), len(upto))
                for head, upto in (
                    self._prefixes(messages, position, text, sample, videos)
                    for position, message in enumerate(messages)
                    if message["role"] == "assistant"
                )
            ]
        except DataError:
            raise
        except Exception as error:  # jinja2's and the template's own raise_exception
            raise sample.fail(f"the chat template refuses it: {error}") from error
        ids: list[int] = []
        learned: list[bool] = []
        # The text is cut before the header of every answer and after the answer. Tokenizers split
        # at added tokens in any case, so where the pieces begin with one, their ids are those of
        # the whole text.
        encode_at_once = True
        cursor = 0
        for begin, end in spans:
            header_at = max(
                [cursor, *(text.rfind(token, cursor, begin) for token in self._special)]
            )
            before = self._encode(text[cursor:header_at])
            header, piece = self._header(text[header_at:begin]), self._encode(text[header_at:end])
            border = next(
                (i + 1 for i, (a, b) in enumerate(zip(header, piece, strict=False)) if a != b),
                len(header),
            )
            ids += before + piece
            learned += [False] * (len(before) + border) + [True] * (len(piece) - border)
            encode_at_once &= cursor == 0 or text.startswith(self._special, cursor)
            cursor = end
        if cursor < len(text):
            rest = self._encode(text[cursor:])
            ids += rest
            learned += [False] * len(rest)
            encode_at_once &= cursor == 0 or text.startswith(self._special, cursor)
        if not encode_at_once and ids != self._encode(text):
            raise sample.fail(
                "the chat template puts no special token between turns, so an answer's tokens "
                "cannot be told from the next turn's; use a template that does"
            )
        return Tokens(np.array(ids, dtype=np.int64), np.array(learned, dtype=bool))

    def question(self, sample: Sample, videos: Sequence[str] = ()) -> Tokens:
        """Ids of a conversation that waits for an answer, the answer's header included; none of
        them is learned. They equal `apply_chat_template(messages, add_generation_prompt=True)`.

        Raises:
            DataError: the template cannot render the sample.
        """
        messages = self.messages(sample)
        try:
            text = self.render(messages, True, videos)
        except Exception as error:  # jinja2's and the template's own raise_exception
            raise sample.fail(f"the chat template refuses it: {error}") from error
        ids = np.array(self._encode(text), dtype=np.int64)
        return Tokens(ids, np.zeros(len(ids), dtype=bool))

    def _prefixes(
        self,
        messages: list[dict[str, Any]],
        position: int,
        text: str,
        sample: Sample,
        videos: Sequence[str],
    ) -> tuple[str, str]:
        """The text up to and with the header of an answer, and up to the answer's end."""
        head = self.render(messages[:position], True, videos)
        last = position + 1 == len(messages)
        upto = text if last else self.render(messages[: position + 1], videos=videos)
        if not (text.startswith(upto) and upto.startswith(head)):
            raise sample.fail(
                f"the chat template renders turn {position} differently when other turns follow; "
                "use a template that renders each turn on its own"
            )
        return head, upto

    def _encode(self, text: str) -> list[int]:
        if self._backend is not None:  # the call below, without its several times larger overhead
            return self._backend.encode(text, add_special_tokens=False).ids
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _header(self, text: str) -> list[int]:
        if text not in self._headers:
            if len(self._headers) > 1000:  # a template without special tokens: nothing recurs
                self._headers.clear()
            self._headers[text] = self._encode(text)
        return self._headers[text]

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

from vlmtrain.core.files import is_dir, is_file
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
_TOOL_ROLE = re.compile(r"""["']tool["']""")


@dataclass(frozen=True)
class Tokens:
    """A sample's ids before the placeholders are expanded."""

    ids: np.ndarray  # int64 [n]: one placeholder per medium
    weights: np.ndarray  # float32 [n]: of tokens the assistant must produce, of others 0


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
        usual = (
            QWEN_TEMPLATE if family_of(spec).system_prompt else QWEN_TEMPLATE.replace(_SYSTEM, "")
        )
        self.template: str = template or _default(tokenizer.chat_template, where) or usual
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
        self.vision_tokens = expected
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
        cls,
        folder: str | Path,
        spec: ModelSpec,
        file: str | Path | None = None,
        system: str = "",
    ) -> ChatTemplate:
        """Load the tokenizer and the template of a Hugging Face model folder.

        The template is looked for where transformers' processor does: chat_template.jinja,
        chat_template.json, then the tokenizer's own. `file` replaces all of these; `system` is the
        system prompt of conversations without one.

        Raises:
            DataError: `file` cannot be read, the folder has no usable tokenizer, or it contradicts
                config.json.
        """
        from transformers import AutoTokenizer

        folder = Path(folder)
        names = ("tokenizer.json", "vocab.json", "tokenizer_config.json")
        if not is_dir(folder):
            raise DataError(
                f"{folder} is gone: a run that trains on keeps some checkpoints only "
                "(--checkpoint.keep); start again"
            )
        if not any(is_file(folder / name) for name in names):
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
        elif is_file(folder / "chat_template.jinja"):
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        elif is_file(folder / "chat_template.json"):
            try:
                content = json.loads((folder / "chat_template.json").read_text(encoding="utf-8"))
                template = _default(content["chat_template"], str(folder / "chat_template.json"))
            except (ValueError, KeyError, TypeError):
                raise DataError(
                    f"{folder / 'chat_template.json'} has no readable 'chat_template'"
                ) from None
        result = cls(tokenizer, spec, template, str(folder))
        if system:
            result.set_system(system)
        return result

    def set_system(self, prompt: str) -> None:
        """Give conversations without a system prompt this one, in the template itself, which then
        does the same for every program that uses it.

        Raises:
            DataError: the prompt holds a vision token, or the template leaves it out.
        """
        for token in self.vision_tokens:
            if token in prompt:
                raise DataError(f"--loader.system holds the reserved token {token}; remove it")
        self.template = (
            "{% if not messages or messages[0]['role'] != 'system' %}"
            # Jinja reads Python's string literals.
            f"{{% set messages = [{{'role': 'system', 'content': {prompt!r}}}] + messages %}}"
            "{% endif %}" + self.template
        )
        if prompt.strip() not in self.render([{"role": "user", "content": "?"}]):
            raise DataError(
                "--loader.system: the chat template writes no system prompt; give one that does "
                "with --loader.template"
            )

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
        tools: Sequence[dict[str, Any]] = (),
        videos: Sequence[str] = (),
    ) -> str:
        """The conversation as text; `videos`: what stands there for each <|video_pad|>."""
        text = self.tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
        return _with_videos(text, videos)

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
            content: Any = turn.text
            if not self._takes_parts:
                content = _with_vision_tokens(turn.text)
            elif any(piece in MARKS for piece in pieces):
                content = [
                    {"type": MARKS[piece]} if piece in MARKS else {"type": "text", "text": piece}
                    for piece in pieces
                ]
            message = {"role": turn.role, "content": content}
            if turn.calls:
                message["tool_calls"] = list(turn.calls)
            result.append(message)
        return result

    def tokens(self, sample: Sample, videos: Sequence[str] = ()) -> Tokens:
        """Ids of the whole conversation and the weights of those the assistant must produce. An
        answer alone is a text to learn: itself and the end-of-sequence token.

        `videos`: what stands in the text for each video, instead of one <|video_pad|>.

        The ids equal `tokenizer.apply_chat_template(messages)` by the same template. A token that
        begins in the header and ends in the answer (a newline joined with the answer's own first
        newline) is not learned: the header is given when the model answers.

        Raises:
            DataError: the template cannot render the sample, or changes earlier turns when later
                ones follow, so that no span of text belongs to one turn.
        """
        messages = self.messages(sample)
        if len(messages) == 1 and messages[0]["role"] == "assistant":
            return self._plain_text(sample, videos)
        try:
            text = self.render(messages, tools=sample.tools, videos=videos)
            self._check_tools(sample, messages, text, videos)
            spans = [
                (len(head), len(upto), turn.weight)
                for (head, upto), turn in (
                    (self._prefixes(messages, position, text, sample, videos), turn)
                    for position, turn in enumerate(sample.turns)
                    if turn.role == "assistant"
                )
            ]
        except DataError:
            raise
        except Exception as error:  # jinja2's and the template's own raise_exception
            raise sample.fail(f"the chat template refuses it: {error}") from error
        ids: list[int] = []
        weights: list[float] = []
        # The text is cut before the header of every answer and after the answer. Tokenizers split
        # at added tokens in any case, so where the pieces begin with one, their ids are those of
        # the whole text.
        encode_at_once = True
        cursor = 0
        for begin, end, weight in spans:
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
            learned = self._weights(text[header_at:end], len(piece), weight, videos)
            weights += [0.0] * (len(before) + border) + learned[border:]
            encode_at_once &= cursor == 0 or text.startswith(self._special, cursor)
            cursor = end
        if cursor < len(text):
            rest = self._encode(text[cursor:])
            ids += rest
            weights += [0.0] * len(rest)
            encode_at_once &= cursor == 0 or text.startswith(self._special, cursor)
        if not encode_at_once and ids != self._encode(text):
            raise sample.fail(
                "the chat template puts no special token between turns, so an answer's tokens "
                "cannot be told from the next turn's; use a template that does"
            )
        return Tokens(np.array(ids, dtype=np.int64), np.array(weights, dtype=np.float32))

    def _plain_text(self, sample: Sample, videos: Sequence[str]) -> Tokens:
        """All of a text is learned but for what stands for its images and videos."""
        (turn,) = sample.turns
        text = _with_videos(_with_vision_tokens(turn.text), videos)
        ids = self._encode(text)
        weights = self._weights(text, len(ids), turn.weight, videos)
        if self.tokenizer.eos_token_id is not None:
            ids.append(int(self.tokenizer.eos_token_id))
            weights.append(turn.weight)
        array = np.array(ids, dtype=np.int64)
        given = np.isin(array, list(self.vision_tokens.values()))
        return Tokens(array, np.where(given, 0, weights).astype(np.float32))

    def _weights(self, text: str, tokens: int, weight: float, videos: Sequence[str]) -> list[float]:
        """The weights of a text's tokens: 0 of those that reach into what stands for a video, where
        that says more than that there is one (Qwen3-VL: when each slice is shown)."""
        spans = [
            match.span()
            for video in {*videos} - {VIDEO_PAD}
            for match in re.finditer(re.escape(video), text)
        ]
        if not spans:
            return [weight] * tokens
        encoding = self.tokenizer(
            text, add_special_tokens=False, verbose=False, return_offsets_mapping=True
        )
        return [
            0.0 if any(first < end and begin < last for begin, end in spans) else weight
            for first, last in encoding["offset_mapping"]
        ]

    def _check_tools(
        self,
        sample: Sample,
        messages: list[dict[str, Any]],
        text: str,
        videos: Sequence[str],
    ) -> None:
        """Raise DataError where the template would leave tools out in silence."""
        bare = [
            {key: value for key, value in message.items() if key != "tool_calls"}
            for message in messages
        ]
        silent = None
        if any(turn.role == "tool" for turn in sample.turns) and not _TOOL_ROLE.search(
            self.template
        ):
            silent = "turns of the role 'tool'"
        elif sample.tools and text == self.render(messages, videos=videos):
            silent = "'tools'"
        elif bare != messages and text == self.render(bare, False, sample.tools, videos):
            silent = "'tool_calls'"
        if silent is not None:
            raise sample.fail(
                f"it has {silent}, which the chat template does not write; give one that does with "
                "--loader.template, or drop the sample"
            )

    def question(self, sample: Sample, videos: Sequence[str] = ()) -> Tokens:
        """Ids of a conversation that waits for an answer, the answer's header included; none of
        them is learned. They equal `apply_chat_template(messages, add_generation_prompt=True)`.

        Raises:
            DataError: the template cannot render the sample.
        """
        messages = self.messages(sample)
        try:
            whole = self.render(messages, tools=sample.tools, videos=videos)
            self._check_tools(sample, messages, whole, videos)
            text = self.render(messages, True, sample.tools, videos)
        except DataError:
            raise
        except Exception as error:  # jinja2's and the template's own raise_exception
            raise sample.fail(f"the chat template refuses it: {error}") from error
        ids = np.array(self._encode(text), dtype=np.int64)
        return Tokens(ids, np.zeros(len(ids), dtype=np.float32))

    def _prefixes(
        self,
        messages: list[dict[str, Any]],
        position: int,
        text: str,
        sample: Sample,
        videos: Sequence[str],
    ) -> tuple[str, str]:
        """The text up to and with the header of an answer, and up to the answer's end."""
        head = self.render(messages[:position], True, sample.tools, videos)
        last = position + 1 == len(messages)
        upto = text if last else self.render(messages[: position + 1], False, sample.tools, videos)
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


def _default(template: Any, where: str) -> str | None:
    """Of named templates that called "default", as transformers' processors choose, with tools too
    (a tokenizer alone would take "tool_use" then).

    Raises:
        DataError: there is none of that name.
    """
    if isinstance(template, list):  # as files have them
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        if "default" not in template:
            raise DataError(
                f"{where} has chat templates named {', '.join(template)} and none named default; "
                "give one with --loader.template"
            )
        template = template["default"]
    return template


def _with_videos(text: str, videos: Sequence[str]) -> str:
    """The text with what stands there for each <|video_pad|>."""
    placeholders = iter(videos)
    return re.sub(re.escape(VIDEO_PAD), lambda pad: next(placeholders, pad[0]), text)


def _with_vision_tokens(text: str) -> str:
    """The text with the vision tokens that stand for its marks."""
    return MARK_PATTERN.sub(
        lambda mark: f"<|vision_start|><|{MARKS[mark[0]]}_pad|><|vision_end|>", text
    )


def write_template(folder: Path, template: str) -> None:
    """Make a chat template that of a model folder, wherever a reader looks for one."""
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    # Older readers know these places only; what they held belongs to the source's template.
    (folder / "chat_template.json").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    if is_file(path):
        config = json.loads(path.read_text(encoding="utf-8"))
        if "chat_template" in config:
            config["chat_template"] = template
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

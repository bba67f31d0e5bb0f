"""Chat messages in OpenAI form to ids and images, through the model makers' own renderer (`deepseek_recipe`).

What the renderer marks as a special token becomes that token's id, everything else is encoded as text: user text,
history, reasoning, tool results and tool descriptions cannot spell a special token. Images travel as numbered stubs
and come back as `ImageRef`; only the renderer's own marks count as images, never a spelling in a text.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from PIL import Image

from spyglass.config.model import ModelConfig
from spyglass.errors import PromptError, json_kind
from spyglass.families import FAMILIES
from spyglass.prompt.data_url import is_data_url
from spyglass.prompt.decode import ImageInput
from spyglass.prompt.placeholder import SPELLING
from spyglass.prompt.tokenizer import PromptTokenizer

if TYPE_CHECKING:
    import deepseek_recipe  # loaded on first use: ids and images need no renderer

Effort = Literal["minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: tuple[Effort, ...] = ("minimal", "low", "medium", "high", "xhigh", "max")
IMAGE_LEFT_OUT = "[picture left out: this model takes none]"
IMAGE_ROLES = ("system", "user", "tool")
STUB_URL = "data:image/png;base64,"
_MODEL = "spyglass"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a conversation is rendered.

    `thinking`: whether the answer starts with reasoning; off by default, as in the reference's own vision command
    line. `effort`: how much, only with `thinking`; None = the renderer's default, "high" (minimal counts as low,
    medium as high). `tools`, `tool_choice`, `response_format`: as in the OpenAI request. `without_vision`: what a
    image does to a model that has no vision: "refuse", or "note" (a short text stands in for it).
    """

    thinking: bool = False
    effort: Effort | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    response_format: Mapping[str, Any] | None = None
    without_vision: Literal["refuse", "note"] = "refuse"


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image of a conversation: what holds it, and where the request had it, for errors."""

    source: ImageInput
    name: str


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation in the renderer's form: text pieces, special tokens by spelling, images."""

    pieces: tuple[str | SpecialPiece | ImageRef, ...]


@dataclass(frozen=True, slots=True)
class SpecialPiece:
    """A special token put there by the renderer."""

    spelling: str


def render_chat(messages: Sequence[Mapping[str, Any]], config: ModelConfig, options: ChatOptions) -> RenderedChat:
    """Render OpenAI-form messages as the family of `config` was trained; image parts are joined with blank lines.

    An image part is `{"type": "image_url", "image_url": {"url": DATA_URL}}`; in Python `url` may also be bytes, a
    `pathlib.Path` or a PIL image. A plain string is never taken for a path: requests from elsewhere must not read
    files.

    Raises:
        PromptError: a malformed message, an unknown kind of part, an image where none may be; named by its place.
    """
    import deepseek_recipe

    check_options(options)
    stubs = ImageStubs(config, options.without_vision)
    given = {
        "reasoning_effort": options.effort,
        "tools": options.tools or None,
        "tool_choice": options.tool_choice,
        "response_format": options.response_format,
    }
    body: dict[str, Any] = {
        "messages": _without_images(messages, stubs),
        "thinking": {"type": "enabled" if options.thinking else "disabled"},
        **{name: value for name, value in given.items() if value is not None},
    }
    converted = convert_request(deepseek_recipe.ChatCompletionRequest, body)
    return render_conversation(converted.conversation, stubs.images, config)


def convert_request(protocol: Any, body: Mapping[str, Any]) -> deepseek_recipe.ConversationRequest:
    """What the library makes of a request body, images in it being stubs. `protocol` is its class of request.

    Raises:
        PromptError: the library refuses the body.
    """
    import deepseek_recipe

    try:
        return protocol({**_as_json(body), "model": _MODEL}).convert(_conversion())  # type: ignore[dict-item]
    except UnicodeEncodeError as error:
        place = f"a text has a lone surrogate at character {error.start}"  # bytes that are no UTF-8 become such
        raise PromptError(f"the request cannot be rendered: {place}; send valid Unicode (UTF-8)") from None
    except (deepseek_recipe.ConversionError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise PromptError(f"the request cannot be rendered: {error}") from error


def render_conversation(
    conversation: deepseek_recipe.Conversation, images: Sequence[ImageRef], config: ModelConfig
) -> RenderedChat:
    """Render what any of the protocols was converted to; `images` are those behind the stubs, by number.

    Raises:
        PromptError: an image stands where the library has no place for one.
    """
    rendered = _encoding(FAMILIES[config.family].renderer).render_conversation(conversation)
    order = [images[_stub_number(source)] for source in rendered.image_sources]
    found = sum(rendered.prompt[start:stop] == SPELLING for start, stop in rendered.special_ranges)
    if not found == len(order) == len(images):
        raise PromptError(f"the conversation has {len(images)} images, its rendering has room for {found}")
    return RenderedChat(_split(rendered.prompt, rendered.special_ranges, order))


class ImageStubs:
    """Images taken out of a request, each leaving a numbered stub that the library carries to its place.

    `without_vision`: as in `ChatOptions`.
    """

    def __init__(self, config: ModelConfig, without_vision: Literal["refuse", "note"] = "refuse") -> None:
        self._note = config.vision is None and without_vision == "note"
        self._blind = config.vision is None
        self.images: list[ImageRef] = []

    def take(self, source: object, part: str, field: str = "") -> str | None:
        """The base64 text that stands for an image, to be sent as a PNG; None = a note goes there instead.

        `part` and `field` within it say where the request had the image.

        Raises:
            PromptError: the model takes no images, or this is none.
        """
        if self._note:
            return None
        if self._blind:
            raise PromptError(f"{part} is an image, and this model takes no images; use a vision checkpoint")
        where = part + field
        if isinstance(source, str) and not is_data_url(source):
            raise PromptError(
                f"{where} must be a data URL, not {source[:40]!r}; images are not fetched, and from Python a file is "
                "passed as pathlib.Path"
            )
        if not isinstance(source, str | bytes | bytearray | memoryview | os.PathLike | Image.Image):
            raise PromptError(f"{where} must be a data URL (or, from Python, bytes, a path or a PIL image)")
        self.images.append(ImageRef(source, where))
        return base64.b64encode(str(len(self.images) - 1).encode()).decode()


def encode_chat(rendered: RenderedChat, tokenizer: PromptTokenizer) -> list[list[int] | ImageRef]:
    """Ids and images of a rendered conversation in prompt order; neighbouring ids are one list.

    Raises:
        PromptError: the tokenizer lacks a special token that this conversation needs.
    """
    parts: list[list[int] | ImageRef] = []
    for piece in rendered.pieces:
        if isinstance(piece, ImageRef):
            parts.append(piece)
            continue
        if not parts or isinstance(parts[-1], ImageRef):
            parts.append([])
        ids = parts[-1]
        assert isinstance(ids, list)
        ids.extend(
            [_special(piece.spelling, tokenizer)] if isinstance(piece, SpecialPiece) else tokenizer.encode_text(piece)
        )
    return parts


def _special(spelling: str, tokenizer: PromptTokenizer) -> int:
    token = tokenizer.special_id(spelling)
    if token is None:
        raise PromptError(f"the tokenizer has no special token {spelling}; use the tokenizer of this model's family")
    return token


def check_options(options: ChatOptions) -> None:
    """Raises PromptError for options that mean nothing; `render_chat` does it too."""
    if options.effort is not None and options.effort not in EFFORTS:
        raise PromptError(f"effort is {options.effort!r}; it is one of {', '.join(EFFORTS)}, or none with thinking off")
    if not isinstance(options.tools, list | tuple):
        raise PromptError(f"tools must be a list of tools, not {json_kind(options.tools)}")
    if not isinstance(options.thinking, bool):
        raise PromptError(f"thinking is {options.thinking!r}; it is True or False")
    if options.effort is not None and not options.thinking:
        raise PromptError(f"effort {options.effort!r} needs thinking; turn thinking on or leave the effort out")


def _without_images(messages: Sequence[Mapping[str, Any]], stubs: ImageStubs) -> list[dict[str, Any]]:
    """The messages with every image replaced by its stub."""
    if not isinstance(messages, list | tuple):
        raise PromptError(f"messages must be a list of messages, not {json_kind(messages)}")
    plain = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, Mapping):
            raise PromptError(f"{where} must be an object with role and content, not {json_kind(message)}")
        content = message.get("content")
        if isinstance(content, list | tuple):
            role = message.get("role")
            parts = [plain_part(part, f"{where}.content[{place}]", role, stubs) for place, part in enumerate(content)]
            message = {**message, "content": parts}
        plain.append(dict(message))
    return plain


def plain_part(part: object, where: str, role: object, stubs: ImageStubs) -> dict[str, Any]:
    """One content part of an OpenAI message as JSON; an image is moved to `stubs`.

    Raises:
        PromptError: an unknown kind of part, or an image where none may be; named by `where`.
    """
    if not isinstance(part, Mapping):
        raise PromptError(f"{where} must be an object with a type, not {json_kind(part)}")
    kind = part.get("type")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise PromptError(f"{where}.text must be a string")
        return dict(part)
    if kind != "image_url":
        raise PromptError(f"{where} has the unknown type {kind!r}; parts are text or image_url")
    if role not in IMAGE_ROLES:
        raise PromptError(f"{where} is an image in a message of role {role!r}; images go to {', '.join(IMAGE_ROLES)}")
    value = part.get("image_url")
    if isinstance(value, Mapping):
        stub = stubs.take(value.get("url"), where, ".image_url.url")
    else:
        stub = stubs.take(value, where, ".image_url")
    if stub is None:
        return {"type": "text", "text": IMAGE_LEFT_OUT}
    return {"type": "image_url", "image_url": {"url": STUB_URL + stub}}


def _stub_number(source: deepseek_recipe.ImageSource) -> int:
    assert source.data_url is not None
    return int(base64.b64decode(source.data_url.removeprefix(STUB_URL)))


@cache
def _tokens() -> deepseek_recipe.SpecialTokens:
    import deepseek_recipe

    return deepseek_recipe.SpecialTokens(image=SPELLING)


@cache
def _encoding(renderer: str) -> deepseek_recipe.DeepseekV4Encoding | deepseek_recipe.DeepseekV41Encoding:
    import deepseek_recipe

    encoding: deepseek_recipe.DeepseekV4Encoding | deepseek_recipe.DeepseekV41Encoding
    encoding = getattr(deepseek_recipe, renderer)()
    return encoding.with_special_tokens(_tokens())


@cache
def _conversion() -> deepseek_recipe.ConversionOptions:
    """The version that is named decides only that images are kept; thinking is off unless the body turns it on."""
    import deepseek_recipe

    options = deepseek_recipe.ConversionOptions(default_thinking_mode=False)
    version = deepseek_recipe.ModelVersion.DeepseekV41Flash
    return options.with_special_tokens(_tokens()).with_model_alias(_MODEL, version)


def _as_json(value: object) -> object:
    """Mappings and sequences of any kind as dict and list, which is all that the library reads."""
    if isinstance(value, Mapping):
        return {name: _as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value


def _split(
    prompt: str, special_ranges: Sequence[tuple[int, int]], order: Sequence[ImageRef]
) -> tuple[str | SpecialPiece | ImageRef, ...]:
    pieces: list[str | SpecialPiece | ImageRef] = []
    images = iter(order)
    done = 0
    for start, stop in special_ranges:
        if start > done:
            pieces.append(prompt[done:start])
        token = prompt[start:stop]
        pieces.append(next(images) if token == SPELLING else SpecialPiece(token))
        done = stop
    if done < len(prompt):
        pieces.append(prompt[done:])
    return tuple(pieces)

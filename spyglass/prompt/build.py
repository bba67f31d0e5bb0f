"""From chat messages, or from ids and images in order, to a `Prompt`.

Every image is opened, its size checked and planned before anything of it is unpacked; its token block is laid out
at the position where it really stands, since V4 pads depend on it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from spyglass.config.model import ModelConfig, VisionConfig
from spyglass.errors import PromptError
from spyglass.prompt.chat import ChatOptions, Effort, ImageRef, RenderedChat, encode_chat, render_chat
from spyglass.prompt.decode import (
    CHAT_RULES,
    PYTHON_LIMITS,
    REFERENCE_RULES,
    ImageInput,
    ImageLimits,
    ImageRules,
    open_image,
    oriented_size,
    read_source,
    to_rgb,
)
from spyglass.prompt.image import cut, resize
from spyglass.prompt.placeholder import resolve_placeholder
from spyglass.prompt.plan import layout_block, plan_image, plan_patches
from spyglass.prompt.tokenizer import PromptTokenizer
from spyglass.prompt.tokens import ImagePlan, ImageSpan, Prompt, TokenKind, prompt_digest
from spyglass.prompt.visibility import visible_extra

IMAGE_POSITION = -1  # what `Prompt.ids_T` holds at image positions
_NUM_ROLES = len(TokenKind) - 1  # all but TEXT
Pixels = NDArray[np.uint8] | NDArray[np.float32]
Unpack = Callable[[bytes, ImageRules, ImagePlan, str], Pixels]  # file, rules, plan and name of an image to its patches


@runtime_checkable
class CutImage(Protocol):
    """An image that is already cut: `Patches`, or anything shaped like it."""

    @property
    def pixels(self) -> Any:
        """[N, 3, p, p], uint8 or already normalised floats."""

    @property
    def vit_grid(self) -> tuple[int, int]:
        """(rows, columns) of patches."""


Part = Sequence[int] | NDArray[np.integer[Any]] | ImageInput | CutImage | ImageRef


def build_prompt(
    messages: Sequence[Mapping[str, Any]],
    config: ModelConfig,
    tokenizer: PromptTokenizer | None,
    *,
    thinking: bool = False,
    effort: Effort | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: str | Mapping[str, Any] | None = None,
    response_format: Mapping[str, Any] | None = None,
    without_vision: Literal["refuse", "note"] = "refuse",
    rules: ImageRules = CHAT_RULES,
    limits: ImageLimits = PYTHON_LIMITS,
) -> Prompt:
    """Prompt of a chat in OpenAI form; the options are those of `ChatOptions`, images follow `rules` and `limits`.

    Raises:
        PromptError: malformed messages or images, no tokenizer, or one that does not fit the model.
    """
    options = ChatOptions(
        thinking=thinking,
        effort=effort,
        tools=tools,
        tool_choice=tool_choice,
        response_format=response_format,
        without_vision=without_vision,
    )
    return prompt_from_chat(render_chat(messages, config, options), config, tokenizer, rules=rules, limits=limits)


def prompt_from_chat(
    rendered: RenderedChat,
    config: ModelConfig,
    tokenizer: PromptTokenizer | None,
    *,
    rules: ImageRules = CHAT_RULES,
    limits: ImageLimits = PYTHON_LIMITS,
    unpack: Unpack | None = None,
) -> Prompt:
    """Prompt of a rendered conversation.

    Raises:
        PromptError: an image that cannot be used, no tokenizer, or one that does not fit the model.
    """
    if tokenizer is None:
        raise PromptError("this checkpoint has no tokenizer.json, so it takes ids and images, not text; add the file")
    placeholder = resolve_placeholder(config, tokenizer)
    return prompt_from_parts(
        encode_chat(rendered, tokenizer), config, rules=rules, limits=limits, placeholder=placeholder, unpack=unpack
    )


def prompt_from_parts(
    parts: Iterable[Part],
    config: ModelConfig,
    *,
    rules: ImageRules = REFERENCE_RULES,
    limits: ImageLimits = PYTHON_LIMITS,
    placeholder: int | None = None,
    with_digests: bool = True,
    unpack: Unpack | None = None,
) -> Prompt:
    """Prompt of token-id lists and images in the order given; needs no tokenizer.

    A part is a list of ids below the vocabulary size, an image (bytes, path, data URL, PIL), or `Patches`. Ids that
    already stand for images are refused: roles of the reference's convention (>= vocabulary size), and the
    unexpanded placeholder (`placeholder`, else that of config.json). Without digests the prompt is one that no cache
    may see, as in training. `unpack` does the work of `unpack_image` elsewhere.

    Raises:
        PromptError: an id out of range, an image that cannot be used, named by its number, or an empty prompt.
    """
    parts = list(parts)
    if config.vision is not None and placeholder is None:
        placeholder = config.image_token_id
    draft = _Draft(config=config, placeholder=placeholder)
    num_images = sum(is_image(part) for part in parts)
    images = _Images(vision=config.vision, rules=rules, limits=limits, count=num_images)
    opened = deque(images.open(part) if is_image(part) else part for part in parts)
    for number in range(len(opened)):
        part = opened.popleft()  # an unpacked image stays in memory no longer than it is needed
        if isinstance(part, _Opened):
            draft.add_image(part.unpack(unpack), part.plan)
        else:
            draft.add_ids(part, f"part {number}")
    return draft.finish(with_digests=with_digests)


def is_image(part: object) -> bool:
    """Whether a part is an image of any form; a str is one here, as a path or data URL."""
    if isinstance(part, list | np.ndarray):
        return False  # ids, by far the most; asking for the protocol's members takes longer than all else here
    sources = (bytes, bytearray, memoryview, str, os.PathLike, Image.Image)
    return isinstance(part, ImageRef | CutImage) or isinstance(part, sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """An image whose size and plan are known; `source` is patches that are ready, or what is still to be unpacked, and
    `file` the bytes that it was opened from."""

    name: str
    source: Pixels | Image.Image
    rules: ImageRules
    plan: ImagePlan
    file: bytes | None = None

    def unpack(self, elsewhere: Unpack | None) -> Pixels:
        if not isinstance(self.source, Image.Image):
            return self.source
        if elsewhere is not None and self.file is not None:
            return elsewhere(self.file, self.rules, self.plan, self.name)
        return unpack_image(self.source, self.rules, self.plan, self.name)


def unpack_image(image: Image.Image, rules: ImageRules, plan: ImagePlan, name: str) -> Pixels:
    """The patches of an image that is open.

    Raises:
        PromptError: damaged data, or another size than its header said.
    """
    size = oriented_size(image, rules)
    rgb = to_rgb(image, rules, name=name)
    if rgb.size != size:
        raise PromptError(f"{name} unpacks to {rgb.width}x{rgb.height}, its header said {size[0]}x{size[1]}")
    return cut(resize(rgb, plan, name=name), plan)


@dataclass(slots=True, kw_only=True)
class _Images:
    """Opens the images of one prompt in order and keeps count of what they will cost together, unpacked."""

    vision: VisionConfig | None
    rules: ImageRules
    limits: ImageLimits
    count: int
    number: int = 0
    total_bytes: int = 0
    total_pixels: int = 0

    def open(self, part: object) -> _Opened:
        """The next image, from its header."""
        source, place = (part.source, part.name) if isinstance(part, ImageRef) else (part, None)
        told = [str(what) for what in (place, source if isinstance(source, os.PathLike) else None) if what is not None]
        name = f"image {self.number}" + (f" ({', '.join(told)})" if told else "")
        if self.vision is None:
            raise PromptError(f"{name}: this model takes no images; use a vision checkpoint")
        if self.count > self.limits.images:
            raise PromptError(f"the prompt has {self.count} images, the limit is {self.limits.images}; send fewer")
        self.number += 1
        if isinstance(source, CutImage):
            pixels, plan = _checked_patches(source, self.vision, name)
            return _Opened(name=name, source=pixels, rules=self.rules, plan=plan)
        assert isinstance(source, bytes | bytearray | memoryview | str | os.PathLike | Image.Image)
        return self._open(source, self.vision, name)

    def _open(self, source: ImageInput, vision: VisionConfig, name: str) -> _Opened:
        data = read_source(source, limits=self.limits, name=name)
        self.total_bytes += len(data) if isinstance(data, bytes) else 0
        if self.total_bytes > self.limits.total_bytes:
            raise PromptError(f"{name}: the images together exceed {self.limits.total_bytes} bytes; send smaller files")
        image = open_image(data, limits=self.limits, name=name)
        width, height = size = oriented_size(image, self.rules)
        if self.count >= self.limits.crowd and max(size) > self.limits.crowded_side:
            raise PromptError(
                f"{name} is {width}x{height}; from {self.limits.crowd} images on a side may have "
                f"{self.limits.crowded_side} pixels, scale it down"
            )
        self.total_pixels += width * height
        if self.total_pixels > self.limits.total_pixels:
            raise PromptError(f"{name}: the images together exceed {self.limits.total_pixels} pixels; scale them down")
        try:
            plan = plan_image(width, height, vision)
        except PromptError as error:
            raise PromptError(f"{name}: {error}") from error
        file = data if isinstance(data, bytes) else None
        return _Opened(name=name, source=image, rules=self.rules, plan=plan, file=file)


def _checked_patches(part: CutImage, vision: VisionConfig, name: str) -> tuple[Pixels, ImagePlan]:
    """Patches as they are, with their plan; floats become fp32."""
    try:
        rows, columns = part.vit_grid
        plan = plan_patches((rows, columns), vision)
        pixels: NDArray[Any] = np.asarray(part.pixels)
    except PromptError as error:
        raise PromptError(f"{name}: {error}") from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise PromptError(
            f"{name}: patches need an array `pixels` and `vit_grid` = (rows, columns): {error}"
        ) from error
    patch = vision.patch_size
    expected = (plan.vit_grid[0] * plan.vit_grid[1], 3, patch, patch)
    if pixels.shape != expected:
        raise PromptError(
            f"{name}: patches of shape {list(pixels.shape)}, a grid of {rows}x{columns} needs {list(expected)}"
        )
    if pixels.dtype == np.uint8:
        return pixels, plan
    if not np.issubdtype(pixels.dtype, np.floating):
        raise PromptError(f"{name}: patches are {pixels.dtype}; give uint8 pixels or normalised floats")
    with np.errstate(over="ignore"):
        values = pixels.astype(np.float32)
    if not np.isfinite(values).all():
        bad = int(np.argwhere(~np.isfinite(values).all(axis=(1, 2, 3)))[0, 0])
        raise PromptError(f"{name}: patch {bad} holds a value that is not finite in fp32")
    return values, plan


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A prompt while it grows."""

    config: ModelConfig
    placeholder: int | None
    ids: list[NDArray[np.int32]] = field(default_factory=list)
    kinds: list[NDArray[np.int8]] = field(default_factory=list)
    rows: list[NDArray[np.int32]] = field(default_factory=list)
    spans: list[ImageSpan] = field(default_factory=list)
    pixels: list[Pixels] = field(default_factory=list)
    plans: list[ImagePlan] = field(default_factory=list)
    position: int = 0
    num_cells: int = 0

    def add_ids(self, part: object, name: str) -> None:
        """Text ids at the end of what is there."""
        ids = _checked_ids(part, self.config.text.vocab_size, self.placeholder, name)
        self._append(ids, np.full(len(ids), TokenKind.TEXT, np.int8), np.full(len(ids), -1, np.int32))

    def add_image(self, pixels: Pixels, plan: ImagePlan) -> None:
        """An image's block at the end of what is there."""
        assert self.config.vision is not None
        span = layout_block(plan, self.position, self.config.vision, len(self.spans))
        rows = np.full(span.length, -1, np.int32)
        rows[span.kinds == TokenKind.IMAGE] = span.order + self.num_cells
        self._append(np.full(span.length, IMAGE_POSITION, np.int32), span.kinds, rows)
        self.num_cells += plan.llm_grid[0] * plan.llm_grid[1]
        self.spans.append(span)
        self.pixels.append(pixels)
        self.plans.append(plan)

    def _append(self, ids: NDArray[np.int32], kinds: NDArray[np.int8], rows: NDArray[np.int32]) -> None:
        self.ids.append(ids)
        self.kinds.append(kinds)
        self.rows.append(rows)
        self.position += len(ids)

    def finish(self, *, with_digests: bool) -> Prompt:
        """The prompt, with who sees whom and, if wanted, every image's digest."""
        if self.position == 0:
            raise PromptError("the prompt is empty; give at least one token or image")
        kinds_T = np.concatenate(self.kinds)
        vision = self.config.vision
        paired = vision is not None and vision.layout == "paired" and bool(self.spans)
        return Prompt(
            ids_T=np.concatenate(self.ids),
            kinds_T=kinds_T,
            spans=tuple(self.spans),
            image_row_T=np.concatenate(self.rows),
            visible_T2=visible_extra(kinds_T, vision.max_tokens)
            if vision is not None and paired
            else np.zeros((self.position, 2), np.int32),
            patches=tuple(self.pixels),
            plans=tuple(self.plans),
            digests=tuple(map(prompt_digest, self.pixels, self.plans)) if with_digests else (),
        )


def _checked_ids(part: object, vocab_size: int, placeholder: int | None, name: str) -> NDArray[np.int32]:
    try:
        ids: NDArray[Any] = np.asarray(part)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PromptError(f"{name} is neither a list of token ids nor an image: {error}") from error
    if ids.ndim == 1 and ids.size == 0:
        return np.zeros(0, np.int32)
    mixed = isinstance(part, list | tuple) and bool in set(map(type, part))  # numpy takes true for 1 among integers
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or mixed:
        raise PromptError(
            f"{name} is a {type(part).__name__} that is neither a flat list of integer token ids nor an image"
        )
    bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if bad.size:
        raise PromptError(f"{name}: {_why_not(int(ids[bad[0]]), vocab_size)} (index {bad[0]})")
    if placeholder is not None and (ids == placeholder).any():
        index = int(np.flatnonzero(ids == placeholder)[0])
        raise PromptError(
            f"{name}: id {placeholder} (index {index}) is the image placeholder; leave it out and give the image "
            "as a part of its own, where its block belongs"
        )
    return ids.astype(np.int32)


def _why_not(token: int, vocab_size: int) -> str:
    if vocab_size <= token < vocab_size + _NUM_ROLES:
        return (
            f"id {token} is an image role (vocabulary size {vocab_size} + {TokenKind(token - vocab_size).name}); "
            "token lists hold text only, give the image as a part of its own"
        )
    return f"id {token} is outside the vocabulary 0..{vocab_size - 1}"

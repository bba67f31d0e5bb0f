"""Prompts in the id conventions of other engines (spec v4 9.6, v41 7.2). Inside, only `Prompt.kinds_T` says what is a
picture.

- reference: picture positions are vocabulary size + role, outside the vocabulary; roles START 0, PAD 1, IMAGE 2,
NEWLINE 3,
  END 4.
- vLLM: the same roles on five reserved tokens, 129257..129261.
- V4.1: every position of a span holds the placeholder, with a separate list of types START 0, IMAGE 1, NEWLINE 2, END 3
  (-1 = text).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spyglass.config.model import ModelConfig
from spyglass.errors import PromptError
from spyglass.prompt.build import IMAGE_POSITION, Part, prompt_from_parts
from spyglass.prompt.tokens import Prompt, TokenKind
from spyglass.prompt.visibility import check_spans

VLLM_FIRST_ID = 129257
_NUM_ROLES = len(TokenKind) - 1
_V41_TYPES = np.array([0, -1, 1, 2, 3], np.int8)  # by TokenKind; V4.1 has no PAD


def to_reference_ids(prompt: Prompt, vocab_size: int) -> NDArray[np.int32]:
    """Ids with picture positions as `vocab_size` + role, int32 [T]."""
    return _with_roles(prompt, vocab_size)


def to_vllm_ids(prompt: Prompt) -> NDArray[np.int32]:
    """Ids with picture positions as vLLM's reserved tokens, int32 [T]; for vocabularies of the released size."""
    return _with_roles(prompt, VLLM_FIRST_ID)


def to_v41_ids(prompt: Prompt, placeholder: int) -> tuple[NDArray[np.int32], NDArray[np.int8]]:
    """Ids with `placeholder` at every picture position, int32 [T], and the V4.1 types, int8 [T].

    Raises:
        PromptError: the prompt has V4 blocks, whose pads V4.1 cannot express.
    """
    if (prompt.kinds_T == TokenKind.PAD).any():
        raise PromptError("this prompt has V4 picture blocks with pads; V4.1 ids cannot express them")
    is_text_T = prompt.kinds_T == TokenKind.TEXT
    types_T = np.where(is_text_T, -1, _V41_TYPES[prompt.kinds_T]).astype(np.int8)
    return np.where(is_text_T, prompt.ids_T, placeholder).astype(np.int32), types_T


def kinds_of_reference_ids(
    ids: Sequence[int] | NDArray[Any], vocab_size: int
) -> tuple[NDArray[np.int32], NDArray[np.int8]]:
    """Split ids of the reference's convention into text ids (-1 at pictures) and kinds, int32 and int8 [T].

    Raises:
        PromptError: an id that is neither text nor a role, or roles that are not whole blocks (stray END, unclosed
        START).
    """
    ids_T = np.asarray(ids)
    if ids_T.ndim != 1 or ids_T.dtype.kind not in "iu":
        raise PromptError("reference ids must be a flat list of integers")
    bad = np.flatnonzero((ids_T < 0) | (ids_T >= vocab_size + _NUM_ROLES))
    if bad.size:
        raise PromptError(
            f"id {int(ids_T[bad[0]])} at position {bad[0]} is neither a token (below {vocab_size}) nor a picture role "
            f"(below {vocab_size + _NUM_ROLES})"
        )
    is_text_T = ids_T < vocab_size
    kinds_T = np.where(is_text_T, TokenKind.TEXT, ids_T - vocab_size).astype(np.int8)
    check_spans(kinds_T)
    return np.where(is_text_T, ids_T, IMAGE_POSITION).astype(np.int32), kinds_T


def prompt_from_reference_ids(
    ids: Sequence[int] | NDArray[Any], pictures: Sequence[Part], config: ModelConfig
) -> Prompt:
    """Prompt of expanded V4 ids in the reference's convention and the pictures behind their blocks, in order.

    Raises:
        PromptError: malformed blocks, another number of pictures than blocks, or a block that is not the one this
        picture has
            at this position.
    """
    vocab_size = config.text.vocab_size
    ids_T, kinds_T = kinds_of_reference_ids(ids, vocab_size)
    stops = np.flatnonzero(kinds_T == TokenKind.END) + 1
    if len(stops) != len(pictures):
        raise PromptError(f"the ids hold {len(stops)} picture blocks, {len(pictures)} pictures were given")
    parts: list[Part] = []
    done = 0
    for stop, picture in zip(stops.tolist(), pictures, strict=True):
        run = ids_T[done:stop]
        parts += [run[run != IMAGE_POSITION], picture]
        done = stop
    tail = ids_T[done:]
    parts.append(tail[tail != IMAGE_POSITION])
    prompt = prompt_from_parts(parts, config)
    written = to_reference_ids(prompt, vocab_size)
    given = np.asarray(ids)
    if not np.array_equal(written, given):
        shared = min(len(written), len(given))
        differs = np.flatnonzero(written[:shared] != given[:shared])
        at = int(differs[0]) if differs.size else shared
        raise PromptError(f"the picture blocks of the ids are not those of the pictures: they part at position {at}")
    return prompt


def _with_roles(prompt: Prompt, first: int) -> NDArray[np.int32]:
    kinds_T = prompt.kinds_T.astype(np.int32)
    return np.where(prompt.kinds_T == TokenKind.TEXT, prompt.ids_T, first + kinds_T).astype(np.int32)

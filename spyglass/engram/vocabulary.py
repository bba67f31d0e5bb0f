"""The compressed vocabulary: tokens that read alike share one class (spec v41 5.1).

key = normalise(text), or the text itself where nothing is left, or the token's raw spelling where the bytes are not
text. Classes are numbered in the order in which their keys first appear.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, normalizers

from spyglass.config.model import EngramConfig
from spyglass.errors import CheckpointError

TOKEN_MAP_NAME = "engram_token_map.json"
TOKENIZER_NAME = "tokenizer.json"
_NOT_TEXT = "\ufffd"  # what decoding leaves of bytes that are not UTF-8
_LONE_SPACE = "\ue000"  # private character that carries a lone space past the stripping


def read_classes(folder: Path, engram: EngramConfig, vocab_size: int) -> NDArray[np.int32]:
    """Class of every token id, int32 [vocab_size]: the folder's own map where it has one, else from its tokenizer.

    Raises:
        CheckpointError: neither file is there, or the one used is damaged or does not give the promised classes.
    """
    own = folder / TOKEN_MAP_NAME
    if own.exists():
        return _read_map(own, engram, vocab_size)
    file = folder / TOKENIZER_NAME
    if not file.exists():
        raise CheckpointError(
            f"{folder}: engram layers need {TOKENIZER_NAME} or {TOKEN_MAP_NAME} to know which tokens read alike; "
            "neither is there"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{file} is not a tokenizer: {error}") from error
    classes = classes_of_tokenizer(tokenizer, vocab_size)
    found = int(classes.max()) + 1
    if found != engram.num_classes:
        raise CheckpointError(
            f"{file} gives {found} classes of tokens, engram_compressed_vocab_size says {engram.num_classes}: it is "
            f"not the tokenizer these tables were made with; fetch the right one or a {TOKEN_MAP_NAME}"
        )
    return classes


def classes_of_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> NDArray[np.int32]:
    """Class of every id below `vocab_size`, int32, by the rule of spec v41 5.1."""
    normalise = _normaliser()
    texts = tokenizer.decode_batch([[token] for token in range(vocab_size)], skip_special_tokens=False)
    seen: dict[str, int] = {}
    classes = np.empty(vocab_size, np.int32)
    for token, text in enumerate(texts):
        raw = tokenizer.id_to_token(token) if _NOT_TEXT in text else None
        key = raw if raw is not None else normalise.normalize_str(text) or text
        classes[token] = seen.setdefault(key, len(seen))
    return classes


def _normaliser() -> normalizers.Normalizer:
    """All marks go (Mn, Mc and Me), case goes, runs of white space become one space, and a lone space stays."""
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex("^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )


def _read_map(file: Path, engram: EngramConfig, vocab_size: int) -> NDArray[np.int32]:
    try:
        values = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    expected = f"expected a list of {vocab_size} integers from 0 to {engram.num_classes - 1}, one for each token"
    if not isinstance(values, list) or len(values) != vocab_size:
        found = f"a list of {len(values)}" if isinstance(values, list) else type(values).__name__
        raise CheckpointError(f"{file} holds {found}; {expected}")
    for token, value in enumerate(values):
        if type(value) is not int or not 0 <= value < engram.num_classes:
            raise CheckpointError(f"{file}: token {token} has class {str(value)[:40]}; {expected}")
    return np.array(values, np.int32)

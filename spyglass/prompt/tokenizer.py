"""The checkpoint's tokenizer, split in two on purpose: text can never spell a special token.

`encode_text` knows only the base vocabulary, so what a person, a tool or an earlier answer wrote stays text, whatever
it spells; special tokens are put in by id. Full encoding with the added vocabulary is not offered.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from spyglass.errors import CapacityError, PromptError, is_recoverable

FILE_NAME = "tokenizer.json"
MAX_BYTES = 1 << 28  # released ones have 6 to 20 MB


class PromptTokenizer:
    """A `tokenizer.json`, ready to make prompts and to read answers."""

    __slots__ = ("_added", "_full", "_longest", "special_ids", "text_only")

    def __init__(self, text: str, name: str = FILE_NAME) -> None:
        """`text` is the content of a tokenizer.json; `name` says in errors where it came from.

        `special_ids` are the added tokens that stand for no text.

        Raises:
            PromptError: not a tokenizer.json, or one whose added tokens are not where it says.
        """
        try:
            parsed: dict[str, Any] = json.loads(text)
            self._added: dict[str, int] = {token["content"]: token["id"] for token in parsed["added_tokens"]}
            self.special_ids = frozenset(token["id"] for token in parsed["added_tokens"] if token["special"])
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise PromptError(f"{name} is not a tokenizer file: {error!r}") from error
        self._full = _build(text, name)
        for spelling, token in self._added.items():
            if self._full.token_to_id(spelling) != token:
                raise PromptError(
                    f"{name} gives {spelling} the id {token}, which its own vocabulary does not leave free"
                )
        self.text_only = _without_added_tokens(self._full)
        self._longest = _longest_tokens(self._full, parsed)

    def __reduce__(self) -> tuple[type[PromptTokenizer], tuple[str]]:
        """For another process, which makes one of the same."""
        return PromptTokenizer, (self._full.to_str(),)

    def refuse_unless_fits(self, texts: Iterable[str], most_tokens: int) -> None:
        """Refuse texts that are certain to make more than `most_tokens`, before that costs memory and time.

        A token of n bytes holds bytes that are in no token longer than n' >= n; so with 1 / n' of each byte a token
        counts at most 1, and a text makes at least as many tokens as its bytes count together.

        Raises:
            CapacityError: even of the longest tokens that its bytes can be in they make more.
        """
        if self._longest is None:
            return
        counts, size = np.zeros(256, np.int64), 0
        for text in texts:
            data = np.frombuffer(text.encode(errors="replace"), np.uint8)
            counts += np.bincount(data, minlength=256)
            size += len(data)
        if float(counts @ (1 / self._longest)) > most_tokens * (1 + 1e-9):  # sums of floats are not exact
            raise CapacityError(
                f"the text has {size:,} bytes, which is more than {most_tokens:,} tokens, the limit of prompt and "
                "answer together; shorten it or raise max_length"
            )

    def encode_text(self, text: str) -> list[int]:
        """Ids of `text` as text: spellings of special tokens come out as ordinary pieces.

        Raises:
            PromptError: the text is not valid Unicode (a lone surrogate).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"the text has a lone surrogate at character {error.start}; send valid Unicode") from None
        try:
            # `encode` would stop every other thread meanwhile
            ids: list[int] = self.text_only.encode_batch([text])[0].ids
        except BaseException as error:
            if isinstance(error, Exception) or not is_recoverable(error):
                raise
            raise PromptError("the tokenizer cannot read this text; send less of it at once") from None
        return ids

    def special_id(self, spelling: str) -> int | None:
        """Id of an added token by its exact spelling, None when this tokenizer has no such token."""
        return self._added.get(spelling)

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of every added token, those that count as text included."""
        return frozenset(self._added.values())

    def spelling(self, token: int) -> str | None:
        """Spelling of an id in the vocabulary's own alphabet, None when there is no such id."""
        piece: str | None = self._full.id_to_token(token)
        return piece

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens spelled out; incomplete UTF-8 shows as U+FFFD."""
        text: str = self._full.decode(list(ids), skip_special_tokens=False)
        return text


def _build(text: str, name: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(text)
    except BaseException as error:  # the library raises bare Exception, whatever is wrong with the file
        if not is_recoverable(error):
            raise
        raise PromptError(f"{name} is not a tokenizer file: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _without_added_tokens(full: Tokenizer) -> Tokenizer:
    """A tokenizer of the base vocabulary only, which puts nothing around a text; shares the model with `full`."""
    plain = Tokenizer(full.model)
    if full.normalizer is not None:
        plain.normalizer = full.normalizer
    if full.pre_tokenizer is not None:
        plain.pre_tokenizer = full.pre_tokenizer
    return plain


def _longest_tokens(full: Tokenizer, parsed: Mapping[str, Any]) -> NDArray[np.float64] | None:
    """For each byte the length in bytes of the longest token of the base vocabulary that has it; None where there is no
    bound.

    In the byte-level alphabet a character is a byte. There is none where something may drop or shorten what is
    written: a normalizer, a pre-tokenizer of another kind, or characters that the vocabulary lacks.
    """
    first = parsed.get("pre_tokenizer") or {"type": "none"}
    steps = first.get("pretokenizers", [first])
    kinds = {step["type"] for step in steps}
    kept = kinds <= {"ByteLevel", "Digits", "Split"} and all(step.get("behavior") != "Removed" for step in steps)
    normalizer = parsed.get("normalizer") or {"normalizers": []}
    if not isinstance(full.model, BPE) or "ByteLevel" not in kinds or not kept or normalizer.get("normalizers") != []:
        return None
    vocabulary = full.get_vocab(with_added_tokens=False)
    if not vocabulary.keys() >= set(ByteLevel.alphabet()):
        return None
    longest: dict[str, int] = {}
    for token in sorted(vocabulary, key=len):
        longest.update(dict.fromkeys(token, len(token)))
    return np.array([longest[letter] for letter in byte_letters()], np.float64)


def byte_letters() -> list[str]:
    """The letter of each byte in the byte-level alphabet: its own where it can be seen, else one from 256 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(256)
    return [chr(byte) if byte in seen else chr(next(others)) for byte in range(256)]


def load_tokenizer(folder: str | os.PathLike[str]) -> PromptTokenizer | None:
    """The tokenizer of a checkpoint folder, None when it has none: ids and images need no tokenizer, only text does.

    Raises:
        PromptError: the file is there (a link that leads nowhere included) but is no tokenizer, or one over which the
            library ends the process: it is tried in another first.
    """
    path = Path(folder) / FILE_NAME
    if not os.path.lexists(path):
        return None
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            raise PromptError(f"{path} is not a file of at most {MAX_BYTES:,} bytes; use the tokenizer of the model")
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise PromptError(f"{path} cannot be read: {error}") from error
    _try_elsewhere(text, str(path))
    return PromptTokenizer(text, str(path))


def _try_elsewhere(text: str, name: str) -> None:
    """Raises PromptError: the library refuses the file, or ends the process over it."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("try_tokenizer.py"))]
    try:
        tried = subprocess.run(command, input=text.encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError as error:
        raise PromptError(f"{name} cannot be tried in a process of its own: {error}") from error
    if tried.stdout:
        raise PromptError(f"{name} is not a tokenizer file: {tried.stdout.decode(errors='replace')}")
    if tried.returncode:
        raise PromptError(
            f"{name} cannot be used: the tokenizers library ends the process over it ({tried.returncode}); use the "
            "tokenizer of the model"
        )

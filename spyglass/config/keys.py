"""API keys: `KEY`, or `NAME=KEY` and what it may have, in one notation for the command line, variables and files.

Of a key only its SHA-256 is kept (keys are long and random, so nothing slower is needed), and a key may be given as
one: `alice=sha256:HEX share=2 requests=60 tokens=90000 images=30`. The numbers are a share of a busy engine and rates a
minute.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from spyglass.errors import ConfigError

_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63})=(\S*[^\s=]\S*)((?:\s+\S+)*)", re.ASCII)
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_SETTING = re.compile(r"(share|requests|tokens|images)=([1-9][0-9]{0,11})")
_EXPECTED = "expected NAME=KEY and then, if wanted, share=N requests=N tokens=N images=N (a share, and rates a minute)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key that opens the server. `requests`, `tokens` and `images` are rates a minute, None = without a limit; of an
    engine that several keys keep busy it gets its `share`."""

    name: str
    digest: str
    share: int = 1
    requests: int | None = None
    tokens: int | None = None
    images: int | None = None

    def __str__(self) -> str:
        settings = (f"{item.name}={getattr(self, item.name)}" for item in fields(self)[2:] if getattr(self, item.name))
        return " ".join([f"{self.name}=sha256:{self.digest}", *settings])


def digest_of(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def read_api_keys(texts: Iterable[str], file: str = "") -> tuple[ApiKey, ...]:
    """The keys of options and of a file, which has one a line, and comments behind `#` at the start of a line.

    A text without a name is a whole key; it is called `key1` if it is the first of all.

    Raises:
        ConfigError: the file cannot be read, a text means nothing, or a name or key is there twice. No key is quoted.
    """
    places = [(f"api_key {number}", text) for number, text in enumerate(texts, 1)]
    if file:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"api_key_file {file!r} cannot be read: {error}") from error
        told = [(f"{file} line {number}", line.strip()) for number, line in enumerate(lines, 1)]
        if not (told := [(place, line) for place, line in told if line and not line.startswith("#")]):
            raise ConfigError(f"api_key_file {file!r} has no key; {_EXPECTED}, one a line")
        places += told
    keys: list[ApiKey] = []
    for place, text in places:
        key = _read_key(text, place, f"key{len(keys) + 1}")
        for other in keys:
            if key.name == other.name:
                raise ConfigError(f"{place} has the name {key.name!r} of a key before it; names must differ")
            if key.digest == other.digest:
                raise ConfigError(f"{place} is the same key as {other.name!r}; give each client one of its own")
        keys.append(key)
    return tuple(keys)


def _read_key(text: str, place: str, name: str) -> ApiKey:
    text = text.strip()
    named = _NAMED.fullmatch(text)
    if named is None and "=" in text and len(text.split()) > 1:  # meant to be more than a key
        raise ConfigError(f"{place} means nothing; {_EXPECTED}")
    if named is None:
        return ApiKey(name=name, digest=digest_of(text))
    settings: dict[str, int] = {}
    for word in named[3].split():
        setting = _SETTING.fullmatch(word)
        if setting is None or setting[1] in settings:
            raise ConfigError(f"{place} ({named[1]}) has the setting {word[:40]!r}; {_EXPECTED}, each once")
        settings[setting[1]] = int(setting[2])
    stored = _HASH.fullmatch(named[2])
    if stored is None and named[2].startswith("sha256:"):
        raise ConfigError(f"{place} ({named[1]}) has a hash that is not 64 hexadecimal digits behind sha256:")
    return ApiKey(name=named[1], digest=stored[1] if stored else digest_of(named[2]), **settings)

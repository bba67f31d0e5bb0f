"""One JSON object from one file, strictly: what a lenient parser would guess about is refused by name."""

from __future__ import annotations

from pathlib import Path

from spyglass.config.json_file import parse_json_text
from spyglass.errors import ConfigError

MAX_BYTES = 16 << 20  # a config.json has a few kilobytes; anything near this is the wrong file


def read_json_object(path: Path) -> dict[str, object]:
    """The object in a UTF-8 JSON file.

    Raises:
        ConfigError: the file is missing, too large, not UTF-8, starts with a byte-order mark, is not JSON (NaN and
            Infinity included), repeats a key, or holds something other than an object.
    """
    text = _read_text(path)
    try:
        value = parse_json_text(text)
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply to be a configuration") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _read_text(path: Path) -> str:
    try:
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; a checkpoint folder needs a config.json")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ConfigError(f"{path}: {size} bytes is too large for a configuration (at most {MAX_BYTES})")
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if raw.startswith(b"\xef\xbb\xbf"):
        raise ConfigError(f"{path}: starts with a byte-order mark; save it as UTF-8 without one")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None

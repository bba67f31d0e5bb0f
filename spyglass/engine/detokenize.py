"""Token ids to text as they come: never half a character, never part of a stop string, nothing taken back.

Byte-level tokens are bytes, so text is an incremental UTF-8 decode of their concatenation. Special tokens are silent
but for the grounding tags that the model uses to point at things (`<｜ref｜>`, `<｜box｜>`, ... spec v4 9.8).
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from spyglass.prompt.tokenizer import PromptTokenizer

DetokenizerState = tuple[tuple[bytes, int], str, str, str]
GROUNDING_TAGS = frozenset(
    f"<｜{slash}{name}｜>" for name in ("polygon", "point", "box", "ref") for slash in ("", "/")
) | frozenset(f"<|{slash}{name}|>" for name in ("polygon", "point", "box", "ref") for slash in ("", "/"))


class TokenBytes:
    """Bytes of each token id, looked up once per id. Special tokens other than the grounding tags are empty."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self.tokenizer = tokenizer
        self._byte_of = _bytes_of_characters()
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        """Empty for special tokens and for ids the tokenizer does not know."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._look_up(token)
        return known

    def _look_up(self, token: int) -> bytes:
        text = self.tokenizer.spelling(token)
        if text is None or (token in self.tokenizer.special_ids and text not in GROUNDING_TAGS):
            return b""
        try:
            return bytes(self._byte_of[character] for character in text)
        except KeyError:  # an added token that is written as itself, not in the byte alphabet
            return text.encode()


class Detokenizer:
    """The text of one answer. `stop` strings end it; they are found across token borders, earliest first.

    With `after` they count only behind that text. `stopped_by` is the one that ended the answer.
    """

    def __init__(self, token_bytes: TokenBytes, stop: Sequence[str] = (), after: str | None = None) -> None:
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop = tuple(stop)
        self._held = ""
        self._after, self._seen = after or "", ""
        self.stopped_by: str | None = None

    @property
    def state(self) -> DetokenizerState:
        return self._decoder.getstate(), self._held, self._after, self._seen

    @state.setter
    def state(self, state: DetokenizerState) -> None:
        decoder, self._held, self._after, self._seen = state
        self._decoder.setstate(decoder)

    def push(self, token: int) -> tuple[str, bool]:
        """Text that is now certain, and whether a stop string has ended the answer."""
        return self._release(self._decoder.decode(self._bytes[token]))

    def finish(self) -> tuple[str, bool]:
        """What was held back, when the answer ends for another reason; an unfinished character becomes U+FFFD."""
        text, stopped = self._release(self._decoder.decode(b"", final=True))
        text, self._held = text + self._held, ""
        return text, stopped

    def _release(self, fresh: str) -> tuple[str, bool]:
        if not self._stop:
            return fresh, False
        if self._after:
            return self._look_for_after(fresh)
        text = self._held + fresh
        found = [(at, stop) for at, stop in ((text.find(stop), stop) for stop in self._stop) if at >= 0]
        if found:
            at, self.stopped_by = min(found, key=lambda place: place[0])
            self._held = ""
            return text[:at], True
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def _look_for_after(self, fresh: str) -> tuple[str, bool]:
        seen = self._seen + fresh
        before, after, rest = seen.partition(self._after)
        if not after:
            self._seen = before[max(0, len(before) - len(self._after) + 1) :]
            return fresh, False
        self._after = ""
        text, stopped = self._release(rest)
        return fresh[: len(fresh) - len(rest)] + text, stopped


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _bytes_of_characters() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and on, in order."""
    printable: Collection[int] = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}

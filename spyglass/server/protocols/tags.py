"""Where the tags of tool calls are in a text, and whether an unfinished text may still become one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from spyglass.families import FAMILIES

MORE, NO = -1, -2  # where there could be a place: more text must come, or there is none
DSML = "｜DSML｜"
MARK = f"<{DSML}"
_NAME = r'[^"\n]{1,256}'


@dataclass(frozen=True, slots=True)
class ClosedCall:
    """A whole call in a text: the tool, the names of its parameters, where it ends."""

    tool: str
    parameters: frozenset[str]
    end: int


class Tag:
    """A tag, and every text that may still become it."""

    def __init__(self, *atoms: str) -> None:
        """`atoms`: the tag's characters and patterns in order, each whole or not there yet."""
        self._whole = re.compile("".join(atoms))
        partial = ""
        for atom in reversed(atoms):
            partial = f"(?:{'[a-z]*' if '|' in atom else atom}{partial})?"
        self._partial = re.compile(partial)

    def at(self, text: str, place: int = 0) -> re.Match[str] | int:
        """The tag at a place of a text, MORE or NO."""
        return self._whole.match(text, place) or (MORE if self._partial.fullmatch(text, place) else NO)


class Tags:
    """The tags of a family. `blocks` are the opening and closing tag of each kind of block that models write."""

    def __init__(self, family: str) -> None:
        space, block = FAMILIES[family].tag_space, FAMILIES[family].calls_tag
        mark = DSML + space
        self.blocks = tuple((f"<{mark}{word}>", f"</{mark}{word}>") for word in (block, "function_calls"))
        self.end_call, self.end_value = f"</{mark}invoke>", f"</{mark}parameter>"
        self.call = Tag(*f'<{mark}invoke name="', f"({_NAME})", '"', ">")
        self.parameter = Tag(*f'<{mark}parameter name="', f"({_NAME})", *'" string="', "(true|false)", '"', ">")

    def begun_block(self, text: str) -> int:
        """Where the calls of the block at the start of `text` begin, once the first has begun; MORE or NO."""
        opened = [opening for opening, _ in self.blocks if text.startswith(opening)]
        if not opened:
            return MORE if any(opening.startswith(text) for opening, _ in self.blocks) else NO
        place = _skip_space(text, len(opened[0]))
        begun = self._begun_call(text, place)
        return begun if isinstance(begun, int) and begun < 0 else place

    def end_of_block(self, text: str, place: int) -> int:
        """Where the closing tag of a block at a place of `text` ends; MORE or NO."""
        for _, closing in self.blocks:
            if text.startswith(closing, place):
                return place + len(closing)
        return MORE if any(closing.startswith(text[place:]) for _, closing in self.blocks) else NO

    def block_end(self, text: str) -> int:
        """Where the block at the start of `text` ends; MORE or NO."""
        place = self.begun_block(text)
        while place >= 0:
            place = _skip_space(text, place)
            end = self.end_of_block(text, place)
            if end >= 0:
                return end
            call = self.closed_call(text, place)
            if not isinstance(call, ClosedCall):
                return MORE if end == MORE else call
            place = call.end
        return place

    def completed(self, text: str) -> str:
        """A block whose closing tag may be missing or unfinished, with all of that tag."""
        closing = next((closing for opening, closing in self.blocks if text.startswith(opening)), "")
        if not closing:
            return text
        text = text.rstrip().removesuffix(closing)
        return text[: len(text) - overlap(text, closing)] + closing

    def closed_call(self, text: str, place: int = 0) -> ClosedCall | int:
        """The whole call at a place of `text`; MORE or NO."""
        begun = self._begun_call(text, place)
        if isinstance(begun, int):
            return begun
        tool, place = begun
        names = set()
        while not text.startswith(self.end_call, place):
            tag = self.parameter.at(text, place)
            if isinstance(tag, int):
                return MORE if self.end_call.startswith(text[place:]) else tag
            end = text.find(self.end_value, tag.end())
            if end < 0:
                return MORE
            names.add(tag[1])
            place = _skip_space(text, end + len(self.end_value))
        return ClosedCall(tool, frozenset(names), place + len(self.end_call))

    def _begun_call(self, text: str, place: int) -> tuple[str, int] | int:
        """Tool of the call at a place and where its first parameter or its end stands; MORE or NO."""
        tag = self.call.at(text, place)
        if isinstance(tag, int):
            return tag
        place = _skip_space(text, tag.end())
        follows = self.parameter.at(text, place)
        if text.startswith(self.end_call, place) or isinstance(follows, re.Match):
            return tag[1], place
        return MORE if self.end_call.startswith(text[place:]) else follows


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark` without being all of it."""
    start = max(0, len(text) - len(mark) + 1)
    while (start := text.find(mark[0], start)) >= 0:
        if mark.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0


def _skip_space(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place

"""The end of an answer: its last text, why it ended and by which stop string, on a model whose tokens are written down.

Ids 2 to 7 spell letters, a character of four bytes and halves of it, so a text may end inside a character: what is left
of it becomes U+FFFD, and that may be all that a stop string still lacked.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spyglass.engine.engine import Engine
from spyglass.engine.request import Delta, SamplingParams
from tests.engine_parts import engine_config, make_engine, make_prompt
from tests.unit.engine.test_answers import EOS, ScriptedModel

CLEF = "𝄞".encode()
SPELLED = {EOS: b"", 2: b"a", 3: b"b", 4: CLEF, 5: CLEF[:2], 6: CLEF[2:], 7: b"ab" + CLEF[:1]}
STOPS = ("a", "b", "ab", "ba", "aab", "a\ufffd", "\ufffd", "b\ufffd", "𝄞", "a𝄞")


def engine_of(script: list[int]) -> Engine:
    return make_engine(ScriptedModel(script), engine_config(), token_bytes=SPELLED)


def begin(engine: Engine, **params: Any) -> int:
    return engine.add(make_prompt(engine_config(), [3]), SamplingParams(temperature=0, **params))


def deltas_of(script: list[int], **params: Any) -> list[Delta]:
    engine, deltas = engine_of(script), list[Delta]()
    begin(engine, **params)
    while engine.has_work:
        deltas += engine.step()
    return deltas


def expected(script: list[int], stop: list[str], limit: int) -> tuple[str, str, str | None]:
    """Text, reason and stop string, by looking at the whole text after every token."""
    spelled = b""
    for number, token in enumerate(script, start=1):
        spelled += SPELLED[token]
        ends = token == EOS or number == limit
        text = spelled.decode(errors="replace") if ends else whole_characters(spelled)
        found = [(text.find(one), one) for one in stop if one in text]
        if found and token != EOS:
            at, one = min(found, key=lambda place: place[0])
            return text[:at], "stop", one
        if ends:
            at, by = min(found, key=lambda place: place[0], default=(len(text), None))
            return text[:at], "stop" if token == EOS else "length" if by is None else "stop", by
    raise AssertionError("the script is longer than the limit")


def whole_characters(spelled: bytes) -> str:
    """The text of some bytes without a character at their end that may still become whole."""
    for cut in range(4):
        head, tail = spelled[: len(spelled) - cut], spelled[len(spelled) - cut :]
        if CLEF.startswith(tail) and tail != CLEF and (not tail or tail[0] == CLEF[0]):
            rest = head
    return rest.decode(errors="replace")


@given(
    script=st.lists(st.sampled_from([token for token in SPELLED if token != EOS]), min_size=1, max_size=6),
    stop=st.lists(st.sampled_from(STOPS), max_size=2, unique=True),
    ended=st.booleans(),
)
def test_an_answer_ends_as_its_whole_text_says(script: list[int], stop: list[str], ended: bool) -> None:
    """Whatever ends it: a stop string in its text or only with its last bytes, the end token, or the limit."""
    limit = len(script)
    if ended:
        script = [*script, EOS]
        limit += 5
    deltas = deltas_of(script, stop=tuple(stop), max_tokens=limit)
    output = deltas[-1].output
    assert output is not None and output.finish_reason == deltas[-1].finish_reason and output.error is None
    assert (output.text, output.finish_reason, output.stopped_by) == expected(script, stop, limit)
    assert "".join(delta.text for delta in deltas) == output.text


def test_a_stop_string_that_only_the_end_completes_is_why_the_answer_ended() -> None:
    """Half a character at the limit becomes U+FFFD, which makes the stop string whole."""
    [*_, last] = deltas_of([2, 3, 5], stop=("b\ufffd",), max_tokens=3)
    assert last.output is not None
    assert (last.output.text, last.output.finish_reason, last.output.stopped_by) == ("a", "stop", "b\ufffd")


def test_of_a_token_that_completes_a_stop_string_nothing_behind_it_is_given() -> None:
    """Not even the half character that it begins."""
    [*_, last] = deltas_of([2, 7], stop=("ab",), max_tokens=9)
    assert last.output is not None and last.finish_reason == "stop"
    assert last.output.text == "a" and last.output.stopped_by == "ab"


@pytest.mark.parametrize("stop", ["b\ufffd", "bbb"])
def test_an_answer_that_is_aborted_gives_what_was_held_and_stays_aborted(stop: str) -> None:
    engine = engine_of([2, 3, 5, 2, 2])
    request = begin(engine, stop=(stop,), max_tokens=9)
    texts = [delta.text for _ in range(3) for delta in engine.step()]
    last = engine.abort(request)
    assert texts == ["a", "", ""] and last is not None and last.output is not None
    assert last.finish_reason == last.output.finish_reason == "abort"
    assert last.output.text == ("a" if stop == "b\ufffd" else "ab\ufffd") == "".join([*texts, last.text])

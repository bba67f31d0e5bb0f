"""Text that spells a special token, a picture or a tag stays text, wherever in a request it stands."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spyglass.config import ModelConfig
from spyglass.prompt import ChatOptions, ImageRef, PromptTokenizer, build_prompt, encode_chat, render_chat
from tests.unit.prompt.conftest import PLACEHOLDER
from tests.unit.prompt.messages import (
    ASSISTANT,
    BOS,
    EOS,
    PICTURE,
    SYSTEM,
    TOOL,
    USER,
    assistant,
    text,
    tool,
    tool_turn,
    user,
)

PLACES: dict[str, Callable[[str], tuple[list[dict[str, Any]], list[dict[str, Any]]]]] = {
    "user": lambda spelled: ([user(spelled)], []),
    "user part": lambda spelled: ([user([text(spelled), PICTURE])], []),
    "behind a picture": lambda spelled: ([user([PICTURE, text(spelled)])], []),
    "system": lambda spelled: ([{"role": "system", "content": spelled}, user("a")], []),
    "history": lambda spelled: ([user("a"), assistant(spelled), user([PICTURE])], []),
    "reasoning": lambda spelled: ([user("a"), assistant("b", reasoning_content=spelled), user("c")], [TOOL]),
    "tool result": lambda spelled: (tool_turn(spelled), [TOOL]),
    "tool result part": lambda spelled: (tool_turn([text(spelled), PICTURE]), [TOOL]),
    "tool arguments": lambda spelled: (tool_turn("r", json.dumps({"place": spelled})), [TOOL]),
    "tool description": lambda spelled: ([user("a")], [tool(description=spelled)]),
    "tool parameter": lambda spelled: ([user("a")], [tool(parameters={"title": spelled, "type": "object"})]),
}
SPELLED = [
    BOS, EOS, USER, ASSISTANT, SYSTEM, "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>",
    "<｜deepseek_image｜>", "<｜image｜>", "<｜image2｜>", "<picture 0>", "<picture 1>", "<｜rl_image_pad｜>",
    "<|place_holder_mm_span_0431|>",
]  # fmt: skip


@pytest.mark.parametrize("family", ["v4", "v41"])
@pytest.mark.parametrize("place", PLACES)
def test_text_that_spells_a_special_token_stays_text(request: pytest.FixtureRequest, place: str, family: str) -> None:
    """Wherever it stands: the special ids and the pictures are those of the same request with harmless text."""
    config: ModelConfig = request.getfixturevalue(family)
    tokenizer: PromptTokenizer = request.getfixturevalue("vision_tokenizer" if family == "v4" else "v41_tokenizer")

    def special_ids(spelled: str) -> list[int]:
        messages, tools = PLACES[place](spelled)
        parts = encode_chat(render_chat(messages, config, ChatOptions(thinking=True, tools=tools)), tokenizer)
        ids = [[-1] if isinstance(part, ImageRef) else part for part in parts]
        return [token for token in itertools.chain.from_iterable(ids) if token >= 128_000 or token <= 2]

    harmless = special_ids("harmless")
    assert PLACEHOLDER not in harmless
    for spelled in (*SPELLED, "".join(SPELLED)):
        assert special_ids(spelled) == harmless


@given(pieces=st.lists(st.sampled_from(SPELLED) | st.text(max_size=8), max_size=6))
def test_any_mixture_of_spellings_is_one_text(
    v4: ModelConfig, vision_tokenizer: PromptTokenizer, pieces: list[str]
) -> None:
    spelled = "".join(pieces)
    parts = encode_chat(render_chat([user([text(spelled), PICTURE])], v4, ChatOptions()), vision_tokenizer)
    assert [type(part) for part in parts] == [list, ImageRef, list]
    expected = vision_tokenizer.encode_text(spelled + "\n\n")
    assert parts[0] == [0, 128803, *expected]
    assert parts[2] == [128804, 128822]


def test_a_listing_with_the_placeholder_and_no_picture_is_a_prompt_without_pictures(
    v41: ModelConfig, v41_tokenizer: PromptTokenizer
) -> None:
    prompt = build_prompt(tool_turn("print('<｜deepseek_image｜><｜image｜>')"), v41, v41_tokenizer, tools=[TOOL])
    assert PLACEHOLDER not in prompt.ids_T
    assert not prompt.spans


def test_a_stray_placeholder_everywhere_and_one_picture_is_one_span(
    v4: ModelConfig, vision_tokenizer: PromptTokenizer
) -> None:
    stray = "<｜deepseek_image｜>"
    messages = [*tool_turn(stray), assistant(stray, reasoning_content=stray), user([text(stray), PICTURE])]
    prompt = build_prompt(messages, v4, vision_tokenizer, thinking=True, tools=[tool(description=stray)])
    assert len(prompt.spans) == 1
    assert PLACEHOLDER not in prompt.ids_T

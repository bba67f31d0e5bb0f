"""What a request makes of calls that must be made behind reasoning, and of stop strings."""

from __future__ import annotations

from typing import Any

import pytest

from spyglass.errors import PromptError
from spyglass.server.protocols.completions import CompletionsEndpoint
from tests.server.protocol_parts import FAMILIES, PATH, PROTOCOLS, ChatProtocol, Family, call_of, served_of


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_with_thinking_a_forced_call_is_a_form_behind_the_reasoning(protocol: ChatProtocol, family: Family) -> None:
    tools = {"look": PATH, "hear": PATH}
    forced = {"messages": {"type": "any"}}.get(protocol, "required")
    free, quiet = call_of(protocol, family, tools=tools, thinking=True), call_of(protocol, family, tools=tools)
    call = call_of(protocol, family, tools=tools, thinking=True, tool_choice=forced)
    assert call.prompt.ids_T.tolist() == free.prompt.ids_T.tolist(), "nothing in the prompt opens the block"
    assert free.params[0].structured is quiet.params[0].structured is None
    assert call.params[0].structured is not None and call.params[0].structured.after == "</think>"
    named: Any = {"type": "tool" if protocol == "messages" else "function", "name": "hear"}
    named = {"type": "function", "function": {"name": "hear"}} if protocol == "chat" else named
    call = call_of(protocol, family, tools=tools, thinking=True, tool_choice=named)
    alone = call_of(protocol, family, tools={"hear": PATH}, thinking=True)
    assert call.prompt.ids_T.tolist() == alone.prompt.ids_T.tolist(), "as without thinking, the others are not shown"
    assert call.params[0].structured is not None
    assert "hear" in call.params[0].structured.value and "look" not in call.params[0].structured.value


@pytest.mark.parametrize("protocol", [*PROTOCOLS, "completions"])
def test_stop_strings_and_ids_have_a_greatest_number_and_length(protocol: Any) -> None:
    name = {"messages": "stop_sequences", "responses": ""}.get(protocol, "stop")

    def params(**more: Any) -> Any:
        if protocol == "completions":
            return CompletionsEndpoint(served_of()).parse({"prompt": "a", **more}, None).params[0]
        return call_of(protocol, **more).params[0]

    assert len(params(stop_token_ids=[7] * 128).stop_token_ids) == 128
    with pytest.raises(PromptError, match="129 stop_token_ids, it may have 128"):
        params(stop_token_ids=[7] * 129)
    if name:
        assert len(params(**{name: ["x" * 1000] * 16}).stop) == 16
        with pytest.raises(PromptError, match="17"):
            params(**{name: ["x"] * 17})
        with pytest.raises(PromptError, match="1001 characters, it may have 1000"):
            params(**{name: ["x", "y" * 1001]})
    if name == "stop":
        with pytest.raises(PromptError, match="1001 characters, it may have 1000"):
            params(stop="y" * 1001)

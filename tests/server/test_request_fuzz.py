"""Bodies of any shape: every endpoint makes a call of them or refuses, and nothing else ever happens."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from spyglass.errors import NotServedError, PromptError
from spyglass.server.protocols.endpoints import make_endpoints
from tests.server.protocol_parts import served_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = (
    "messages input prompt tools tool_choice response_format thinking stop n text reasoning system output_config "
    "structured_outputs guided_choice logprobs stream_options include logit_bias max_tokens tokens model "
    "chat_template_kwargs stream echo think format options images raw suffix"
).split()
BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "image", "input_text", "input_image", "tool_result"]) | JSON},
    optional=dict.fromkeys(("text", "image_url", "source", "content", "tool_use_id"), JSON),
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"]), "content": JSON | st.lists(BLOCK, max_size=2)},
    optional={"tool_calls": JSON, "type": st.sampled_from(["message", "function_call_output"]), "output": JSON},
)


@settings(max_examples=60, deadline=None)
@given(
    body=st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3),
    messages=st.lists(MESSAGE, max_size=2),
    valid=st.booleans(),
)
def test_any_body_is_a_call_or_refused(body: dict[str, Any], messages: list[Any], valid: bool) -> None:
    many = [{"role": "user", "content": "json"}] if valid else messages
    for endpoint in make_endpoints(served_of()):
        named = {"model": "tiny"}
        for more in ({}, {**named, "messages": many, "max_tokens": 5}, {"input": many}, {**named, "prompt": "a"}):
            try:
                endpoint.parse({**more, **body}, None)
            except (PromptError, NotServedError) as error:
                assert str(error)

"""Counting and spelling tokens: for the model that is served only, and of ids that it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.errors import NotServedError, PromptError
from spyglass.server.app import served_by
from spyglass.server.exchange import Endpoint, Served
from spyglass.server.protocols.count import CountMessages, CountResponses, Detokenize, Tokenize

SAID = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def served(llm: LLM) -> Served:
    return served_by(llm, ServerConfig())


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [(CountMessages, {"messages": SAID}), (CountResponses, {"input": "hello"}), (Tokenize, {"prompt": "hello"}),
     (Tokenize, {"messages": SAID}), (Detokenize, {"tokens": [5]})],
)  # fmt: skip
def test_nothing_is_counted_for_a_model_that_is_not_served(
    endpoint: Callable[[Served], Endpoint], body: dict[str, Any], served: Served
) -> None:
    with pytest.raises(NotServedError, match="another"):
        endpoint(served).parse({"model": "another", **body}, None)
    endpoint(served).parse({"model": "tiny", **body}, None)


@pytest.mark.parametrize("bad", [-1, 129280, 5.0, True, "5", None])
def test_what_is_no_id_of_the_vocabulary_has_no_text_and_its_place_is_named(bad: Any, served: Served) -> None:
    assert served.config.text.vocab_size == 129280
    with pytest.raises(PromptError, match=r"tokens\[1\] is .*, expected a token id from 0 to 129279"):
        Detokenize(served).parse({"tokens": [5, bad]}, None)
    Detokenize(served).parse({"tokens": [5, 129279]}, None)


def test_a_text_begins_with_the_start_unless_told_and_is_spelled_token_by_token(served: Served) -> None:
    whole = Tokenize(served).parse({"prompt": "hello you", "return_token_strs": True}, None).body
    bare = Tokenize(served).parse({"prompt": "hello you", "add_special_tokens": False}, None).body
    assert whole["tokens"] == [served.config.bos_token_id, *bare["tokens"]] and "token_strs" not in bare
    assert whole["count"] == len(whole["tokens"]) == len(whole["token_strs"])
    assert Detokenize(served).parse({"tokens": bare["tokens"]}, None).body == {"prompt": "hello you"}

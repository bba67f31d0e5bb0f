"""The official clients against a live server with the tiny model: what they send is understood, what they get is right.

The model's weights are random, so its words mean nothing; forms of answer and calls that must be made are real.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.engine.structured import grammar
from spyglass.server.app import create_app
from tests.server.parts import Live, running, wait_for
from tests.server.protocol_parts import URL
from tests.unit.prompt.test_data_url import PLAIN

PARAMETERS = {
    "type": "object",
    "properties": {"mode": {"type": "string", "enum": ["near", "far"]}, "zoom": {"type": "boolean"}},
    "required": ["mode", "zoom"],
}
SCHEMA = {
    "type": "object",
    "properties": {"seen": {"type": "boolean"}},
    "required": ["seen"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # a random model would fill JSON with blanks
}
QUESTION: Any = [{"role": "user", "content": "Where?"}]
PHOTO: Any = [
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "?"}]}
]


@pytest.fixture(scope="module")
def served(llm: LLM) -> Iterator[Live]:
    with running(create_app(llm, ServerConfig(grace_seconds=1))) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(served: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


def test_chat_streams_what_it_answers_whole(client: openai.OpenAI, llm: LLM) -> None:
    options: Any = {"model": "tiny", "messages": PHOTO, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**options)
    pieces, usage = [], None
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(pieces) == whole.choices[0].message.content
    assert whole.usage is not None and usage is not None and whole.choices[0].finish_reason == "length"
    assert usage.completion_tokens == whole.usage.completion_tokens == 8
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    details = usage.prompt_tokens_details
    assert details is not None and details.images == 1  # type: ignore[attr-defined]
    assert 0 <= (details.cached_tokens or 0) < usage.prompt_tokens
    assert llm.config.vision is not None


def test_responses_stream_what_they_answer_whole(client: openai.OpenAI) -> None:
    content: Any = [{"type": "input_text", "text": "?"}, {"type": "input_image", "image_url": URL, "detail": "auto"}]
    options: Any = {"model": "tiny", "input": [{"role": "user", "content": content}], "max_output_tokens": 6}
    options |= {"temperature": 0, "reasoning": {"effort": "low"}}
    whole = client.responses.create(**options)
    assert whole.status == "incomplete" and whole.incomplete_details is not None
    assert whole.usage is not None and whole.usage.output_tokens_details.reasoning_tokens == 6
    with client.responses.stream(**options) as stream:
        events = list(stream)
    first, last = events[0], events[-1]
    assert first.type == "response.created" and last.type == "response.incomplete"
    assert last.response.output[0].content == whole.output[0].content  # type: ignore[union-attr]
    assert last.response.usage is not None and last.response.usage.total_tokens == whole.usage.total_tokens
    counted: Any = client.responses.input_tokens.count(
        model="tiny", input=options["input"], reasoning={"effort": "low"}
    )
    assert counted.input_tokens == whole.usage.input_tokens


def test_messages_stream_what_they_answer_whole(claude: anthropic.Anthropic) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": PLAIN}
    messages: Any = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "?"}]}]
    options: Any = {"model": "tiny", "messages": messages, "max_tokens": 6, "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**options)
    with claude.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert whole.content[0].type == "text" and whole.content[0].text == text
    assert (
        (whole.stop_reason, whole.usage.output_tokens)
        == ("max_tokens", 6)
        == (final.stop_reason, final.usage.output_tokens)
    )
    counted = claude.messages.count_tokens(model="tiny", messages=messages)
    for usage in (whole.usage, final.usage):
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_calls_that_must_be_made_are_made_in_every_protocol(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    function: Any = {"name": "look", "parameters": PARAMETERS}
    chat: Any = {"model": "tiny", "messages": QUESTION, "max_tokens": 99, "seed": 1, "parallel_tool_calls": False}
    tools: Any = [{"type": "function", "function": function}]
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        (answer,) = client.chat.completions.create(**chat, tools=tools, tool_choice=choice).choices
        (call,) = answer.message.tool_calls or ()
        assert answer.finish_reason == "tool_calls" and call.type == "function" and call.function.name == "look"
        _check(json.loads(call.function.arguments))
    response = client.responses.create(
        model="tiny", input="Where?", tools=[{"type": "function", "strict": False, **function}], tool_choice="required",
        max_output_tokens=99, parallel_tool_calls=False,
    )  # fmt: skip
    (item,) = response.output
    assert item.type == "function_call" and response.status == "completed"
    _check(json.loads(item.arguments))
    with claude.messages.stream(
        model="tiny", messages=QUESTION, max_tokens=99, tools=[{"name": "look", "input_schema": PARAMETERS}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    ) as stream:  # fmt: skip
        message = stream.get_final_message()
    (block,) = message.content
    assert message.stop_reason == "tool_use" and block.type == "tool_use"
    _check(block.input)


@pytest.mark.parametrize("stream", [False, True])
def test_with_thinking_a_call_that_must_be_made_follows_the_reasoning(
    client: openai.OpenAI, llm: LLM, stream: bool
) -> None:
    """The random model is made to end its reasoning soon, and would rather end the answer than call."""
    assert llm.tokenizer is not None
    think_end, end = llm.tokenizer.special_id("</think>"), llm.config.eos_token_ids[0]
    body: Any = {
        "model": "tiny",
        "messages": QUESTION,
        "max_tokens": 99,
        "tools": [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "logit_bias": {str(think_end): 10.5, str(end): 20},
    }
    reasoned = 0
    for seed in range(3):
        if stream:
            chunks = [c.choices[0] for c in client.chat.completions.create(**body, seed=seed, stream=True)]
            thoughts = "".join(getattr(c.delta, "reasoning_content", None) or "" for c in chunks)
            calls = [call for c in chunks for call in c.delta.tool_calls or ()]
            name = "".join(call.function.name or "" for call in calls if call.function is not None)
            arguments = "".join(call.function.arguments or "" for call in calls if call.function is not None)
            reason, content = chunks[-1].finish_reason, "".join(c.delta.content or "" for c in chunks)
        else:
            (choice,) = client.chat.completions.create(**body, seed=seed).choices
            (call,) = choice.message.tool_calls or ()
            assert call.type == "function"
            thoughts = choice.message.model_dump().get("reasoning_content") or ""
            name, arguments, reason = call.function.name, call.function.arguments, choice.finish_reason
            content = choice.message.content or ""
        assert (name, reason, content.strip()) == ("look", "tool_calls", "")
        _check(json.loads(arguments))
        reasoned += bool(thoughts)
    assert reasoned


def _check(arguments: Any) -> None:
    assert arguments["mode"] in ("near", "far") and isinstance(arguments["zoom"], bool) and len(arguments) == 2


def test_a_call_and_its_result_go_back_into_the_conversation(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]
    first = client.chat.completions.create(
        model="tiny", messages=QUESTION, tools=tools, tool_choice="required", max_tokens=99, parallel_tool_calls=False
    )
    message = first.choices[0].message
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": PHOTO[0]["content"]}
    turns: Any = [*QUESTION, message.model_dump(), result]
    second = client.chat.completions.create(model="tiny", messages=turns, tools=tools, max_tokens=2)
    assert second.usage is not None and second.usage.prompt_tokens_details.images == 1  # type: ignore[union-attr]


def test_output_items_of_a_response_go_back_as_they_are(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "name": "look", "parameters": PARAMETERS, "strict": False}]
    options: Any = {"model": "tiny", "tools": tools, "max_output_tokens": 99, "parallel_tool_calls": False}
    first = client.responses.create(input="Where?", tool_choice="required", **options)
    (call,) = first.output
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "far"}
    items: Any = [{"role": "user", "content": "Where?"}, call.model_dump(), result]
    options["max_output_tokens"] = 3
    second = client.responses.create(input=items, **options)
    third = client.responses.create(
        input=[*items, *(item.model_dump() for item in second.output), *QUESTION],
        reasoning={"effort": "low"},
        **options,
    )
    assert second.usage is not None and third.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens


def test_forms_of_answer_are_kept(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "seen", "schema": SCHEMA, "strict": True}}
    chat = client.chat.completions.create(model="tiny", messages=QUESTION, response_format=form, max_tokens=40)
    assert set(json.loads(chat.choices[0].message.content or "")) == {"seen"}
    assert chat.choices[0].finish_reason == "stop"
    choice = client.chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=9, extra_body={"guided_choice": ["left", "right"]}
    )
    assert choice.choices[0].message.content in ("left", "right")
    message = claude.messages.create(
        model="tiny", messages=QUESTION, max_tokens=9, extra_body={"structured_outputs": {"regex": "[ab]{3}"}}
    )
    assert message.content[0].type == "text" and len(message.content[0].text) == 3


def test_beside_tools_an_answer_is_json_or_a_sound_call(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "seen", "schema": SCHEMA}}
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]
    options: Any = {"model": "tiny", "messages": QUESTION, "tools": tools, "response_format": form, "max_tokens": 99}
    bias: Any = {str(token): 100 for token in _ids(client, "{")}
    (answer,) = client.chat.completions.create(**options, logit_bias=bias).choices
    assert set(json.loads(answer.message.content or "")) == {"seen"} and answer.finish_reason == "stop"
    bias = {str(token): 100 for token in _ids(client, "\n\n<")}
    (answer,) = client.chat.completions.create(**options, logit_bias=bias, parallel_tool_calls=False).choices
    (call,) = answer.message.tool_calls or ()
    assert call.type == "function" and answer.finish_reason == "tool_calls"
    _check(json.loads(call.function.arguments))


def test_several_answers_come_apart_with_their_logprobs(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": QUESTION, "n": 3, "seed": 4, "max_tokens": 4}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    texts = {choice.index: choice.message.content for choice in whole.choices}
    assert sorted(texts) == [0, 1, 2] and len(set(texts.values())) > 1
    for choice in whole.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert (
            b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content).decode() == choice.message.content
        )
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    streamed = dict.fromkeys(texts, "")
    for chunk in client.chat.completions.create(**options, stream=True):
        for part in chunk.choices:
            streamed[part.index] += part.delta.content or ""
    assert streamed == texts


def test_completions_continue_text_and_ids(client: openai.OpenAI) -> None:
    plain = client.completions.create(model="tiny", prompt="Hello", max_tokens=5, temperature=0)
    expected = plain.choices[0].text
    for prompt in ("Hello", [0, *_ids(client, "Hello")]):
        done = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=5, temperature=0, echo=True, logprobs=1
        )
        (choice,) = done.choices
        assert choice.text == "Hello" + expected and choice.finish_reason == "length"
        logprobs = choice.logprobs
        assert logprobs is not None and logprobs.tokens is not None and logprobs.text_offset is not None
        assert logprobs.token_logprobs is not None and logprobs.token_logprobs[0] is None
        assert len(logprobs.tokens) == len(logprobs.text_offset) == len(logprobs.token_logprobs) == 2 + 5
        assert logprobs.text_offset[:3] == [0, 0, 5]
    stream = client.completions.create(model="tiny", prompt="Hello", max_tokens=5, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected


def test_several_prompts_are_answered_prompt_by_prompt_as_each_alone(client: openai.OpenAI) -> None:
    prompts: list[str] = ["Hello", "A dog", "Hello"]
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "n": 2, "seed": 3}
    alone = {text: client.completions.create(prompt=text, **options) for text in set(prompts)}
    expected = [(2 * i + j, alone[text].choices[j].text) for i, text in enumerate(prompts) for j in range(2)]
    together = client.completions.create(prompt=prompts, **options)
    echoed = client.completions.create(prompt=prompts, echo=True, **options)
    assert [choice.text for choice in echoed.choices] == [prompts[index // 2] + text for index, text in expected]
    assert [(choice.index, choice.text) for choice in together.choices] == expected
    counted = [alone[text].usage for text in prompts]
    assert together.usage is not None
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(together.usage, name) == sum(getattr(usage, name) for usage in counted)
    told = dict(expected)
    streamed = dict.fromkeys(told, "")
    usage = None
    for chunk in client.completions.create(
        prompt=[[0, *_ids(client, text)] for text in prompts],
        echo=True,
        stream=True,
        stream_options={"include_usage": True},
        **options,
    ):
        usage = chunk.usage
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == {index: prompts[index // 2] + text for index, text in told.items()} and usage == together.usage


def test_the_tokens_of_several_prompts_are_all_counted_once(client: openai.OpenAI, served: Live) -> None:
    def total() -> int:
        line = next(
            x for x in served.client.get("/metrics").text.splitlines() if x.startswith("vllm:prompt_tokens_total")
        )
        return int(float(line.split()[-1]))

    before = total()
    usage = client.completions.create(model="tiny", prompt=["Hello", "A dog"], n=3, max_tokens=1).usage
    assert usage is not None
    wait_for(lambda: total() == before + usage.prompt_tokens)


def test_of_several_prompts_a_bad_one_is_named_and_none_is_answered(client: openai.OpenAI) -> None:
    for prompts, told in (
        (["a", 5], r"prompt\[1\] must be a text or a list of token ids, not a number"),
        ([[0, 5], [0, 10**9]], r"prompt\[1\]: part 0"),
        (["a"] * 129, "129 prompts, a request may have 128"),
        (["a"] * 65, "n 2 with 65 prompts are more than 128 answers"),
    ):
        with pytest.raises(openai.APIStatusError, match=told):
            client.completions.create(model="tiny", prompt=prompts, max_tokens=1, n=2)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="best_of is not available"):
        client.completions.create(model="tiny", prompt="a", best_of=2)


def _ids(client: openai.OpenAI, text: str) -> list[int]:
    body: Any = client.post("/../tokenize", body={"prompt": text, "add_special_tokens": False}, cast_to=object)
    back: Any = client.post("/../detokenize", body={"tokens": body["tokens"]}, cast_to=object)
    assert back["prompt"] == text
    return list(body["tokens"])


def test_errors_are_the_clients_own(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    with pytest.raises(openai.BadRequestError, match="audio is not available") as bad:
        client.chat.completions.create(model="tiny", messages=QUESTION, extra_body={"audio": {}})
    assert (bad.value.type, bad.value.param) == ("invalid_request_error", "audio")
    with pytest.raises(openai.NotFoundError, match="served are tiny"):
        client.responses.create(model="other", input="hi")
    with pytest.raises(anthropic.BadRequestError, match="unknown type 'imagee'"):
        claude.messages.create(model="tiny", max_tokens=2, messages=[{"role": "user", "content": [{"type": "imagee"}]}])  # type: ignore[list-item,typeddict-item]
    with pytest.raises(anthropic.NotFoundError, match="served are tiny"):
        claude.messages.create(model="other", max_tokens=2, messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 16384 tokens") as long:
        client.completions.create(model="tiny", prompt=[5] * 20_000)
    assert long.value.code == "context_length_exceeded"


def test_only_a_model_that_is_not_served_has_the_code_of_one(client: openai.OpenAI) -> None:
    """What is stored nowhere, as an answer by its id, is an unknown path and no unknown model."""
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="gpt", input="a")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.retrieve("resp_1")
    assert (caught.value.code, caught.value.param) == (None, None)


def test_many_clients_at_once_get_their_own_answers(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    def ask(number: int) -> tuple[int, str]:
        question: Any = [{"role": "user", "content": f"Number {number % 8}?"}]
        if number % 2:
            message = claude.messages.create(
                model="tiny", max_tokens=6, messages=question, extra_body={"temperature": 0}
            )
            return number % 8, message.content[0].text  # type: ignore[union-attr]
        chunks = client.chat.completions.create(
            model="tiny", max_tokens=6, temperature=0, messages=question, stream=True
        )
        return number % 8, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    alone = dict(map(ask, range(8)))
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, range(32)))
    assert all(alone[number] == text for number, text in together) and len(set(alone.values())) > 4


def test_forms_are_compiled_where_requests_are_read(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """A form may take seconds, and all answers under way would wait for it."""
    threads, begin = [], grammar.GrammarCompiler.begin

    def noted(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return begin(*given)

    monkeypatch.setattr(grammar.GrammarCompiler, "begin", noted)
    options: Any = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
    client.chat.completions.create(**options, extra_body={"guided_choice": ["never asked for before"]})
    assert [name.split("_")[0] for name in threads] == ["form"]  # and never the engine's

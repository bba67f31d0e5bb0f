"""Chat messages: the renderings of the specification, pictures wherever they may stand, text that stays text."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import deepseek_recipe
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from spyglass.config import ModelConfig
from spyglass.errors import PromptError
from spyglass.prompt import (
    REFERENCE_RULES,
    ChatOptions,
    PromptTokenizer,
    build_prompt,
    encode_chat,
    render_chat,
)
from tests.unit.prompt.conftest import respelled
from tests.unit.prompt.messages import (
    ASSISTANT,
    BOS,
    EOS,
    PICTURE,
    SYSTEM,
    TOOL,
    USER,
    assistant,
    rendered,
    text,
    tool_turn,
    user,
)
from tests.unit.prompt.pictures import encode, noise
from tests.unit.prompt.test_data_url import SPELLINGS

EFFORT_75 = "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
TURNS = [user("Q1"), assistant("A1", reasoning_content="R1"), user("Q2")]
V41_CASES: list[tuple[list[dict[str, Any]], bool, str]] = [
    ([user("Hello")], True, f"{SYSTEM}{EFFORT_75}{USER}Hello{ASSISTANT}<think>"),
    ([user("Hello")], False, f"{USER}Hello{ASSISTANT}</think>"),
    ([{"role": "system", "content": "Be terse."}, user("Hello")], True,
     f"{SYSTEM}{EFFORT_75}Be terse.{USER}Hello{ASSISTANT}<think>"),
    ([{"role": "system", "content": "Be terse."}, user("Hello")], False,
     f"{SYSTEM}Be terse.{USER}Hello{ASSISTANT}</think>"),
    (TURNS, True, f"{SYSTEM}{EFFORT_75}{USER}Q1{ASSISTANT}</think>A1{EOS}{USER}Q2{ASSISTANT}<think>"),
    (TURNS, False, f"{USER}Q1{ASSISTANT}</think>A1{EOS}{USER}Q2{ASSISTANT}</think>"),
    ([user("a"), user("b")], False, f"{USER}a\n\nb{ASSISTANT}</think>"),
    ([user("a"), assistant("b"), {"role": "system", "content": "new sys"}, user("c")], False,
     f"{USER}a{ASSISTANT}</think>b{EOS}{SYSTEM}new sys{USER}c{ASSISTANT}</think>"),
    ([user([text("before"), PICTURE, text("after")])], False, f"{USER}before\n\n#\n\nafter{ASSISTANT}</think>"),
    ([user([PICTURE, PICTURE, text("compare")])], False, f"{USER}#\n\n#\n\ncompare{ASSISTANT}</think>"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "thinking", "expected"), V41_CASES)
def test_v41_renderings(v41: ModelConfig, messages: list[dict[str, Any]], thinking: bool, expected: str) -> None:
    assert rendered(messages, v41, thinking=thinking) == BOS + expected


def test_v41_effort_levels(v41: ModelConfig) -> None:
    levels = {"minimal": 50, "low": 50, "medium": 75, "high": 75, "xhigh": 75, "max": 100}
    for effort, level in levels.items():
        assert f"Reasoning Effort: {level} (" in rendered([user("x")], v41, thinking=True, effort=effort)


def test_v4_renders_an_image_then_text_as_the_specification_prints_it(v4: ModelConfig) -> None:
    expected = f"{BOS}{USER}#\n\nDescribe it.{ASSISTANT}</think>"
    assert rendered([user([PICTURE, text("Describe it.")])], v4) == expected


def test_v4_system_text_has_no_marker_and_a_finished_turn_ends_with_eos(v4: ModelConfig) -> None:
    system = {"role": "system", "content": "S."}
    assert rendered([system, user("a"), assistant("b"), user("c")], v4) == (
        f"{BOS}S.{USER}a{ASSISTANT}</think>b{EOS}{USER}c{ASSISTANT}</think>"
    )
    assert rendered([user("a"), assistant("b"), system, user("c")], v4).startswith(f"{BOS}S.{USER}a")


def test_v4_effort_is_a_preamble_and_low_has_none(v4: ModelConfig) -> None:
    by_effort = {effort: rendered([user("x")], v4, thinking=True, effort=effort) for effort in ("low", "high", "max")}
    assert by_effort["low"] == f"{BOS}{USER}x{ASSISTANT}<think>"
    assert by_effort["high"].startswith(f"{BOS}Reasoning Effort: Absolute maximum with no shortcuts permitted.\n")
    assert by_effort["max"].startswith(f"{BOS}Reasoning Effort: Beyond maximum")
    assert rendered([user("x")], v4, thinking=True) == by_effort["high"]


def test_earlier_reasoning_is_kept_only_with_tools(v4: ModelConfig) -> None:
    assert "R1" not in rendered(TURNS, v4, thinking=True, effort="low")
    assert "<think>R1</think>" in rendered(TURNS, v4, thinking=True, effort="low", tools=[TOOL])


@pytest.fixture(scope="module")
def makers(tokenizer_text: str) -> dict[str, tuple[Any, Any]]:
    """The makers' own encoding with its own tokenizer, and the model version it is for, by family."""
    version = deepseek_recipe.ModelVersion
    whole = {"v4": tokenizer_text, "v41": respelled(tokenizer_text, {128799: SYSTEM})}
    tokenizers = {family: deepseek_recipe.Tokenizer.from_str(text) for family, text in whole.items()}
    return {
        "v4": (deepseek_recipe.DeepseekV4Encoding().with_tokenizer(tokenizers["v4"]), version.DeepseekV4Pro),
        "v41": (deepseek_recipe.DeepseekV41Encoding().with_tokenizer(tokenizers["v41"]), version.DeepseekV41Flash),
    }


def makers_ids(makers: tuple[Any, Any], messages: list[dict[str, Any]], options: ChatOptions) -> list[int]:
    encoding, version = makers
    body: dict[str, Any] = {"model": "m", "messages": messages}
    body["thinking"] = {"type": "enabled" if options.thinking else "disabled"}
    if options.thinking:
        body["reasoning_effort"] = options.effort
    if options.tools:
        body["tools"] = options.tools
    conversion = deepseek_recipe.ConversionOptions().with_model_alias("m", version)
    ids: list[int] = encoding.encode(deepseek_recipe.ChatCompletionRequest(body).convert(conversion).conversation)
    return ids


@pytest.mark.parametrize("family", ["v4", "v41"])
@pytest.mark.parametrize("with_system", [False, True])
@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("effort", [None, "low", "high", "max"])
def test_text_prompts_have_the_ids_of_the_makers_package(
    request: pytest.FixtureRequest,
    makers: dict[str, tuple[Any, Any]],
    family: str,
    with_system: bool,
    with_tools: bool,
    effort: Any,
) -> None:
    """No thinking and three efforts, with and without tools and system text: ids as of the family's version."""
    config: ModelConfig = request.getfixturevalue(family)
    tokenizer: PromptTokenizer = request.getfixturevalue("tokenizer" if family == "v4" else "v41_tokenizer")
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"place": "<think>"}'}}
    messages = [
        {"role": "system", "content": "Be <｜User｜> terse."},
        user("Where is </think> 世界?"),
        assistant(None, reasoning_content="hm <think>", tool_calls=[call]),
        {"role": "tool", "tool_call_id": "c", "content": "<｜end▁of▁sentence｜>"},
    ]
    if not with_tools:
        messages[2:] = [assistant("There: <｜image｜> <｜image2｜>", reasoning_content="hm"), user("Where?")]
    messages = messages if with_system else messages[1:]
    options = ChatOptions(thinking=effort is not None, effort=effort, tools=[TOOL] if with_tools else [])
    (ids,) = encode_chat(render_chat(messages, config, options), tokenizer)
    assert ids == makers_ids(makers[family], messages, options)


def test_spelled_ids_of_a_short_prompt(v41: ModelConfig, v41_tokenizer: PromptTokenizer) -> None:
    prompt = build_prompt([user("Hello")], v41, v41_tokenizer)
    assert prompt.ids_T.tolist() == [0, 128803, 19923, 128804, 128822]
    assert build_prompt([user("Hello")], v41, v41_tokenizer, thinking=True).ids_T[:2].tolist() == [0, 128799]


def test_pictures_in_tool_results_are_seen(v41: ModelConfig, v41_tokenizer: PromptTokenizer) -> None:
    photo = {"type": "image_url", "image_url": {"url": encode(noise(640, 480), "PNG")}}
    lengths = []
    for result in ([text("res")], [text("res"), photo]):
        prompt = build_prompt(tool_turn(result), v41, v41_tokenizer, tools=[TOOL])
        lengths.append(len(prompt) - len(prompt.spans) * len(v41_tokenizer.encode_text("\n\n")))
    assert lengths[1] - lengths[0] == 206
    assert "<tool_result>res\n\n#</tool_result>" in rendered(tool_turn([text("res"), PICTURE]), v41, tools=[TOOL])


def test_pictures_keep_their_order_over_messages(v4: ModelConfig, tokenizer: PromptTokenizer) -> None:
    sizes = [(64, 64), (640, 480), (1920, 1080), (480, 640)]
    parts = [{"type": "image_url", "image_url": {"url": Image.new("RGB", size)}} for size in sizes]
    messages = [
        {"role": "system", "content": [parts[0], text("s")]},
        user([text("a"), parts[1]]),
        assistant("b"),
        user([parts[2], text("c"), parts[3]]),
    ]
    prompt = build_prompt(messages, v4, tokenizer)
    assert [plan.num_tokens for plan in prompt.plans] == [114, 206, 366, 210]


def test_python_objects_may_stand_where_a_data_url_may(
    v4: ModelConfig, tokenizer: PromptTokenizer, tmp_path: Path
) -> None:
    image = noise(50, 40)
    path = tmp_path / "photo.png"
    image.save(path)
    forms: list[object] = [image, path, path.read_bytes(), bytearray(path.read_bytes()), SPELLINGS["no padding"]]
    digests = []
    for form, nested in itertools.product(forms, (True, False)):
        part = {"type": "image_url", "image_url": {"url": form} if nested else form}
        digests.append(build_prompt([user([part])], v4, tokenizer).digests)
    assert len({*digests[:-2]}) == 1


@pytest.mark.parametrize("url", ["/etc/passwd", "photo.png", "http://a.b/c.png", "file:///etc/passwd", ""])
def test_a_string_that_is_no_data_url_never_reads_a_file(v4: ModelConfig, url: str) -> None:
    with pytest.raises(PromptError, match=r"messages\[0\]\.content\[0\]\.image_url\.url must be a data URL"):
        render_chat([user([{"type": "image_url", "image_url": {"url": url}}])], v4, ChatOptions())


LOOP: dict[str, Any] = {}
LOOP["loop"] = LOOP
BROKEN: list[tuple[Any, str]] = [
    ([user([{"type": "image_urll"}])], r"messages\[0\]\.content\[0\] has the unknown type 'image_urll'"),
    ([user("a"), user([text("b"), {}])], r"messages\[1\]\.content\[1\] has the unknown type None"),
    ([user(["a"])], r"messages\[0\]\.content\[0\] must be an object"),
    ([user([{"type": "text"}])], r"messages\[0\]\.content\[0\]\.text must be a string"),
    ([user([{"type": "image_url"}])], r"messages\[0\]\.content\[0\]\.image_url must be a data URL"),
    ([user([{"type": "image_url", "image_url": {}}])], r"image_url\.url must be a data URL"),
    ([user([{"type": "image_url", "image_url": {"url": 5}}])], r"image_url\.url must be a data URL"),
    ([user("a"), assistant([PICTURE])], r"messages\[1\]\.content\[0\] is an image in a message of role 'assistant'"),
    (["a"], r"messages\[0\] must be an object"),
    ("a", "must be a list of messages"),
    (None, "must be a list of messages"),
    ([], "cannot be rendered"),
    ([{"role": "alien", "content": "x"}], "cannot be rendered: .*alien"),
    ([{"content": "x"}], "cannot be rendered"),
    ([user(None)], "cannot be rendered"),
    ([user("\ud800")], "cannot be rendered: a text has a lone surrogate at character 0"),
    ([user({1, 2})], "cannot be rendered"),
    ([user(LOOP)], "cannot be rendered"),
    ([user({1j: 2})], "cannot be rendered"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "message"), BROKEN)
def test_broken_messages_are_refused_by_place(v4: ModelConfig, messages: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        render_chat(messages, v4, ChatOptions())


def test_a_broken_picture_is_named_by_number_and_place(v4: ModelConfig, tokenizer: PromptTokenizer) -> None:
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(PromptError, match=r"image 1 \(messages\[1\]\.content\[2\]\.image_url\.url\) is none of JPEG"):
        build_prompt([user([PICTURE]), user([text("a"), text("b"), broken])], v4, tokenizer)


def test_a_model_without_vision_names_the_picture_or_leaves_a_note(
    text_only: ModelConfig, tokenizer: PromptTokenizer
) -> None:
    messages = [user([text("a"), PICTURE]), assistant("b"), user("c")]
    with pytest.raises(PromptError, match=r"messages\[0\]\.content\[1\] is an image, and this model takes no images"):
        build_prompt(messages, text_only, tokenizer)
    assert rendered(messages, text_only, without_vision="note").startswith(
        f"{BOS}{USER}a\n\n[picture left out: this model takes none]{ASSISTANT}"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"effort": "high"}, "needs thinking"),
        ({"effort": "much", "thinking": True}, "one of minimal, low"),
        ({"thinking": "off"}, "it is True or False"),
    ],
)
def test_effort_goes_with_thinking(v4: ModelConfig, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PromptError, match=message):
        render_chat([user("a")], v4, ChatOptions(**options))


def test_json_answers_and_tool_choice_are_passed_on(v4: ModelConfig) -> None:
    as_json = rendered([user("json please")], v4, response_format={"type": "json_object"})
    assert "Reply with JSON object ONLY." in as_json
    assert "look" not in rendered([user("a")], v4, tools=[TOOL], tool_choice="none")
    assert "look" in rendered([user("a")], v4, tools=[TOOL], tool_choice="auto")
    with pytest.raises(PromptError, match="cannot be rendered"):
        rendered([user("a")], v4, tools=[{"type": "function"}])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.lists(
    JSON
    | st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]) | JSON, "content": st.just("x") | JSON},
        optional={
            "tool_calls": JSON,
            "tool_call_id": JSON,
            "reasoning_content": JSON,
            "prefix": JSON,
        },
    ),
    max_size=3,
)


@given(messages=MESSAGES | JSON, tools=JSON, tool_choice=JSON, response_format=JSON)
def test_any_request_is_rendered_or_a_prompt_error(
    v4: ModelConfig, messages: Any, tools: Any, tool_choice: Any, response_format: Any
) -> None:
    for options in ({}, {"tools": tools}, {"tool_choice": tool_choice}, {"response_format": response_format}):
        try:
            assert isinstance(rendered(messages, v4, **options), str)
        except PromptError as error:
            assert str(error)


def test_text_needs_a_tokenizer_that_has_the_familys_tokens(
    v4: ModelConfig, v41: ModelConfig, tokenizer: PromptTokenizer
) -> None:
    with pytest.raises(PromptError, match=r"no tokenizer\.json"):
        build_prompt([user("a")], v4, None)
    with pytest.raises(PromptError, match="no special token <｜System｜>"):
        build_prompt([user("a")], v41, tokenizer, thinking=True)


def test_chats_turn_photos_upright_and_the_option_leaves_them(v4: ModelConfig, tokenizer: PromptTokenizer) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    part = {"type": "image_url", "image_url": {"url": encode(noise(640, 480), "JPEG", exif=exif)}}
    assert build_prompt([user([part])], v4, tokenizer).plans[0].num_tokens == 210
    assert build_prompt([user([part])], v4, tokenizer, rules=REFERENCE_RULES).plans[0].num_tokens == 206

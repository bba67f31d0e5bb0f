"""What the page does with an answer and a conversation, in Chromium: at two sizes, in both colour schemes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from spyglass.server.page import PAGE
from tests.server.chromium import Page
from tests.server.test_playground import Scripted, ask, browser, give, in_browser, live, page, scripted

__all__ = ["browser", "live", "page", "scripted"]  # fixtures
pytestmark = in_browser
MARKDOWN = """# Head
Some **bold**, *italic*, ~~gone~~ and `co<b>de` with a [link](https://a.example/x) and [none](javascript:alert(1)).

1. one
2. two
   - inner

> said

| a | b |
|---|---|
| 1 | <i>2</i> |

```python
print("<b>")
```
<img src=x onerror=alert(1)> 2 * 3 * 4 snake_case_name"""


def said(page: Page) -> Any:
    return page.run("[...document.querySelectorAll('.assistant > .text')].at(-1).textContent")


def wait_for_answers(page: Page, count: int) -> None:
    page.wait_for(
        f"running === null && document.querySelectorAll('.assistant').length === {count}"
        f" && document.querySelectorAll('.assistant')[{count - 1}].querySelector('.facts').textContent.includes('in')"
    )


def press(page: Page, text: str) -> None:
    """The last button of this text or label."""
    found = f"[...document.querySelectorAll('button')].filter(one => [one.textContent, one.title].includes({text!r}))"
    page.run(f"{found}.at(-1).click()")


def say(scripted: Scripted, *texts: str) -> None:
    scripted.deltas[:] = [{"content": text} for text in texts]


def test_markdown_becomes_elements_and_nothing_a_model_writes_becomes_html(page: Page, scripted: Scripted) -> None:
    say(scripted, *(MARKDOWN[n : n + 7] for n in range(0, len(MARKDOWN), 7)))
    ask(page, "write")
    wait_for_answers(page, 1)
    kinds = page.run("[...document.querySelectorAll('.assistant > .text *')].map(one => one.localName)")
    assert set(kinds) == {
        "h2", "p", "strong", "em", "del", "code", "a", "ol", "ul", "li", "blockquote", "table", "tr", "th", "td",
        "div", "pre", "button",
    }  # fmt: skip
    assert page.run("document.querySelector('.assistant pre').textContent") == 'print("<b>")'
    assert page.run("document.querySelector('.assistant a').href") == "https://a.example/x"
    text = said(page)
    assert "<img src=x onerror=alert(1)> 2 * 3 * 4 snake_case_name" in text and "[none](javascript:alert(1))" in text
    assert "co<b>de" in text and "<i>2</i>" in text
    for risky in ("innerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert risky not in PAGE.read_text(encoding="utf-8")


def test_boxes_stay_on_the_image_and_stray_marks_are_hidden(page: Page, scripted: Scripted) -> None:
    give(page, "drop")
    pieces = [
        "It<｜/re",
        "f｜> is <｜ref｜>a ring<｜/ref｜><｜bo",
        "x｜>[[-50,100,80",
        "00,999]]<｜/box｜> there<｜/ref｜>.",
    ]
    say(scripted, *pieces)
    ask(page, "Where?")
    wait_for_answers(page, 1)
    assert said(page) == "It is a ringbox [[-50,100,8000,999]] there."
    box = page.run(
        "(({x, y, width, height}) => [x, y, width, height].map(one => one.baseVal.value))"
        "(document.querySelector('.user .marks rect'))"
    )
    assert box == pytest.approx([0, 100 / 999 * 480, 640, 899 / 999 * 480], rel=1e-5)


def test_half_a_mark_is_not_shown_while_it_comes(page: Page) -> None:
    for begun in ("so <", "so <｜", "so <｜re", "so <｜box｜>[[1", "so <｜box｜>[[1,2,3,4]]<｜/bo"):
        assert page.run(f"read({begun!r}, false).text") == "so ", begun
    assert page.run("read('a < b', false).text") == "a < b" and page.run("read('x <', true).text") == "x <"


def test_an_answer_is_copied_asked_for_again_and_a_question_changed(page: Page, scripted: Scripted) -> None:
    page.run(
        "window.copied = []; Object.defineProperty(navigator, 'clipboard',"
        " {value: {writeText: async text => copied.push(text)}})"
    )
    say(scripted, "It is <｜ref｜>red<｜/ref｜><｜box｜>[[1,2,3,4]]<｜/box｜>.")
    ask(page, "first")
    wait_for_answers(page, 1)
    press(page, "Copy")
    page.wait_for("copied.length")
    assert page.run("copied") == ["It is red."]
    say(scripted, "Another.")
    press(page, "Retry")
    page.wait_for("running === null && document.querySelector('.assistant > .text').textContent === 'Another.'")
    assert [len(body["messages"]) for body in scripted.bodies] == [1, 1]
    ask(page, "second")
    wait_for_answers(page, 2)
    page.run("[...document.querySelectorAll('.user .tools button')][0].click()")
    assert page.run("document.getElementById('say').value") == "first"
    press(page, "Cancel")
    assert page.run("turns.length") == 4 and page.run("document.getElementById('say').value") == ""
    page.run("[...document.querySelectorAll('.user .tools button')][0].click()")
    ask(page, "changed")
    wait_for_answers(page, 1)
    assert [message["content"][0]["text"] for message in scripted.bodies[-1]["messages"]] == ["changed"]


def test_conversations_are_kept_opened_and_deleted(page: Page, live: Any, scripted: Scripted) -> None:
    press(page, "Delete all conversations")
    page.wait_for("document.querySelectorAll('#list li').length === 0")
    give(page, "drop")
    ask(page, "about one")
    wait_for_answers(page, 1)
    press(page, "New chat")
    ask(page, "about two")
    wait_for_answers(page, 1)
    page.wait_for("document.querySelectorAll('#list li').length === 2")
    page.open(live.url)
    page.wait_for("document.querySelectorAll('#list li').length === 2 && document.getElementById('model').value")
    assert page.run("document.getElementById('hello') !== null"), "the page begins with an empty conversation"
    press(page, "about one")
    wait_for_answers(page, 1)
    assert page.run("document.querySelectorAll('.user figure img').length") == 1
    assert page.run("document.querySelectorAll('.user .marks rect').length") == 1, "and what was pointed at"
    ask(page, "more")
    wait_for_answers(page, 2)
    assert [message["role"] for message in scripted.bodies[-1]["messages"]] == ["user", "assistant", "user"]
    press(page, "Delete about two")
    page.wait_for("document.querySelectorAll('#list li').length === 1")
    press(page, "Delete about one")
    page.wait_for("document.querySelectorAll('#list li').length === 0 && document.getElementById('hello') !== null")


def test_all_of_sampling_is_sent_where_it_is_stated(page: Page, scripted: Scripted) -> None:
    values = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
        "repetition_penalty": 1.1, "seed": 11, "max_tokens": 33,
    }  # fmt: skip
    ask(page, "plain")
    wait_for_answers(page, 1)
    plain = scripted.bodies[-1]
    assert {name for name in values if name in plain} == {"temperature", "max_tokens"}
    assert "tools" not in plain and "stop" not in plain and plain["thinking"] == {"type": "disabled"}
    schema = {"type": "object"}
    texts = {"stop_texts": "a\nb", "system": "Be brief.", "thinking": "high", "schema": json.dumps(schema)}
    for name, value in {**values, **texts}.items():
        page.run(f"document.getElementById({name!r}).value = {json.dumps(value)}")
    press(page, "New chat")
    ask(page, "full")
    wait_for_answers(page, 1)
    body = scripted.bodies[-1]
    assert {name: body[name] for name in values} == values and body["stop"] == ["a", "b"]
    assert body["thinking"] == {"type": "enabled"} and body["reasoning_effort"] == "high"
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["response_format"]["json_schema"]["schema"] == schema


def test_a_tool_is_called_and_its_result_goes_back(page: Page, scripted: Scripted) -> None:
    page.run("document.getElementById('tools').value = '[{'")
    ask(page, "wrong")
    page.wait_for("document.querySelector('.error')?.textContent.startsWith('the list of tools is not JSON')")
    tool = {"name": "look", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}
    page.run(f"document.getElementById('tools').value = {json.dumps(json.dumps(tool))}")
    head = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": ""}}
    scripted.deltas[:] = [{"tool_calls": [head]}, {"tool_calls": [{"index": 0, "function": {"arguments": '{"n": 3}'}}]}]
    press(page, "New chat")
    ask(page, "call it")
    wait_for_answers(page, 1)
    assert scripted.bodies[-1]["tools"] == [{"type": "function", "function": tool}]
    assert page.run("document.querySelector('.assistant pre').textContent") == 'look({"n": 3})'
    say(scripted, "Done.")
    page.run("document.querySelector('.assistant textarea').value = 'three'")
    press(page, "Give result")
    wait_for_answers(page, 2)
    roles = [message["role"] for message in scripted.bodies[-1]["messages"]]
    assert roles == ["user", "assistant", "tool"] and said(page) == "Done."
    assert scripted.bodies[-1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"n": 3}'
    assert scripted.bodies[-1]["messages"][2] == {"role": "tool", "tool_call_id": "call_1", "content": "three"}


def test_an_empty_page_offers_an_image_and_questions(page: Page, scripted: Scripted) -> None:
    press(page, "New chat")
    press(page, "What shape is the red thing?")
    wait_for_answers(page, 1)
    kinds = [part["type"] for part in scripted.bodies[-1]["messages"][0]["content"]]
    assert kinds == ["image_url", "text"]
    page.run("document.querySelector('.user .frame').click()")
    assert page.run("document.querySelector('.user figure').className") == "large"


SIZES = {"desk": (1100, 800), "phone": (390, 760)}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_everything_fits_can_be_read_and_has_a_name(
    page: Page, scripted: Scripted, size: str, scheme: str, tmp_path: Path
) -> None:
    width, height = SIZES[size]
    page.resize(width, height)
    page.prefer(scheme)
    try:
        give(page, "drop")
        say(scripted, MARKDOWN + "\n\n```\n" + "a long line " * 40 + "\n```")
        ask(page, "a question " * 30)
        wait_for_answers(page, 1)
        for opened in (False, True):
            if opened:
                page.run("document.getElementById('open').click()")
            wide = page.run(
                "[document.scrollingElement.scrollWidth,"
                " (log => log.scrollWidth - log.clientWidth)(document.getElementById('log'))]"
            )
            assert wide == [width, 0], "nothing reaches over the edge"
            send = page.run(
                "(({right, bottom}) => [right, bottom])(document.getElementById('send').getBoundingClientRect())"
            )
            assert send[0] <= width and send[1] <= height
            page.screenshot(tmp_path / f"{opened}.png")
        nameless = page.run(
            "[...document.querySelectorAll('button, input, select, textarea, [role]')].filter(one =>"
            " !(one.textContent.trim() || one.title || one.getAttribute('aria-label') || one.labels?.length"
            " || one.getAttribute('role') === 'status')).map(one => one.outerHTML)"
        )
        assert not nameless
        colours = page.run(
            "['.assistant > .text', '.user > .text', '.facts', '#send', '#hello, .quiet'].map(one =>"
            " { const at = document.querySelector(one); let under = at; while (getComputedStyle(under).backgroundColor"
            " === 'rgba(0, 0, 0, 0)') under = under.parentElement; return [getComputedStyle(at).color,"
            " getComputedStyle(under).backgroundColor]; })"
        )
        for front, back in colours:
            assert contrast(front, back) >= 4.5, (front, back)
        assert (luminance(colours[0][1]) > 0.5) == (scheme == "light")
        page.run("document.getElementById('menu').click()")
        assert page.run("document.getElementById('chats').getBoundingClientRect().width") > 100
        page.run("dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
        shown = page.run("document.getElementById('chats').getBoundingClientRect().width > 0")
        assert shown == (size == "desk"), "on a phone the list comes and goes"
    finally:
        page.resize(*SIZES["desk"])
        page.prefer("light")


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)` (WCAG 2.2)."""
    parts = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(front: str, back: str) -> float:
    bright, dark = sorted((luminance(front), luminance(back)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_a_keyboard_reaches_and_works_everything(page: Page, scripted: Scripted, live: Any) -> None:
    assert page.run("document.querySelectorAll('[tabindex]:not([tabindex=\"0\"])').length") == 0
    page.run("document.getElementById('say').focus()")
    page.run("document.getElementById('say').value = 'for ever'")
    page.run(
        "document.getElementById('say').dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', cancelable: true}))"
    )
    page.wait_for("document.querySelector('.assistant[aria-busy]') !== null")
    page.wait_for("document.querySelector('.assistant > .text').textContent.includes('It is')")
    page.run("dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
    page.wait_for("document.querySelector('.facts').textContent.includes('stopped')")
    assert page.run("document.activeElement.id") == "say"
    assert page.run("document.getElementById('status').textContent") == "stopped"
    live.wait_until_idle()

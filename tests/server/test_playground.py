"""The page in a real browser: a picture dropped on it is planned, sent, answered, and pointed at."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from spyglass.config.server import ServerConfig
from spyglass.config.shipped import shipped_models
from spyglass.engine.llm import LLM
from spyglass.engine.request import Delta
from spyglass.errors import PromptError
from spyglass.prompt import plan_image
from spyglass.prompt.image import resize
from spyglass.server.app import create_app
from spyglass.server.exchange import Call, Fetch
from spyglass.server.protocols.chat import CHAT_FIELDS
from spyglass.server.protocols.fields import Fields
from spyglass.tiny_world.cases import make_case
from tests.server.chromium import Page, chromium, find_chromium
from tests.server.parts import Live, plain, running

PROGRAM = find_chromium()
in_browser = pytest.mark.skipif(PROGRAM is None, reason="no Chromium here: install Debian's package `chromium`")
SAID = [
    "It is a ",
    "<｜ref｜>red",
    "<｜/ref｜><｜box｜>[[100,200,",
    "500,800]]<｜/box｜>",
    " <img src=x onerror=alert(1)>.",
]


@dataclass
class Scripted:
    """Chat Completions as far as the page reads them; the words are fixed, the tokens come from the engine."""

    served: Any
    path: str = "/v1/chat/completions"
    fields: Fields = CHAT_FIELDS
    bodies: list[Mapping[str, Any]] = field(default_factory=list)
    deltas: list[Mapping[str, Any]] = field(default_factory=list)  # what the next answers say, in place of the usual

    def parse(self, body: Mapping[str, Any], fetch: Fetch | None) -> Call:
        self.bodies.append(body)
        asked = [message for message in body["messages"] if message["role"] == "user"]
        question = asked[-1]["content"][-1]["text"]
        if question == "refuse me":
            raise PromptError("messages[0] is refused, as asked")
        call = plain_call(self.served, 4000 if question == "for ever" else 3)
        return Call(
            model=body["model"], prompts=call.prompts, params=call.params, stream=True, reply=ScriptedReply(self.deltas)
        )

    def error(self, status: int, message: str, **more: str | None) -> Mapping[str, Any]:
        return {"error": {"message": message}}


@dataclass
class ScriptedReply:
    deltas: list[Mapping[str, Any]]
    malformed_tool_call: bool = False

    def begin(self, request_id: str) -> bytes:
        usual = [{"reasoning_content": "I look <b>closely</b>. "}, *({"content": text} for text in SAID)]
        pieces = self.deltas or usual
        return b"".join(self._event({"choices": [{"index": 0, "delta": piece}]}) for piece in pieces)

    def push(self, index: int, delta: Delta) -> bytes:
        return self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": delta.finish_reason}]})

    def end(self) -> bytes:
        usage = {"prompt_tokens": 220, "completion_tokens": 14, "prompt_tokens_details": {"cached_tokens": 4}}
        return self._event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"

    def whole(self, request_id: str) -> tuple[int, Mapping[str, Any]]:
        raise AssertionError("the page streams")

    def _event(self, value: Mapping[str, Any]) -> bytes:
        return b"data: " + json.dumps(value).encode() + b"\n\n"


def plain_call(served: Any, tokens: int) -> Call:
    call = served.parse({"ids": [0, 5, 6], "max_tokens": tokens, "stream": True}, None)
    assert isinstance(call, Call)
    return call


@pytest.fixture(scope="module")
def scripted(llm: LLM) -> Scripted:
    return Scripted(plain(llm))


@pytest.fixture(scope="module")
def live(llm: LLM, scripted: Scripted) -> Iterator[Live]:
    with running(create_app(llm, ServerConfig(grace_seconds=1), endpoints=[scripted])) as server:
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    assert PROGRAM is not None
    with chromium(PROGRAM, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser: Page, live: Live, scripted: Scripted) -> Iterator[Page]:
    scripted.bodies.clear()
    scripted.deltas.clear()
    browser.complaints.clear()
    browser.open(live.url)
    browser.wait_for("document.getElementById('dot').className === 'ready' && document.getElementById('model').value")
    yield browser
    assert not browser.complaints


def give(page: Page, event: str, width: int = 640, height: int = 480) -> None:
    """A PNG of this size, dropped on the page or pasted into it."""
    carry = {"drop": "new DragEvent('drop', {bubbles: true, dataTransfer: held})",
             "paste": "new ClipboardEvent('paste', {bubbles: true, clipboardData: held})"}[event]  # fmt: skip
    page.run(
        f"""(async () => {{
        const canvas = new OffscreenCanvas({width}, {height}), pen = canvas.getContext('2d');
        pen.fillStyle = '#88a'; pen.fillRect(0, 0, {width}, {height});
        pen.fillStyle = 'red'; pen.fillRect(64, 96, 256, 288);
        const held = new DataTransfer();
        held.items.add(new File([await canvas.convertToBlob({{type: 'image/png'}})], 'red.png', {{type: 'image/png'}}));
        document.body.dispatchEvent({carry});
        }})()"""
    )
    page.wait_for("document.querySelector('#tray figcaption')?.textContent.includes('tokens')")


def drop_picture(page: Page, picture: Image.Image) -> None:
    """This picture, as a PNG, dropped on the page."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    page.run(
        f"""(async () => {{
        const bytes = Uint8Array.from(atob('{base64.b64encode(file.getvalue()).decode()}'), c => c.charCodeAt(0));
        const held = new DataTransfer();
        held.items.add(new File([bytes], 'picture.png', {{type: 'image/png'}}));
        document.body.dispatchEvent(new DragEvent('drop', {{bubbles: true, dataTransfer: held}}));
        }})()"""
    )
    page.wait_for("document.querySelector('#tray figcaption')?.textContent.includes('tokens')")


def ask(page: Page, question: str) -> None:
    page.run(f"document.getElementById('say').value = {json.dumps(question)}; document.getElementById('send').click()")


@in_browser
@pytest.mark.parametrize("event", ["drop", "paste"])
@pytest.mark.parametrize("size", [(640, 480), (300, 900)])
def test_a_picture_shows_the_cells_and_tokens_the_model_sees(
    page: Page, live: Live, llm: LLM, event: str, size: tuple[int, int]
) -> None:
    give(page, event, *size)
    assert llm.config.vision is not None
    plan = plan_image(*size, llm.config.vision)
    rows, columns = plan.llm_grid
    shown = page.run("document.querySelector('#tray figcaption').textContent")
    assert shown == f"{size[0]}×{size[1]}, {rows}×{columns} cells, {plan.num_tokens} tokens"
    assert page.run("document.querySelectorAll('.grid line').length") == 0
    page.run("document.getElementById('grid').click()")
    assert page.run("document.querySelectorAll('.grid line').length") == rows + columns + 2
    span = page.run(
        "(() => { const at = [...document.querySelectorAll('.grid line')].map(one => Number(one.getAttribute('x1')));"
        " return Math.max(...at) - Math.min(...at); })()"
    )
    edges = page.run(
        "['img', 'svg'].map(one => document.querySelector('#tray figure ' + one).getBoundingClientRect())"
        ".map(({left, top, right, bottom}) => [left, top, right, bottom])"
    )
    assert edges[0] == pytest.approx(edges[1], abs=0.1), (
        "what is drawn lies on the picture, however wide its caption is"
    )
    planned = live.client.get("/playground/plan", params={"width": size[0], "height": size[1]}).json()
    assert span == pytest.approx(planned["resized"][0] / planned["placed"][2] * size[0])


@in_browser
def test_the_answer_streams_with_reasoning_apart_and_boxes_on_the_picture(
    page: Page, scripted: Scripted, tmp_path: Path
) -> None:
    give(page, "drop")
    ask(page, "What is red?")
    page.wait_for("document.querySelector('.facts')?.textContent.includes('tokens in')")
    body = scripted.bodies[0]
    assert [part["type"] for part in body["messages"][0]["content"]] == ["image_url", "text"]
    assert body["messages"][0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert page.run("document.querySelector('.reasoning .text').textContent") == "I look <b>closely</b>. "
    said = page.run("document.querySelector('.assistant > .text').textContent")
    assert said == "It is a redbox [[100,200,500,800]] <img src=x onerror=alert(1)>."
    box = page.run(
        "(({x, y, width, height}) => [x, y, width, height].map(one => one.baseVal.value))"
        "(document.querySelector('.user .marks rect'))"
    )
    assert box == pytest.approx([100 / 999 * 640, 200 / 999 * 480, 400 / 999 * 640, 600 / 999 * 480], rel=1e-5)
    facts = page.run("document.querySelector('.facts').textContent")
    assert "220 tokens in (4 cached)" in facts and "14 out" in facts and "tokens/s" in facts
    page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes()[:4] == b"\x89PNG"


@in_browser
@pytest.mark.skipif(not shipped_models(), reason="no trained model is shipped with this checkout")
def test_the_shipped_model_points_at_what_is_asked_for(browser: Page) -> None:
    case = make_case(7, 24, "test", kinds=["grounding"])
    with running(create_app(LLM(shipped_models()[0]), ServerConfig(grace_seconds=1))) as server:
        browser.complaints.clear()
        browser.open(server.url)
        browser.wait_for(
            "document.getElementById('dot').className === 'ready' && document.getElementById('model').value"
        )
        drop_picture(browser, case.images[0])
        ask(browser, case.question)
        browser.wait_for("document.querySelector('.facts')?.textContent.includes('tokens in')")
        drawn = "document.querySelector('.user .marks rect')"
        x, y, width, height = browser.run(
            f"['x', 'y', 'width', 'height'].map(side => Number({drawn}.getAttribute(side)))"
        )
        box = (x, y, x + width, y + height)
    (thing,) = [thing for thing in case.scenes[0].things if (thing.colour, thing.shape) == ("purple", "ring")]
    assert box == pytest.approx(thing.box, abs=12), "the drawn box lies on the ring"
    assert not browser.complaints


@in_browser
def test_the_next_question_carries_the_conversation(page: Page, scripted: Scripted) -> None:
    give(page, "drop")
    ask(page, "first")
    page.wait_for("document.querySelectorAll('.facts')[0]?.textContent.includes('tokens in')")
    ask(page, "second")
    page.wait_for("document.querySelectorAll('.facts')[1]?.textContent.includes('tokens in')")
    roles = [message["role"] for message in scripted.bodies[1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert scripted.bodies[1]["messages"][1]["content"] == "".join(SAID)


@in_browser
def test_a_refused_question_is_given_back_and_is_no_part_of_the_chat(page: Page, scripted: Scripted) -> None:
    ask(page, "refuse me")
    page.wait_for("document.querySelector('.error')?.textContent === 'messages[0] is refused, as asked'")
    page.wait_for("document.getElementById('say').value === 'refuse me'")
    ask(page, "again")
    page.wait_for("document.querySelector('.facts')?.textContent.includes('tokens in')")
    page.complaints.clear()  # the browser notes the refusal itself
    assert [message["role"] for message in scripted.bodies[-1]["messages"]] == ["user"]


@in_browser
def test_stop_ends_the_request_on_the_server_too(page: Page, live: Live) -> None:
    ask(page, "for ever")
    page.wait_for("document.querySelector('.assistant > .text')?.textContent.includes('It is a')")
    page.run("document.getElementById('stop').click()")
    page.wait_for("document.querySelector('.facts').textContent.includes('stopped')")
    live.wait_until_idle()


def test_the_plan_of_a_picture_is_refused_in_words(live: Live) -> None:
    odd = [{"width": text, "height": 50} for text in ("x", "5_0", " 50", "+50")]
    for query in (*odd, {"width": 0, "height": 5}, {"width": 5}, {"width": 1, "height": 2**40}):
        answer = live.client.get("/playground/plan", params=query)
        assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize("size", [(300, 100), (30, 1000), (1000, 30), (640, 480)])
def test_the_plan_says_where_the_model_sees_the_picture(size: tuple[int, int], live: Live, llm: LLM) -> None:
    """A white picture among grey bars, as the model gets it; 1,000 x 30 is stretched and has none."""
    assert llm.config.vision is not None
    seen = resize(Image.new("RGB", size, (255, 255, 255)), plan_image(*size, llm.config.vision))
    left, top, right, bottom = seen.convert("L").point(lambda value: 255 * (value > 250)).getbbox() or (0, 0, 0, 0)
    told = live.client.get("/playground/plan", params={"width": size[0], "height": size[1]}).json()
    assert told["resized"] == list(seen.size) and told["placed"] == [left, top, right - left, bottom - top]


def test_the_page_needs_nothing_from_elsewhere(live: Live) -> None:
    answer = live.client.get("/")
    assert answer.status_code == 200 and "text/html" in answer.headers["content-type"]
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "") and "https://" not in answer.text


@in_browser
def test_an_answer_that_a_new_chat_cuts_off_does_not_come_into_it(page: Page) -> None:
    page.run(
        """(() => {
        const plain = window.fetch;
        window.fetch = (url, options) => !url.startsWith('/v1/chat') ? plain(url, options) : new Promise((_, fail) =>
            options.signal.addEventListener('abort', () => fail(new DOMException('gone', 'AbortError'))));
        document.getElementById('say').value = 'first';
        document.getElementById('send').click();
        document.getElementById('fresh').click();
        })()"""
    )
    page.wait_for("running === null")
    assert page.run("turns.length") == 0

"""Small inputs that would cost everybody much: each is refused before it costs, or bounded, and nobody else notices."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from PIL import Image

from spyglass.config.json_file import parse_json_text, read_json_object
from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.engine.worker import EngineWorker
from spyglass.errors import PromptError
from spyglass.prompt.decode import open_image
from spyglass.server import body
from spyglass.server.app import create_app
from spyglass.server.batch import answered
from spyglass.server.body import parse_json
from spyglass.server.errors import error_response
from spyglass.server.limits import MAX_LOGPROBS, MAX_VALUES, limits_table
from spyglass.server.memory import MemoryBudget, Reservation
from spyglass.server.parsing import prepared
from spyglass.server.protocols.completions import CompletionsEndpoint
from spyglass.server.stream import send_whole
from tests.scripted import ScriptedEngine
from tests.server.parts import running, wait_for
from tests.server.protocol_parts import call_of, endpoint_of, served_of, tokenizer_of
from tests.server.test_flow import ask, scripted

DOCUMENT = Path(__file__).parents[2] / "docs" / "server.md"


def refusal(endpoint: Any, request: Mapping[str, Any]) -> str:
    with pytest.raises(PromptError) as caught:
        endpoint.parse(request, None)
    return error_response(caught.value).message


def test_h1_answers_times_tokens_times_logprobs_are_bounded() -> None:
    completions = CompletionsEndpoint(served_of())
    attack = {"prompt": "a", "n": 64, "max_tokens": 300, "logprobs": 700, "ignore_eos": True}
    assert "64 answers with 300 tokens and 700 alternatives each are more than 500,000" in refusal(completions, attack)
    echo = {"prompt": [5] * 4000, "max_tokens": 1, "logprobs": 700, "echo": True}
    assert "echoed prompts" in refusal(completions, echo)
    call = call_of("chat", thinking=True, logprobs=True, top_logprobs=20, n=2)
    assert (call.params[0].max_tokens or 0) * 2 * 21 <= MAX_LOGPROBS, "a length that nobody gave is made to fit"
    assert "are more than" in refusal(
        endpoint_of("chat"),
        {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20, "max_tokens": 50_000},
    )


def test_h2_a_jpeg_of_many_scans_is_refused_before_it_is_unpacked() -> None:
    out = io.BytesIO()
    Image.new("L", (8192, 8192)).save(out, "JPEG", progressive=True)
    file = out.getvalue()
    open_image(file)
    scan = b"\xff\xda\x00\x08\x01\x01\x00\x01\x3f\x00\x00"
    with pytest.raises(PromptError, match="too many for its size"):
        open_image(file[:-2] + 100 * scan + file[-2:])


def tiff(**tags: int) -> bytes:
    """A grey TIFF of 16 x 16 pixels by its tags, without pixels."""
    known = {"width": 256, "height": 257, "bits": 258, "compression": 259, "photometric": 262, "rows": 278}
    known |= {"tile_width": 322, "tile_length": 323, "tile_offset": 324, "tile_bytes": 325, "offset": 273, "bytes": 279}
    values = {"width": 16, "height": 16, "bits": 8, "compression": 1, "photometric": 1, **tags}
    entries = b"".join(
        struct.pack("<HHII", known[name], 4, 1, value)
        for name, value in sorted(values.items(), key=lambda i: known[i[0]])
    )
    return b"II*\0" + struct.pack("<IH", 8, len(values)) + entries + bytes(4 + 1024)


def test_h3_a_tiff_with_a_part_far_larger_than_itself_is_refused() -> None:
    tiled = {"tile_offset": 300, "tile_bytes": 256}
    strip = {"offset": 300, "bytes": 256}
    open_image(tiff(**tiled, tile_width=256, tile_length=256))
    open_image(tiff(**strip, rows=0xFFFFFFFF))
    for file in (tiff(**tiled, tile_width=20_000, tile_length=20_000), tiff(**strip, rows=2_000_000)):
        with pytest.raises(PromptError, match="a tile or strip far larger than itself"):
            open_image(file)


def test_h4_a_key_written_twice_is_found_in_one_pass() -> None:
    keys = ",".join(f'"{number}":0' for number in range(300_000))
    with pytest.raises(ValueError, match="'299999' is written twice"):
        parse_json_text(f'{{{keys},"299999":0}}')


def test_h5_values_are_counted_before_a_body_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    few = json.dumps({"text": "a, {b} [c] \\" * 200_000, "ids": list(range(1000))}).encode()
    assert len(few) > 1 << 20 and parse_json(few)
    monkeypatch.setattr(body, "parse_json_text", lambda _: pytest.fail("it was read"))
    for values in (
        b"{}," * (MAX_VALUES + 1) + b"{}",
        b'"",' * (MAX_VALUES + 1) + b'""',
        b"1," * (MAX_VALUES + 1) + b"1",
    ):
        with pytest.raises(PromptError, match="more than 2,000,000 values"):
            parse_json(b'{"messages":[' + values + b"]}")


def test_h5_a_name_of_megabytes_is_named_by_its_beginning() -> None:
    name = "n" * 5_000_000
    call = endpoint_of("chat").parse({"messages": [{"role": "user", "content": "a"}], name: 1}, None)
    assert call.ignored == ("n" * 100,)
    strict = endpoint_of("chat", strict_fields=True)
    assert len(refusal(strict, {"messages": [{"role": "user", "content": "a"}], name: 1})) < 3000


def test_h6_a_tokenizer_that_panics_refuses_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    panic = type("PanicException", (BaseException,), {})

    class Panicking:
        def encode_batch(self, texts: Any) -> Any:
            raise panic("no")

    tokenizer = tokenizer_of("deepseek_v4")
    monkeypatch.setattr(tokenizer, "text_only", Panicking())
    with pytest.raises(PromptError, match="cannot read this text"):
        tokenizer.encode_text("a")


def test_h9_half_bodies_take_no_places_of_whole_requests(llm: LLM) -> None:
    head = b"POST /plain HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{"
    with scripted(llm, ScriptedEngine(), max_waiting=0) as server:
        port = int(server.url.rpartition(":")[2])
        raws = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(40)]
        for raw in raws:
            raw.sendall(head)
        wait_for(lambda: server.service.reading.num_taken == 40)
        assert server.post({"max_tokens": 3}).status_code == 200
        for raw in raws:
            raw.close()
        wait_for(lambda: server.service.reading.num_taken == 0)


def test_h9_a_body_that_pauses_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_PAUSE_SECONDS", 0.2)
    head = b"POST /plain HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{"
    with scripted(llm, ScriptedEngine()) as server:
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 30) as raw:
            raw.sendall(head)
            assert raw.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_h10_a_whole_answer_counts_as_held_until_it_is_read() -> None:
    """The last part of a body is sent, by the transport's flow control, when most of what went before has been read."""
    budget, sent = MemoryBudget(1 << 30), list[tuple[bytes, int]]()

    class Done:
        async def accepted(self) -> None: ...

        async def deltas(self) -> list[Any]:
            return []

    class Told:
        def whole(self, request_id: str) -> tuple[int, dict[str, str]]:
            return 200, {"text": "x" * 10_000}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append((message["body"], budget.total))

    call: Any = SimpleNamespace(reply=Told())
    timer: Any = None
    asyncio.run(send_whole(call, cast(Any, Done()), timer, "r", Reservation(budget), send))
    (whole, first), (rest, last) = sent
    assert len(whole) == first == last > 10_000 and rest == b""


def test_h12_lists_are_counted_before_they_are_looked_at() -> None:
    million = {str(number): 1 for number in range(200_000)}
    messages = {"messages": [{"role": "user", "content": "a"}]}
    assert "logit_bias has 200,000 tokens" in refusal(endpoint_of("chat"), {**messages, "logit_bias": million})
    assert "200000 stop strings" in refusal(endpoint_of("chat"), {**messages, "stop": ["a"] * 200_000})


@pytest.mark.parametrize("stream", [True, False])
def test_h14_a_client_that_closes_its_sending_half_gets_its_answer(stream: bool, llm: LLM) -> None:
    with (
        scripted(llm, ScriptedEngine(pause_s=0.01)) as server,
        ask(server, {"max_tokens": 20, "stream": stream}) as raw,
    ):
        raw.shutdown(socket.SHUT_WR)
        received = b""
        while part := raw.recv(1 << 16):
            received += part
        assert b"HTTP/1.1 200 OK" in received and (
            b"done" in received if stream else b"[1, 2, 3" in received.replace(b",", b", ")
        )


def test_h16_a_device_holds_no_earlier_answers() -> None:
    for device in ("/dev/full", "/dev/zero"):
        assert answered(Path(device)) == {}


def test_naming_which_of_many_parameters_is_at_fault_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = {f"f{n}": {"type": "object", "properties": {f"p{n}": {"type": "string"}}} for n in range(60)}
    call, tried = call_of("chat", tools=tools, tool_choice="required"), list[Any]()

    def prepare(prompt: Any, params: Any) -> Any:
        tried.append(params)
        if len(tried) == 1:
            raise PromptError("the grammar asked for takes too long")
        return SimpleNamespace()

    clock = iter(range(1000))
    monkeypatch.setattr("spyglass.server.parsing.time.monotonic", lambda: 0.1 * next(clock))
    with pytest.raises(PromptError, match="takes too long"):
        prepared(call, prepare)
    assert 1 < len(tried) < 10


def test_h15_h17_at_the_second_signal_every_stream_has_its_last_event_and_every_whole_answer_is_a_503(llm: LLM) -> None:
    engine = ScriptedEngine(pause_s=0.01)
    worker = EngineWorker(engine, max_live=100)
    app = create_app(llm, ServerConfig(grace_seconds=600), worker=worker)
    request = {"prompt": [0, 5, 6], "max_tokens": 10_000, "ignore_eos": True}
    with running(app) as server, ThreadPoolExecutor(2) as pool:
        bodies = [request, {**request, "stream": True}]
        answers = [pool.submit(server.post, each, "/v1/completions") for each in bodies]
        wait_for(lambda: len(engine.live) == 2)
        server.server.handle_exit(2, None)
        wait_for(lambda: server.service.stopping)
        server.server.handle_exit(2, None)
        whole, streamed = (answer.result(60) for answer in answers)
    assert whole.status_code == 503 and whole.headers["retry-after"] == "5"
    assert "before it was whole" in whole.json()["error"]["message"]
    assert streamed.text.endswith("data: [DONE]\n\n") and "before it was whole" in streamed.text


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
    (tmp_path / "config.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json_object(tmp_path / "config.json") == {"a": 1}


def test_the_document_has_the_table_of_limits() -> None:
    assert limits_table() in DOCUMENT.read_text(encoding="utf-8")

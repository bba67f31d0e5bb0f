"""The load generator: what it asks is reproducible, what it reads of a stream is what the server sent."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from spyglass.bench.serve import Load, make_bodies, summarise
from spyglass.bench.stream_client import Answer, ask

LOAD = Load(requests=20, clients=4, rate=None, words=5, images=0.5, max_tokens=3, seed=7)


def test_the_same_seed_asks_the_same_and_no_two_requests_are_alike() -> None:
    bodies = [json.dumps(body) for body in make_bodies(LOAD)]
    assert bodies == [json.dumps(body) for body in make_bodies(LOAD)]
    assert len(set(bodies)) == 20
    assert 0 < sum("image_url" in body for body in bodies) < 20


def served(parts: list[bytes], status: str = "200 OK", chunked: bool = True) -> Answer:
    """What the client makes of a server that sends these parts."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        kind = "transfer-encoding: chunked" if chunked else "connection: close"
        writer.write(f"HTTP/1.1 {status}\r\n{kind}\r\n\r\n".encode())
        for part in parts:
            writer.write(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
            await writer.drain()
            await asyncio.sleep(0.01)
        if chunked:
            writer.write(b"0\r\n\r\n")
        writer.close()

    async def run() -> Answer:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await ask(f"http://127.0.0.1:{port}/v1/chat/completions", {"a": 1})

    return asyncio.run(run())


def piece(**delta: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("chunked", [True, False])
def test_events_are_read_however_they_are_cut(chunked: bool) -> None:
    whole = piece(role="assistant") + piece(content="a") + piece(content="bc") + USAGE
    cut = [whole[i : i + 11] for i in range(0, len(whole), 11)]
    answer = served(cut, chunked=chunked)
    assert (answer.status, answer.error, answer.text, answer.tokens) == (200, None, "abc", 3)
    assert answer.asked < answer.pieces[0] <= answer.pieces[1] <= answer.ended and len(answer.pieces) == 2
    assert answer.per_token == pytest.approx((answer.ended - answer.pieces[0]) / 2)


def test_refusals_errors_in_the_stream_and_broken_connections_are_failures() -> None:
    refused = served([b'{"error": "busy"}'], "429 Too Many Requests", chunked=False)
    assert refused.status == 429 and "busy" in str(refused.error)
    broken = served([piece(content="a"), b'data: {"error": {"message": "gone"}}\n\n'])
    assert "gone" in str(broken.error)
    nobody = asyncio.run(ask("http://127.0.0.1:9/v1", {}))
    assert nobody.status == 0 and nobody.error
    summary = summarise([refused, broken, nobody, served([piece(content="a"), USAGE])], 2.0)
    assert (summary["answered"], summary["failed"]) == (1, 3)
    assert summary["tokens_per_second"] == pytest.approx(1.5) and len(summary["errors"]) == 3


def test_percentiles_are_of_single_answers() -> None:
    answers = [
        Answer(asked=0.0, status=200, pieces=[n / 1000], ended=n / 1000 + 0.02, usage={"completion_tokens": 3})
        for n in range(1, 101)
    ]
    summary = summarise(answers, 1.0)
    assert summary["ttft_ms"]["p50"] == pytest.approx(50.5) and summary["ttft_ms"]["p99"] == pytest.approx(99.01)
    assert summary["tpot_ms"]["p50"] == pytest.approx(10.0)

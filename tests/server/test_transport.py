"""The way of a request through a live server, with the smallest protocol there can be."""

from __future__ import annotations

from tests.server.parts import Live, events, ids_of


def test_a_stream_brings_what_the_whole_answer_holds(live: Live) -> None:
    body = {"ids": [0, 7, 8, 9], "max_tokens": 6, "n": 2}
    whole = live.post(body)
    assert whole.status_code == 200, whole.text
    stream = live.post({**body, "stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    found = events(stream.text)
    assert found[0] == {"id": stream.headers["x-request-id"]} and found[-1] == {"done": True}
    assert [ids_of(found, 0), ids_of(found, 1)] == whole.json()["answers"]
    assert len(whole.json()["answers"][0]) == 6

"""Requests read in processes of their own: the same calls and patches, and what takes too long takes only itself."""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from spyglass.config.server import ServerConfig
from spyglass.engine import shares
from spyglass.engine.llm import LLM
from spyglass.errors import OverloadedError, PromptError, SpyglassError
from spyglass.prompt import plan_image
from spyglass.prompt.build import unpack_image
from spyglass.prompt.decode import CHAT_RULES, open_image
from spyglass.prompt.tokens import ImagePlan, Prompt
from spyglass.server.app import create_app
from spyglass.server.exchange import Call, Immediate
from spyglass.server.passing import ReadBody, Refusal, Wanted, receive_value, send_value
from spyglass.server.protocols.endpoints import make_endpoints
from spyglass.server.workers import Job, Workers
from spyglass.server.writing import json_bytes
from tests.server.parts import data_url, running, wait_for
from tests.server.protocol_parts import config_of, served_of, tokenizer_of

SERVED = served_of()
CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def nothing_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is."""
    monkeypatch.setattr(shares, "LEVELS", ())


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    made = Workers(SERVED)
    yield made
    made.close()


def photo(seed: int, width: int = 90, height: int = 70) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def plan_of(width: int = 90, height: int = 70) -> ImagePlan:
    vision = config_of("deepseek_v4").vision
    assert vision is not None
    return plan_image(width, height, vision)


def asking(text: str = "hello", **more: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], **more}).encode()


def read(workers: Workers, path: str, body: bytes, **more: Any) -> Call | Immediate | Wanted:
    return workers.read(path, body, more.get("adapters", ()), more.get("remote"), more.get("job") or Job())


def same(one: Prompt, other: Prompt) -> bool:
    arrays = all((getattr(one, name) == getattr(other, name)).all() for name in ("ids_T", "kinds_T", "visible_T2"))
    pixels = all((left == right).all() for left, right in zip(one.patches, other.patches, strict=True))
    return arrays and pixels and one.digests == other.digests and one.plans == other.plans


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
SEEN = [{"type": "image_url", "image_url": {"url": data_url(Image.effect_noise((700, 500), 90))}}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "a word"}], "n": 2, "seed": 3, "logprobs": True}),
    (CHAT, {"messages": [{"role": "user", "content": SEEN}], "tools": [TOOL], "tool_choice": "required"}),
    ("/v1/completions", {"prompt": ["one", "two"], "echo": True, "n": 2, "max_tokens": 7}),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "thinking": {"type": "enabled"}},
    ),
    ("/api/chat", {"messages": [{"role": "user", "content": "a"}], "model": "tiny"}),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_object"}}}),
]


@pytest.mark.parametrize(("path", "body"), BODIES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_call_that_was_read_elsewhere_is_the_one_that_would_be_read_here(
    path: str, body: dict[str, Any], workers: Workers
) -> None:
    endpoint = next(one for one in make_endpoints(SERVED) if one.path == path)
    here, there = endpoint.parse(body, None), read(workers, path, json.dumps(body).encode())
    assert isinstance(here, Call) and isinstance(there, Call)
    assert here.params == there.params and here.tools == there.tools and here.ignored == there.ignored
    assert len(here.prompts) == len(there.prompts) and all(map(same, here.prompts, there.prompts))
    assert len(set(map(id, here.prompts))) == len(set(map(id, there.prompts))), "answers share their prompt"
    assert type(here.reply) is type(there.reply)
    assert len(here.reply.begin("r")) == len(there.reply.begin("r")), "ids differ"


def test_counts_come_as_the_bytes_that_are_sent(workers: Workers) -> None:
    found = read(workers, "/tokenize", json.dumps({"prompt": "a word " * 1000}).encode())
    assert isinstance(found, Immediate)
    assert json.loads(found.content)["tokens"] == [*tokens_of("a word " * 1000)]


def tokens_of(text: str) -> list[int]:
    start = SERVED.config.bos_token_id
    return [*([] if start is None else [start]), *tokenizer_of("deepseek_v4").encode_text(text)]


def test_an_error_is_the_one_that_would_be_raised_here(workers: Workers) -> None:
    for body in (b"{", b"[]", asking(tools=3), asking(model="other"), asking("long " * 100_000), asking(n=1000)):
        errors = []
        for parse in (read_here, lambda body: read(workers, CHAT, body)):
            with pytest.raises(SpyglassError) as caught:
                parse(body)
            errors.append((type(caught.value), str(caught.value), getattr(caught.value, "field", None)))
        assert errors[0] == errors[1]


def read_here(body: bytes) -> object:
    from spyglass.server.body import parse_json

    return next(one for one in make_endpoints(SERVED) if one.path == CHAT).parse(parse_json(body), None)


def test_adapters_are_those_of_the_moment(workers: Workers) -> None:
    with pytest.raises(SpyglassError, match="not served here"):
        read(workers, CHAT, asking(model="mine"))
    call = read(workers, CHAT, asking(model="mine"), adapters=("mine",))
    assert isinstance(call, Call) and call.adapter == "mine"


def test_remote_images_are_named_first_and_used_when_they_are_here(workers: Workers) -> None:
    parts = [{"type": "image_url", "image_url": {"url": f"http://x/{name}"}} for name in "ab"]
    body = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
    with pytest.raises(PromptError, match="this server fetches no images"):
        read(workers, CHAT, body)
    assert read(workers, CHAT, body, remote={}) == Wanted(("http://x/a", "http://x/b"))
    call = read(workers, CHAT, body, remote={"http://x/a": photo(0), "http://x/b": photo(1)})
    assert isinstance(call, Call) and call.images == 2
    with pytest.raises(PromptError, match=r"messages\[0\]\.content\[1\].*gone"):
        read(workers, CHAT, body, remote={"http://x/a": photo(0), "http://x/b": PromptError("gone")})


def test_patches_are_those_that_would_be_made_here_from_any_number_of_threads(workers: Workers) -> None:
    def both(seed: int) -> bool:
        file = photo(seed, 900, 700)
        there = workers.unpack(file, CHAT_RULES, plan_of(900, 700), "image 0")
        here = unpack_image(open_image(file), CHAT_RULES, plan_of(900, 700), "image 0")
        return bool((there == here).all()) and there.dtype == here.dtype and there.flags.writeable

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(both, range(6)))


@pytest.mark.parametrize("without", ["", "memfd_create"])
def test_large_arrays_arrive_with_and_without_shared_memory(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file system takes part: /dev/shm may be small or missing."""
    if without:
        monkeypatch.delattr(os, without)
    pixels = np.random.default_rng(0).integers(0, 255, (2000, 300), np.uint8)
    one, other = socket.socketpair()
    sending = threading.Thread(target=send_value, args=(one, (pixels, True)))
    sending.start()
    result, goes_on = receive_value(other, {})
    sending.join()
    assert goes_on and isinstance(result, np.ndarray) and (result == pixels).all()
    one.close()
    with pytest.raises(EOFError):
        receive_value(other, {})


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="bodies go through the socket")
def test_a_large_body_waits_for_no_turns_of_two_processes() -> None:
    """It lies in memory that both see, so all of it is sent before anybody reads."""
    body, image = bytes(range(256)) * 100_000, bytes(1 << 20)
    remote = {"x": PromptError("no"), "y": pickle.PickleBuffer(image)}
    job = ReadBody(path=CHAT, body=pickle.PickleBuffer(body), adapters=("a",), remote=remote)
    one, other = socket.socketpair()
    send_value(one, job)
    found = receive_value(other, {})
    assert (found.path, found.body, found.adapters, str(found.remote["x"])) == (CHAT, body, ("a",), "no")
    assert found.remote["y"] == image
    for end in (one, other):
        end.close()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted on Linux alone")
def test_a_body_for_a_process_that_has_ended_is_given_back() -> None:
    one, other = socket.socketpair()
    other.close()
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):
        send_value(one, ReadBody(path=CHAT, body=pickle.PickleBuffer(bytes(1 << 20)), adapters=(), remote=None))
    assert sorted(os.listdir("/proc/self/fd")) == before
    one.close()


def test_what_is_wrong_with_an_image_is_told_as_here(workers: Workers) -> None:
    file = photo(0)[:5000]
    with pytest.raises(PromptError) as here:
        unpack_image(open_image(file, name="image 3"), CHAT_RULES, plan_of(), "image 3")
    with pytest.raises(PromptError) as there:
        workers.unpack(file, CHAT_RULES, plan_of(), "image 3")
    assert str(there.value) == str(here.value) and "image 3" in str(there.value)


@pytest.mark.parametrize("limits", [{"cpu_seconds": 0.0001}, {"memory": 1 << 20}])
def test_what_takes_too_much_ends_its_process_and_nothing_else(limits: dict[str, float]) -> None:
    workers = Workers(SERVED, **limits)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(PromptError, match=r"image 0 takes too long or too much memory|too much memory to read"):
            workers.unpack(photo(0, 4000, 3000), CHAT_RULES, plan_of(4000, 3000), "image 0")
    workers.close()


def test_what_takes_long_gives_way_more_and_leaves_no_process_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, before = Workers(SERVED), set(children(os.getpid()))
    assert isinstance(read(workers, CHAT, asking()), Call)
    (source,) = set(children(os.getpid())) - before
    (first,) = children(source)
    assert isinstance(read(workers, CHAT, asking()), Call)
    assert children(source) == [first], "a process is used again"
    monkeypatch.setattr(shares, "LEVELS", ((0.0, 10),))
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "setpriority", lambda kind, pid, nice: seen.append((pid, nice)))
    assert isinstance(read(workers, CHAT, asking()), Call)
    assert seen == [(first, min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10))] and not children(source)
    workers.close()


def test_a_job_is_ended_from_outside_and_the_next_one_is_done(workers: Workers) -> None:
    job, failed = Job(), []

    def long() -> None:
        try:
            read(workers, CHAT, asking("a word " * 3_000_000, max_tokens=1), job=job)
        except SpyglassError as error:
            failed.append(str(error))

    working = threading.Thread(target=long)
    working.start()
    job.end()
    working.join()
    assert failed == ["nobody waits for this request"]
    assert isinstance(read(workers, CHAT, asking()), Call)


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(child) for child in file.read().split()]


def test_processes_that_are_killed_while_they_wait_or_work_are_replaced() -> None:
    workers = Workers(SERVED)
    before = set(children(os.getpid()))
    assert isinstance(read(workers, CHAT, asking()), Call)
    (source,) = set(children(os.getpid())) - before
    (waiting,) = children(source)
    os.kill(waiting, signal.SIGKILL)
    for _ in range(2):  # whoever meets a process that was ended is told to come again, and the next one is served
        try:
            found = read(workers, CHAT, asking())
        except OverloadedError as error:
            assert "ended from outside" in str(error)
    assert isinstance(found, Call)
    for child in children(source):
        os.kill(child, signal.SIGKILL)
    os.kill(source, signal.SIGKILL)
    for _ in range(2):
        try:
            found = read(workers, CHAT, asking())
        except OverloadedError:
            found = Wanted(())
    assert isinstance(found, Call)
    workers.close()
    wait_for(lambda: set(children(os.getpid())) <= before)


def test_without_open_files_there_is_a_clear_error_and_later_none(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object, **__: object) -> Any:
        raise OSError(24, "Too many open files")

    lonely = Workers(SERVED)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", none)
        with pytest.raises(OverloadedError, match="Too many open files"):
            read(lonely, CHAT, asking())
    assert isinstance(read(lonely, CHAT, asking()), Call)
    lonely.close()


def test_a_fault_of_ours_is_told_with_its_place_and_no_error_of_theirs() -> None:
    try:
        raise KeyError("x")
    except KeyError as error:
        found = pickle.loads(pickle.dumps(Refusal.of(error))).error()
    assert isinstance(found, RuntimeError) and "test_workers.py" in str(found)


def test_a_body_written_in_pieces_is_the_one_written_at_once() -> None:
    value = {"a": [1, {"b": ['x"y', None, True, 1.5, {}, [], "\u2028é"]}], "": {"c": {"d": [[[[[[[[[1]]]]]]]]]}}}
    assert json_bytes(value) == json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    assert json_bytes({"a": "\ud800"}) == b'{"a":"?"}'


def test_the_reading_of_a_body_ends_with_its_client(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []

    def endless(_: Workers, path: str, body: bytes, adapters: object, remote: object, job: Job) -> Call:
        jobs.append(job)
        wait_for(lambda: job.over)
        raise SpyglassError("nobody waits for this request")

    monkeypatch.setattr(Workers, "read", endless)
    body = asking("word " * 10_000)
    with running(create_app(llm, ServerConfig())) as server:
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 30) as raw:
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
            raw.sendall(head.encode() + b"\r\n\r\n" + body)
            wait_for(lambda: jobs)
            assert not jobs[0].over
        wait_for(lambda: jobs[0].over)
        server.wait_until_idle()

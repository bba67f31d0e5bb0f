"""Faults of the machine below a server of its own process: each is answered in words, and the service comes back."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from PIL import Image

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.lora.write import write_adapter
from spyglass.server.app import create_app
from spyglass.server.errors import error_response
from tests.adapter_parts import random_adapter, shapes_of
from tests.scripted import ScriptedEngine
from tests.server.parts import data_url, running, wait_for
from tests.server.test_flow import scripted

OPTIONS = ("--port", "0", "--device", "cpu", "--dtype", "float32", "--threads", "1", "--model-name", "tiny")
IMAGE = [{"type": "image_url", "image_url": {"url": data_url(Image.effect_noise((300, 200), 90))}}]
SEEING = {"messages": [{"role": "user", "content": IMAGE}], "max_tokens": 2}
READING = {"messages": [{"role": "user", "content": "word " * 10_000}], "max_tokens": 2}


@contextmanager
def served(folder: Path, log: Any = None) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """`spyglass serve` with a port that is found out from the system, since the log may be written nowhere."""
    command = [sys.executable, "-m", "spyglass.cli.main", "serve", str(folder), *OPTIONS]
    process = subprocess.Popen(command, stderr=log or subprocess.DEVNULL)
    try:
        ports: list[int] = []

        def listens() -> bool:
            assert process.poll() is None, "it did not start"
            ports[:] = _listening(process.pid)
            return bool(ports)

        wait_for(listens)
        with httpx.Client(base_url=f"http://127.0.0.1:{ports[0]}", timeout=120) as client:
            wait_for(lambda: client.get("/health").status_code == 200)
            yield process, client
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()


def _listening(pid: int) -> list[int]:
    """Ports on which a process listens."""
    mine = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            mine.add(os.readlink(fd))
        except OSError:
            continue
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def ask(client: httpx.Client, body: dict[str, Any] | None) -> int:
    """The status of a chat, or of the server's health; 0 where the connection ended."""
    try:
        if body is None:
            return client.get("/health").status_code
        return client.post("/v1/chat/completions", json=body).status_code
    except httpx.TransportError:
        return 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_full_disk_below_the_log_killed_processes_and_no_open_files_are_survived(tiny_folder: Path) -> None:
    with open("/dev/full", "wb") as full, served(tiny_folder, full) as (process, client):
        assert ask(client, SEEING) == ask(client, READING) == 200

        children = descendants(process.pid)
        assert children, "an image is unpacked in a process of its own"
        for child in children:
            os.kill(child, signal.SIGKILL)
        statuses = [ask(client, body) for body in (SEEING, READING) * 3]
        assert set(statuses) <= {200, 429} and statuses[-2:] == [200, 200], statuses

        before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        count = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (count + 8, before[1]))
        with ExitStack() as many:
            address = client.base_url.host, client.base_url.port
            for _ in range(100):
                many.enter_context(socket.create_connection(address, 30))
            time.sleep(1.5)  # connections wait in the system's queue meanwhile
        wait_for(lambda: ask(client, None) == 200)
        assert ask(client, SEEING) in (200, 429), "if no new process can be had, that is said"
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
        wait_for(lambda: ask(client, SEEING) == 200)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OSError(errno.EMFILE, "x"), OSError(errno.ENFILE, "x"), OSError(errno.ENOSPC, "x")],
    ids=["memory", "files", "files of all", "disk"],
)
def test_what_the_machine_lacks_is_a_503_that_says_so_and_is_logged(error: Exception) -> None:
    response = error_response(error)
    assert response.status == 503 and not response.known and int(response.headers["retry-after"]) > 0
    assert re.search("no memory|no more open files|no space", response.message)


def test_a_clock_that_jumps_ends_no_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    real, shift = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + shift[0])
    with scripted(llm, ScriptedEngine(pause_s=0.005)) as server:
        answers: list[int] = []
        asking = threading.Thread(target=lambda: answers.append(server.post({"max_tokens": 60}).status_code))
        asking.start()
        for jump in (86_400.0, -86_400.0, -10 * 86_400.0, 0.0):
            shift[0] = jump
            assert server.client.get("/health").status_code == 200
            assert server.post({"max_tokens": 2}).status_code == 200
        asking.join()
        assert answers == [200]


def test_while_a_slow_file_system_is_read_others_are_answered(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, let = threading.Event(), threading.Event()
    add = LLM.add_adapter

    def slow(model: LLM, name: str, folder: Path) -> None:
        reading.set()
        assert let.wait(120)
        add(model, name, folder)

    monkeypatch.setattr(LLM, "add_adapter", slow)
    write_adapter(tmp_path / "one", random_adapter(shapes_of(llm.loaded.model), ["attention"], rank=4, seed=0))
    config = ServerConfig(allow_adapter_loading=True, adapter_root=str(tmp_path))
    with running(create_app(llm, config)) as server:
        server.wait_until_idle()
        told: list[int] = []
        body = {"lora_name": "slow", "lora_path": "one"}
        loading = threading.Thread(
            target=lambda: told.append(server.post(body, "/v1/load_lora_adapter").status_code), daemon=True
        )
        loading.start()
        assert reading.wait(120)
        assert server.client.get("/health").status_code == 200
        assert server.post({"prompt": [5], "max_tokens": 2}, "/v1/completions").status_code == 200
        assert not told
        let.set()
        loading.join()
        assert told == [200]
        assert server.post({"lora_name": "slow"}, "/v1/unload_lora_adapter").status_code == 200

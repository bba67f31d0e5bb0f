"""A served model on several processes: it answers and stops like any other; when one of them is gone, it says so."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

COMMAND = [sys.executable, "-m", "spyglass", "serve", "spyglass-tiny-v41", "--port", "0", "--device", "cpu"]
JSON = {"content-type": "application/json"}
OPTIONS = ["--tensor-parallel-size", "2", "--threads", "1", "--images", "0"]


@contextlib.contextmanager
def served() -> Iterator[tuple[subprocess.Popen[str], str, list[int]]]:
    """The process, where it answers, and its other ranks."""
    process = subprocess.Popen([*COMMAND, *OPTIONS], stderr=subprocess.PIPE, text=True, process_group=0)
    try:
        assert process.stderr is not None
        told = ""
        while not (found := re.search(r"http://[\d.]+:\d+", told)):
            line = process.stderr.readline()
            assert line, told
            told += line
        while health(found[0])["status"] == "starting":
            time.sleep(0.1)
        yield process, found[0], children(process.pid)
    finally:
        process.kill()
        process.communicate()


def children(pid: int) -> list[int]:
    """Ranks below a process."""
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as listed:
        found = [int(number) for number in listed.read().split()]
    return [child for child in found if b"spyglass.engine.rank" in command(child)]


def command(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as line:
            return line.read()
    except OSError:
        return b""


def health(url: str) -> dict[str, str]:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as refused:
        return dict(json.load(refused))


def ask(url: str) -> str:
    body = {"messages": [{"role": "user", "content": "What shape is a ball?"}], "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), JSON)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def ended(pids: list[int]) -> bool:
    return not any(command(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_told_to_stop_leaves_no_process(sign: int) -> None:
    """Ctrl-C comes to all processes of a terminal's group."""
    with served() as (process, url, ranks):
        assert len(ranks) == 1 and health(url)["status"] == "ok" and ask(url)
        os.killpg(process.pid, sign)
        assert process.wait(60) in (0, -sign, 128 + sign)
        assert ended(ranks)


@pytest.mark.slow
def test_a_server_whose_rank_is_gone_says_so_and_ends_with_an_error() -> None:
    with served() as (process, url, ranks):
        os.kill(ranks[0], signal.SIGKILL)
        expected = f"rank 1 (process {ranks[0]}) has ended with signal SIGKILL"
        while "failed" not in (state := health(url)["status"]):
            time.sleep(0.05)
        assert state == f"failed: {expected}"
        _, told = process.communicate(timeout=60)
        assert process.returncode == 1 and expected in told.splitlines()[-1]
        assert ended(ranks)


@pytest.mark.slow
def test_ranks_end_with_a_server_that_is_killed() -> None:
    with served() as (process, _, ranks):
        process.kill()
        process.wait()
        while not ended(ranks):
            time.sleep(0.1)

"""A headless Chromium over its debugging pipe, so that no driver program and no websocket library is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 30.0


def find_chromium() -> str | None:
    """The program, if this machine has one."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Page:
    """One tab. Messages are JSON objects that end with a zero byte; answers carry the number of their call."""

    def __init__(self, write_to: int, read_from: int) -> None:
        self._write_to, self._read_from = write_to, read_from
        self._held, self._number, self._session = b"", 0, None
        self.complaints: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self.resize(1100, 800)

    def resize(self, width: int, height: int) -> None:
        """The size of the window, in pixels."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        """The colour scheme, light or dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression; promises are waited for."""
        answer = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str, seconds: float = SECONDS) -> Any:
        stop = time.monotonic() + seconds
        while time.monotonic() < stop:
            value = self.run(condition)
            if value:
                return value
            time.sleep(0.05)
        raise AssertionError(f"{condition} did not come true in {seconds} s; the page complained: {self.complaints}")

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_to, json.dumps(message).encode() + b"\0")
        stop = time.monotonic() + SECONDS
        while True:
            answer = self._read(stop)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        """Keep what the page's console would show in red."""
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(event["params"]["exceptionDetails"]))
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.complaints.append(event["params"]["entry"]["text"])

    def _read(self, stop: float) -> dict[str, Any]:
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._read_from], [], [], max(0.0, stop - time.monotonic()))
            assert ready, "Chromium does not answer"
            part = os.read(self._read_from, 1 << 20)
            assert part, "Chromium has ended"
            self._held += part
        line, self._held = self._held.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def chromium(program: str, profile: Path) -> Iterator[Page]:
    """A running browser with one tab; gone afterwards."""
    to_browser, from_us = os.pipe()
    from_browser, to_us = os.pipe()

    def place() -> None:  # the browser reads calls from 3 and writes answers to 4
        keep_read, keep_write = os.dup(to_browser), os.dup(to_us)
        os.dup2(keep_read, 3)
        os.dup2(keep_write, 4)

    flags = ["--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    flags += ["--disable-dev-shm-usage", f"--user-data-dir={profile}", "--hide-scrollbars"]
    process = subprocess.Popen(
        [program, *flags], preexec_fn=place, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        os.close(to_browser)
        os.close(to_us)
        yield Page(from_us, from_browser)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
        os.close(from_us)
        os.close(from_browser)

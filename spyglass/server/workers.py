"""Images unpacked in a few processes that can be ended: what takes too long or too much there never runs here."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from typing import Any

import numpy as np

from spyglass.errors import PromptError, SpyglassError
from spyglass.prompt.build import Pixels
from spyglass.prompt.decode import ImageRules
from spyglass.prompt.tokens import ImagePlan
from spyglass.server.limits import IMAGE_BYTES, IMAGE_CPU_SECONDS, IMAGE_SECONDS

_KEPT = 2  # processes that wait for the next image, some 60 MB each


class ImageWorkers:
    """Unpacks as `unpack_image` does. Any thread may call it; each call has a process of its own meanwhile."""

    def __init__(
        self,
        *,
        cpu_seconds: float = IMAGE_CPU_SECONDS,
        wall_seconds: float = IMAGE_SECONDS,
        memory: int = IMAGE_BYTES,
    ) -> None:
        self._limits = cpu_seconds, wall_seconds, memory
        self._lock = threading.Lock()
        self._waiting: list[subprocess.Popen[bytes]] = []
        self._closed = False

    def __call__(self, file: bytes, rules: ImageRules, plan: ImagePlan, name: str) -> Pixels:
        """The patches of an image.

        Raises:
            PromptError: it cannot be unpacked, or takes too long or too much memory.
            SpyglassError: no process can be started.
        """
        with self._lock:
            process = self._waiting.pop() if self._waiting else None
        if process is None or process.poll() is not None:
            process = self._start()
        goes_on = False
        try:
            error, pixels, goes_on = _ask(process, (file, rules, plan, name))
        except (OSError, EOFError, pickle.UnpicklingError):  # it has ended over this image
            raise PromptError(f"{name} takes too long or too much memory to unpack; send it smaller") from None
        finally:
            with self._lock:
                goes_on = goes_on and len(self._waiting) < _KEPT and not self._closed
                if goes_on:
                    self._waiting.append(process)
            if not goes_on:
                _end(process)
        if error is not None:
            raise PromptError(error)
        return pixels

    def close(self) -> None:
        """End the processes that wait, and later those that work."""
        with self._lock:
            waiting, self._waiting, self._closed = self._waiting, [], True
        for process in waiting:
            _end(process)

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "spyglass.prompt.unpack"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                process_group=0,  # Ctrl+C is for us, who may let answers end
            )
        except OSError as error:
            raise SpyglassError(f"the process that unpacks images cannot be started: {error}") from error
        assert process.stdin is not None
        pickle.dump(self._limits, process.stdin)
        return process


def _ask(process: subprocess.Popen[bytes], image: tuple[Any, ...]) -> tuple[str | None, Pixels, bool]:
    assert process.stdin is not None and process.stdout is not None
    pickle.dump(image, process.stdin)
    process.stdin.flush()
    error, shape, dtype, goes_on = pickle.load(process.stdout)
    pixels = np.empty(shape, dtype)
    buffer = pixels.reshape(-1).view(np.uint8).data
    while buffer:
        count = process.stdout.readinto(buffer)  # type: ignore[attr-defined]  # a buffered reader has it
        if not count:
            raise EOFError
        buffer = buffer[count:]
    return error, pixels, goes_on


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()

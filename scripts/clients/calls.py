"""Make calls by name and print what came of each."""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Callable, Iterable
from json import loads
from typing import Any


def run(
    calls: Callable[[str, str], Iterable[tuple[str, Callable[[], Any]]]], is_sound: Callable[[str, Any], bool]
) -> int:
    """Make the calls to the server whose address is the only argument, at its first model; how many failed."""
    url = sys.argv[1].rstrip("/")
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        model = loads(answer.read())["data"][0]["id"]
    failed = 0
    for name, call in calls(url, model):
        try:
            value = call()
            sound, shown = is_sound(name, value), repr(value)
        except Exception as error:
            sound, shown = False, f"{type(error).__name__} {error}"
        print("ok  " if sound else "FAIL", name, shown[:160].replace("\n", " "), flush=True)
        failed += not sound
    return failed

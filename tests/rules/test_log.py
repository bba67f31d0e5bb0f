"""The log's index finds every entry: one table, before the first of them, in which each is linked."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

LOG = (Path(__file__).resolve().parents[2] / "docs" / "log.md").read_text(encoding="utf-8")


def anchor(heading: str) -> str:
    """How a heading is linked to."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def test_every_entry_is_linked_from_one_index() -> None:
    assert LOG.count("<!-- index -->") == LOG.count("<!-- end of index -->") == 1
    index = LOG.partition("<!-- index -->")[2].partition("<!-- end of index -->")[0]
    topics = Counter(re.findall(r"^\| ([^|\[]+) \|", index, re.MULTILINE))
    assert set(topics.values()) == {1}, topics
    entries = {anchor(heading) for heading in re.findall(r"^## (.*)$", LOG, re.MULTILINE)}
    linked = re.findall(r"\]\(#([^)]*)\)", index)
    assert set(linked) <= {anchor(heading) for heading in re.findall(r"^#+ (.*)$", LOG, re.MULTILINE)}
    assert entries <= set(linked), entries - set(linked)

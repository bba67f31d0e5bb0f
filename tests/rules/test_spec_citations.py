"""Every section of a specification that the code cites is there to be read."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CITED = re.compile(r"[Ss]pec (v41?) (\d+(?:\.\d+)?)((?:(?:,| and) \d+\.\d+)*)")
HEADING = re.compile(r"^#+ (\d+(?:\.\d+)?)\.? ", re.MULTILINE)


def test_cited_sections_exist() -> None:
    there = {v: set(HEADING.findall((ROOT / f"docs/spec/{v}.md").read_text(encoding="utf-8"))) for v in ("v4", "v41")}
    cited: dict[tuple[str, str], str] = {}
    for path in (path for folder in ("spyglass", "tests", "docs", "scripts") for path in (ROOT / folder).rglob("*")):
        if path.suffix in (".py", ".cpp", ".h", ".md") and "spec" not in path.parts:
            for version, first, more in CITED.findall(path.read_text(encoding="utf-8")):
                for section in [first, *re.findall(r"\d+\.\d+", more)]:
                    cited[version, section] = str(path.relative_to(ROOT))
    assert len(cited) > 50
    missing = {f"spec {v} {s}": path for (v, s), path in cited.items() if s not in there[v]}
    assert not missing

"""`python -m tests.server.screenshot docs`: the page with a real answer, for the README and `docs/server.md`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.server.app import create_app
from spyglass.tiny_world.cases import make_case
from tests.server.chromium import chromium, find_chromium
from tests.server.parts import running
from tests.server.test_playground import ask, drop_picture

MODEL, SEED, CASE = "spyglass-tiny-v4", 7, 24
SHOTS = (("playground", 1000, 640, "light"), ("playground-phone", 390, 700, "dark"))


def main(folder: Path) -> None:
    """Drop an image on the page, ask, keep what the browser shows at two sizes in both colour schemes."""
    program = find_chromium()
    assert program is not None, "this needs Chromium"
    case = make_case(SEED, CASE, "test", kinds=["grounding"])
    with (
        running(create_app(LLM(MODEL), ServerConfig())) as server,
        tempfile.TemporaryDirectory() as profile,
        chromium(program, Path(profile)) as page,
    ):
        page.open(server.url)
        page.wait_for("document.getElementById('dot').className === 'ready' && document.getElementById('model').value")
        page.run("document.getElementById('grid').click()")
        drop_picture(page, case.images[0])
        ask(page, case.question)
        page.wait_for("document.querySelector('.facts')?.textContent.includes('tokens in')")
        page.run("document.querySelector('.user .frame').click(); document.activeElement.blur()")
        page.wait_for("document.querySelectorAll('#list li').length === 1")
        for name, width, height, scheme in SHOTS:
            page.resize(width, height)
            page.prefer(scheme)
            page.run("document.getElementById('log').scrollTop = 1e6")
            page.screenshot(folder / f"{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

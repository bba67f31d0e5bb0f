"""`python -m tests.server.screenshot docs/playground.png`: the page in the README, with a real answer."""

from __future__ import annotations

import base64
import io
import json
import sys
import tempfile
from pathlib import Path

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.server.app import create_app
from spyglass.tiny_world.cases import make_case
from tests.server.chromium import chromium, find_chromium
from tests.server.parts import running

MODEL, SEED, CASE = "spyglass-tiny-v4", 7, 24


def main(target: Path) -> None:
    """Drop a picture on the page, ask, keep what the browser shows."""
    program = find_chromium()
    assert program is not None, "this needs Chromium"
    case = make_case(SEED, CASE, "test", kinds=["grounding"])
    file = io.BytesIO()
    case.pictures[0].save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    with (
        running(create_app(LLM(MODEL), ServerConfig())) as server,
        tempfile.TemporaryDirectory() as profile,
        chromium(program, Path(profile)) as page,
    ):
        page.open(server.url)
        page.wait_for("document.getElementById('dot').className === 'ready' && document.getElementById('model').value")
        page.run("document.getElementById('grid').click()")
        page.run(
            f"""(async () => {{
            const held = new DataTransfer(), blob = Uint8Array.from(atob('{url.split(",")[1]}'), c => c.charCodeAt(0));
            held.items.add(new File([blob], 'picture.png', {{type: 'image/png'}}));
            document.body.dispatchEvent(new DragEvent('drop', {{bubbles: true, dataTransfer: held}}));
            }})()"""
        )
        page.wait_for("document.querySelector('#tray figcaption')?.textContent.includes('tokens')")
        page.run(f"document.getElementById('say').value = {json.dumps(case.question)}")
        page.run("document.getElementById('send').click()")
        page.wait_for("document.querySelector('.facts')?.textContent.includes('tokens in')")
        page.screenshot(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""`spyglass run --batch FILE`: what stands between the option and `spyglass.server.batch`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from spyglass.errors import ConfigError
from spyglass.progress import Progress

if TYPE_CHECKING:
    from spyglass.engine import LLM

_SUFFIX = ".answers.jsonl"


def output_path(batch: Path, output: Path | None) -> Path:
    """Where the answers go.

    Raises:
        ConfigError: that is the file of the requests, or lies in no folder.
    """
    path = output or batch.with_name(batch.name.removesuffix(".jsonl") + _SUFFIX)
    if path.resolve() == batch.resolve():
        raise ConfigError(f"--output {path} is the file of the requests; name another")
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path} lies in a folder that does not exist")
    return path


def run_file(llm: LLM, batch: Path, output: Path) -> int:
    """Answer the lines of a file that have no answer yet; 0 if all went well, 1 if some were refused or
    faulty, now or before.

    Raises:
        PromptError: the file of requests, or what stands in the file of answers, is not what it should be.
    """
    from spyglass.config.server import ServerConfig
    from spyglass.server.app import served_by
    from spyglass.server.batch import answered, batch_lines, check_batch, run_batch
    from spyglass.server.protocols.endpoints import make_endpoints

    endpoints = make_endpoints(served_by(llm, ServerConfig()))
    urls = [endpoint.path for endpoint in endpoints]
    (total, faults), done = check_batch(batch, urls), answered(output)
    if faults:
        print(f"spyglass: {faults}", file=sys.stderr)
    with (
        open(output, "a", encoding="utf-8") as out,
        Progress(total=total, initial=len(done), unit="request", desc="answering") as bar,
    ):
        left = (line for line in batch_lines(batch, urls) if line.custom_id not in done)
        good, bad = run_batch(llm, endpoints, left, out, lambda fine: bar.update())
    well = sum(done.values())
    earlier = f"; before: {well} answered, {len(done) - well} refused" if done else ""
    print(f"spyglass: {good} answered, {bad} refused{earlier}: {output}", file=sys.stderr)
    return 0 if bad == 0 and well == len(done) and not faults else 1

"""A line of the log: one JSON object, loud where we are at fault, silent about what says nothing."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading

import pytest

from spyglass.engine.stats import EngineStats
from spyglass.server.line_writer import LineWriter
from spyglass.server.log import Record, log_request
from spyglass.server.log_lines import JsonLines, PlainLines, log_throughput, set_up_logs

LOGGERS = ("spyglass", "uvicorn", "py.warnings", "spyglass.audit")


@pytest.mark.parametrize(
    ("status", "level"), [(200, "INFO"), (400, "INFO"), (429, "INFO"), (500, "ERROR"), (503, "INFO")]
)
def test_only_faults_of_ours_are_errors_in_the_log(status: int, level: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="spyglass.server"):
        log_request(Record(request_id="a", method="POST", path="/x", status=status))
    assert [record.levelname for record in caplog.records] == [level]


def test_a_request_is_one_line_with_what_there_is_to_say(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="spyglass.server"):
        log_request(Record(request_id="a", method="POST", path="/x", status=200, total_s=0.12345678, finish=("stop",)))
    line = JsonLines().format(caplog.records[0])
    found = json.loads(line)
    assert "\n" not in line and found.pop("time").endswith("Z")
    usual = {"level": "info", "logger": "spyglass.server", "message": "request"}
    said = {"request_id": "a", "method": "POST", "path": "/x", "status": 200, "total_s": 0.123457, "finish": ["stop"]}
    assert found == usual | said


def test_a_fault_brings_its_traceback_in_the_same_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        try:
            raise KeyError("lost")
        except KeyError:
            logging.getLogger("spyglass.server").exception("a request failed")
    line = JsonLines().format(caplog.records[0])
    assert "\n" not in line and "KeyError: 'lost'" in json.loads(line)["traceback"]


def test_on_a_terminal_a_line_is_for_people(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="spyglass.server"):
        log_request(Record(request_id="a", method="POST", path="/x", status=200, total_s=0.12345678, finish=("stop",)))
    line = PlainLines().format(caplog.records[0])
    assert line[8:] == " POST /x 200, request_id a, finish stop, total_s 0.123" and line[2] == line[5] == ":"
    fault = logging.LogRecord("spyglass.server", logging.ERROR, "", 0, "a request failed", None, None)
    assert PlainLines().format(fault)[8:] == " error: a request failed"


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("form", ["auto", "text", "json"])
def test_the_form_of_the_log_follows_the_option_or_the_terminal(
    form: str, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stderr", screen)
    kept = {name: (logging.getLogger(name).handlers, logging.getLogger(name).propagate) for name in LOGGERS}
    try:
        set_up_logs("info", form)  # type: ignore[arg-type]
        logging.getLogger("spyglass.server").info("here")
        for handler in logging.getLogger("spyglass").handlers:
            handler.flush()
    finally:
        logging.captureWarnings(False)
        for name, (handlers, propagate) in kept.items():
            logging.getLogger(name).handlers, logging.getLogger(name).propagate = handlers, propagate
    assert screen.getvalue().startswith("{") == (form == "json" or (form == "auto" and not terminal))


def test_throughput_is_told_while_steps_are_taken_and_not_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    busy = EngineStats(steps=5, running=2, prompt_tokens=300, generated_tokens=40, prefix_queries=100, prefix_hits=25)
    states = [busy, busy, EngineStats(), EngineStats()]

    def read() -> EngineStats:
        if not states:
            raise asyncio.CancelledError
        return states.pop()

    with caplog.at_level(logging.INFO, logger="spyglass.server"), pytest.raises(asyncio.CancelledError):
        asyncio.run(log_throughput(read, 0.001))
    (line,) = [json.loads(JsonLines().format(record)) for record in caplog.records]
    assert line["message"] == "throughput" and line["running"] == 2 and line["prefix_hits"] == 0.25
    assert line["prompt_tokens_per_s"] == pytest.approx(line["generated_tokens_per_s"] * 7.5, rel=0.1)


class Stuck(io.StringIO):
    """A reader that does not read until it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.let, self.fails = threading.Event(), False

    def write(self, text: str) -> int:
        self.let.wait()
        if self.fails:
            raise OSError(28, "No space left on device")
        return super().write(text)


def log(writer: LineWriter, text: str) -> None:
    writer.handle(logging.LogRecord("x", logging.INFO, "", 0, text, (), None))


def test_who_logs_waits_for_no_reader_and_lines_that_are_left_out_are_counted() -> None:
    out = Stuck()
    writer = LineWriter(out, most=3)
    for number in range(10):
        log(writer, f"line {number}")
    assert writer.left_out >= 6, "nobody has read a line, and all were logged at once"
    out.let.set()
    writer.flush()
    log(writer, "the last")
    writer.flush()
    lines = out.getvalue().splitlines()
    assert lines.count("line 0") == 1 and lines[-1] == "the last"
    assert sum("lines of the log are left out" in line for line in lines) == 1
    assert len(lines) == 10 - writer.left_out + 2


def test_a_full_disk_costs_lines_and_no_request() -> None:
    out = Stuck()
    out.let.set()
    out.fails = True
    writer = LineWriter(out)
    log(writer, "lost")
    writer.flush()
    out.fails = False
    log(writer, "kept")
    writer.flush()
    told, kept = out.getvalue().splitlines()
    assert writer.left_out == 1 and told.startswith("1 lines of the log are left out") and kept == "kept"

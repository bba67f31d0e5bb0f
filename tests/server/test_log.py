"""A line of the log: one JSON object, loud where we are at fault, silent about what says nothing."""

from __future__ import annotations

import io
import json
import logging
import threading

import pytest

from spyglass.server.log import JsonLines, LineWriter, Record, log_request


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


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("x", logging.INFO, "", 0, text, (), None)


def test_who_logs_waits_for_no_reader_and_lines_that_are_left_out_are_counted() -> None:
    out = Stuck()
    writer = LineWriter(out, most=3)
    for number in range(10):
        writer.handle(record(f"line {number}"))
    assert writer.left_out >= 6, "nobody has read a line, and all were logged at once"
    out.let.set()
    writer.flush()
    lines = out.getvalue().splitlines()
    assert lines.count("line 0") == 1 and f"{writer.left_out} lines left out" in out.getvalue()
    assert len(lines) == 10 - writer.left_out + 1


def test_a_full_disk_costs_lines_and_no_request() -> None:
    out = Stuck()
    out.let.set()
    out.fails = True
    writer = LineWriter(out)
    writer.handle(record("lost"))
    writer.flush()
    out.fails = False
    writer.handle(record("kept"))
    writer.flush()
    assert writer.left_out == 1 and out.getvalue().endswith('1 lines left out"}\nkept\n')

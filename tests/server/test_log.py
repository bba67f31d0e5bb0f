"""A line of the log: one JSON object, loud where we are at fault, silent about what says nothing."""

from __future__ import annotations

import json
import logging

import pytest

from spyglass.server.log import JsonLines, Record, log_request


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

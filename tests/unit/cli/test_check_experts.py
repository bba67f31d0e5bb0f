"""`spyglass check --plan` of experts in host memory: where they lie, and what the bandwidths of a machine allow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from spyglass.checkpoint.random import new_checkpoint
from spyglass.cli.main import main
from spyglass.machine import Device, Machine

GB = 10**9


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flash")
    new_checkpoint(folder, "flash-vision", headers_only=True)
    return folder


def rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    main(["check", str(folder), "--plan", "--json"])
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)["experts"]}


def with_gpu(monkeypatch: pytest.MonkeyPatch, gpu: int, ram: int) -> None:
    """A machine of so many GB of both, whose GPU reads 4 TB/s and whose host 100 GB/s."""
    machine = Machine(Device("RAM", ram * GB, ram * GB), (Device("card", gpu * GB, gpu * GB),))
    monkeypatch.setattr("spyglass.machine.this_machine", lambda: machine)
    monkeypatch.setattr("spyglass.bench.gpu.read_bandwidth", lambda: 4e12)
    monkeypatch.setattr("spyglass.bench.gpu.host_bandwidth", lambda: 1e11)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def test_smaller_cards_leave_more_experts_to_the_host(
    flash: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spyglass.machine.this_machine", lambda: Machine(Device("RAM", 64 * GB, 32 * GB), ()))
    found = rows(flash, capsys)
    assert list(found) == ["24 GB", "32 GB", "48 GB", "80 GB", "96 GB", "141 GB"]
    sizes = [row["host_bytes"] for row in found.values()]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 43 * 3_422_552_064
    assert found["24 GB"]["token"]["host"] == pytest.approx(sizes[0] * 6 / 256)


def test_what_a_machine_allows_follows_from_its_bandwidths(
    flash: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu(monkeypatch, 140, 128)
    row = rows(flash, capsys)["card"]
    seconds = row["token"]["device"] / 4e12 + row["token"]["host"] / 1e11
    assert row["tokens_per_second"]["1"] == pytest.approx(1 / seconds)
    assert main(["check", str(flash), "--plan"]) == 0
    out = capsys.readouterr().out
    assert f"at 4.00 TB/s and 100 GB/s, measured now, at most {1 / seconds:,.0f} (1)" in out
    assert "but not into" not in out


def test_what_is_missing_on_the_host_is_said(
    flash: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu(monkeypatch, 26, 128)
    main(["check", str(flash), "--plan"])
    out = capsys.readouterr().out
    assert "43 of 43 layers' experts, 147.17 GB, would be in host memory and 128.00 GB are free there, 19.17 GB" in out
    assert "but not into this machine's free memory" in out

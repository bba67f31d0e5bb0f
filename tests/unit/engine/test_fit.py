"""What is free decides what caches may take."""

from __future__ import annotations

import pytest
import torch

from spyglass.engine import fit


@pytest.mark.parametrize(("free", "most"), [(800, 100), (0, 0), (None, 1 << 30)])
def test_the_prefix_cache_takes_an_eighth_of_what_is_free_unless_told(
    free: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "free_memory", lambda place: free)
    assert fit.prefix_bytes(torch.device("cpu")) == most


@pytest.mark.parametrize(("free", "told"), [(64 << 20, True), (2 << 30, False), (None, False)])
def test_little_shared_memory_for_several_gpus_is_told_with_what_is_missing(
    free: int | None, told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("spyglass.engine.fit.shared_memory", lambda: free)
    fit.require_devices(torch.device("cuda"), 2)
    assert ("/dev/shm has 64 MB free, 960 MB less" in caplog.text) == told
    caplog.clear()
    fit.require_devices(torch.device("cuda"), 1)
    fit.require_devices(torch.device("cpu"), 2)
    assert not caplog.text, "nothing else needs it"

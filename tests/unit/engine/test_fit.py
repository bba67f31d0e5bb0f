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

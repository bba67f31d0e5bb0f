"""Op tests draw the same numbers in every run."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)

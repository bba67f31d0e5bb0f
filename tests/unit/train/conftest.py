"""A tiny checkpoint with its tokenizer, made once for the tests of the train room."""

from __future__ import annotations

from pathlib import Path

import pytest

from spyglass.checkpoint.random import new_checkpoint


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    new_checkpoint(folder, "tiny", seed=0)
    return folder

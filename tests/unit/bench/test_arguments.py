"""What a person may type for a count."""

from __future__ import annotations

import argparse

import pytest

from spyglass.bench.arguments import positive
from spyglass.cli.main import main


def test_counts_are_whole_numbers_of_at_least_one() -> None:
    assert positive("12") == 12
    for text in ("0", "-1", "x", "1.5", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="at least 1"):
            positive(text)


def test_a_missing_benchmark_is_told_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench"])
    text = capsys.readouterr().err
    assert "image,load,model" in text and "rest" not in text

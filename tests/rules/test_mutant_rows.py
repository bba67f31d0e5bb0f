"""Rows of `make mutants` must fit the files they change, so that they never rot unseen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.mutant import Mutant
from tests.mutants.rows import ROWS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", ROWS, ids=[f"{row.file}: {row.fault}" for row in ROWS])
def test_a_row_fits_its_file_exactly_once_and_leaves_it_valid(mutant: Mutant) -> None:
    mutant.mutate((ROOT / mutant.file).read_text(encoding="utf-8"))
    for word in mutant.tests.split():
        if word.startswith("tests/"):
            assert (ROOT / word.split("::")[0]).exists(), word


def test_a_row_that_does_not_fit_is_refused() -> None:
    for old, new in (("absent", "x"), ("a", "x"), ("b", "b")):
        with pytest.raises(ValueError, match="file"):
            Mutant("file", old, new, "tests", "").mutate("a a b")


def test_no_two_rows_plant_the_same_fault() -> None:
    edits = [(row.file, row.old, row.new) for row in ROWS]
    assert len(edits) == len(set(edits))

"""Rows of `make mutants` must fit the files they change, so that they never rot unseen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.mutant import Mutant
from tests.mutants.rows import ROWS
from tests.mutants.syntax import edits

ROOT = Path(__file__).resolve().parents[2]


def test_every_row_fits_its_file_exactly_once_and_leaves_it_valid() -> None:
    wrong = []
    for row in ROWS:
        try:
            row.mutate((ROOT / row.file).read_text(encoding="utf-8"))
        except (ValueError, SyntaxError, OSError) as error:
            wrong.append(str(error))
        wrong += [word for word in row.tests.split() if word[:6] == "tests/" and not (ROOT / word).exists()]
    assert not wrong, "\n".join(wrong)


def test_a_row_that_does_not_fit_is_refused() -> None:
    for old, new in (("absent", "x"), ("a", "x"), ("b", "b")):
        with pytest.raises(ValueError, match="file"):
            Mutant("file", old, new, "tests", "").mutate("a a b")


def test_no_two_rows_plant_the_same_fault() -> None:
    edits = [(row.file, row.old, row.new) for row in ROWS]
    assert len(edits) == len(set(edits))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", {"a <= b"}),
        ("(a) is not (b)", {"(a) is (b)"}),
        ("x = a - é * b", {"x = a + é * b", "x = (a)", "x = (é * b)", "x = a - é / b", "x = a - (é)", "x = a - (b)"}),
        ("x = f'{a}' % 10", {"x = f'{a}' % (10 + 1)"}),
        ("if a and b:\n    c()", {"if a or b:\n    c()", "if (not (a and b)):\n    c()", "if a and b:\n    pass"}),
        ("if a:\n    raise E(f'{1 + 1}')", {"if (not (a)):\n    raise E(f'{1 + 1}')", "if a:\n    pass"}),
        ("def f():\n    'd'\n    g(x)", {"def f():\n    'd'\n    return; g(x)", "def f():\n    'd'\n    pass"}),
        ("def f(a: int = 3) -> list[int]:\n    return a", {"def f(a: int = (3 + 1)) -> list[int]:\n    return a"}),
        ("x: tuple[int, 3] = 'text'", set()),
    ],
)  # fmt: skip
def test_the_general_mutator_plants_these_faults(source: str, expected: set[str]) -> None:
    found = {edit.apply(source) for edit in edits(source)}
    assert found == expected


def test_the_general_mutator_keeps_to_the_lines_it_is_given() -> None:
    assert {edit.line for edit in edits("a + b\nc + d\ne + f\n", {2})} == {2}

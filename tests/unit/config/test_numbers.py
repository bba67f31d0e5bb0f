"""Text of people becomes a number only where it plainly is one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spyglass.config.fields import integer, number

NO_NUMBERS = [
    "",
    " 1",
    "1 ",
    "1\n",
    "+1",
    "--1",
    "1_0",
    "\u0661",
    "\uff11",
    "²",
    "0x1",
    "1,0",
    "one",
    "nan",
    "inf",
    "-Infinity",
]


@given(value=st.integers())
def test_an_integer_in_decimal_digits_is_read(value: int) -> None:
    assert integer(str(value)) == value


@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_a_finite_number_is_read_exactly(value: float) -> None:
    assert number(repr(value)) == value and number(f"{value:.17e}") == value


@pytest.mark.parametrize("text", [*NO_NUMBERS, "1.0", "1e3", "9" * 5000])
def test_what_is_written_otherwise_is_no_integer(text: str) -> None:
    with pytest.raises(ValueError):
        integer(text)


@pytest.mark.parametrize("text", [*NO_NUMBERS, ".", "1e", "e3", "1e999", "1.0.0", "1e+_3"])
def test_what_is_written_otherwise_is_no_number(text: str) -> None:
    with pytest.raises(ValueError):
        number(text)


def test_points_and_exponents_may_be_written_in_the_usual_ways() -> None:
    assert [number(text) for text in (".5", "5.", "-0.5e-1", "1E+2", "007")] == [0.5, 5.0, -0.05, 100.0, 7.0]


@pytest.mark.parametrize("read", [integer, number])
def test_a_refusal_shows_the_beginning_of_what_was_written(read: Callable[[str], float]) -> None:
    with pytest.raises(ValueError, match=r"'x9+' is no") as caught:
        read("x" + "9" * 5000)
    assert len(str(caught.value)) < 100

"""What an adapter may be called: one rule for command lines, Python and HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from spyglass.errors import AdapterError
from spyglass.lora.use import adapter_name

NO_NAMES: list[Any] = [
    "", ".", "..", "../x", "a/b", "a\\b", " a", "a ", "a b", "a\n", "a\0", "\x1b[31m", "-a", "_a", ":a", "é", "\u0430",
    "x" * 129, "x" * 10_000, None, 5,
]  # fmt: skip


@pytest.mark.parametrize("name", ["a", "7", "sql-v2.1", "Org_x:latest", "x" * 128])
def test_letters_digits_and_four_signs_make_a_name(name: str) -> None:
    assert adapter_name(name) == name


@pytest.mark.parametrize("name", NO_NAMES, ids=repr)
def test_everything_else_is_refused_briefly_and_told_what_a_name_may_be(name: Any) -> None:
    with pytest.raises(AdapterError, match="a name is 1 to 128 letters") as caught:
        adapter_name(name)
    assert len(str(caught.value)) < 400 and str(caught.value).isprintable()


def test_a_model_s_own_name_is_none_for_an_adapter() -> None:
    adapter_name("b", ["a"])
    with pytest.raises(AdapterError, match="'a' is both the model and an adapter"):
        adapter_name("a", ["a"])

"""Memory that requests hold: shared fairly, given back exactly once."""

from __future__ import annotations

import pytest

from spyglass.errors import OverloadedError
from spyglass.server.memory import MemoryBudget, Reservation


def test_one_alone_may_hold_more_than_many_together() -> None:
    held = MemoryBudget(100)
    alone, other = Reservation(held), Reservation(held)
    alone.take(90)
    alone.take(90)
    with pytest.raises(OverloadedError, match="take 180 bytes, 100 may be"):
        other.take(1)
    assert held.total == 180


def test_together_they_hold_exactly_what_there_is() -> None:
    held = MemoryBudget(100)
    first, second = Reservation(held), Reservation(held)
    first.take(60)
    with pytest.raises(OverloadedError):
        second.take(41)
    second.take(40)
    with pytest.raises(OverloadedError):
        first.take(1)
    assert held.total == 100


def test_everything_is_given_back_once() -> None:
    held = MemoryBudget(100)
    first, second = Reservation(held), Reservation(held)
    first.take(20)
    first.take(30)
    second.take(10)
    first.release()
    assert held.total == 10
    first.release()
    assert held.total == 10
    second.release()
    assert held.total == 0

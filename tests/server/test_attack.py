"""The short form of `make attack`, and what its judge says of runs that break the law."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.attack import LAW_SECONDS, MOST_GROWTH, Noticed, Outcome, attack

SECONDS = 60.0
NOTHING = {"seen": {}, "wrong": [], "slowest": {}}
FINE = Outcome(
    alone=Noticed(pauses=[0.05], health=[0.01], answers=3),
    beside=Noticed(pauses=[0.2], health=[0.2], answers=3),
    attackers=NOTHING,
    files=NOTHING,
    before=1 << 30,
    peak=2 << 30,
    after=1 << 30,
    loop={"0.25": 99, "2.5": 99, "+Inf": 99},
)


@pytest.mark.slow
def test_beside_attackers_every_answer_is_right_and_nobody_waits_much_longer_than_alone(tiny_folder: Path) -> None:
    outcome = asyncio.run(attack(tiny_folder, SECONDS))
    assert not (faults := outcome.faults(absolute=False)), faults[:5]
    kinds = {what.partition(" ")[0] for what in outcome.attackers["seen"]}
    assert {"mutated", "raw", "counted", "text", "picture"} <= kinds, outcome.attackers["seen"]
    assert outcome.files["seen"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"beside": Noticed(pauses=[LAW_SECONDS + 0.1], answers=1)}, "the longest pause is 0.35 s"),
        ({"beside": Noticed(health=[0.6], answers=1)}, "the longest health is 0.60 s"),
        ({"beside": Noticed()}, "no answer came"),
        ({"alone": Noticed(wrong=["a crossed answer"])}, "a crossed answer"),
        ({"attackers": {**NOTHING, "wrong": ["raw: a 500"]}}, "a 500"),
        ({"files": {**NOTHING, "wrong": ["config: TypeError"]}}, "config: TypeError"),
        ({"attackers": {**NOTHING, "slowest": {"raw": 1.5}}}, "a refusal of raw took 1.5 s"),
        ({"loop": {"0.25": 97, "+Inf": 99}}, "the event loop was later than 0.25 s 2 times"),
        ({"after": (1 << 30) + MOST_GROWTH + 1}, "are kept after the attacks"),
    ],
)
def test_what_breaks_the_law_is_named(change: dict[str, object], fault: str) -> None:
    assert FINE.faults(absolute=True) == []
    assert any(fault in told for told in replace(FINE, **change).faults(absolute=True))  # type: ignore[arg-type]


def test_a_slow_machine_is_judged_by_what_clients_notice_alone() -> None:
    slow = replace(FINE, alone=Noticed(pauses=[2.0], answers=1), beside=Noticed(pauses=[6.0], answers=1))
    assert slow.faults(absolute=False) == [] and slow.faults(absolute=True)
    stuck = replace(slow, beside=Noticed(pauses=[6.5] * 200, answers=1))
    assert "the longest p99 pause is 6.50 s, at most 6.25 may be" in stuck.faults(absolute=False)[0]
    once = replace(slow, beside=Noticed(pauses=[0.1] * 200 + [23.0], answers=1))
    assert "the longest pause is 23.00 s" in once.faults(absolute=False)[0]

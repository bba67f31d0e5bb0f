"""Sampling parameters are refused by name when they mean nothing."""

from __future__ import annotations

from typing import Any

import pytest

from spyglass.engine.request import SamplingParams
from spyglass.errors import PromptError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("top_k", 2.0),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("stop", [""]),
        ("stop", [3]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("ignore_eos", 1),
        ("logprobs", -1),
        ("prompt_logprobs", True),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(PromptError, match=field):
        SamplingParams(**{field: value})


def test_borders_are_allowed() -> None:
    SamplingParams(temperature=0, top_p=1, top_k=0, min_p=1, seed=2**64 - 1, max_tokens=0, logprobs=0)
    SamplingParams(presence_penalty=-2, frequency_penalty=2, repetition_penalty=0.01, max_tokens=None)


def test_one_stop_string_is_not_taken_for_its_letters() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_only_penalties_make_the_sampler_keep_track_of_tokens() -> None:
    assert not SamplingParams(top_p=0.5, temperature=0).penalised
    for field in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{field: 0.5}).penalised

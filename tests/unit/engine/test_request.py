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
        ("temperature", 1.1e6),
        ("temperature", 10**400),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("top_k", 2.0),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-40),
        ("repetition_penalty", 1e39),
        ("repetition_penalty", 10**400),
        ("presence_penalty", 2.1),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", -2.1),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        pytest.param("seed", 10**5000, id="seed-longer-than-python-spells-out"),
        ("stop", 3),
        ("stop", [""]),
        ("stop", [3]),
        ("stop_token_ids", 3),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("ignore_eos", 1),
        ("logprobs", -1),
        ("logprobs", 1001),
        ("prompt_logprobs", True),
        ("prompt_logprobs", 10**9),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(PromptError, match=field):
        SamplingParams(**{field: value})


def test_borders_are_allowed() -> None:
    SamplingParams(temperature=0, top_p=1, top_k=0, min_p=1, seed=2**64 - 1, max_tokens=0, logprobs=0)
    SamplingParams(presence_penalty=-2, frequency_penalty=2, repetition_penalty=0.01, max_tokens=None)
    SamplingParams(temperature=1e6, repetition_penalty=100, top_k=10**400, max_tokens=10**400, prompt_logprobs=1000)


def test_one_stop_string_is_not_taken_for_its_letters() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_stop_lists_that_a_client_sends_as_null_are_empty() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None)  # type: ignore[arg-type]
    assert params.stop == params.stop_token_ids == ()


def test_only_penalties_make_the_sampler_keep_track_of_tokens() -> None:
    assert not SamplingParams(top_p=0.5, temperature=0).penalised
    for field in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{field: 0.5}).penalised

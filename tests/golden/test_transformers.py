"""Text logits against transformers' `deepseek_v4` on the same weights, fp32 plain; made by make_transformers.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spyglass.config import parse_model_config
from spyglass.model import VisionLanguageModel
from spyglass.ops.table import describe
from tests.driver import Part, memory_for, prefill, run, text_tokens
from tests.golden.oracle_case import COLUMNS, LENGTHS, LONG, LONG_ROWS, VALUES, config, prompt, weights
from tests.small_models import PLACES, build_model, ops_of
from tests.tolerance import PLAIN_LOGITS, assert_close, assert_same_argmax

AT_ONCE = 6000  # tokens of one step


@pytest.fixture(scope="module", params=PLACES, ids=str)
def model(request: pytest.FixtureRequest) -> VisionLanguageModel:
    return build_model(config(), weights(), device=request.param[0], ops=ops_of(request.param))


@pytest.fixture(scope="module")
def theirs(golden: Path) -> dict[str, Any]:
    with np.load(golden / "v4" / "transformers.npz") as found:
        return dict(found)


def groups(lengths: list[int]) -> Iterator[list[int]]:
    """Lengths that fit one step together."""
    group: list[int] = []
    for length in lengths:
        if group and sum(group) + length > AT_ONCE:
            yield group
            group = []
        group.append(length)
    yield group


def last_rows(model: VisionLanguageModel, lengths: list[int]) -> torch.Tensor:
    """Logits of the last row of a prompt of each length, many prompts in one step."""
    rows = []
    for group in groups(lengths):
        memory = memory_for(model, len(group), max(group))
        parts = [Part(sequence=s, tokens=text_tokens(prompt(n)), start=0) for s, n in enumerate(group)]
        rows.append(run(model, memory, parts)[np.cumsum(group) - 1])
    return torch.cat(rows)


def some(theirs: dict[str, Any], lengths: list[int]) -> dict[str, Any]:
    """Their last rows for these lengths."""
    index = [LENGTHS.index(length) for length in lengths]
    return {key: value[index] for key, value in theirs.items() if key.startswith("last")}


def check(ours: torch.Tensor, theirs: dict[str, Any], which: str) -> None:
    assert_close(ours[:, COLUMNS], theirs[which], PLAIN_LOGITS, which)
    assert_same_argmax(ours, theirs[f"{which}_argmax"], PLAIN_LOGITS, which)


def test_prompts_around_the_borders_of_groups_agree(model: VisionLanguageModel, theirs: dict[str, Any]) -> None:
    lengths = [*range(1, 17), *range(125, 134), 255, 256, 257, 383, 384, 385, 511, 512, 513, 600]
    check(last_rows(model, lengths), some(theirs, lengths), "last")


@pytest.mark.slow
def test_every_length_up_to_600_agrees(model: VisionLanguageModel, theirs: dict[str, Any]) -> None:
    """All residues modulo 4 and 128. Where faster ops run too, the defining ones take every fifth long prompt."""
    lengths = list(LENGTHS)
    build = model.options.build
    if set(build.ops.chosen.values()) == {"reference"} != set(describe(build.device.type, "float32").values()):
        lengths = [*range(1, 133), *range(133, 601, 5)]
    check(last_rows(model, lengths), some(theirs, lengths), "last")


@pytest.mark.slow
def test_a_prompt_long_enough_for_selection_agrees(model: VisionLanguageModel, theirs: dict[str, Any]) -> None:
    """Behind 2,051 tokens the indexer leaves entries out."""
    check(prefill(model, text_tokens(prompt(LONG)))[LONG_ROWS], theirs, "long")


def test_selection_matters_in_the_long_prompt(model: VisionLanguageModel, theirs: dict[str, Any]) -> None:
    """So that the test above cannot pass for the wrong reason: attending everything misses its bound."""
    build = model.options.build
    wide = parse_model_config({**VALUES, "index_topk": LONG}, "oracle")
    attending = build_model(wide, weights(), device=build.device.type, ops=build.ops)
    every = prefill(attending, text_tokens(prompt(LONG)))[LONG_ROWS]
    behind = np.abs(every.numpy()[:, COLUMNS] - theirs["long"]).max(axis=-1)
    first = 2051 - LONG_ROWS.start
    assert behind[:first].max() < PLAIN_LOGITS.absolute < np.median(behind[first + 50 :])

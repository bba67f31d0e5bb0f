"""Planning, layout, patches and visibility against the official preprocessing, number for number and bit for bit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spyglass.prompt import (
    ImagePlan,
    TokenKind,
    normalisation_table,
    normalise,
    patchify,
    plan_image,
    span_v4,
    span_v41,
    visible_extra,
    window_range,
)
from tests.released import V4_VISION, V41_VISION

DATA = Path(__file__).parent / "data" / "pictures"
VISION = {"v4": V4_VISION, "v41": V41_VISION}
VOCABULARY = 129280
V41_CODES = {TokenKind.START: "0", TokenKind.IMAGE: "1", TokenKind.NEWLINE: "2", TokenKind.END: "3"}


def load(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text())


def plan_of(rows: int, columns: int) -> ImagePlan:
    return ImagePlan(
        resized=(columns * 42, rows * 42),
        vit_grid=(rows * 3, columns * 3),
        llm_grid=(rows, columns),
        num_tokens=0,
        stretch=False,
        patch_size=14,
    )


@pytest.mark.parametrize("family", VISION)
def test_a_thousand_sizes_are_planned_as_officially(family: str) -> None:
    for width, height, *expected in load("grids")[family]:
        plan = plan_image(width, height, VISION[family])
        assert [*plan.vit_grid, *plan.llm_grid, plan.num_tokens] == expected, (width, height)


def test_v4_blocks_are_laid_out_as_officially() -> None:
    for case in load("layouts")["v4"]:
        span = span_v4.layout(plan_of(case["llm_h"], case["llm_w"]), case["start"])
        assert "".join(map(str, span.kinds.tolist())) == case["types"]
        assert span.order.tolist() == case["perm"]


def test_v41_spans_are_laid_out_as_officially() -> None:
    for case in load("layouts")["v41"]:
        span = span_v41.layout(plan_of(case["llm_h"], case["llm_w"]), 0)
        assert "".join(V41_CODES[TokenKind(kind)] for kind in span.kinds.tolist()) == case["types"]


@pytest.mark.parametrize("family", VISION)
@pytest.mark.parametrize("case", load("patches")["images"], ids=lambda case: case["file"])
def test_patches_are_those_of_the_official_preprocessing_bit_for_bit(case: dict[str, Any], family: str) -> None:
    expected = case[family]
    plan = plan_image(case["w"], case["h"], VISION[family])
    patches = patchify(DATA / "images" / case["file"], plan)
    values = normalisation_table()[patches]
    assert [*plan.vit_grid, *plan.llm_grid] == expected["grid"]
    assert values.reshape(-1)[:8].tolist() == expected["first8"]
    assert hashlib.sha256(normalise(patches).tobytes()).hexdigest() == expected["sha256_bf16"]


@pytest.mark.parametrize("number", range(25))
def test_positions_see_what_they_see_officially(number: int) -> None:
    case = load("visibility")[number]
    ids_T = np.asarray(case["ids"])  # picture positions are the vocabulary size and their role
    kinds_T = np.where(ids_T < VOCABULARY, TokenKind.TEXT, ids_T - VOCABULARY).astype(np.int8)
    extra_T2 = visible_extra(kinds_T, V4_VISION.max_tokens)
    assert extra_T2.T.tolist() == [case["left"], case["right"]]
    low_T, high_T = window_range(extra_T2, 128)
    keys = low_T[:, None] + np.arange(case["window_shape"][1])
    index = np.where(keys <= high_T[:, None], keys, -1).astype(np.int32)
    assert hashlib.sha256(index.tobytes()).hexdigest() == case["window_sha256"]

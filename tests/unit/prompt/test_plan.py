"""Planning: every size the specification and the reports print, the limits, and what must hold for all sizes."""

from __future__ import annotations

import dataclasses
import math
import random

import deepseek_recipe
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spyglass.config import VisionConfig
from spyglass.errors import ConfigError, PromptError
from spyglass.prompt import ImagePlan, layout_block, plan_image, plan_patches
from tests.released import V4_VISION, V41_VISION

# size, then (resized, LLM grid, tokens) of V4 and of V4.1
REPORTED = [
    ((1, 1), ((392, 392), (10, 10), 114), ((546, 546), (13, 13), 184)),
    ((14, 14), ((392, 392), (10, 10), 114), ((546, 546), (13, 13), 184)),
    ((64, 64), ((392, 392), (10, 10), 114), ((546, 546), (13, 13), 184)),
    ((27, 257), ((126, 1190), (29, 3), 122), ((182, 1680), (40, 5), 242)),
    ((448, 448), ((448, 448), (11, 11), 146), ((546, 546), (13, 13), 184)),
    ((560, 266), ((560, 266), (7, 14), 122), ((798, 378), (9, 19), 182)),
    ((640, 480), ((644, 490), (12, 16), 206), ((644, 490), (12, 16), 206)),
    ((480, 640), ((490, 644), (16, 12), 210), ((490, 644), (16, 12), 210)),
    ((800, 600), ((812, 602), (15, 20), 338), ((812, 602), (15, 20), 317)),
    ((1024, 768), ((882, 658), (16, 21), 354), ((1036, 770), (19, 25), 496)),
    ((1024, 1024), ((756, 756), (18, 18), 346), ((1036, 1036), (25, 25), 652)),
    ((1280, 720), ((1036, 588), (14, 25), 366), ((1288, 728), (18, 31), 578)),
    ((1920, 1080), ((1036, 588), (14, 25), 366), ((1708, 966), (23, 41), 968)),
    ((1080, 1920), ((560, 1008), (24, 14), 362), ((966, 1708), (41, 23), 986)),
    ((2048, 2048), ((756, 756), (18, 18), 346), ((1302, 1302), (31, 31), 994)),
    ((4000, 3000), ((882, 658), (16, 21), 354), ((1512, 1134), (27, 36), 1001)),
    ((1093, 5), ((1092, 140), (4, 26), 110), ((8050, 42), (1, 192), 195)),
    ((5, 1093), ((28, 5684), (136, 1), 274), ((42, 8050), (192, 1), 386)),
    ((8000, 1000), ((2016, 252), (6, 48), 298), ((3696, 462), (11, 88), 981)),
    ((10000, 1), ((1092, 140), (4, 26), 110), ((42882, 42), (1, 1021), 1024)),
    ((1, 10000), ((42, 7896), (188, 1), 378), ((42, 21462), (511, 1), 1024)),
]
# spec v4 9.1: size, resized (height, width), ViT grid, LLM grid, tokens
V4_EXAMPLES = [
    ((1, 1), (392, 392), (28, 28), (10, 10), 114),
    ((50, 50), (392, 392), (28, 28), (10, 10), 114),
    ((384, 384), (392, 392), (28, 28), (10, 10), 114),
    ((640, 480), (490, 644), (35, 46), (12, 16), 206),
    ((1920, 1080), (588, 1036), (42, 74), (14, 25), 366),
    ((1080, 1920), (1008, 560), (72, 40), (24, 14), 362),
    ((4000, 3000), (658, 882), (47, 63), (16, 21), 354),
    ((3000, 4000), (840, 630), (60, 45), (20, 15), 322),
    ((1024, 1024), (756, 756), (54, 54), (18, 18), 346),
    ((5000, 500), (252, 2016), (18, 144), (6, 48), 298),
    ((800, 100), (140, 1092), (10, 78), (4, 26), 110),
    ((801, 100), (140, 1092), (10, 78), (4, 26), 110),
    ((5000, 100), (140, 1092), (10, 78), (4, 26), 110),
    ((100, 5000), (4200, 84), (300, 6), (100, 2), 302),
    ((1, 5000), (7896, 42), (564, 3), (188, 1), 378),
]
# spec v41 7.1: size, LLM grid, tokens
V41_EXAMPLES = [
    ((544, 544), (13, 13), 184),
    ((1920, 1080), (23, 41), 968),
    ((4000, 3000), (27, 36), 1001),
    ((1, 5000), (511, 1), 1024),
    ((5000, 1), (1, 916), 919),
]
FAMILIES = pytest.mark.parametrize("vision", [V4_VISION, V41_VISION], ids=["v4", "v41"])
SIDES = st.integers(1, 8192) | st.integers(1, 60)


@pytest.mark.parametrize(("size", "in_v4", "in_v41"), REPORTED)
def test_reported_sizes(
    size: tuple[int, int],
    in_v4: tuple[tuple[int, int], tuple[int, int], int],
    in_v41: tuple[tuple[int, int], tuple[int, int], int],
) -> None:
    for vision, expected in ((V4_VISION, in_v4), (V41_VISION, in_v41)):
        plan = plan_image(*size, vision)
        assert (plan.resized, plan.llm_grid, plan.num_tokens) == expected


@pytest.mark.parametrize(("size", "resized", "vit", "llm", "tokens"), V4_EXAMPLES)
def test_v4_examples(
    size: tuple[int, int], resized: tuple[int, int], vit: tuple[int, int], llm: tuple[int, int], tokens: int
) -> None:
    plan = plan_image(*size, V4_VISION)
    assert (plan.resized[::-1], plan.vit_grid, plan.llm_grid, plan.num_tokens) == (resized, vit, llm, tokens)


@pytest.mark.parametrize(("size", "llm", "tokens"), V41_EXAMPLES)
def test_v41_examples(size: tuple[int, int], llm: tuple[int, int], tokens: int) -> None:
    plan = plan_image(*size, V41_VISION)
    assert (plan.llm_grid, plan.num_tokens) == (llm, tokens)


@pytest.mark.parametrize(
    ("size", "once", "repeated"),
    [
        ((2587, 44), 204, 206),
        ((56, 3333), 302, 305),
        ((3, 3982), 946, 1010),
        ((16, 2578), 332, 338),
        ((4263, 3), 492, 507),
        ((13, 4871), 504, 506),
    ],
)
def test_the_v41_rule_is_applied_once_as_in_the_python_reference(
    size: tuple[int, int], once: int, repeated: int
) -> None:
    assert plan_image(*size, V41_VISION).num_tokens == once
    assert _makers_count(*size) == repeated


def test_repeated_until_it_stands_still_the_v41_rule_is_that_of_the_makers_package() -> None:
    random_side = random.Random(11)
    for _ in range(4000):
        width, height = (int(math.exp(random_side.uniform(0, math.log(8000)))) for _ in "wh")
        assert _fixed_point(width, height).num_tokens == _makers_count(width, height), (width, height)


def _makers_count(width: int, height: int) -> int:
    image = deepseek_recipe.ImageInfo(b"", width, height)
    return deepseek_recipe.MultiModalData([image]).image_token_adjustment() + 1


def _fixed_point(width: int, height: int) -> ImagePlan:
    while (plan := plan_image(width, height, V41_VISION)).resized != (width, height):
        width, height = plan.resized
    return plan


@FAMILIES
def test_no_size_costs_more_than_the_longest_block(vision: VisionConfig) -> None:
    most, longest = {"paired": (378, (1, 415)), "reading": (1024, (1, 1552))}[vision.layout]
    sides = [*range(1, 260), *range(260, 2000, 37), *range(2000, 8193, 411)]
    assert max(plan_image(w, h, vision).num_tokens for w in sides for h in sides) == most
    assert plan_image(*longest, vision).num_tokens == most


@FAMILIES
@given(width=SIDES, height=SIDES, start=st.integers(0, 4000))
def test_plans_are_consistent(vision: VisionConfig, width: int, height: int, start: int) -> None:
    plan = plan_image(width, height, vision)
    assert plan.resized == (plan.vit_grid[1] * plan.patch_size, plan.vit_grid[0] * plan.patch_size)
    assert plan.llm_grid == tuple(-(-side // vision.downsample_ratio) for side in plan.vit_grid)
    span = layout_block(plan, start, vision)
    assert span.length == plan.num_tokens + span.lead <= vision.max_tokens
    assert plan_patches(plan.vit_grid, vision).num_tokens == plan.num_tokens


@FAMILIES
@given(width=st.integers(1, 3000), height=st.integers(1, 3000))
def test_unclamped_pictures_have_no_fewer_pixels_than_the_floor_up_to_one_truncated_row(
    vision: VisionConfig, width: int, height: int
) -> None:
    plan = plan_image(width, height, vision)
    if plan.stretch or width * 20 < height or height * 20 < width:
        return
    assert plan.resized[0] * plan.resized[1] >= vision.min_pixels * 0.9


def test_the_floor_is_met_exactly_at_its_size_and_below() -> None:
    assert plan_image(384, 384, V4_VISION).resized == (392, 392)
    assert plan_image(383, 385, V4_VISION).resized == (392, 392)
    assert plan_image(393, 393, V4_VISION).resized == (406, 406)


def test_eight_to_one_is_stretched_and_less_is_not() -> None:
    assert plan_image(800, 100, V4_VISION).stretch
    assert plan_image(801, 100, V4_VISION).stretch
    assert not plan_image(799, 100, V4_VISION).stretch
    assert not plan_image(100, 8000, V4_VISION).stretch
    assert not plan_image(8000, 1000, V41_VISION).stretch


def test_width_counts_as_eight_heights_at_most() -> None:
    assert plan_image(5000, 100, V4_VISION).resized == plan_image(800, 100, V4_VISION).resized
    unclamped = dataclasses.replace(V4_VISION, max_wh_ratio=None)
    assert plan_image(5000, 100, unclamped).resized != plan_image(800, 100, unclamped).resized


@given(width=SIDES, height=SIDES)
def test_a_ratio_written_as_a_float_changes_nothing(width: int, height: int) -> None:
    as_float = dataclasses.replace(V4_VISION, max_wh_ratio=8.0)
    assert plan_image(width, height, as_float) == plan_image(width, height, V4_VISION)


def test_two_rows_are_used_where_no_clamp_bounds_the_width() -> None:
    unclamped = dataclasses.replace(V4_VISION, max_wh_ratio=None)
    plan = plan_image(40_000, 100, unclamped)
    assert (plan.llm_grid, plan.num_tokens) == ((2, 187), 378)  # 188 columns would need two more pads: 382


@pytest.mark.parametrize(
    ("size", "vision"),
    [((1, 15_792), V4_VISION), ((1, 60_000), V4_VISION), ((1, 43_000), V41_VISION), ((90_000, 1), V41_VISION)],
)
def test_pictures_of_which_one_side_would_vanish_are_refused_by_name(
    size: tuple[int, int], vision: VisionConfig
) -> None:
    with pytest.raises(PromptError, match=f"{size[0]}x{size[1]} pixels is too thin"):
        plan_image(*size, vision)


def test_the_thinnest_pictures_that_keep_a_pixel_are_planned() -> None:
    assert plan_image(1, 15_791, V4_VISION).resized == (42, 7896)
    assert plan_image(60_000, 1, V4_VISION).stretch


@FAMILIES
@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-3, 4), (2**31, 1), (1.5, 2), ("3", 4), (None, 1)])
def test_sides_that_are_no_pixel_counts_are_refused(vision: VisionConfig, size: tuple[int, int]) -> None:
    with pytest.raises(PromptError, match=r"width|height"):
        plan_image(*size, vision)


@FAMILIES
def test_every_token_limit_that_holds_one_cell_plans_every_size(vision: VisionConfig) -> None:
    least = {"paired": 9, "reading": 4}[vision.layout]
    for limit in range(least, 120):
        small = dataclasses.replace(vision, max_tokens=limit)
        for size in ((640, 480), (300, 300), (33, 500), (500, 40)):
            plan = plan_image(*size, small)
            assert plan.num_tokens + layout_block(plan, 0, small).lead <= limit
    with pytest.raises(ConfigError, match="no image fits"):
        plan_image(640, 480, dataclasses.replace(vision, max_tokens=least - 1))


@FAMILIES
def test_cut_pictures_may_be_smaller_than_the_planner_makes_them(vision: VisionConfig) -> None:
    plan = plan_patches((9, 12), vision)
    assert (plan.vit_grid, plan.llm_grid, plan.resized) == ((9, 12), (3, 4), (168, 126))
    assert plan_patches((1, 1), vision).llm_grid == (1, 1)
    assert plan_patches((4, 7), vision).llm_grid == (2, 3)


@FAMILIES
@pytest.mark.parametrize("grid", [(0, 3), (3, -1), (1.0, 2), (200, 200)])
def test_impossible_grids_are_refused(vision: VisionConfig, grid: tuple[int, int]) -> None:
    with pytest.raises(PromptError, match=r"patch|grid"):
        plan_patches(grid, vision)


@pytest.mark.parametrize("size", [(2387, 1287), (4324, 3896), (663, 5955)])
def test_the_budget_falls_by_one_token_at_a_time(size: tuple[int, int]) -> None:
    """Sizes whose solution for 381 tokens is too long: the one for 380 is taken, not the next (spec v4 9.1, step 5)."""
    w, h = size
    solutions = []
    for budget in (381, 380):
        columns = math.sqrt((budget - 2) / (h / w) + 0.25) - 0.5
        scale = min(math.floor(columns) * 42 / w, math.floor(columns * h / w) // 2 * 2 * 42 / h)
        width, height = math.floor(w * scale / 14) * 14, math.floor(h * scale / 14) * 14
        rows, cells = math.ceil(height / 42), math.ceil(width / 42)
        body = (rows + rows % 2) * (cells + 1)
        solutions.append(((width, height), body + body // 2 % 2 * 2 + 2))
    assert [tokens <= 381 for _, tokens in solutions] == [False, True]
    assert plan_image(w, h, V4_VISION).resized == solutions[1][0]

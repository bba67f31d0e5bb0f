"""The aligner: the order of features, zero padding, exact GELU, and the gather that serves all pictures at once."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spyglass.batch.images import Grid
from spyglass.config.model import VisionConfig
from spyglass.layers.build import BuildContext, weight_slots
from spyglass.ops.table import bind_ops
from spyglass.params.table import tower_params
from spyglass.quant.codec import encode
from spyglass.quant.formats import F32
from spyglass.vision.aligner import Aligner, cell_index, unfold_cells
from tests.vision_parts import SMALL, full_name

grids = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4)


def aligner(width: int, first: np.ndarray, second: np.ndarray, bias: tuple[float, float] = (0.0, 0.0)) -> Aligner:
    config = VisionConfig(
        **{field: getattr(SMALL, field) for field in SMALL.__dataclass_fields__} | {"hidden_size": width}
    )
    build = BuildContext(
        ops=bind_ops("cpu", "float32", "reference"),
        device=torch.device("cpu"),
        dtype=torch.float32,
        params=tower_params(config, len(first)),
    )
    module = Aligner(config, build)
    weights = {
        "aligner.w1.weight": first,
        "aligner.w1.bias": np.full(len(first), bias[0]),
        "aligner.w2.weight": second,
        "aligner.w2.bias": np.full(len(first), bias[1]),
    }
    for slot in weight_slots(module):
        slot.put(encode(torch.from_numpy(weights[full_name(slot)]).float(), F32))
    return module


def report_rows() -> torch.Tensor:
    """Value 1000 · row + 10 · column + channel on a 3 x 3 grid with 2 channels."""
    return torch.tensor([[1000.0 * y + 10 * x + c for c in range(2)] for y in range(3) for x in range(3)])


def test_a_cell_is_flattened_channel_by_channel() -> None:
    channel = [0, 10, 20, 1000, 1010, 1020, 2000, 2010, 2020]
    assert unfold_cells(report_rows(), [(3, 3)], 3).tolist() == [channel + [value + 1 for value in channel]]


def test_identity_weights_show_the_order_through_the_whole_aligner() -> None:
    rows = 10 * report_rows()  # gelu(0) = 0 and gelu(x) = x from 10 on
    out = aligner(2, np.eye(18), np.eye(18))(rows, [(3, 3)])
    channel = [0, 100, 200, 10000, 10100, 10200, 20000, 20100, 20200]
    assert out.tolist() == [channel + [value + 10 for value in channel]]


@given(grids)
def test_one_gather_equals_torch_unfold_of_each_zero_padded_picture(pictures: list[Grid]) -> None:
    total = sum(height * width for height, width in pictures)
    rows = torch.randn(total, 5, generator=torch.Generator().manual_seed(total))
    parts = []
    for part, (height, width) in zip(rows.split([h * w for h, w in pictures]), pictures, strict=True):
        image = part.T.reshape(1, 5, height, width)
        padded = torch.nn.functional.pad(image, (0, -width % 3, 0, -height % 3))
        parts.append(torch.nn.functional.unfold(padded, 3, stride=3)[0].T)
    assert torch.equal(unfold_cells(rows, pictures, 3), torch.cat(parts))


def test_cells_of_pictures_follow_one_another_in_reading_order() -> None:
    index = cell_index([(1, 1), (2, 5)], 3)
    assert index.dtype == np.int64
    assert index.tolist() == [
        [0, -1, -1, -1, -1, -1, -1, -1, -1],
        [1, 2, 3, 6, 7, 8, -1, -1, -1],
        [4, 5, -1, 9, 10, -1, -1, -1, -1],
    ]


def test_the_padding_is_zero_even_where_the_next_picture_begins() -> None:
    rows = torch.full((3, 1), 7.0)
    assert unfold_cells(rows, [(1, 2), (1, 1)], 3).tolist() == [
        [7, 7, 0, 0, 0, 0, 0, 0, 0],
        [7, 0, 0, 0, 0, 0, 0, 0, 0],
    ]


def test_both_biases_are_added_and_the_first_before_the_gelu() -> None:
    out = aligner(1, np.zeros((9, 9)), np.eye(9), bias=(-0.5, 3.0))(torch.ones(1, 1), [(1, 1)])
    gelu = -0.5 * 0.5 * (1 + math.erf(-0.5 / math.sqrt(2)))
    assert out.flatten().tolist() == pytest.approx([gelu + 3.0] * 9, abs=1e-6)


def test_gelu_is_exact_and_not_the_tanh_form() -> None:
    x = torch.tensor([[2.7]])
    out = aligner(1, np.eye(9), np.eye(9))(x, [(1, 1)])[0, 0].item()
    assert out == pytest.approx(2.7 * 0.5 * (1 + math.erf(2.7 / math.sqrt(2))), abs=1e-6)
    assert abs(out - torch.nn.functional.gelu(x, approximate="tanh").item()) > 1e-4

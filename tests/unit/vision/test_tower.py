"""The tower: golden vectors, a second implementation, one test per term, and the laws of packing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from spyglass.batch.images import Grid
from spyglass.config.model import VisionConfig
from spyglass.layers.build import BuildContext, weight_slots
from spyglass.ops.rope_half.reference import rope_half
from spyglass.ops.table import bind_ops
from spyglass.params.table import tower_params
from spyglass.quant.codec import encode
from spyglass.quant.formats import F32
from spyglass.vision.tower import VisionMlp, VisionTower, patch_positions, rotary_tables
from tests import numpy_vision
from tests.tolerance import VISION_BFLOAT16, VISION_FLOAT32, assert_close, assert_law
from tests.vision_parts import (
    ODD,
    SMALL,
    Largest,
    Vision,
    counting,
    full_name,
    random_pictures,
    random_weights,
    weight_shapes,
)

CASES = (0, 1, 2, 4)
MIXED: list[Grid] = [(4, 6), (1, 7), (5, 1), (3, 3), (2, 8)]


class Golden:
    """vision.npz: inputs and outputs of four pictures, and the weights they share."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            self.values: dict[str, NDArray[np.float32]] = dict(file)
        self.weights = {k.removeprefix("small.w."): v for k, v in self.values.items() if k.startswith("small.w.")}
        self.grids: list[Grid] = [tuple(self.values[f"small.{case}.grid"].tolist()) for case in CASES]
        self.patches = [self.values[f"small.{case}.patches"] for case in CASES]

    def all(self, key: str) -> NDArray[np.float32]:
        return np.concatenate([self.values[f"small.{case}.{key}"] for case in CASES])


@pytest.fixture(scope="module")
def vectors() -> Iterator[Golden]:
    yield Golden(Path(__file__).parents[2] / "golden" / "data" / "vision.npz")


def test_tower_and_aligner_agree_with_the_golden_vectors_in_float32(vectors: Golden) -> None:
    rows, cells = Vision(SMALL, 96, vectors.weights).encode(vectors.patches, vectors.grids)
    assert rows.dtype == cells.dtype == torch.float32
    assert_close(rows, vectors.all("vit_fp32"), VISION_FLOAT32)
    assert_close(cells, vectors.all("out_fp32"), VISION_FLOAT32)


def test_tower_and_aligner_agree_with_the_golden_vectors_in_bfloat16(vectors: Golden) -> None:
    rows, cells = Vision(SMALL, 96, vectors.weights, torch.bfloat16).encode(vectors.patches, vectors.grids)
    assert rows.dtype == cells.dtype == torch.bfloat16
    assert_close(cells, vectors.all("out_bf16"), VISION_BFLOAT16)


@pytest.mark.parametrize("name", sorted(weight_shapes(SMALL, 96)))
def test_the_golden_vectors_notice_every_tensor(vectors: Golden, name: str) -> None:
    """A bias, norm or matrix that the code dropped could not pass the tests above."""
    neutral = np.ones_like if "norm" in name else np.zeros_like
    changed = vectors.weights | {name: neutral(vectors.weights[name])}
    _, cells = Vision(SMALL, 96, changed).encode(vectors.patches, vectors.grids)
    assert np.abs(cells.numpy() - vectors.all("out_fp32")).max() > 1000 * VISION_FLOAT32.absolute


@pytest.mark.parametrize(("config", "hidden"), [(SMALL, 20), (ODD, 24)], ids=["small", "odd"])
@pytest.mark.parametrize("grid", [(1, 1), (1, 11), (11, 1), (5, 7), (6, 9)])
def test_a_second_implementation_agrees(config: VisionConfig, hidden: int, grid: Grid) -> None:
    weights = random_weights(config, hidden, seed=5)
    (patches,) = random_pictures(config, [grid], seed=6)
    rows, cells = Vision(config, hidden, weights).encode([patches], [grid])
    expected = numpy_vision.tower(
        patches,
        grid,
        weights,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        theta=config.rope_theta,
        eps=config.norm_eps,
    )
    assert_close(rows, expected, VISION_FLOAT32)
    assert_close(cells, numpy_vision.aligner(expected, grid, weights, ratio=config.downsample_ratio), VISION_FLOAT32)


def test_names_and_shapes_are_those_of_the_released_checkpoint() -> None:
    released = dataclasses.replace(
        SMALL, num_hidden_layers=32, hidden_size=1024, num_attention_heads=16, intermediate_size=2816
    )
    build = BuildContext(
        ops=bind_ops("cpu", "bfloat16"),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        params=tower_params(released, 4096),
    )
    slots = weight_slots(VisionTower(released, build))
    expected = {k: v for k, v in weight_shapes(released, 4096).items() if k.startswith("vision.")}
    assert {full_name(slot): slot.shape for slot in slots} == expected
    assert len(slots) == len(expected) == 3 + 32 * 8
    assert expected["vision.blocks.31.mlp.w1.weight"] == (5632, 1024)


# Packing


def test_packed_pictures_equal_each_alone() -> None:
    vision = Vision(SMALL, 32, random_weights(SMALL, 32, seed=1))
    patches = random_pictures(SMALL, MIXED, seed=2)
    rows, cells = vision.encode(patches, MIXED)
    alone = [vision.encode([p], [grid]) for p, grid in zip(patches, MIXED, strict=True)]
    assert_law(rows, torch.cat([rows for rows, _ in alone]))
    assert_law(cells, torch.cat([cells for _, cells in alone]))


def test_the_order_of_the_pictures_does_not_matter() -> None:
    vision = Vision(SMALL, 32, random_weights(SMALL, 32, seed=1))
    patches = random_pictures(SMALL, MIXED, seed=2)
    order = [3, 0, 4, 1, 2]
    rows, _ = vision.encode(patches, MIXED)
    shuffled, _ = vision.encode([patches[i] for i in order], [MIXED[i] for i in order])
    parts = rows.split([height * width for height, width in MIXED])
    assert_law(shuffled, torch.cat([parts[i] for i in order]))


def test_no_gradient_flows_between_pictures() -> None:
    vision = Vision(SMALL, 32, random_weights(SMALL, 32, seed=1))
    images = vision.pack(list(random_pictures(SMALL, [(3, 4), (2, 3)], seed=2)), [(3, 4), (2, 3)])
    images.patches_U.requires_grad_()
    vision.aligner(vision.tower(images), images.grids_I2)[:2].square().sum().backward()  # 2 rows: the first picture's
    gradient = images.patches_U.grad
    assert gradient is not None
    assert (gradient[:12].abs().amax(dim=(1, 2, 3)) > 0).all()
    assert (gradient[12:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pixels_and_their_normalised_values_give_the_same_bits(dtype: torch.dtype) -> None:
    vision = Vision(SMALL, 32, random_weights(SMALL, 32, seed=1), dtype)
    pixels = np.random.default_rng(0).integers(0, 256, (6, 3, 14, 14), dtype=np.uint8)
    values = (pixels.astype(np.float32) / 255 - 0.5) / 0.5
    floats = torch.from_numpy(values).bfloat16().float().numpy()
    assert torch.equal(vision.encode([pixels], [(2, 3)])[0], vision.encode([floats], [(2, 3)])[0])


@pytest.mark.parametrize("grids", [[(3, 3)], MIXED, MIXED * 4], ids=["1", "5", "20"])
def test_ops_run_once_per_layer_however_many_pictures_there_are(grids: list[Grid]) -> None:
    ops, calls = counting(bind_ops("cpu", "float32", "reference"))
    vision = Vision(SMALL, 32, random_weights(SMALL, 32, seed=1), ops=ops)
    vision.encode(random_pictures(SMALL, grids, seed=2), grids)
    assert calls == {"vit_attention": 2, "rope_half": 2, "silu_mul": 2, "rms_norm": 5, "linear_block": 1 + 2 * 4 + 2}


def test_memory_is_linear_in_the_patches() -> None:
    """Nothing the tower makes is larger than the widest row (gate and up of the MLP) times the patches."""
    vision = Vision(SMALL, 32, random_weights(SMALL, 32, seed=1))
    grid = (40, 30)
    with Largest() as largest:
        vision.encode(random_pictures(SMALL, [grid], seed=2), [grid])
    assert largest.elements <= 1200 * max(588, 512, 128 * 9)


def test_an_empty_batch_gives_no_rows() -> None:
    rows, cells = Vision(SMALL, 32, random_weights(SMALL, 32, seed=1)).encode([], [])
    assert rows.shape == (0, 128) and cells.shape == (0, 32)


# Rotary embedding


def test_positions_count_rows_and_columns_from_zero_in_every_picture() -> None:
    rows, columns = patch_positions([(2, 3), (2, 1)])
    assert rows.tolist() == [0, 0, 0, 1, 1, 1, 0, 1]
    assert columns.tolist() == [0, 1, 2, 0, 1, 2, 0, 0]


def test_the_first_half_of_the_angles_is_the_row_and_the_second_the_column() -> None:
    cos, sin = rotary_tables([(4, 5)], 10000.0, 64)
    patch = 3 * 5 + 2  # row 3, column 2
    frequency = 10000.0 ** (-2 * np.arange(16) / 32)
    angles = np.concatenate([3 * frequency, 2 * frequency])
    np.testing.assert_allclose(cos[patch].numpy(), np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin[patch].numpy(), np.sin(angles), atol=1e-6)
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (20, 32)


def test_attention_sees_relative_places_only() -> None:
    """Turning q and k by the same shift changes no dot product: scores depend on the difference of places alone."""
    q, k = torch.randn(2, 1, 1, 64, generator=torch.Generator().manual_seed(0)).unbind(0)
    cos, sin = rotary_tables([(9, 9)], 10000.0, 64)

    def score(one: tuple[int, int], other: tuple[int, int]) -> float:
        u, w = (slice(y * 9 + x, y * 9 + x + 1) for y, x in (one, other))
        return float((rope_half(q, cos[u], sin[u]) * rope_half(k, cos[w], sin[w])).sum())

    assert score((1, 2), (4, 3)) == pytest.approx(score((5, 6), (8, 7)), abs=1e-5)
    assert score((1, 2), (4, 3)) != pytest.approx(score((1, 2), (3, 4)), abs=1e-2)


# Single terms


def mlp(gate: list[float], up: list[float], dtype: torch.dtype) -> torch.Tensor:
    """silu(gate) · up through w1 = [gate rows, up rows] on the input 1, and w2 = 1."""
    config = dataclasses.replace(SMALL, hidden_size=len(gate), intermediate_size=len(gate))
    name = str(dtype).removeprefix("torch.")
    build = BuildContext(
        ops=bind_ops("cpu", name, "reference"),
        device=torch.device("cpu"),
        dtype=dtype,
        params=tower_params(config, 8),
    )
    module = VisionMlp(build, "vision.blocks.0.mlp")
    first = np.zeros((2 * len(gate), len(gate)), np.float32)
    first[:, 0] = [*gate, *up]
    weights = {
        "vision.blocks.0.mlp.w1.weight": first,
        "vision.blocks.0.mlp.w2.weight": np.eye(len(gate), dtype=np.float32),
    }
    for slot in weight_slots(module):
        slot.put(encode(torch.from_numpy(weights[full_name(slot)]), F32))
    x = torch.zeros(1, len(gate), dtype=dtype)
    x[0, 0] = 1
    return module(x, torch.zeros(1, dtype=torch.int32))[0]


def test_the_first_half_of_w1_is_the_gate() -> None:
    gate, up = np.array([1.5, -2.0, 0.25]), np.array([-3.0, 0.5, 2.0])
    out = mlp(gate.tolist(), up.tolist(), torch.float32)
    np.testing.assert_allclose(out.numpy(), gate / (1 + np.exp(-gate)) * up, rtol=1e-6)


def test_silu_is_rounded_to_bfloat16_before_the_product() -> None:
    gate = torch.linspace(-4, 4, 64).bfloat16()
    up = torch.linspace(0.3, 7, 64).bfloat16()
    silu = gate.double() * torch.sigmoid(gate.double())
    twice = (silu.bfloat16().double() * up.double()).bfloat16()
    once = (silu * up.double()).bfloat16()
    out = mlp(gate.tolist(), up.tolist(), torch.bfloat16)
    assert torch.equal(out, twice)
    assert not torch.equal(twice, once)


def test_the_norm_eps_is_that_of_the_vision_config(vectors: Golden) -> None:
    """With pictures near zero the eps decides: 1e-6 is the tower's own, whatever the text model uses."""
    tiny = {k: v * 1e-3 if "patch_embed" in k else v for k, v in vectors.weights.items()}
    patches = [p * 0.05 for p in vectors.patches]
    expected = np.concatenate(
        [
            numpy_vision.tower(p, grid, tiny, layers=2, heads=2, theta=10000.0, eps=1e-6)
            for p, grid in zip(patches, vectors.grids, strict=True)
        ]
    )
    rows, _ = Vision(SMALL, 96, tiny).encode(patches, vectors.grids)
    assert_close(rows, expected, VISION_FLOAT32)
    without, _ = Vision(dataclasses.replace(SMALL, norm_eps=1e-20), 96, tiny).encode(patches, vectors.grids)
    assert (without - rows).abs().max() > 1e-3


# Adapters


def test_every_map_of_the_tower_sees_the_adapter_of_its_picture() -> None:
    vision = Vision(SMALL, 32, random_weights(SMALL, 32, seed=1))
    seen: dict[str, list[int]] = {}
    for module in [*vision.tower.modules(), *vision.aligner.modules()]:
        if hasattr(module, "adapter"):

            def adapter(x: torch.Tensor, slot: torch.Tensor, module: torch.nn.Module = module) -> torch.Tensor:
                seen[module.name] = slot.tolist()
                return slot[:, None] * torch.ones(len(x), module.out_features)

            module.adapter = adapter
    grids: list[Grid] = [(2, 4), (1, 3)]
    images = vision.pack(list(random_pictures(SMALL, grids, seed=2)), grids, adapter_ids=[0, 2])
    with torch.no_grad():
        rows = vision.tower(images)
        cells = vision.aligner(rows, images.grids_I2, images.adapter_I)
    assert {name for name in seen if name.startswith("aligner")} == {"aligner.w1", "aligner.w2"}
    assert len(seen) == 1 + 2 * 4 + 2
    for name, slots in seen.items():
        assert slots == ([0, 0, 2] if name.startswith("aligner") else [0] * 8 + [2] * 3)
    for module in [*vision.tower.modules(), *vision.aligner.modules()]:
        if hasattr(module, "adapter"):
            module.adapter = None
    with torch.no_grad():
        plain_rows = vision.tower(images)
        plain_cells = vision.aligner(plain_rows, images.grids_I2, images.adapter_I)
    assert torch.equal(rows[:8], plain_rows[:8]) and torch.equal(cells[:2], plain_cells[:2])
    assert not torch.equal(rows[8:], plain_rows[8:])

"""Kernels of the products at launches that the table of cases is too small for, interpreted, against the reference."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from spyglass.ops.launches import pretended
from spyglass.quant.codec import encode
from spyglass.quant.formats import BF16, FP4, FakeQuant, Format, fp8
from spyglass.quant.packed import Packed
from spyglass.quant.tiles import tile
from tests.ops.adapter_cases import expert_adapters
from tests.ops.call import Source
from tests.ops.triton_lane import interpret
from tests.tolerance import OP_FLOAT32, assert_close

pytest.importorskip("triton", "3.9", reason="older interpreters do not know numpy 2")
Pair = tuple[torch.Tensor, torch.Tensor]
E4M3, SMALL = FakeQuant(element="e4m3", block=128), FakeQuant(element="e4m3", block=32)


@pytest.fixture(scope="module")
def child() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=interpret) as pool:
        yield pool


def _weight(*shape: int, format: Format) -> Packed:
    return encode(torch.randn(shape) * shape[-1] ** -0.5, format)


def _experts(
    rows: int,
    side: int,
    format: Format,
    rounding: FakeQuant | None,
    tiles: int = 0,
    tiled: bool = False,
    adapters: str = "",
) -> Pair:
    from spyglass.ops.experts_grouped import reference, triton

    launch = triton.Many(rows=128, tokens=tiles, stages=1)
    launches = triton.Tuning(up=launch, down=launch) if tiles else None
    stacks = [_weight(3, side, side, format=format) for _ in range(3)]
    ids = torch.stack([torch.randperm(3)[:2] for _ in range(rows)]).int()
    ids[rows // 2] = -1
    args, options = (torch.randn(rows, side), ids, torch.rand(rows, 2)), dict[str, Any](limit=1.0, rounding=rounding)
    if adapters:
        source = Source(torch.float32, rows)
        options |= expert_adapters(source, (3, side, side, 2), torch.float32, ranks=(20, 5))
    if adapters == "w3 alone":
        given = options["adapters"]
        options["adapters"] = replace(given, matrices={"w3": given.matrices["w3"]})
    held = [tile(stack) for stack in stacks] if tiled else stacks
    found = triton.experts_grouped(*args, *held, **options, launches=launches)  # type: ignore[arg-type]
    return found, reference.experts_grouped(*args, *stacks, **options)  # type: ignore[arg-type]


def _linear(rows: int, shape: tuple[int, int], format: Format, rounding: FakeQuant | None, tiles: bool = False) -> Pair:
    from spyglass.ops.linear_block import reference, triton

    x, weight = torch.randn(rows, shape[1]), _weight(*shape, format=format)
    options = {"rounding": rounding, "addend_TO": torch.randn(rows, shape[0]), "bias_O": torch.randn(shape[0])}
    launch = triton.Many(rows=128, tokens=64, warps=8, stages=1) if tiles else None
    found = triton.linear_block(x, weight, **options, launch=launch)  # type: ignore[arg-type]
    return found, reference.linear_block(x, weight, **options)  # type: ignore[arg-type]


CASES: dict[str, Callable[[], Pair]] = {
    "linear, FP8": lambda: _linear(3, (128, 512), fp8((128, 128)), E4M3),
    "linear, FP8 in small blocks": lambda: _linear(11, (128, 512), fp8((32, 32)), SMALL),
    "linear, bf16, a tail of rows": lambda: _linear(3, (48, 256), BF16, None),
    "linear, tiles": lambda: _linear(37, (256, 256), fp8((128, 128)), E4M3, tiles=True),
    "linear, tiles, small blocks": lambda: _linear(70, (128, 128), fp8((32, 32)), SMALL, tiles=True),
    "experts, few": lambda: _experts(2, 128, FP4, E4M3),
    "experts, few, not rounded": lambda: _experts(2, 128, FP4, None),
    "experts, few, FP8": lambda: _experts(2, 128, fp8((32, 32)), SMALL),
    "experts, few, listed": lambda: _experts(11, 128, FP4, E4M3),
    "experts, few, tiled": lambda: _experts(1, 512, FP4, E4M3, tiled=True),
    "experts, tiles": lambda: _experts(25, 128, FP4, E4M3, tiles=32),
    "experts, tiles, tiled": lambda: _experts(25, 512, FP4, E4M3, tiles=32, tiled=True),
    "experts, few, adapters": lambda: _experts(7, 128, FP4, E4M3, adapters="all"),
    "experts, few, one row's adapter": lambda: _experts(1, 128, fp8((32, 32)), SMALL, adapters="all"),
    "experts, few, listed, adapters": lambda: _experts(21, 128, FP4, E4M3, adapters="all"),
    "experts, few, adapters of w3": lambda: _experts(7, 128, FP4, None, adapters="w3 alone"),
    "experts, tiles, adapters": lambda: _experts(40, 128, FP4, E4M3, tiles=32, adapters="all"),
    "experts, tiles, adapters of w3": lambda: _experts(25, 128, FP4, E4M3, tiles=32, adapters="w3 alone"),
}


def run(name: str) -> Pair:
    """One case, in a process that interprets."""
    torch.manual_seed(0)
    with pretended(90):
        return CASES[name]()


@pytest.mark.parametrize("name", CASES)
def test_products_agree_with_the_reference(child: ProcessPoolExecutor, name: str) -> None:
    found, expected = child.submit(run, name).result()
    assert_close(found, expected, OP_FLOAT32, name)

"""Parameter tables of a few modules, for tests that build a module alone."""

from __future__ import annotations

from typing import Any

from spyglass.params.table import Param
from spyglass.quant.formats import BF16


def param(*shape: int, kind: Any = "matrix", **more: Any) -> Param:
    return Param(shape=shape, kind=kind, component="text", format=BF16, **more)


def expert_params(name: str, count: int, hidden: int, width: int) -> dict[str, Param]:
    """The three matrices of each expert of a layer."""
    shapes = {"w1": (width, hidden), "w2": (hidden, width), "w3": (width, hidden)}
    return {
        f"{name}.{expert}.{matrix}": param(*shape, num_experts=count)
        for expert in range(count)
        for matrix, shape in shapes.items()
    }

"""Ops are declared once: by their folder and reference, with shapes on a device that has no values."""

from __future__ import annotations

import inspect

import pytest
import torch

from spyglass.ops.declare import Ops, capabilities
from spyglass.ops.table import OPS, bind_ops
from tests.ops.call import Source, run_call
from tests.ops.cases import CASES

REFERENCE, META = (bind_ops(device, "float32", "reference") for device in ("cpu", "meta"))


def test_every_folder_with_a_reference_is_an_op_and_no_other() -> None:
    declared = {name for name, value in vars(Ops).items() if isinstance(value, staticmethod)}
    assert declared == set(OPS) and len(OPS) > 20


@pytest.mark.parametrize("op", OPS)
def test_implementations_are_called_as_the_reference(op: str) -> None:
    """What more they take is theirs, and has a default."""
    expected = list(inspect.signature(getattr(REFERENCE, op)).parameters.values())
    for device, which in (("cpu", "auto"), ("cpu", "training")):
        taken = list(inspect.signature(getattr(bind_ops(device, "float32", which), op)).parameters.values())  # type: ignore[arg-type]
        assert [one.name for one in taken[: len(expected)]] == [one.name for one in expected], which
        assert all(one.default is not inspect.Parameter.empty for one in taken[len(expected) :]), which


@pytest.mark.parametrize(("op", "case"), CASES)
def test_shapes_and_dtypes_are_known_without_values(op: str, case: str) -> None:
    call = CASES[op, case](Source(torch.float32, 9))
    expected, got = run_call(getattr(REFERENCE, op), call), run_call(getattr(META, op), call, device="meta")
    assert [(out.shape, out.dtype) for out in got] == [(out.shape, out.dtype) for out in expected]


def test_capabilities_are_asked_by_name() -> None:
    assert not REFERENCE.can("experts_grouped", "capturable") and REFERENCE.can("rms_norm", "capturable")
    assert "capturable" in capabilities("vit_attention", "varlen")
    assert REFERENCE.capture_backend == "eager"
    assert REFERENCE.replaced({**REFERENCE.chosen, "rms_norm": "cpu"}).chosen["rms_norm"] == "cpu"

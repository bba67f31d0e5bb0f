"""The whole model against vectors of an independent engine, fp32; origin of the numbers in PROVENANCE.md."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from spyglass.model import LoadedModel, load_model
from spyglass.quant.codec import decode
from spyglass.quant.formats import FP4, fp8
from spyglass.quant.packed import Packed
from tests.driver import prefill, text_tokens
from tests.golden import seeded_v4
from tests.golden_case import COLUMNS, tokens_of
from tests.small_models import HOST_AND_GPU
from tests.tolerance import (
    GOLDEN_LOGITS,
    GOLDEN_SPARSE_LOGITS,
    ROUNDED_LOGITS,
    Tolerance,
    assert_close,
    assert_same_argmax,
)

PICTURES = [f"v4-vision.pic{number}" for number in range(6)]
SPARSE = ["v4-sparse.pic0", "v4-sparse.text65", "v4-sparse.text300", "v4-sparse.text520"]
Loader = Callable[..., LoadedModel]


@pytest.fixture(scope="module", params=HOST_AND_GPU)
def load(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, golden: Path) -> Loader:
    """`load(config, weights, ...)`: a checkpoint folder with weights drawn again, then `load_model`."""
    loaded: dict[Any, LoadedModel] = {}

    def load_once(config: str, weights: seeded_v4.Which, **options: Any) -> LoadedModel:
        key = (config, weights, *sorted(options.items()))
        if key not in loaded:
            folder = tmp_path_factory.mktemp("checkpoint")
            shutil.copy(golden / "configs" / f"{config}.json", folder / "config.json")
            seeded_v4.write(folder / "model-00001-of-00001.safetensors", weights, golden)
            loaded[key] = load_model(folder, device=request.param, dtype="float32", progress=False, **options)
        return loaded[key]

    return load_once


@pytest.fixture(scope="module")
def goldens(golden: Path) -> dict[str, Any]:
    with np.load(golden / "v4" / "goldens.npz") as found:
        return dict(found)


def check(loaded: LoadedModel, case: str, goldens: dict[str, Any], tolerance: Tolerance) -> None:
    logits = prefill(loaded.model, tokens_of(goldens, case, loaded.model)).numpy()
    assert_close(logits[:, COLUMNS], goldens[f"{case}.logits"], tolerance, case)
    assert_same_argmax(logits, goldens[f"{case}.argmax"], tolerance, case)


@pytest.mark.parametrize("case", ["v4-vision.text40", *PICTURES])
def test_a_vision_model_agrees_with_an_independent_engine(case: str, load: Loader, goldens: dict[str, Any]) -> None:
    check(load("v4-vision-packed", "vision", numerics="plain", expand=True), case, goldens, GOLDEN_LOGITS)


@pytest.mark.parametrize("case", SPARSE)
def test_odd_constants_and_selection_agree(case: str, load: Loader, goldens: dict[str, Any]) -> None:
    check(load("v4-sparse", "vision", numerics="plain", expand=True), case, goldens, GOLDEN_SPARSE_LOGITS)


@pytest.mark.parametrize("case", ["v4-vision.text40", "v4-vision.pic0"])
def test_weights_that_stay_packed_give_the_same_logits(case: str, load: Loader, goldens: dict[str, Any]) -> None:
    check(load("v4-vision-packed", "vision", numerics="plain"), case, goldens, GOLDEN_LOGITS)


@pytest.mark.parametrize("case", ["text1", "text5"])
def test_a_text_model_agrees(case: str, load: Loader, golden: Path) -> None:
    with np.load(golden / "v4" / "rounded.npz") as found:
        ids, logits = found[f"plain.{case}.ids"], found[f"plain.{case}.logits"]
    loaded = load("v4-text-packed", "text", numerics="plain")
    assert_close(prefill(loaded.model, text_tokens(ids)), logits, GOLDEN_LOGITS)


@pytest.mark.parametrize(
    ("length", "ops"), [(1, "auto"), (3, "auto"), (1, "reference"), (3, "reference"), (5, "reference")]
)
def test_rounded_arithmetic_agrees_without_a_flipped_code(length: int, ops: str, load: Loader, golden: Path) -> None:
    """Of five tokens a value lies so near to the border of a code that a more exact sum flips it (docs/log.md)."""
    with np.load(golden / "v4" / "rounded.npz") as found:
        ids, logits = found[f"ids{length}"], found[f"logits{length}"]
    loaded = load("v4-text-packed", "text", ops=ops)
    assert loaded.numerics == "reference"
    assert_close(prefill(loaded.model, text_tokens(ids)), logits, ROUNDED_LOGITS)


def test_plain_arithmetic_is_not_rounded_arithmetic(load: Loader, golden: Path) -> None:
    with np.load(golden / "v4" / "rounded.npz") as found:
        ids, logits = found["ids5"], torch.from_numpy(found["logits5"])
    plain = prefill(load("v4-text-packed", "text", numerics="plain").model, text_tokens(ids))
    assert (plain - logits).abs().max() > 100 * ROUNDED_LOGITS.absolute


def test_a_model_without_its_tower_answers_text_alike(load: Loader, goldens: dict[str, Any]) -> None:
    loaded = load("v4-vision-packed", "vision", numerics="plain", images=False)
    assert loaded.report.counts["vision"].used == 0
    check(loaded, "v4-vision.text40", goldens, GOLDEN_LOGITS)


def test_packed_weights_decode_to_exactly_the_bf16_set(golden: Path, tmp_path: Path) -> None:
    seeded_v4.write(tmp_path / "model.safetensors", "vision", golden)
    result = hashlib.sha256()
    loaded = _bf16_tensors(tmp_path)
    for name in sorted(loaded):
        result.update(name.encode() + loaded[name].contiguous().view(torch.uint8).numpy().tobytes())
    assert result.hexdigest() == json.loads((golden / "v4" / "decoded.json").read_text())["v4-vision"]


def _bf16_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every matrix and vector that a bf16 checkpoint stores as bf16, decoded where it is packed."""
    tensors = load_file(folder / "model.safetensors")
    out = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bfloat16:
            out[name] = tensor
        elif tensor.dtype in (torch.int8, torch.float8_e4m3fn):
            scale = tensors[f"{name.removesuffix('.weight')}.scale"].view(torch.uint8)
            if tensor.dtype == torch.int8:
                packed = Packed(FP4, tensor.view(torch.uint8), scale, (tensor.shape[0], tensor.shape[1] * 2))
            else:
                packed = Packed(fp8((128, 128)), tensor, scale, tuple(tensor.shape))
            out[name] = decode(packed)
    return out

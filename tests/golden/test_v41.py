"""V4.1 end to end against an independent engine: text, pictures, sparse selection, packed weights (fp32, plain).

Everything runs through the step loop, in steps that end inside pictures, groups and look-backs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spyglass import LLM, Patches
from tests.engram_values import values
from tests.golden import seeded_v41
from tests.golden.seeded import skip_unless
from tests.golden_case import COLUMNS
from tests.small_models import HOST_AND_GPU
from tests.tolerance import GOLDEN_LOGITS, GOLDEN_SPARSE_LOGITS, Tolerance, assert_close

SETS = {"v41": GOLDEN_LOGITS, "v41-sparse": GOLDEN_SPARSE_LOGITS, "v41-packed": GOLDEN_LOGITS}
WHOLE = ("text1", "text2", "text5", "text33", "text65", "text130", "text200", "text301", "text401")
PICTURES = ("pic0", "pic1", "pic2", "pic3")


@pytest.fixture(scope="module")
def goldens(golden: Path) -> dict[str, Any]:
    with np.load(golden / "v41" / "goldens.npz") as found:
        return {key: found[key] for key in found}


@pytest.fixture(scope="module")
def folders(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The three checkpoint folders."""
    skip_unless(seeded_v41.tensors(packed=True), seeded_v41.DIGEST)
    made = {}
    for name in SETS:
        made[name] = tmp_path_factory.mktemp(name)
        config = (golden / "configs" / f"{name}.json").read_text(encoding="utf-8")
        seeded_v41.write(made[name], config, packed=name == "v41-packed")
    return made


Opener = Callable[[str, int], LLM]


@pytest.fixture(scope="module", params=HOST_AND_GPU)
def opened(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Opener:
    """`opened(set, step)`: the model of a set, run in steps of at most so many tokens."""
    models: dict[tuple[str, int], LLM] = {}

    def open_once(name: str, step: int) -> LLM:
        if (name, step) not in models:
            models[name, step] = LLM(
                folders[name], device=request.param, dtype="float32", numerics="plain", max_step_tokens=step
            )
        return models[name, step]

    return open_once


def parts_of(goldens: dict[str, Any], case: str) -> list[Any]:
    """Ids and patches in prompt order."""
    ids, parts, done, number = goldens[f"{case}.ids"].astype(np.int64), list[Any](), 0, 0
    while f"{case}.{number}.patches" in goldens:
        start = int(goldens[f"{case}.{number}.start"])
        stored = torch.from_numpy(goldens[f"{case}.{number}.patches"]).view(torch.bfloat16)
        rows, columns = goldens[f"{case}.{number}.grid"].tolist()
        parts += [ids[done:start].tolist(), Patches(stored.float().numpy(), (rows, columns))]
        done, number = start + int(goldens[f"{case}.{number}.length"]), number + 1
    return [part for part in [*parts, ids[done:].tolist()] if not isinstance(part, list) or part]


def check(logits: torch.Tensor, goldens: dict[str, Any], case: str, tolerance: Tolerance) -> None:
    assert_close(logits[:, COLUMNS], goldens[f"{case}.logits"], tolerance, case)
    clear = goldens[f"{case}.lead"] > 2 * tolerance.absolute
    assert (logits.argmax(-1).numpy() == goldens[f"{case}.argmax"])[clear].all(), case


def test_the_redrawn_weights_are_those_of_the_golden_files(folders: dict[str, Path]) -> None:
    """`folders` compares the digest; the packed numbers equal the bfloat16 ones in every bit."""
    from safetensors.torch import load_file

    from spyglass.engram import open_engram
    from spyglass.model import load_model

    plain = load_file(folders["v41"] / "model.safetensors")
    loaded = load_model(folders["v41-packed"], dtype="float32", expand=True, progress=False)
    assert loaded.numerics == "reference"
    for index, layer in enumerate(loaded.model.text.layers):
        weight = layer.attn.wq_b.weight.data
        assert torch.equal(weight.bfloat16(), plain[f"layers.{index}.attn.wq_b.weight"])
        first = layer.ffn.experts.stacks["w1"].data[0]
        assert torch.equal(first.bfloat16(), plain[f"layers.{index}.ffn.experts.0.w1.weight"])
    table = open_engram(folders["v41-packed"], loaded.config).tables[1]
    rows = values(table[np.arange(6126)])
    assert np.array_equal(rows, plain["layers.1.engram.embed.weight"].float().numpy())


@pytest.mark.parametrize("step", [512, 37])
@pytest.mark.parametrize("name", list(SETS))
def test_text_logits(name: str, step: int, opened: Opener, goldens: dict[str, Any]) -> None:
    llm, source = opened(name, step), "v41" if name == "v41-packed" else name
    cases = [f"{source}.{case}" for case in WHOLE if f"{source}.{case}.ids" in goldens]
    assert len(cases) >= 3
    for case in cases:
        check(llm.logits(parts_of(goldens, case)), goldens, case, SETS[name])


@pytest.mark.parametrize("step", [512, 37])
@pytest.mark.parametrize("name", list(SETS))
def test_picture_logits(name: str, step: int, opened: Opener, goldens: dict[str, Any]) -> None:
    llm, source = opened(name, step), "v41" if name == "v41-packed" else name
    cases = [f"{source}.{case}" for case in PICTURES if f"{source}.{case}.ids" in goldens]
    assert cases
    for case in cases:
        check(llm.logits(parts_of(goldens, case)), goldens, case, SETS[name])


def test_engram_off_is_another_model(folders: dict[str, Path], goldens: dict[str, Any], tmp_path: Path) -> None:
    """Zero tables: the memory adds nothing, and the logits move by far more than the tolerance."""
    found = seeded_v41.tensors(packed=False)
    for name in found:
        if ".engram.embed" in name:
            found[name] = torch.zeros_like(found[name])
    from safetensors.torch import save_file

    save_file(found, tmp_path / "model.safetensors")
    for file in ("config.json", "engram_token_map.json"):
        (tmp_path / file).write_bytes((folders["v41"] / file).read_bytes())
    off = LLM(tmp_path, device="cpu", dtype="float32", numerics="plain", ops="reference")
    got = off.logits(parts_of(goldens, "v41.text33"))[:, COLUMNS]
    assert float((got - torch.from_numpy(goldens["v41.text33.logits"])).abs().max()) > 0.5

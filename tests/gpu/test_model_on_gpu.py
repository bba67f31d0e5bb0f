"""A whole small checkpoint on a GPU: the golden logits, the host's numbers, and the laws every driver relies on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from spyglass import LLM, Patches, SamplingParams
from tests.golden import seeded_v4
from tests.tolerance import GOLDEN_LOGITS, Tolerance, assert_close, assert_law

pytestmark = pytest.mark.gpu
VOCABULARY = 512
COLUMNS = slice(7, None, 32)  # the logits that the golden file keeps
CASES = ("text40", "pic0", "pic2")  # those whose pictures are there as patches
Parts = list[list[int] | Patches]


@pytest.fixture(scope="module")
def folder(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small vision checkpoint as a folder, without a tokenizer."""
    path = tmp_path_factory.mktemp("checkpoint")
    shutil.copy(golden / "configs" / "v4-vision-packed.json", path / "config.json")
    seeded_v4.write(path / "model-00001-of-00001.safetensors", "vision", golden)
    return path


@pytest.fixture(scope="module")
def goldens(golden: Path) -> dict[str, Any]:
    with np.load(golden / "v4" / "goldens.npz") as found:
        return dict(found)


def load(
    folder: Path,
    device: str = "cuda",
    dtype: Literal["float32", "bfloat16"] = "float32",
    numerics: Literal["plain", "reference"] = "plain",
    **options: Any,
) -> LLM:
    return LLM(folder, device=device, dtype=dtype, numerics=numerics, **options)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    yield load(folder)


def parts_of(goldens: dict[str, Any], case: str) -> Parts:
    """Text runs and pictures of a golden prompt, whose picture positions hold 512 + role."""
    ids = goldens[f"v4-vision.{case}.ids"].astype(int).tolist()
    parts: Parts = []
    picture, place = 0, 0
    while place < len(ids):
        stop = place
        if ids[place] >= VOCABULARY:
            stop = ids.index(VOCABULARY + 4, place) + 1  # END
            grid = goldens[f"v4-vision.{case}.{picture}.vit_grid"].tolist()
            bits = torch.from_numpy(goldens[f"v4-vision.{case}.{picture}.patches"])
            parts.append(Patches(bits.view(torch.bfloat16).float().numpy(), (grid[0], grid[1])))
            picture += 1
        else:
            while stop < len(ids) and ids[stop] < VOCABULARY:
                stop += 1
            parts.append(ids[place:stop])
        place = stop
    return parts


@pytest.mark.parametrize("case", CASES)
def test_the_golden_logits_agree(case: str, plain: LLM, goldens: dict[str, Any]) -> None:
    logits = plain.logits(parts_of(goldens, case))
    assert_close(logits[:, COLUMNS], goldens[f"v4-vision.{case}.logits"], GOLDEN_LOGITS, case)


@pytest.mark.parametrize("ops", ["reference", "auto"])
def test_the_gpu_agrees_with_the_host_in_float32(ops: str, folder: Path, goldens: dict[str, Any]) -> None:
    parts = parts_of(goldens, "pic2")
    assert_close(load(folder, ops=ops).logits(parts), load(folder, "cpu").logits(parts), GOLDEN_LOGITS)


@pytest.mark.parametrize("numerics", ["plain", "reference"])
def test_bfloat16_on_the_gpu_is_as_close_to_float32_as_on_the_host(
    numerics: Literal["plain", "reference"], folder: Path, goldens: dict[str, Any]
) -> None:
    """Rounded arithmetic amplifies, so the size of the error is compared, and on a short prompt."""
    parts = [list(part)[:6] for part in parts_of(goldens, "text40") if not isinstance(part, Patches)][:1]
    exact = load(folder, "cpu", numerics=numerics).logits(parts)
    here = (load(folder, "cpu", "bfloat16", numerics).logits(parts) - exact).abs().mean()
    there = (load(folder, "cuda", "bfloat16", numerics).logits(parts) - exact).abs().mean()
    assert torch.isfinite(there)
    assert there < 4 * here + 1e-3


def test_prefill_in_chunks_equals_prefill_at_once(folder: Path, plain: LLM, goldens: dict[str, Any]) -> None:
    """A step holds at most one picture of the largest kind, 384 tokens; the prompt is two and a half of them long."""
    text = np.random.default_rng(0).integers(2, VOCABULARY, (2, 450)).tolist()
    parts = [text[0], *parts_of(goldens, "pic0"), text[1]]
    chunked = load(folder, max_step_tokens=384)
    assert_law(chunked.logits(parts), plain.logits(parts))


def test_decoding_equals_prefill(plain: LLM, goldens: dict[str, Any]) -> None:
    parts = parts_of(goldens, "pic0")
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True)
    (output,) = plain.generate([parts], params)
    again = plain.logits([*parts, list(output.token_ids)]).log_softmax(dim=-1)[-13:-1]
    assert output.logprobs is not None
    for row, entry in zip(again, output.logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=GOLDEN_LOGITS.absolute)


def test_prompts_together_equal_each_alone(plain: LLM, goldens: dict[str, Any]) -> None:
    prompts = [parts_of(goldens, case) for case in CASES]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, ignore_eos=True)
    together = plain.generate(prompts, params)
    for prompt, output in zip(prompts, together, strict=True):
        (alone,) = plain.generate([prompt], params)
        assert alone.token_ids == output.token_ids
        assert alone.logprobs is not None and output.logprobs is not None
        bound = Tolerance(absolute=GOLDEN_LOGITS.absolute, why="log-probabilities move no further than logits")
        assert_close([x.logprob for x in output.logprobs], [x.logprob for x in alone.logprobs], bound)


def test_a_picture_changes_what_follows_it(plain: LLM, goldens: dict[str, Any]) -> None:
    parts = parts_of(goldens, "pic0")
    other = [Patches(-part.pixels, part.vit_grid) if isinstance(part, Patches) else part for part in parts]
    assert (plain.logits(parts)[-1] - plain.logits(other)[-1]).abs().max() > 0.05


def test_pictures_go_through_graphs_in_bfloat16(folder: Path, goldens: dict[str, Any]) -> None:
    parts = parts_of(goldens, "pic0")
    graphed, eager = load(folder, dtype="bfloat16"), load(folder, dtype="bfloat16", vision_graphs="off")
    graphs = graphed.loaded.model.vision_graphs
    assert graphs is not None and eager.loaded.model.vision_graphs is None
    before = graphs.hits, graphs.eager.total()  # loading runs the largest pictures there are, in one call
    with_graphs, without = graphed.logits(parts), eager.logits(parts)
    assert (graphs.hits, graphs.eager.total()) == (before[0] + 1, before[1])
    assert (with_graphs - without).abs().mean() < 0.25 * without.std()  # bf16 steps, amplified by the text model


def test_steps_one_ahead_give_what_steps_one_by_one_give(folder: Path) -> None:
    """fp32: the same kernels on the same rows, but for a surplus row of answers that have ended."""
    params = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(seed=1, max_tokens=20, ignore_eos=True, logprobs=2),
        SamplingParams(seed=2, top_p=0.8, top_k=40, max_tokens=7, ignore_eos=True),
        SamplingParams(seed=3, repetition_penalty=1.3, max_tokens=15, ignore_eos=True),
    ]
    prompts = [list(range(3, 3 + length)) for length in (5, 140, 9, 30)]
    outputs = [load(folder, async_scheduling=mode).generate(prompts, params) for mode in ("off", "on")]
    assert [o.token_ids for o in outputs[0]] == [o.token_ids for o in outputs[1]]
    assert [o.finish_reason for o in outputs[0]] == [o.finish_reason for o in outputs[1]]

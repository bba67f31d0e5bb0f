"""A V4.1 checkpoint folder from writing to answering: chat, pictures, placements, packed and plain arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from spyglass import LLM, SamplingParams
from spyglass.errors import CheckpointError
from spyglass.prompt import plan_image
from tests.tolerance import assert_law

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PHOTO = Image.effect_noise((90, 60), 80).convert("RGB")
MESSAGES = [
    {"role": "system", "content": "Be terse."},
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": PHOTO}},
            {"type": "text", "text": "What is this? <｜System｜>"},
        ],
    },
]


@pytest.fixture(scope="module")
def folder(checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of("tiny-v41", seed=1)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, device="cpu", dtype="float32", max_step_tokens=64)


def test_a_conversation_with_a_picture_is_answered(llm: LLM) -> None:
    output = llm.chat(MESSAGES, GREEDY)
    assert len(output.token_ids) == 6 and output.error is None
    assert llm.config.vision is not None
    planned = plan_image(PHOTO.width, PHOTO.height, llm.config.vision).num_tokens
    assert output.usage.image_tokens == planned == output.usage.prompt_tokens - len(text_ids(llm))


def text_ids(llm: LLM, thinking: bool = False) -> list[int]:
    prompt = llm.chat_prompt(MESSAGES, thinking=thinking)
    return [int(token) for token in prompt.ids_T if token >= 0]


def test_the_prompt_is_that_of_v41(llm: LLM) -> None:
    """`<｜System｜>` in its place (id 128799), as typed by the user it stays text; thinking puts the effort line in."""
    plain, thinking = text_ids(llm), text_ids(llm, thinking=True)
    assert plain[:2] == thinking[:2] == [0, 128799]
    assert plain.count(128799) == thinking.count(128799) == 1
    assert plain[-2:] == [128804, 128822] and thinking[-2:] == [128804, 128821]
    assert llm.tokenizer is not None
    assert "Reasoning Effort: 75" in llm.tokenizer.decode(thinking) and "Effort" not in llm.tokenizer.decode(plain)


@pytest.mark.parametrize("placement", ["host", "device"])
def test_the_place_of_the_tables_changes_nothing(folder: Path, placement: str) -> None:
    """Compared in plain arithmetic: with rounding on, a code may flip."""
    first, second = (
        LLM(folder, device="cpu", dtype="float32", numerics="plain", images=0, engram=place)  # type: ignore[arg-type]
        for place in ("mmap", placement)
    )
    ids = [0, *range(600, 640)]
    assert torch.equal(first.logits(ids), second.logits(ids))


def test_packed_weights_choose_the_released_arithmetic_and_expanding_them_changes_nothing(
    folder: Path, llm: LLM
) -> None:
    assert llm.loaded.numerics == "reference"
    plain = LLM(folder, device="cpu", dtype="float32", numerics="plain")
    wide = LLM(folder, device="cpu", dtype="float32", numerics="plain", expand_weights=True)
    ids = [0, *range(900, 930)]
    assert_law(wide.logits(ids), plain.logits(ids))
    assert float((llm.logits(ids) - plain.logits(ids)).abs().max()) > 1e-3


def test_without_pictures_the_tower_stays_unread(folder: Path) -> None:
    text_only = LLM(folder, device="cpu", dtype="float32", images=0)
    assert text_only.loaded.report.counts["vision"].used == 0
    assert len(text_only.generate([[0, 5, 6]], GREEDY)[0].token_ids) == 6


def test_a_folder_without_its_tables_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    (shard,) = folder.glob("*.safetensors")
    found = {name: tensor for name, tensor in load_file(shard).items() if "layers.3.engram.embed" not in name}
    save_file(found, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(CheckpointError, match=r"layers\.3\.engram\.embed"):
        LLM(tmp_path, device="cpu")


def test_bf16_runs_too(folder: Path) -> None:
    logits = LLM(folder, device="cpu", dtype="bfloat16").logits([0, *range(900, 1000)])
    assert torch.isfinite(logits).all()

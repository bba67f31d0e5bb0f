"""A step calls the same ops however many sequences it has, and never holds anything quadratic in its tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spyglass.model import VisionLanguageModel
from spyglass.ops.declare import Ops
from spyglass.ops.table import OPS, bind_ops
from tests.driver import Memory, Part, prefill, run, text_tokens
from tests.small_models import prompt_with_pictures, random_text, small_config, small_model


def counting(ops: Ops, counts: Counter[str]) -> Ops:
    """The same ops, counted."""

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return getattr(ops, name)(*args, **kwargs)

        return call

    return ops.replaced(**{name: counted(name) for name in OPS})


def calls(model: VisionLanguageModel, counts: Counter[str], lengths: list[int], start: int = 0) -> Counter[str]:
    """Op calls of one step of `lengths` rows per sequence, behind `start` rows each."""
    sequences = [text_tokens(random_text(start + length, seed=s)) for s, length in enumerate(lengths)]
    longest = max(len(tokens) for tokens in sequences)
    memory = Memory(text=model.config.text, dtype=torch.float32, sequences=len(lengths), length=longest)
    if start:
        run(model, memory, [Part(sequence=s, tokens=t.cut(0, start), start=0) for s, t in enumerate(sequences)])
    counts.clear()
    run(model, memory, [Part(sequence=s, tokens=t.cut(start, len(t)), start=start) for s, t in enumerate(sequences)])
    return Counter(counts)


@pytest.mark.parametrize(("length", "start"), [(1, 131), (17, 0), (140, 0), (1, 127)])
def test_op_calls_do_not_depend_on_the_number_of_sequences(length: int, start: int) -> None:
    counts: Counter[str] = Counter()
    model = small_model(ops=counting(bind_ops("cpu", "float32", "reference"), counts))
    alone = calls(model, counts, [length], start)
    assert sum(alone.values()) > 20 * len(model.config.text.layers)
    for sequences in (2, 5, 16):
        assert calls(model, counts, [length] * sequences, start) == alone


def test_picture_rows_add_no_op_calls_to_the_backbone() -> None:
    counts: Counter[str] = Counter()
    model = small_model(ops=counting(bind_ops("cpu", "float32", "reference"), counts))
    tokens = prompt_with_pictures([4, (1, 9), 3], model.config)
    text = calls(model, counts, [len(tokens)])
    counts.clear()
    prefill(model, tokens)
    assert counts == text


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def test_no_tensor_grows_with_tokens_times_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the tokens, at most a little more than twice the largest tensor; selection is on in both.

    Scores are made in blocks of a fixed number, made small here so that these lengths need several.
    """
    monkeypatch.setattr("spyglass.ops.index_topk.reference.SCORES_AT_ONCE", 1 << 16)
    model = small_model(config=small_config(index_topk=7))
    sizes = []
    for length in (1000, 2000):
        tokens = text_tokens(random_text(length))
        with _Largest() as largest:
            prefill(model, tokens)
        sizes.append(largest.elements)
    assert sizes[1] <= 2.2 * sizes[0], sizes
    assert sizes[1] < 2000 * 2000 * model.config.text.num_attention_heads / 10

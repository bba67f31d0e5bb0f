"""However a sequence is cut into steps and whatever runs beside it, its logits are the same (fp32, plain)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spyglass.model import VisionLanguageModel
from tests.driver import Part, Tokens, memory_for, prefill, run, text_tokens
from tests.small_models import PLACES, ops_of, prompt_with_pictures, random_text, small_config, small_model
from tests.tolerance import assert_law

# text, pictures with every number of leading pads, spans shorter and longer than the window of 9, adjacent pictures
PIECES = [(3, 4), 5, (2, 14), (0, 9), 3, (1, 6), 24]


@pytest.fixture(scope="module", params=PLACES, ids=str)
def model(request: pytest.FixtureRequest) -> VisionLanguageModel:
    return small_model(seed=3, device=request.param[0], ops=ops_of(request.param))


@pytest.fixture(scope="module")
def prompt(model: VisionLanguageModel) -> Tokens:
    return prompt_with_pictures(PIECES, model.config)


@pytest.fixture(scope="module")
def whole(model: VisionLanguageModel, prompt: Tokens) -> torch.Tensor:
    return prefill(model, prompt)


def legal_cuts(tokens: Tokens) -> list[int]:
    return [place for place in range(1, len(tokens)) if tokens.legal_cut(place)]


def test_two_chunks_cut_at_any_legal_place_equal_the_whole(
    model: VisionLanguageModel, prompt: Tokens, whole: torch.Tensor
) -> None:
    cuts = legal_cuts(prompt)
    assert len(cuts) > 30
    for cut in cuts:
        assert_law(prefill(model, prompt, [cut]), whole, f"cut at {cut}")


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 31])
def test_many_small_chunks_equal_the_whole(
    chunk: int, model: VisionLanguageModel, prompt: Tokens, whole: torch.Tensor
) -> None:
    cuts, last = [], 0
    for cut in [*legal_cuts(prompt), len(prompt)]:
        if cut - last >= chunk and cut < len(prompt):
            cuts.append(cut)
            last = cut
    longest = int(np.diff([0, *cuts, len(prompt)]).max())
    assert_law(prefill(model, prompt, cuts, ring=longest), whole)


@pytest.mark.parametrize("cut", [121, 125, 127, 128, 129, 131, 200, 255, 256, 257])
def test_cuts_around_a_long_group_equal_the_whole(cut: int, model: VisionLanguageModel) -> None:
    tokens = text_tokens(random_text(300, seed=1))
    whole, longest = prefill(model, tokens), max(cut, 300 - cut)
    assert_law(prefill(model, tokens, [cut], ring=longest), whole, f"cut at {cut}")
    assert_law(prefill(model, tokens, [3, cut - 2, cut], ring=longest), whole, f"cuts before {cut}")


def test_a_prompt_of_every_length_then_decoding_equals_the_whole(model: VisionLanguageModel) -> None:
    """Lengths of all residues modulo 4 and 128: the first decoded rows after each equal those of one long pass."""
    tokens = text_tokens(random_text(262, seed=2))
    whole = prefill(model, tokens)
    for length in range(1, 258):
        memory = memory_for(model, 1, length + 4, ring=length)
        run(model, memory, [Part(sequence=0, tokens=tokens.cut(0, length), start=0)])
        for place in range(length, length + (4 if length % 32 in (0, 31) else 1)):
            row = run(model, memory, [Part(sequence=0, tokens=tokens.cut(place, place + 1), start=place)])
            assert_law(row[0], whole[place], f"decoded {place} after a prompt of {length}")


def test_decoding_across_two_long_groups_equals_the_whole(model: VisionLanguageModel) -> None:
    tokens = text_tokens(random_text(270, seed=4))
    cuts = list(range(120, 270))
    assert_law(prefill(model, tokens, cuts, ring=120), prefill(model, tokens))


def test_a_batch_equals_each_sequence_alone(model: VisionLanguageModel, prompt: Tokens) -> None:
    others = [
        text_tokens(random_text(1, seed=5)),
        text_tokens(random_text(140, seed=6)),
        prompt,
        prompt_with_pictures([6, (1, 20), 11], model.config, seed=7, rows_seed=8),
        text_tokens(random_text(67, seed=9)),
    ]
    memory = memory_for(model, 5, 140)
    together = run(model, memory, [Part(sequence=s, tokens=t, start=0) for s, t in enumerate(others)])
    for alone, part in zip(others, together.split([len(t) for t in others]), strict=True):
        assert_law(part, prefill(model, alone), f"{len(alone)} tokens")


def test_prefill_and_decode_share_a_step(model: VisionLanguageModel, prompt: Tokens) -> None:
    """One sequence decodes, one continues in chunks, one arrives with pictures, in the same steps."""
    decoding, chunked = text_tokens(random_text(150, seed=10)), text_tokens(random_text(131, seed=11))
    memory = memory_for(model, 3, 150)
    steps = [
        {0: (0, 145)},
        {0: (145, 146), 1: (0, 125)},
        {1: (125, 127), 0: (146, 147), 2: (0, len(prompt) - 5)},
        {2: (len(prompt) - 5, len(prompt)), 1: (127, 131), 0: (147, 150)},
    ]
    found: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    tokens = {0: decoding, 1: chunked, 2: prompt}
    for step in steps:
        parts = [Part(sequence=s, tokens=tokens[s].cut(*ends), start=ends[0]) for s, ends in step.items()]
        out = run(model, memory, parts)
        for part, rows in zip(parts, out.split([len(part.tokens) for part in parts]), strict=True):
            found[part.sequence].append(rows)
    for s, rows in found.items():
        assert_law(torch.cat(rows), prefill(model, tokens[s]), f"sequence {s}")


@pytest.mark.slow
def test_the_laws_hold_where_every_layer_selects(model: VisionLanguageModel) -> None:
    """Thousands of tokens, one entry in a hundred picked: chunked, decoded and whole passes agree."""
    config = small_config(compress_ratios=[4, 4, 128, 4], index_topk=11)
    build = model.options.build
    model = small_model(seed=5, config=config, device=build.device.type, ops=build.ops)
    tokens = text_tokens(random_text(2200, seed=12))
    whole = prefill(model, tokens)
    assert_law(prefill(model, tokens, [1000, 1003, 2193, *range(2194, 2200)], ring=1190), whole)

"""Decode steps from a tape are the steps themselves, bit for bit; whatever is no plain decode step is not kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spyglass.model import VisionLanguageModel
from spyglass.text.kept import KeptSteps
from tests.driver import Memory, Part, build_step, memory_for, run, text_tokens
from tests.small_models import ops_of, random_text, small_config, small_model

LENGTHS = (3, 11, 126, 40)  # groups of 4 and of 128 close at different times
STEPS = 24


def make(dtype: torch.dtype, *, kept: bool, topk: int = 48) -> VisionLanguageModel:
    name = str(dtype).removeprefix("torch.")
    model: VisionLanguageModel = small_model(
        seed=5,
        packed=True,
        config=small_config(index_topk=topk),
        expand=False,
        dtype=dtype,
        numerics="reference",
        ops=ops_of(("cpu", "auto"), name),
    )
    if not kept:
        model.text._kept = None
    return model


def decode(model: VisionLanguageModel) -> tuple[list[torch.Tensor], Memory]:
    """Prompts of LENGTHS, then STEPS tokens each, together; fewer sequences towards the end."""
    ids = [random_text(length + STEPS, seed=number) for number, length in enumerate(LENGTHS)]
    memory = memory_for(model, len(LENGTHS), max(LENGTHS) + STEPS)
    for number, length in enumerate(LENGTHS):
        run(model, memory, [Part(sequence=number, tokens=text_tokens(ids[number][:length]), start=0)])
    out = []
    for step in range(STEPS):
        going = range(len(LENGTHS) if step < STEPS - 6 else 2)
        parts = [
            Part(sequence=n, tokens=text_tokens(ids[n][LENGTHS[n] + step :][:1]), start=LENGTHS[n] + step)
            for n in going
        ]
        out.append(run(model, memory, parts))
    return out, memory


@pytest.mark.parametrize("topk", [48, 5], ids=["all rows attended", "rows chosen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_from_tapes_has_the_bits_of_decoding_op_by_op(dtype: torch.dtype, topk: int) -> None:
    model = make(dtype, kept=True, topk=topk)
    got, memory = decode(model)
    expected, plain = decode(make(dtype, kept=False, topk=topk))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, expected, strict=True))
    for name, pages in memory.pages.items():
        assert torch.equal(pages.nan_to_num(nan=7e7), plain.pages[name].nan_to_num(nan=7e7)), name
    assert isinstance(model.text._kept, KeptSteps)
    replays = model.text._kept.replays
    assert replays >= 14, f"{replays} of {STEPS} steps came from a tape"


def test_what_a_step_gave_stays_as_it_is_in_later_steps() -> None:
    model = make(torch.float32, kept=True)
    given: list[tuple[torch.Tensor, torch.Tensor]] = []
    model.text.register_forward_hook(lambda _, __, out: given.append((out[0], out[0].clone())))
    decode(model)
    assert model.text._kept is not None and model.text._kept.replays > 1
    assert all(torch.equal(kept, then) for kept, then in given)


def test_steps_with_anything_else_in_them_are_not_kept() -> None:
    model = make(torch.float32, kept=True)
    kept = model.text._kept
    assert kept is not None
    memory = memory_for(model, 2, 40)
    both = [Part(sequence=n, tokens=text_tokens(random_text(1)), start=3) for n in range(2)]
    batch = build_step(memory, both)[0]
    with torch.no_grad():
        assert kept.fits(batch)
        longer = [Part(sequence=0, tokens=text_tokens(random_text(2)), start=3), both[1]]
        assert not kept.fits(build_step(memory, longer)[0])
        slot = torch.ones(2, dtype=torch.int32)
        assert not kept.fits(replace(batch, slot_T=slot))
        assert not kept.fits(replace(batch, has_pictures=True))
        assert not kept.fits(replace(batch, capture=(0,)))
        assert not kept.fits(replace(batch, engram_rows={0: slot}))
        assert not kept.fits(replace(batch, window_width=model.config.text.sliding_window + 1))
    assert not kept.fits(batch), "gradients"


def test_a_second_thread_runs_op_by_op_meanwhile() -> None:
    model = make(torch.float32, kept=True)
    kept = model.text._kept
    assert kept is not None
    with kept._one_at_a_time:
        got, _ = decode(model)
    assert kept.replays == 0
    expected, _ = decode(make(torch.float32, kept=False))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, expected, strict=True))


def test_the_least_recently_used_tape_goes() -> None:
    model = make(torch.float32, kept=True)
    kept = model.text._kept
    assert kept is not None
    tokens = text_tokens(random_text(1))
    for sequences in (*range(1, 40), 1, 1):
        memory = memory_for(model, sequences, 8)
        run(model, memory, [Part(sequence=n, tokens=tokens, start=0) for n in range(sequences)])
    assert kept.replays == 0, "the first had been forgotten"
    run(model, memory, [Part(sequence=0, tokens=tokens, start=0)])
    assert kept.replays == 1


def test_inputs_of_other_strides_have_a_tape_of_their_own() -> None:
    """Kernels are told how far apart rows lie, which is then on the tape."""
    kept = make(torch.float32, kept=True).text._kept
    assert kept is not None
    rows = torch.zeros(4, 12)
    for given in (rows[:, :4], rows[:, 4:8], torch.zeros(4, 8)[:, :4], torch.zeros(4, 4)):
        kept.run(lambda x, *_: x.clone(), given, (), ())  # type: ignore[arg-type]
    assert len(kept._tapes) == 3

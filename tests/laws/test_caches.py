"""What is found in a cache is what would have been computed: logits and answers of hits equal those of cold runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spyglass.lora.use import NO_ADAPTER, AdapterHandle
from spyglass.prompt.tokens import Patches, Prompt
from tests.cache_parts import (
    BOTH_CACHES,
    BRIEF,
    MIXED,
    SHOWN,
    CountedModel,
    World,
    ask,
    finish,
    make_world,
    picture,
    spread,
    text,
)
from tests.engine_parts import NO_CACHES, PREFIX_BLOCK, pages_used


@pytest.fixture(scope="module", params=["v4", "v41"])
def world(request: pytest.FixtureRequest) -> World:
    return make_world(request.param)


PIECES = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 40), st.integers(0, 2)),  # text: length, seed
        st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2)),  # picture: rows, columns, seed
    ),
    min_size=1,
    max_size=4,
)


def parts_of(pieces: Sequence[Any]) -> list[Any]:
    return [text(*piece) if len(piece) == 2 else picture(*piece) for piece in pieces]


@settings(max_examples=12)
@given(turns=st.lists(PIECES, min_size=2, max_size=4), fork=st.integers(0, 2), step=st.integers(40, 90))
def test_every_turn_of_a_conversation_and_of_a_fork_of_it_answers_as_a_cold_run(
    turns: list[Any], fork: int, step: int, world: World
) -> None:
    engine = world.engine(step=step, **BOTH_CACHES)
    said: list[Any] = []
    histories: list[list[Any]] = []
    for turn in turns:
        said = said + parts_of(turn)
        prompt = world.prompt(said)
        output = ask(engine, prompt)
        world.check(output, prompt)
        if histories:
            assert output.usage.cached_tokens >= len(world.prompt(histories[-1])) - 1
        said = [*said, list(output.token_ids)]
        histories.append(said)
    again = world.prompt([*histories[fork % len(histories)], *parts_of(turns[0])])
    world.check(ask(engine, again), again)
    engine.prefixes.clear()
    assert set(pages_used(engine).values()) == {0}


def test_a_prompt_that_shares_any_beginning_goes_on_from_the_last_snapshot_before_the_difference(world: World) -> None:
    """The other prompt differs from position c on; c takes every place in a block and in a compressed group."""
    whole = world.prompt(MIXED)
    places = legal_places(whole)
    engine = world.engine(step=50, **BOTH_CACHES)
    ask(engine, whole)
    for c in [c for c in range(1, len(whole), 3) if whole.kinds_T[c] < 0]:
        other = world.prompt([*cut(MIXED, whole, c), [(int(whole.ids_T[c]) + 1) % 60 + 2], text(3, c)])
        output = ask(engine, other, BRIEF)
        world.check(output, other, BRIEF)
        assert max([place for place in places if place <= c], default=0) <= output.usage.cached_tokens <= c, c


def legal_places(prompt: Prompt) -> list[int]:
    """Where a prompt that was run must have left snapshots: blocks, ends of pictures, the last cut before its end."""
    legal = [c for c in range(1, len(prompt)) if prompt.visible_T2[c - 1, 1] == 0]
    ends = {span.start + span.length for span in prompt.spans}
    return [c for c in legal if c % PREFIX_BLOCK == 0 or c in ends or c == legal[-1]]


def cut(parts: Sequence[Any], prompt: Prompt, c: int) -> list[Any]:
    """Parts of a prompt up to its position c, which lies in text."""
    out: list[Any] = []
    spans = iter(prompt.spans)
    place = 0
    for part in parts:
        if place < c:
            out.append(part[: c - place] if isinstance(part, list) else part)
        place += len(part) if isinstance(part, list) else next(spans).length
    return out


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_a_picture_is_encoded_once_wherever_it_stands(offset: int, world: World) -> None:
    """On V4 its block is 0 to 3 tokens longer, depending on where it begins."""
    counted = CountedModel(world.model)
    engine = replace(world, model=counted).engine(**BOTH_CACHES)
    lengths = set()
    for before in [8 + offset, 8, 9, 10, 11]:
        prompt = world.prompt([text(before, before), picture(4, 6, 1), text(3, 9)])
        output = ask(engine, prompt, BRIEF)
        world.check(output, prompt, BRIEF)
        lengths.add(prompt.spans[0].length)
    assert counted.pictures == 1
    stats = engine.stats()
    assert (stats.image_queries, stats.image_hits) == (4, 3)  # the prompt that came twice needs no picture at all
    assert len(lengths) == (4 if world.model.config.vision.layout == "paired" else 1)


def test_requests_with_the_same_picture_in_one_step_encode_it_once(world: World) -> None:
    counted = CountedModel(world.model)
    for options in (BOTH_CACHES, NO_CACHES):
        engine = replace(world, model=counted).engine(step=300, **options)
        prompts = [world.prompt([text(n, n), picture(4, 6, 1), picture(2, 2, n), text(n, 9)]) for n in (1, 2, 3)]
        outputs = finish(engine, [engine.add(prompt, BRIEF) for prompt in prompts])
        for output, prompt in zip(outputs, prompts, strict=True):
            world.check(output, prompt, BRIEF)
        assert counted.pictures == 4
        counted.pictures = 0


def test_another_picture_of_the_same_size_is_not_taken_for_the_first(world: World) -> None:
    """A, then B, then A (B differs in its very last pixel only)."""
    pixels = np.random.default_rng(0).integers(0, 256, (36, 3, 4, 4), dtype=np.uint8)
    other = pixels.copy()
    other[-1, -1, -1, -1] ^= 255
    a, b = (world.prompt([text(18, 1), Patches(each, (6, 6)), text(4, 2)]) for each in (pixels, other))
    engine = world.engine(**BOTH_CACHES)
    first, second, third = (ask(engine, prompt) for prompt in (a, b, a))
    for output, prompt in zip((first, second, third), (a, b, a), strict=True):
        world.check(output, prompt)
    assert not np.array_equal(spread(first), spread(second))
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens == PREFIX_BLOCK  # text before the picture
    assert third.usage.cached_tokens == len(a) - 1


def test_a_repeated_prompt_computes_its_last_token_only(world: World) -> None:
    counted = CountedModel(world.model)
    engine = replace(world, model=counted).engine(**BOTH_CACHES)
    prompt = world.prompt(MIXED)
    ask(engine, prompt)
    counted.rows = counted.pictures = 0
    output = ask(engine, prompt)
    world.check(output, prompt)
    assert output.usage.cached_tokens == len(prompt) - 1
    assert (counted.rows, counted.pictures) == (SHOWN.max_tokens, 0)
    stats = engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (2 * len(prompt), len(prompt) - 1)
    assert (stats.image_queries, stats.image_hits) == (3, 0)
    assert stats.cache_share == 0 < engine.prefixes.counts.bytes_held  # what only the cache holds can be had


def test_a_prompt_that_ends_with_a_picture_is_run_again_from_before_its_block_where_it_cannot_be_cut(
    world: World,
) -> None:
    prompt = world.prompt([text(9, 1), picture(4, 4, 1)])
    engine = world.engine(**BOTH_CACHES)
    for known in (0, prompt.spans[0].start + prompt.spans[0].lead if prompt.visible_T2.any() else len(prompt) - 1):
        output = ask(engine, prompt)
        world.check(output, prompt)
        assert output.usage.cached_tokens == known


def test_rows_of_one_adapter_are_never_used_for_another(world: World) -> None:
    """Digests cover weights, alpha and scale; the name of an adapter and its slot count not."""
    engine = world.engine(**BOTH_CACHES)
    prompt = world.prompt([text(20, 1), picture(4, 4, 1), text(20, 2)])
    text_a, text_b = AdapterHandle(text_digest=b"a"), AdapterHandle(text_digest=b"b")
    vision_a, vision_b = AdapterHandle(vision_digest=b"a"), AdapterHandle(vision_digest=b"b")
    whole, before_picture = len(prompt) - 1, PREFIX_BLOCK
    encoded = 0
    for adapter, known, encodes in (
        (NO_ADAPTER, 0, True),
        (text_a, 0, False),  # an adapter of the text leaves the pictures as they are
        (text_b, 0, False),
        (vision_a, before_picture, True),
        (vision_b, before_picture, True),
        (replace(vision_b, text_digest=b"b"), before_picture, False),
        (NO_ADAPTER, whole, None),
        (text_a, whole, None),
        (vision_a, whole, None),
    ):
        output = ask(engine, prompt, BRIEF, adapter)
        assert output.usage.cached_tokens == known, adapter
        world.check(output, prompt, BRIEF)
        encoded += encodes is True
        assert engine.image_cache.counts.queries - engine.image_cache.counts.hits == encoded, adapter


def test_an_edit_near_the_end_of_an_agents_long_context_costs_a_block_at_most(world: World) -> None:
    """Live 556 tokens, new prompt 553, 540 in common."""
    engine = world.engine(step=128, **BOTH_CACHES)
    live = ask(engine, world.prompt([text(552, 1)]))
    assert live.usage.cached_tokens == 0
    common = text(552, 1)[:540]
    output = ask(engine, world.prompt([common, text(13, 2)]))
    assert 540 - PREFIX_BLOCK < output.usage.cached_tokens <= 540
    world.check(output, world.prompt([common, text(13, 2)]))


def test_all_turns_of_many_sessions_go_on_where_they_were(world: World) -> None:
    """32 sessions, 5 turns, a shared beginning of 80 tokens with a picture."""
    counted = CountedModel(world.model)
    engine = replace(world, model=counted).engine(step=64, **BOTH_CACHES)
    shared = [text(70, 1), picture(3, 3, 1)]
    ends = world.prompt([*shared, [5]]).spans[0]
    sessions: list[list[Any]] = [list(shared) for _ in range(32)]
    known = [ends.start + ends.length] * len(sessions)
    ask(engine, world.prompt([*shared, [5]]), BRIEF)
    for turn in range(5):
        prompts = [world.prompt([*said, text(5, 100 * turn + number)]) for number, said in enumerate(sessions)]
        outputs = finish(engine, [engine.add(prompt, BRIEF) for prompt in prompts])
        for number, (output, prompt) in enumerate(zip(outputs, prompts, strict=True)):
            assert output.usage.cached_tokens == known[number]
            if number % 11 == turn:
                world.check(output, prompt, BRIEF)
            sessions[number] += [text(5, 100 * turn + number), list(output.token_ids)]
            known[number] = len(prompt) + len(output.token_ids) - 1
    assert counted.pictures == 1


def test_prompts_that_arrive_together_run_what_they_share_about_once(world: World) -> None:
    counted = CountedModel(world.model)
    engine = replace(world, model=counted).engine(step=64, **BOTH_CACHES)
    shared = text(320, 1)
    prompts = [world.prompt([shared, text(4, 10 + number)]) for number in range(4)]
    outputs = finish(engine, [engine.add(prompt, BRIEF) for prompt in prompts])
    for output, prompt in zip(outputs, prompts, strict=True):
        world.check(output, prompt, BRIEF)
    assert counted.rows < 2 * len(shared)
    assert counted.rows == sum(len(p) + 1 for p in prompts) - sum(output.usage.cached_tokens for output in outputs)

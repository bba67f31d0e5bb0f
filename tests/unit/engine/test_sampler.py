"""The sampler against its definition, token by token, and against distributions it must reproduce."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spyglass.engine import sampler, thresholds
from spyglass.engine.request import SamplingParams
from spyglass.engine.sampler import (
    SampleInput,
    UsedTokens,
    argmax,
    inverse_draw,
    penalise,
    sample,
    uniform,
)
from spyglass.engine.thresholds import (
    kept_weights,
    threshold_of_all,
    threshold_of_sorted,
    threshold_of_top,
    top_entries,
)

NONE = torch.tensor([], dtype=torch.int64)


def draws(logits: Any, params: SamplingParams, count: int, seed: int = 0, banned: torch.Tensor = NONE) -> list[int]:
    """`count` tokens of one distribution, at positions 0, 1, ..."""
    rows = torch.as_tensor(logits, dtype=torch.float32).repeat(count, 1)
    step = SampleInput(
        params=[params] * count,
        seed_S=np.full(count, seed, np.uint64),
        position_S=np.arange(count, dtype=np.uint64),
        used=[None] * count,
    )
    return sample(rows, step, banned).read().ids


def slow_kept(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """The definition, written token by token in double precision: probability of each kept token."""
    top = max(logits)
    x = [(value - top) / params.temperature for value in logits]
    kept = [i for i in range(len(x)) if not params.top_k or sum(other > x[i] for other in x) < params.top_k]
    mass = sum(math.exp(x[i]) for i in kept)
    kept = [i for i in kept if sum(math.exp(x[j]) for j in kept if x[j] > x[i]) < params.top_p * mass or x[i] == 0]
    kept = [i for i in kept if math.exp(x[i]) >= params.min_p]
    total = sum(math.exp(x[i]) for i in kept)
    return {i: math.exp(x[i]) / total for i in kept}


# Logits on a coarse grid, so that ties are common and no cut falls within rounding of a token's mass
GRID = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=1, max_size=40)


@given(
    logits=GRID,
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.0312345, 0.2712345, 0.5012345, 0.7312345, 0.9512345, 1.0]),
    min_p=st.sampled_from([0.0, 0.0112345, 0.1012345, 0.4012345, 1.0]),
)
def test_kept_tokens_are_those_of_the_definition(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    weight = kept_weights(torch.tensor([logits]), [params])[0].double()
    expected = slow_kept(logits, params)
    assert set(torch.nonzero(weight).flatten().tolist()) == set(expected)
    for token, probability in expected.items():
        assert float(weight[token] / weight.sum()) == pytest.approx(probability, rel=1e-5)


@given(logits=GRID, top_k=st.integers(0, 45), top_p=st.sampled_from([0.0312345, 0.2712345, 0.5012345, 0.9512345, 1.0]))
def test_a_search_among_all_keeps_what_the_definition_keeps(logits: list[float], top_k: int, top_p: float) -> None:
    x = torch.tensor([logits]) - max(logits)
    least = threshold_of_all(x, x.exp(), np.array([top_k], np.float64), np.array([top_p]))
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p)
    assert set(torch.nonzero(x[0] >= least[0]).flatten().tolist()) == set(slow_kept(logits, params))


def test_the_likeliest_suffice_for_peaked_rows_and_say_so_where_they_do_not() -> None:
    """Rows from nearly even to nearly certain, over more columns than are looked at first."""
    generator = torch.Generator().manual_seed(5)
    x = (torch.randn(24, 30_000, generator=generator) * torch.linspace(0.01, 12, 24)[:, None] * 8).round() / 8
    x -= x.amax(dim=-1, keepdim=True)
    known = []
    for top_k, top_p in ((0, 0.9012345), (20, 1.0), (40, 0.7012345), (200, 1.0), (200, 0.9012345), (0, 0.3012345)):
        settings = np.full(24, top_k, np.float64), np.full(24, top_p)
        found, sure = threshold_of_top(x, x.exp(), *settings)
        assert torch.equal(found[sure], threshold_of_all(x, x.exp(), *settings)[sure]), (top_k, top_p)
        known.append(int(sure.sum()))
    assert known[1:4] == [24, 24, 0] and 0 < known[0] < known[5] < 24


@pytest.mark.parametrize("columns", [3, 256, 300, 20_000])
def test_the_likeliest_are_the_head_of_the_sorted_row(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    x = torch.randint(-50, 50, (6, columns), generator=generator) / torch.randint(1, 20, (6, 1), generator=generator)
    x[2, -1] = 1000.0
    for blocks in (1, 3, 64):
        values, ids = top_entries(x, blocks)
        for row in range(6):
            count = int((values[row] > -math.inf).sum())
            assert count >= min(blocks, columns)
            assert torch.equal(values[row, :count], x[row].sort(descending=True).values[:count])
            assert torch.equal(x[row, ids[row, :count]], values[row, :count])
            assert len(set(ids[row, :count].tolist())) == count


@given(logits=GRID, top_k=st.integers(0, 12), top_p=st.sampled_from([0.05, 0.5012345, 0.9012345, 1.0]))
def test_sorted_rows_give_the_thresholds_of_the_search(logits: list[float], top_k: int, top_p: float) -> None:
    """What a GPU does, where nothing may depend on how many entries are found."""
    x = torch.tensor([logits]) - max(logits)
    settings = np.array([top_k], np.float64), np.array([top_p])
    least, _ = threshold_of_sorted(x.sort(dim=-1, descending=True).values, x.exp(), *settings)
    assert torch.equal(x >= least, x >= threshold_of_all(x, x.exp(), *settings))


def test_on_a_device_nothing_depends_on_values_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors have no values: whatever asks for one, or for how many there are, raises."""
    for module in (sampler, thresholds):
        monkeypatch.setattr(module, "to_device", lambda array, device: torch.as_tensor(array).to(device))
    params = [
        SamplingParams(top_k=5, top_p=0.9, logprobs=3),
        SamplingParams(temperature=0),
        SamplingParams(min_p=0.1, logit_bias={3: 1.0}),
        SamplingParams(top_p=0.5, repetition_penalty=1.2, prompt_logprobs=2),
        SamplingParams(),
    ]
    step = SampleInput(
        params=params,
        seed_S=range(5),
        position_S=range(5),
        used=[None, None, None, used([1, 2], [0, 3]), None],
        grammar_rows=[1, 4],
        allowed=torch.ones(2, 3000, dtype=torch.bool),
    )
    found = sample(torch.empty(5, 3000, device="meta"), step, torch.empty(2, dtype=torch.int64, device="meta"))
    assert found.ids_S.device.type == "meta" and found.ids_S.shape == (5,)
    with pytest.raises(NotImplementedError):
        found.read()


def test_each_row_is_cut_by_its_own_parameters() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 3000) * 2
    params = [
        SamplingParams(),
        SamplingParams(top_k=7),
        SamplingParams(top_p=0.8123),
        SamplingParams(min_p=0.05),
        SamplingParams(top_k=900, top_p=0.95123, min_p=0.001, temperature=1.7),
        SamplingParams(top_k=1),
    ]
    together = kept_weights(logits.clone(), params)
    for row, own in enumerate(params):
        alone = kept_weights(logits[row : row + 1].clone(), [own])
        assert torch.equal(alone[0], together[row])
        assert set(torch.nonzero(alone[0]).flatten().tolist()) == set(slow_kept(logits[row].tolist(), own))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=1000).filter(any), st.floats(0, 1, exclude_max=True))
def test_the_choice_is_the_inverse_of_the_cumulative_distribution(counts: list[int], u: float) -> None:
    """Small integers: every sum is exact, in blocks or not."""
    weight = torch.zeros(1, -(-len(counts) // 256) * 256)
    weight[0, : len(counts)] = torch.tensor(counts, dtype=torch.float32)
    [chosen] = inverse_draw(weight, torch.tensor([u], dtype=torch.float64)).tolist()
    cumulative = np.cumsum(counts)
    assert chosen == int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    assert counts[chosen] > 0


@pytest.mark.parametrize("columns", [255, 256, 257, 1000, 5000])
def test_the_choice_is_right_behind_any_number_of_blocks(columns: int) -> None:
    counts = np.random.default_rng(columns).integers(0, 4, columns)
    weight = torch.zeros(200, -(-columns // 256) * 256)
    weight[:, :columns] = torch.from_numpy(counts).float()
    u = np.random.default_rng(1).random(200)
    chosen = inverse_draw(weight, torch.from_numpy(u)).tolist()
    assert chosen == np.searchsorted(np.cumsum(counts), u * counts.sum(), side="right").tolist()


def test_the_largest_uniform_number_still_chooses_a_token_that_may_be_drawn() -> None:
    weight = torch.zeros(1, 512)
    weight[0, [3, 300]] = torch.tensor([1.0, 1e-30])
    [chosen] = inverse_draw(weight, torch.tensor([1.0], dtype=torch.float64)).tolist()
    assert chosen in (3, 300)


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625]))
    counts = np.bincount(draws(logits, SamplingParams(), 40_000), minlength=5) / 40_000
    assert counts == pytest.approx(np.exp(logits), abs=0.012)


def test_temperature_sharpens_as_a_power() -> None:
    p = np.array([0.5, 0.3, 0.2])
    for temperature in (0.5, 2.0):
        counts = np.bincount(draws(np.log(p), SamplingParams(temperature=temperature), 40_000), minlength=3)
        expected = p ** (1 / temperature)
        assert counts / 40_000 == pytest.approx(expected / expected.sum(), abs=0.012)


def test_temperature_0_and_a_vanishing_temperature_take_the_likeliest() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(1))
    best = int(logits.argmax())
    assert set(draws(logits, SamplingParams(temperature=0), 50)) == {best}
    for temperature in (1e-30, 1e-46, 5e-324):
        assert set(draws(logits, SamplingParams(temperature=temperature), 50)) == {best}


@pytest.mark.parametrize("columns", [1, 7, 255, 256, 257, 512, 1000])
def test_the_largest_is_torchs_argmax_ties_and_nan_included(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    rows = torch.randint(-3, 4, (40, columns), generator=generator).float()
    rows[3] = -math.inf
    rows[4, torch.randint(columns, (1,), generator=generator)] = math.nan
    rows[5, -1] = 9.0
    assert torch.equal(argmax(rows), rows.argmax(dim=-1))


def test_a_huge_temperature_draws_evenly_and_never_what_is_banned() -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)).masked_fill(torch.arange(40) < 20, -torch.inf)
    drawn = draws(logits, SamplingParams(temperature=1e6), 2000)
    assert set(drawn) == set(range(20, 40))
    assert np.bincount(drawn)[20:] == pytest.approx(100, rel=0.4)


def test_a_top_k_beyond_the_vocabulary_keeps_all_of_it() -> None:
    logits = torch.zeros(10)
    for top_k in (10, 11, 2**70, 10**400):
        assert set(draws(logits, SamplingParams(top_k=top_k), 300)) == set(range(10))


def test_a_random_number_depends_on_seed_and_position_alone() -> None:
    seeds = np.array([1, 2, 1, 2**64 - 1], np.uint64)
    places = np.array([5, 5, 6, 2**63], np.uint64)
    together = uniform(seeds, places)
    assert together.tolist() == [uniform(seeds[i : i + 1], places[i : i + 1])[0] for i in range(4)]
    assert len(set(together.tolist())) == 4


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_random_numbers_are_uniform_and_unrelated(vary: str) -> None:
    count = 100_000
    running, fixed = np.arange(count, dtype=np.uint64), np.full(count, 7, np.uint64)
    u = uniform(running, fixed) if vary == "seed" else uniform(fixed, running)
    assert 0 <= u.min() and u.max() < 1
    assert np.histogram(u, bins=20, range=(0, 1))[0] == pytest.approx(count / 20, rel=0.06)
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02
    assert len(np.unique(u)) == count


def test_a_row_draws_the_same_alone_and_among_others() -> None:
    torch.manual_seed(2)
    logits = torch.randn(5, 700)
    params = [SamplingParams(temperature=0 if row == 2 else 1.0, top_p=1 - row / 10) for row in range(5)]
    seeds, places = np.arange(5, dtype=np.uint64), np.array([9, 3, 4, 5, 7], np.uint64)

    def run(rows: list[int]) -> list[int]:
        step = SampleInput(
            params=[params[r] for r in rows], seed_S=seeds[rows], position_S=places[rows], used=[None] * len(rows)
        )
        return sample(logits[rows].clone(), step, NONE).read().ids

    together = run([0, 1, 2, 3, 4])
    assert [run([row])[0] for row in range(5)] == together
    assert run([4, 2, 0]) == [together[4], together[2], together[0]]


def used(ids: list[int], counts: list[float]) -> UsedTokens:
    return UsedTokens(ids_J=np.array(ids, np.int64), counts_J=np.array(counts, np.float32))


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    logits = torch.tensor([[2.0, -2.0, 0.0, 3.0]])
    penalise(logits, [SamplingParams(repetition_penalty=1.6)], [used([0, 1, 2], [1, 0, 0])])
    assert logits.tolist() == [pytest.approx([1.25, -3.2, 0.0, 3.0])]


def test_frequency_penalty_counts_occurrences_in_the_answer() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0]])
    penalise(logits, [SamplingParams(frequency_penalty=0.5)], [used([0, 1], [3, 0])])
    assert logits.tolist() == [[-0.5, 1.0, 1.0]]


def test_presence_penalty_counts_once_and_spares_the_prompt() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0]])
    penalise(logits, [SamplingParams(presence_penalty=0.75)], [used([0, 1], [3, 0])])
    assert logits.tolist() == [[0.25, 1.0, 1.0]]


def test_repetition_comes_before_the_subtracted_penalties() -> None:
    logits = torch.tensor([[2.0]])
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5)
    penalise(logits, [params], [used([0], [2])])
    assert logits.tolist() == [[2.0 / 2 - 0.25 * 2 - 0.5]]


def test_penalties_touch_only_their_own_row() -> None:
    logits = torch.ones(4, 3)
    params = [
        SamplingParams(),
        SamplingParams(presence_penalty=1.0),
        SamplingParams(),
        SamplingParams(frequency_penalty=1.0),
    ]
    penalise(logits, params, [None, used([2], [1]), None, used([0, 1], [2, 1])])
    assert logits.tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 1], [-1, 0, 1]]


def test_banned_ids_are_never_drawn() -> None:
    logits = [9.0, 8.0, 1.0, 0.0]
    banned = torch.tensor([0, 1])
    assert draws(logits, SamplingParams(temperature=0), 1, banned=banned) == [2]
    assert set(draws(logits, SamplingParams(temperature=5.0), 300, banned=banned)) == {2, 3}
    assert set(draws(logits, SamplingParams(top_k=2), 300, banned=banned)) == {2, 3}


def test_logprobs_are_the_models_own_and_add_up_to_one() -> None:
    torch.manual_seed(3)
    logits = torch.randn(2, 50)
    step = SampleInput(
        params=[SamplingParams(temperature=0.2, logprobs=50, presence_penalty=2.0, top_k=1), SamplingParams()],
        seed_S=np.zeros(2, np.uint64),
        position_S=np.zeros(2, np.uint64),
        used=[used([int(logits[0].argmax())], [1]), None],
    )
    drawn = sample(logits.clone(), step, torch.tensor([5])).read()
    entry = drawn.logprobs[0]
    assert entry is not None and drawn.logprobs[1] is None
    own = logits[0].log_softmax(-1)
    assert entry.logprob == pytest.approx(float(own[entry.token_id]), abs=1e-5)
    assert sum(math.exp(value) for _, value in entry.top) == pytest.approx(1.0, abs=1e-5)
    assert [token for token, _ in entry.top] == own.argsort(descending=True).tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_numbers_is_reported_and_spoils_no_other(bad: float) -> None:
    params = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_p=0.5),
        SamplingParams(top_k=2),
        SamplingParams(temperature=0),
        SamplingParams(top_p=0.9),
    ]
    logits = torch.full((6, 300), bad)
    logits[4:] = 0.0
    logits[4:, 1] = 50.0
    step = SampleInput(params=params, seed_S=np.zeros(6, np.uint64), position_S=np.zeros(6, np.uint64), used=[None] * 6)
    drawn = sample(logits, step, NONE).read()
    assert drawn.is_finite == [False] * 4 + [True] * 2
    assert drawn.ids[4:] == [1, 1]

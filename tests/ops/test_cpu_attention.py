"""Compiled attention and index choice against the reference, over shuffled pages of NaN."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from spyglass.ops.index_topk import cpu as index_cpu
from spyglass.ops.index_topk import reference as index_reference
from spyglass.ops.sparse_attention import cpu as attention_cpu
from spyglass.ops.sparse_attention import reference as attention_reference
from tests.ops.cpu_kernels import DTYPES, every_isa, kernels, tolerance
from tests.ops.paged import Paged
from tests.tolerance import assert_close


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attention_case(
    lengths: list[int],
    heads: int,
    dim: int,
    dtype: torch.dtype,
    *,
    window: int = 9,
    ratio: int = 3,
    only_last: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """Prefill of sequences of these lengths (or their last rows): arguments, options of the pool, window width."""
    rows = [torch.randn(n, dim).to(dtype) for n in lengths]
    pooled = [torch.randn(max(n // ratio, 1), dim).to(dtype) for n in lengths]
    near, far = Paged(rows, 7), Paged(pooled, 4)
    seq = np.concatenate([[s] * (1 if only_last else n) for s, n in enumerate(lengths)])
    position = np.concatenate([[n - 1] if only_last else np.arange(n) for n in lengths])
    lo, hi = np.maximum(position - window + 1, 0), position.copy()
    if not only_last and len(hi) > 30:
        hi[20:26] = np.minimum(position[20:26].max(), np.array(lengths)[seq[20:26]] - 1)  # a picture sees to its end
        lo[28], hi[28] = 1, 0  # a padding row sees nothing
    q = torch.randn(len(seq), heads, dim).to(dtype)
    arguments = (q, near.pages, near.table, ints(seq), ints(lo), ints(hi), torch.randn(heads))
    options = {"scale": dim**-0.5, "window_width": int((hi - lo).max()) + 1}
    visible = np.where(lo > hi, 0, (position + 1) // ratio)
    pool = {"pool_NBD": far.pages, "pool_table_SP": far.table, "visible_T": ints(visible)}
    return arguments, options, pool


def topk_indices(visible: torch.Tensor, count: int, prefix: bool) -> torch.Tensor:
    """Ascending choices among the visible entries, some of them absent or not visible."""
    out = torch.full((len(visible), count), -1, dtype=torch.int32)
    for t, seen in enumerate(visible.tolist()):
        chosen = torch.arange(min(seen, count)) if prefix else torch.randperm(seen + 2)[:count].sort().values
        out[t, : len(chosen)] = chosen.int()
    return out


@every_isa
def test_attention_reads_any_mix_of_query_and_page_dtypes(isa: str) -> None:
    for q_dtype, page_dtype in itertools.product(DTYPES, DTYPES):
        (q, pages, *rest), options, _ = attention_case([40], 5, 48, page_dtype)
        got = attention_cpu.sparse_attention(q.to(q_dtype), pages, *rest, kernels=kernels(isa), **options)
        want = attention_reference.sparse_attention(q.to(q_dtype), pages, *rest, **options)
        assert_close(got, want, tolerance(q_dtype))


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_logits_do_not_overflow(dtype: torch.dtype, isa: str) -> None:
    for only_last, sink_value in itertools.product((False, True), (0.0, 80.0, -1e4)):
        (q, pages, *rest, sink), options, _ = attention_case([20], 4, 32, dtype, only_last=only_last)
        arguments = (q * 100, pages, *rest, torch.full_like(sink, sink_value))
        got = attention_cpu.sparse_attention(*arguments, kernels=kernels(isa), **options)
        assert_close(got, attention_reference.sparse_attention(*arguments, **options), tolerance(dtype))


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_that_only_their_scale_makes_small_are_no_less_exact(dtype: torch.dtype, isa: str) -> None:
    """The largest score is taken off scaled: unscaled, it is hundreds away from the others, and all would vanish."""
    for only_last in (False, True):
        (q, pages, *rest), options, _ = attention_case([20], 4, 32, dtype, only_last=only_last)
        arguments, options = (q * 100, pages, *rest[:-1], rest[-1] - 1e4), options | {"scale": 1e-3}
        got = attention_cpu.sparse_attention(*arguments, kernels=kernels(isa), **options)
        assert_close(got, attention_reference.sparse_attention(*arguments, **options), tolerance(dtype))


@every_isa
def test_queries_that_see_nothing_give_zeros_among_others(isa: str) -> None:
    for with_pool in (False, True):
        (q, pages, table, seq, lo, hi, sink), options, pool = attention_case(
            [40, 25, 9, 30, 12], 4, 32, torch.float32, only_last=True
        )
        lo[[1, 3]], hi[[1, 3]] = 20, 3
        pool["visible_T"][[1, 3]] = 0
        if with_pool:
            options |= pool | {"pool_width": int(pool["visible_T"].max())}
        got = attention_cpu.sparse_attention(q, pages, table, seq, lo, hi, sink, kernels=kernels(isa), **options)
        want = attention_reference.sparse_attention(q, pages, table, seq, lo, hi, sink, **options)
        assert not got[[1, 3]].any()
        assert_close(got, want, tolerance(torch.float32))


@every_isa
def test_far_apart_ranges_of_one_sequence_share_nothing(isa: str) -> None:
    """Neighbouring queries that look at distant places: rows between them are gone, and must not be read."""
    rows = torch.randn(4000, 16)
    rows[50:3900] = float("nan")
    pages = Paged([rows], 16)
    lo, hi = ints([3, 3950, 10, 3901, 5, 0]), ints([30, 3999, 12, 3905, 4, 49])
    arguments = (torch.randn(6, 2, 16), pages.pages, pages.table, ints([0] * 6), lo, hi, torch.zeros(2))
    got = attention_cpu.sparse_attention(*arguments, scale=0.3, window_width=50, kernels=kernels(isa))
    assert_close(
        got, attention_reference.sparse_attention(*arguments, scale=0.3, window_width=50), tolerance(torch.float32)
    )


@every_isa
def test_pages_of_a_ring_are_read_round(isa: str) -> None:
    rows = [torch.randn(40, 16), torch.randn(33, 16)]
    pages = Paged(rows, 7, first=[25, 20])
    lo, hi = ints([25, 27, 31, 20, 24]), ints([33, 35, 39, 28, 32])
    arguments = (torch.randn(5, 2, 16), pages.pages, pages.table, ints([0, 0, 0, 1, 1]), lo, hi, torch.zeros(2))
    got = attention_cpu.sparse_attention(*arguments, scale=0.3, window_width=9, kernels=kernels(isa))
    want = attention_reference.sparse_attention(*arguments, scale=0.3, window_width=9)
    assert want.isfinite().all()
    assert_close(got, want, tolerance(torch.float32))


@every_isa
def test_probabilities_are_rounded_and_their_sum_is_not(isa: str) -> None:
    """255 keys have p = exp(-2^-10), rounded 1: a mean just below a midpoint, times 256 / (1 + 255 p), is above it."""
    rows = torch.zeros(256, 2)
    rows[1:, 0] = -(2.0**-10)
    rows[:, 1] = torch.where(torch.arange(256) < 130, 1.0, 1 + 2.0**-7)
    for count, page_dtype in itertools.product((1, 3), DTYPES):
        pages = Paged([rows.to(page_dtype)], 16)
        q = torch.tensor([[[1.0, 0.0]]] * count, dtype=torch.bfloat16)
        places = [ints([value] * count) for value in (0, 0, 255)]
        arguments = (q, pages.pages, pages.table, *places, torch.full((1,), -1e4))
        for run in (
            attention_reference.sparse_attention,
            partial(attention_cpu.sparse_attention, kernels=kernels(isa)),
        ):
            assert run(*arguments, scale=1.0, window_width=256)[:, 0, 1].tolist() == [1 + 2.0**-7] * count


@every_isa
def test_attention_threads_agree(isa: str) -> None:
    """One query on two threads, and many: the same numbers as on one."""
    before = torch.get_num_threads()
    try:
        for only_last in (True, False):
            arguments, options, pool = attention_case([70], 16, 128, torch.bfloat16, only_last=only_last)
            options |= pool | {"topk_indices_TX": topk_indices(pool["visible_T"], 8, False), "pool_width": 8}
            outs = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                outs.append(attention_cpu.sparse_attention(*arguments, kernels=kernels(isa), **options))
            assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    finally:
        torch.set_num_threads(before)


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_that_shares_nothing_gets_the_same_bits_in_any_company(dtype: torch.dtype, isa: str) -> None:
    """Alone, where threads share out its heads, among many, and beside a prompt."""
    (q, pages, table, seq, lo, hi, sink), options, pool = attention_case(
        [70, 33, 12, 9, 40], 6, 64, dtype, only_last=True
    )
    options |= pool | {"pool_width": 23}

    def run(rows: list[int], first: int = 0) -> torch.Tensor:
        own = options | {"visible_T": options["visible_T"][rows]}
        low = lo.clone()
        low[first] -= 3
        arguments = (q[rows], pages, table, seq[rows], low[rows], hi[rows], sink)
        return attention_cpu.sparse_attention(*arguments, kernels=kernels(isa), **own)

    together = run([0, 1, 2, 3, 4])
    for row in range(1, 5):
        assert torch.equal(run([row])[0], together[row])
        assert torch.equal(run([0, 0, 0, row])[3], together[row])


def index_case(lengths: list[int], heads: int, dim: int, dtype: torch.dtype, tokens: int) -> tuple[Any, ...]:
    keys = Paged([torch.randn(n, dim).to(dtype) for n in lengths], 5)
    seq = np.sort(np.random.default_rng(2).integers(0, len(lengths), tokens))
    visible = np.random.default_rng(3).integers(0, np.array(lengths)[seq] + 1)
    q, weights = torch.randn(tokens, heads, dim).to(dtype), torch.randn(tokens, heads).to(dtype)
    return q, weights, keys.pages, keys.table, ints(seq), ints(visible)


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stepwise", [False, True])
def test_index_choices_are_the_reference_up_to_equal_scores(stepwise: bool, dtype: torch.dtype, isa: str) -> None:
    """Same entries; where they differ, the scores of what was taken and of what was left are as good as equal."""
    for lengths, heads, dim, k, tokens in [
        ([23, 6], 3, 8, 4, 40),
        ([300], 64, 128, 50, 3),
        ([130, 90], 5, 32, 64, 130),
    ]:
        arguments = index_case(lengths, heads, dim, dtype, tokens)
        options = {"max_visible": max(lengths), "stepwise": stepwise}
        got = index_cpu.index_topk(*arguments, k=k, kernels=kernels(isa), **options)
        scaled = (arguments[0], arguments[1] * 0.37, *arguments[2:])
        again = index_cpu.index_topk(*arguments, k=k, weight_scale=0.37, kernels=kernels(isa), **options)
        assert torch.equal(again, index_cpu.index_topk(*scaled, k=k, kernels=kernels(isa), **options))
        want = index_reference.index_topk(*arguments, k=k, **options)
        scores = index_reference.index_scores(*arguments, **options)
        assert got.shape == want.shape and got.dtype == torch.int32
        for row in range(tokens):
            mine, theirs = set(got[row].tolist()) - {-1}, set(want[row].tolist()) - {-1}
            count = len(mine)
            assert count == len(theirs) and got[row, :count].tolist() == sorted(mine)
            assert (got[row, count:] == -1).all()
            for entry in mine ^ theirs:
                edge = scores[row, want[row, :count].long()].min()
                assert abs(float(scores[row, entry] - edge)) <= (2e-5 if dtype == torch.float32 else 1e-2) * 30


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_scores_go_to_the_lowest_entries(dtype: torch.dtype, isa: str) -> None:
    rows = torch.ones(40, 8).to(dtype)
    rows[7] *= 2
    rows[30] *= -1  # relu makes it zero
    keys = Paged([rows], 6)
    for tokens in (1, 9):
        q, weights = torch.ones(tokens, 2, 8).to(dtype), torch.ones(tokens, 2).to(dtype)
        arguments = (q, weights, keys.pages, keys.table, ints([0] * tokens), ints([40] * tokens))
        got = index_cpu.index_topk(*arguments, k=5, max_visible=40, stepwise=True, kernels=kernels(isa))
        assert got.tolist() == [[0, 1, 2, 3, 7]] * tokens
        worst = index_cpu.index_topk(
            q, -weights, *arguments[2:], k=3, max_visible=40, stepwise=False, kernels=kernels(isa)
        )
        assert worst.tolist() == [[0, 1, 30]] * tokens, "zero, of either sign, is above every negative score"


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_entry_that_overflows_below_is_never_picked_and_one_that_is_no_number_first(
    dtype: torch.dtype, isa: str
) -> None:
    """So what is wrong with a key reaches the answer, where it is noticed."""
    rows = torch.ones(12, 8)
    rows[2:] *= 1e30
    rows[5] = float("nan")
    keys = Paged([rows.to(dtype)], 5)
    q, weights = torch.full((1, 2, 8), 1e30).to(dtype), -torch.ones(1, 2).to(dtype)
    arguments = (q, weights, keys.pages, keys.table, ints([0]), ints([12]))
    for run in (index_reference.index_topk, partial(index_cpu.index_topk, kernels=kernels(isa))):
        assert run(*arguments, k=4, max_visible=12, stepwise=False).tolist() == [[0, 1, 5, -1]]
        positive = (q, -weights, *arguments[2:])
        assert run(*positive, k=1, max_visible=12, stepwise=False).tolist() == [[5]]


@every_isa
@pytest.mark.parametrize(
    ("what", "q", "weights", "keys"),
    [
        ("dot", (1 + 2.0**-7, 1.0), (1.5, -1.0), ((0.0, 0.0), (1 - 2.0**-8, 1.5))),
        ("product", (1.0, 1.0), (1 + 2.0**-7, -1.0), ((0.0, 0.0), (1 + 2.0**-7, 1 + 2.0**-6))),
        ("sum", (1.0, 1.0), (1.0, 1.0), ((1.0, 1.0), (1.0, 1 + 2.0**-7))),
    ],
)
def test_scores_in_steps_are_rounded_at_each(
    what: str, q: tuple[float, ...], weights: tuple[float, ...], keys: tuple[tuple[float, ...], ...], isa: str
) -> None:
    """Two heads that see a channel each. Rounded after this step the entries are equal, else the second is better."""
    pages = Paged([torch.tensor(keys, dtype=torch.bfloat16)], 4)
    rows = (torch.diag(torch.tensor(q, dtype=torch.bfloat16))[None], torch.tensor([weights], dtype=torch.bfloat16))
    arguments = (*rows, pages.pages, pages.table, ints([0]), ints([2]))
    for run in (index_reference.index_topk, partial(index_cpu.index_topk, kernels=kernels(isa))):
        picked = [run(*arguments, k=1, max_visible=2, stepwise=stepwise).tolist() for stepwise in (True, False)]
        assert picked == [[[0]], [[1]]], what

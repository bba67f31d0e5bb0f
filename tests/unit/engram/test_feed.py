"""Rows on their way to a model: the same numbers for every placement, size of step and activation dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from spyglass.engine.request import SamplingParams
from spyglass.engram import EngramStore, Placement, TableRows
from spyglass.engram.feed import EngramFeed
from spyglass.prompt.build import prompt_from_parts
from spyglass.quant.codec import encode
from spyglass.quant.formats import BF16, fp8
from tests.engine_parts import mixed_parts, run_all
from tests.engram_values import rows_of, values
from tests.small_v41 import make_engine, small_store, small_v41_config, small_v41_model

CPU = torch.device("cpu")


def store_of(form: str, placement: Placement, head_dim: int = 36) -> EngramStore:
    """Random tables of the small model in one of the stored forms."""
    store = small_store(small_v41_config(engram_head_dim=head_dim))
    tables = {}
    for layer, table in store.tables.items():
        values = torch.from_numpy(table.data)
        if form == "fp8":
            packed = encode(values, fp8((1, 32)))
            assert packed.scale is not None
            stored = TableRows(
                format=packed.format, data=packed.data.view(torch.uint8).numpy(), scale=packed.scale.numpy()
            )
        elif form == "bf16":
            stored = TableRows(format=BF16, data=values.bfloat16().view(torch.uint16).numpy(), scale=None)
        else:
            stored = table
        tables[layer] = stored
    return replace(store, tables=tables, placement=placement)


def step_of(lengths: list[int], seed: int = 0) -> tuple[NDArray[np.int32], NDArray[np.int8], NDArray[np.int32]]:
    """Ids and kinds of packed sequences, and where each begins."""
    random = np.random.default_rng(seed)
    total = sum(lengths)
    kinds = np.where(random.random(total) < 0.1, 2, -1).astype(np.int8)
    return random.integers(0, 68, total).astype(np.int32), kinds, np.cumsum([0, *lengths]).astype(np.int32)


@pytest.mark.parametrize("placement", ["mmap", "host", "device"])
@pytest.mark.parametrize("form", ["fp8", "bf16", "f32"])
@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [130, 1, 40]])
def test_rows_of_a_step_are_those_of_each_sequence(form: str, placement: Placement, lengths: list[int]) -> None:
    store = store_of(form, placement)
    ids, kinds, starts = step_of(lengths)
    lookback = np.array([[9, -2, 4], [-1, -1, -1], [3, 5, -1]], np.int32)[: len(lengths)]
    rows = EngramFeed(store, device=CPU, dtype=torch.float32).start(ids, kinds, lookback, starts)()
    for number in range(len(lengths)):
        mine = slice(int(starts[number]), int(starts[number + 1]))
        alone = rows_of(store, ids[mine], kinds[mine], lookback[number])
        for layer in (1, 4):
            assert rows[layer].shape == (sum(lengths), 6 * 36)
            assert np.array_equal(rows[layer][mine].numpy(), alone[layer]), (layer, number)


class Recorded(TableRows):
    """A table that remembers which rows were asked for, in order."""

    asked: ClassVar[list[NDArray[np.int64]]]

    def __getitem__(self, rows: NDArray[np.int64]) -> TableRows:
        type(self).asked.append(rows.reshape(-1).copy())
        return TableRows.__getitem__(self, rows)


@pytest.mark.parametrize("placement", ["mmap", "host"])
def test_rows_of_a_prompt_that_goes_on_are_read_while_the_step_before_runs(placement: Placement) -> None:
    """Tables in memory are not read ahead; nor are steps of a few tokens. The answers are the same."""
    model = small_v41_model(seed=3)
    prompt = prompt_from_parts(mixed_parts([70, (4, 4), 120]), model.config)
    params, outputs = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), []
    Recorded.asked = []
    for step in (512, 80):
        store = small_store(model.config)
        table = store.tables[1]
        recorded = Recorded(format=table.format, data=table.data, scale=table.scale)
        store = replace(store, tables=store.tables | {1: recorded}, placement=placement)
        outputs += run_all(make_engine(model, step=step, store=store), [prompt], params)
    assert outputs[0].token_ids == outputs[1].token_ids
    whole, asked = Recorded.asked[0], Recorded.asked[3:]
    columns, tokens = len(whole) // len(prompt), [len(rows) for rows in asked]
    cut = [whole[first * columns :][: 80 * columns] for first in range(0, len(prompt), 80)]
    expected = [cut[0], cut[1], *cut[1:]] if placement == "mmap" else cut
    assert len(cut) == 3 and len(cut[2]) <= 64 * columns, "the last step is one of a few tokens"
    assert all(np.array_equal(*pair) for pair in zip(asked, expected, strict=False)), tokens
    assert tokens[len(expected) :] == [columns] * 2, "answers"


def test_bf16_activations_get_the_rounded_rows() -> None:
    store = store_of("fp8", "mmap")
    ids, kinds, starts = step_of([20])
    start = np.full((1, 3), -1, np.int32)
    exact = EngramFeed(store, device=CPU, dtype=torch.float32).start(ids, kinds, start, starts)()
    rounded = EngramFeed(store, device=CPU, dtype=torch.bfloat16).start(ids, kinds, start, starts)()
    assert all(torch.equal(rounded[layer], exact[layer].bfloat16()) for layer in (1, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["mmap", "device"])
@pytest.mark.parametrize("form", ["fp8", "bf16", "f32"])
def test_rows_arrive_on_the_gpu(form: str, placement: Placement) -> None:
    store = store_of(form, placement)
    ids, kinds, starts = step_of([100, 3])
    start = np.full((2, 3), -1, np.int32)
    here = EngramFeed(store, device=CPU, dtype=torch.bfloat16).start(ids, kinds, start, starts)()
    there = EngramFeed(store, device=torch.device("cuda"), dtype=torch.bfloat16).start(ids, kinds, start, starts)()
    assert all(there[layer].is_cuda and torch.equal(there[layer].cpu(), here[layer]) for layer in (1, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_and_scale_is_looked_up_right(dtype: torch.dtype) -> None:
    """Whole blocks of 32 take the table path of processors: all 256 codes under extreme scales, NaN included."""
    store = store_of("fp8", "mmap", head_dim=64)
    table = store.tables[1]
    assert table.scale is not None
    table.data[:4] = np.arange(256, dtype=np.uint8).reshape(4, 64)
    table.scale[:4] = [[0, 1], [127, 254], [255, 100], [126, 128]]
    feed = EngramFeed(store, device=CPU, dtype=dtype)
    got = feed.values_of(1, np.arange(4)[None])
    want = torch.from_numpy(values(table[np.arange(4)])).to(dtype)
    assert torch.equal(got.nan_to_num(7e9), want.nan_to_num(7e9)) and torch.equal(got.isnan(), want.isnan())

"""Rows as codes on a GPU, at released sizes: the bytes that a processor writes, read as the numbers that they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from spyglass import LLM, SamplingParams
from spyglass.config import cache
from spyglass.ops.row_finish import reference as finish_reference
from spyglass.ops.sparse_attention import triton as attention
from spyglass.ops.table import bind_ops
from spyglass.quant.formats import FakeQuant, StoredRow
from spyglass.quant.rows import decode_rows
from tests.ops import paged_cases as cases
from tests.ops.call import Call, Source, assert_agrees, poisoned, run_call
from tests.tolerance import OP_BFLOAT16

pytestmark = pytest.mark.gpu
V4 = StoredRow(quant=FakeQuant(element="e4m3", block=64), dim=512, dims=448)
V41 = StoredRow(quant=FakeQuant(element="e4m3", block=32), dim=512, dims=512)
V41_POOL = StoredRow(quant=FakeQuant(element="e2m1", block=16, scale="e4m3"), dim=512, dims=512)
KEYS = StoredRow(quant=FakeQuant(element="e2m1", block=32), dim=128, dims=128)
BOTH = {"v4": (V4, V4), "v4.1": (V41, V41_POOL)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("format", [V4, V41, V41_POOL, KEYS], ids=["v4", "v4.1", "v4.1 pool", "keys"])
def test_the_bytes_are_those_of_a_processor(format: StoredRow, dtype: torch.dtype) -> None:
    source = Source(dtype, 300)
    x = source.normal(300, format.dim) * torch.exp2(source.below(24, 300, 1).float() - 16).to(dtype)
    x[:, ::7] = 0
    angle = source.fp32(300, 32)
    write = torch.randperm(400, generator=source.generator)[:300]
    write[::5] = -1
    pages = torch.full((50, 8, format.row_bytes), 255, dtype=torch.uint8)
    want, got = pages.clone(), pages.cuda()
    options: dict[str, Any] = {"quant": format.quant, "dims": format.dims}
    finish_reference.row_finish(x, angle.cos(), angle.sin(), pages_NBD=want, write_T=write, **options)
    tables = angle.cos().cuda(), angle.sin().cuda()
    bind_ops("cuda", str(dtype)[6:]).row_finish(x.cuda(), *tables, pages_NBD=got, write_T=write.cuda(), **options)
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("pool", ["none", "all", "chosen"])
@pytest.mark.parametrize("rows", [1, 5, 33, 140])
@pytest.mark.parametrize("family", BOTH)
def test_attention_over_codes_is_attention_over_numbers(family: str, rows: int, pool: str) -> None:
    """As the reference has it, and, launched alike, with the bits of plain rows."""
    options: dict[str, Any] = {"heads": 64, "dim": 512, "window": 128, "slack": 3, "turned": rows != 33}
    options |= {"pool": pool != "none", "topk": pool if pool == "chosen" else "", "formats": BOTH[family]}
    call = cases.sparse_attention(Source(torch.bfloat16, rows), **options)
    expected = run_call(bind_ops("cuda", "bfloat16", "reference").sparse_attention, call, "cuda")
    results = run_call(bind_ops("cuda", "bfloat16").sparse_attention, call, "cuda", poisoned)
    assert_agrees(call, results, tuple(result.cpu() for result in expected), OP_BFLOAT16, f"{rows} rows")
    near, far = BOTH[family]
    args, given = list(call.args), dict(call.options)
    args[1] = decode_rows(args[1], near, torch.bfloat16)
    if pool != "none":
        given["pool_NBD"] = decode_rows(given["pool_NBD"], far, torch.bfloat16)
    plain = run_call(attention.sparse_attention, Call(args=tuple(args), options=given), "cuda")
    assert torch.equal(results[0], plain[0])


@pytest.mark.parametrize("entries", [700, 5000, 40_000])
def test_a_choice_among_codes_is_that_among_numbers(entries: int) -> None:
    generator = torch.Generator().manual_seed(entries)
    q = torch.randn(5, 64, 128, generator=generator).bfloat16().cuda()
    codes = torch.randint(0, 256, (entries // 64 + 1, 64, KEYS.row_bytes), generator=generator, dtype=torch.uint8)
    codes[..., KEYS.scales_at :] = codes[..., KEYS.scales_at :] % 4 + 125
    weights = torch.randn(5, 64, generator=generator).bfloat16().cuda()
    table = torch.randperm(len(codes), generator=generator).int().cuda().expand(5, -1).contiguous()
    visible = torch.tensor([entries, entries - 1, 513, 0, entries // 2], dtype=torch.int32, device="cuda")
    lists = (table, torch.arange(5, dtype=torch.int32, device="cuda"), visible)
    options: dict[str, Any] = {"k": 512, "max_visible": entries, "stepwise": True}
    op = bind_ops("cuda", "bfloat16").index_topk
    got = op(q, weights, codes.cuda(), *lists, key_format=KEYS, **options)
    want = op(q, weights, decode_rows(codes, KEYS, torch.bfloat16).cuda(), *lists, **options)
    assert torch.equal(got, want)


@pytest.mark.parametrize("model", ["spyglass-tiny-v4", "spyglass-tiny-v41"])
def test_answers_from_codes_are_those_from_numbers(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, then decoding, in captured steps; the longest is long enough for a choice of entries."""
    numbers = np.random.default_rng(5)
    prompts = [numbers.integers(10, 400, length).tolist() for length in (3, 700, 130, 2300, 1)]
    answers = []
    for stored in ({"cuda"}, set[str]()):
        monkeypatch.setattr(cache, "STORED_ON", frozenset(stored))
        llm = LLM(model, device="cuda", numerics="reference", max_sequences=4, max_length=4096, max_step_tokens=256)
        assert {pages.dtype == torch.uint8 for (kind, _), pages in llm.engine.allocator.pages.items()
                if kind in ("window", "pool", "index")} == {bool(stored)}  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2)
        answers.append([(output.token_ids, output.logprobs) for output in llm.generate(prompts, params)])
    assert answers[0] == answers[1]

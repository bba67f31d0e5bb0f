"""Rows of the cache as codes: read back they are exactly what rounding leaves, and ops read them as plain rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from spyglass.config.presets import preset_config
from spyglass.config.read import parse_model_config
from spyglass.errors import DeviceError
from spyglass.ops.fake_quant.reference import fake_quant
from spyglass.ops.index_topk import cpu as index_cpu
from spyglass.ops.index_topk import reference as index_reference
from spyglass.ops.row_finish import cpu as finish_cpu
from spyglass.ops.row_finish import reference as finish_reference
from spyglass.ops.sparse_attention import cpu as attention_cpu
from spyglass.ops.sparse_attention import reference as attention_reference
from spyglass.quant.formats import FakeQuant, StoredRow
from spyglass.quant.rows import decode_rows, encode_rows
from tests.ops.cpu_kernels import DTYPES, every_isa, kernels
from tests.ops.test_cpu_attention import attention_case, ints, topk_indices

E4M3_64, E4M3_32 = FakeQuant(element="e4m3", block=64), FakeQuant(element="e4m3", block=32)
E2M1_32, E2M1_16 = FakeQuant(element="e2m1", block=32), FakeQuant(element="e2m1", block=16, scale="e4m3")
FORMATS = {
    "v4 rows": StoredRow(quant=E4M3_64, dim=512, dims=448),
    "v4.1 window": StoredRow(quant=E4M3_32, dim=512, dims=512),
    "v4.1 pool": StoredRow(quant=E2M1_16, dim=512, dims=512),
    "index keys": StoredRow(quant=E2M1_32, dim=128, dims=128),
    "small": StoredRow(quant=E4M3_64, dim=40, dims=32),
    "small pool": StoredRow(quant=E2M1_16, dim=40, dims=40),
    "small keys": StoredRow(quant=E2M1_32, dim=24, dims=24),
    "odd": StoredRow(quant=E4M3_64, dim=77, dims=71),
    "odd codes": StoredRow(quant=E2M1_16, dim=37, dims=37),
}
every_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


def values(rows: int, dim: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Numbers of very different sizes, zeros of both signs and values between codes among them."""
    source = np.random.default_rng([seed, rows, dim])
    x = source.normal(size=(rows, dim)) * 2.0 ** source.integers(-12, 9, size=(rows, 1))
    x[:, ::7] *= 2.0 ** source.integers(-14, 3, size=x[:, ::7].shape)
    x[source.random(x.shape) < 0.05] = 0.0
    x[source.random(x.shape) < 0.05] = -0.0
    x[source.random(x.shape) < 0.2] = source.integers(-12, 13) / 4
    x[0], x[1] = 0.0, -0.0
    return torch.from_numpy(x).to(dtype)


def rounded(x: torch.Tensor, format: StoredRow) -> torch.Tensor:
    return fake_quant(x, format.quant, dims=format.dims, tail_bf16=True)


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    integers = {2: torch.int16, 4: torch.int32}[want.element_size()]
    return got.dtype == want.dtype and torch.equal(got.view(integers), want.view(integers))


def test_a_token_costs_what_the_released_formats_say() -> None:
    """448 + 128 + 7 bytes and 68 for V4; 528, 288 and 68 for V4.1 (spec v4 4.7, v41 4.6)."""
    for preset, want in (("flash-vision", (584, 584, 68)), ("v41-flash", (528, 288, 68))):
        text = parse_model_config(preset_config(preset, packed=True), preset).text
        kinds = (("window", text.head_dim), ("pool", text.head_dim), ("index", text.index_head_dim))
        rows = [text.reference_rounding.stored_row(kind, dim) for kind, dim in kinds]  # type: ignore[arg-type]
        assert tuple(row.row_bytes for row in rows if row is not None) == want


@every_format
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_read_back_is_what_rounding_leaves(format: StoredRow, dtype: torch.dtype) -> None:
    x = values(60, format.dim, dtype)
    rows = encode_rows(x, format)
    assert rows.dtype == torch.uint8 and rows.shape == (60, format.row_bytes)
    assert same_bits(decode_rows(rows, format, dtype), rounded(x, format))


@every_format
def test_what_is_no_number_stays_so_and_bytes_of_ones_are_none(format: StoredRow) -> None:
    x = values(3, format.dim, torch.float32)
    x[0, 5], x[1, format.dim - 1] = float("nan"), float("nan")
    got = decode_rows(encode_rows(x, format), format, torch.float32)
    assert got[0, 5].isnan() and got[1, -1].isnan() and same_bits(got[2], rounded(x, format)[2])
    assert decode_rows(torch.full((1, format.row_bytes), 255, dtype=torch.uint8), format, torch.float32).isnan().all()


@every_isa
@every_format
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_writers_write_the_same_bytes(format: StoredRow, dtype: torch.dtype, isa: str) -> None:
    x = values(30, format.dim, dtype, seed=1)
    x[7, 3], x[9, 1], x[11, 0] = float("nan"), float("inf"), float("-inf")
    tables = torch.ones(30, 1), torch.zeros(30, 1)
    write = torch.randperm(40)[:30]
    write[::5] = -1
    options: dict[str, Any] = {"quant": format.quant, "dims": format.dims, "tail_bf16": True, "write_T": write}
    got, want = (torch.full((8, 5, format.row_bytes), 255, dtype=torch.uint8) for _ in range(2))
    finish_cpu.row_finish(x, *tables, pages_NBD=got, kernels=kernels(isa), **options)
    finish_reference.row_finish(x, *tables, pages_NBD=want, **options)
    readable = [decode_rows(pages, format, torch.float32) for pages in (got, want)]
    assert torch.equal(readable[0].isnan(), readable[1].isnan())
    numbers = ~readable[1].isnan().any(-1)
    assert torch.equal(got[numbers], want[numbers]) and numbers.sum() >= 20


def stored(pages: torch.Tensor, format: StoredRow) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages as codes, and as plain rows of what those read as; rows of NaN become bytes of ones."""
    codes = encode_rows(pages, format)
    codes[pages.isnan().all(-1)] = 255
    return codes, decode_rows(codes, format, pages.dtype)


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kinds", [("v4 rows", "v4 rows"), ("v4.1 window", "v4.1 pool"), ("small", "small pool")])
def test_attention_over_codes_has_the_bits_of_attention_over_numbers(
    kinds: tuple[str, str], dtype: torch.dtype, isa: str
) -> None:
    near, far = (FORMATS[kind] for kind in kinds)
    formats = {"window_format": near, "pool_format": far}
    for lengths, only_last in (([40, 9], False), ([30], True), ([200, 60, 44, 31, 12, 70, 50, 90, 20], True)):
        (q, window, *rest), options, pool = attention_case(lengths, 5, near.dim, dtype, only_last=only_last, ratio=2)
        pages = stored(window, near), stored(pool["pool_NBD"], far)
        for chosen in (None, 5, 8):
            more = pool | {"pool_width": int(pool["visible_T"].max())}
            if chosen is not None:
                more |= {
                    "topk_indices_TX": topk_indices(pool["visible_T"], chosen, prefix=chosen == 8),
                    "pool_width": chosen,
                }
            got, plain = (
                attention_cpu.sparse_attention(
                    q,
                    pages[0][which],
                    *rest,
                    kernels=kernels(isa),
                    **options,
                    **(more | {"pool_NBD": pages[1][which]}),
                    **formats,
                )
                for which in (0, 1)
            )
            assert same_bits(got, plain)
            want = [
                attention_reference.sparse_attention(
                    q, pages[0][which], *rest, **options, **(more | {"pool_NBD": pages[1][which]}), **formats
                )
                for which in (0, 1)
            ]
            assert same_bits(*want) and not got.isnan().any()


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["index keys", "small keys"])
def test_a_choice_among_codes_is_that_among_numbers(kind: str, dtype: torch.dtype, isa: str) -> None:
    format = FORMATS[kind]
    (q, *_), _, pool = attention_case([90, 33], 6, format.dim, dtype, ratio=1)
    pages, weights = stored(pool["pool_NBD"], format), torch.randn(len(q), 6).to(dtype)
    seq = ints([0] * 90 + [1] * 33)
    for which, op in (("cpu", index_cpu.index_topk), ("reference", index_reference.index_topk)):
        extra = {"kernels": kernels(isa)} if which == "cpu" else {}
        got, want = (
            op(
                q, weights, keys, pool["pool_table_SP"], seq, pool["visible_T"], k=7, max_visible=90, stepwise=True,
                key_format=format, **extra,
            )
            for keys in pages
        )  # fmt: skip
        assert torch.equal(got, want)


def test_bytes_of_no_format_are_refused() -> None:
    (q, window, *rest), options, _ = attention_case([9], 2, 40, torch.float32)
    codes = encode_rows(window.nan_to_num(), FORMATS["small"])
    for format in (None, FORMATS["odd"]):
        with pytest.raises(DeviceError, match="cannot read rows of"):
            attention_cpu.sparse_attention(q, codes, *rest, window_format=format, **options)

"""What rows of engram tables stand for, computed here and nowhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spyglass.engram import EngramStore, TableRows


def values(rows: TableRows) -> NDArray[np.float32]:
    """float32 [..., head_dim] of stored rows."""
    if rows.scale is None:
        return rows.data if rows.data.dtype == np.float32 else (rows.data.astype(np.uint32) << 16).view(np.float32)
    scale = np.repeat(e8m0_values()[rows.scale], 32, axis=-1)[..., : rows.data.shape[-1]]
    return e4m3_values()[rows.data] * scale


def rows_of(store: EngramStore, ids_T: Any, kinds_T: Any, lookback_L: Any) -> dict[int, NDArray[np.float32]]:
    """Values of one sequence's rows by layer, float32 [T, columns * head_dim]."""
    wanted = store.row_ids(ids_T, kinds_T, lookback_L[None], np.array([0, len(ids_T)], np.int32))
    return {layer: values(store.tables[layer][rows]).reshape(len(ids_T), -1) for layer, rows in wanted.items()}


def e4m3_values() -> NDArray[np.float32]:
    """The value of every e4m3 byte: bias 7, no infinities, 0x7f and 0xff NaN."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    magnitude = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    magnitude = np.where((byte & 0x7F) == 0x7F, np.nan, magnitude)
    return np.where(byte & 0x80, -magnitude, magnitude).astype(np.float32)


def e8m0_values() -> NDArray[np.float32]:
    """The value of every e8m0 byte: 2^(u - 127), 255 NaN."""
    return np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan)).astype(np.float32)

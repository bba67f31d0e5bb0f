"""From the tokens of a step to the rows a model takes in, as tensors on its device (spec v41 5.4, 5.6).

Addresses depend on ids alone, so `start` is called as soon as a step's tokens are known and its result is asked for
when the model is about to run. Rows of a prompt that goes on in the next step are read from disk while this one runs
(`expect`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spyglass.engram.store import EngramStore, TableRows
from spyglass.quant.codec import decode
from spyglass.quant.formats import Format
from spyglass.quant.pack import e8m0_to_float
from spyglass.quant.packed import Packed

_INLINE_TOKENS = 64  # a step this small is gathered at once: handing it to a thread would take longer
_COPIED_ROWS = 1 << 16
_BLOCK = 32  # columns that share a scale
_TORCH = {"F8_E4M3": torch.float8_e4m3fn, "BF16": torch.bfloat16, "F32": torch.float32}
Rows = dict[int, torch.Tensor]
_Step = tuple[NDArray[np.int32], NDArray[np.int8], NDArray[np.int32], NDArray[np.int32]]  # arguments of `row_ids`


class EngramFeed:
    """Fetches rows of all engram layers of a store; with placement "device" the tables are copied there when made."""

    def __init__(self, store: EngramStore, *, device: torch.device, dtype: torch.dtype) -> None:
        self.store = store
        self._device, self._dtype = device, dtype
        self._thread, self._ahead = (
            ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("engram", "read-ahead")
        )
        self._codes = _codes_of(dtype) if device.type == "cpu" else None
        self._tables: dict[int, Packed] = {}
        if store.placement == "device":
            self._tables = {layer: _to_device(table, device) for layer, table in store.tables.items()}

    def start(
        self,
        ids_T: NDArray[np.int32],
        kinds_T: NDArray[np.int8],
        lookback_SL: NDArray[np.int32],
        query_start_S: NDArray[np.int32],
    ) -> Callable[[], Rows]:
        """Begin fetching; the call returned gives the rows by layer, [T, columns * head_dim] in the activation dtype.

        Arguments as in `hashing.row_ids`.
        """
        step = (ids_T, kinds_T, lookback_SL, query_start_S)
        if len(ids_T) > _INLINE_TOKENS:
            return self._thread.submit(self._fetch, step).result
        rows = self._fetch(step)
        return lambda: rows

    def expect(
        self,
        ids_T: NDArray[np.int32],
        kinds_T: NDArray[np.int8],
        lookback_SL: NDArray[np.int32],
        query_start_S: NDArray[np.int32],
    ) -> None:
        """Begin to read from disk what a later step will want, in the background; arguments as `start`.

        Tables that are in memory already are left alone, and so are steps that are gathered at once.
        """
        if self.store.placement == "mmap" and len(ids_T) > _INLINE_TOKENS:
            self._ahead.submit(self._read_ahead, (ids_T, kinds_T, lookback_SL, query_start_S))

    def _read_ahead(self, step: _Step) -> None:
        for layer, rows_TJ in self.store.row_ids(*step).items():
            self.store.tables[layer][rows_TJ]  # what is read stays among the system's cached files

    def _fetch(self, step: _Step) -> Rows:
        wanted, tokens = self.store.row_ids(*step), len(step[0])
        return {layer: self.values_of(layer, rows_TJ).view(tokens, -1) for layer, rows_TJ in wanted.items()}

    def values_of(self, layer: int, rows_TJ: NDArray[np.int64]) -> torch.Tensor:
        """Decoded rows [T * J, head_dim]; what crosses to the device are the stored bytes."""
        table = self._tables.get(layer)
        if table is None:
            gathered = self.store.tables[layer][rows_TJ.reshape(-1)]
            if self._codes is not None and gathered.scale is not None and gathered.data.shape[1] % _BLOCK == 0:
                return self._looked_up(gathered, self._codes, gathered.scale)
            packed = _packed(gathered, self._device)
        else:
            index = torch.from_numpy(rows_TJ.reshape(-1)).to(self._device)
            scale = None if table.scale is None else table.scale.index_select(0, index)
            data = table.data.view(_bytes_of(table.format)).index_select(0, index).view(table.data.dtype)
            packed = Packed(table.format, data, scale, tuple(data.shape))
        return decode(packed, self._dtype)

    def _looked_up(self, rows: TableRows, codes: _Codes, scale: NDArray[np.uint8]) -> torch.Tensor:
        """The same numbers by table: on a processor a look-up is several times faster than converting each code."""
        values = torch.from_numpy(np.take(codes.elements, rows.data)).view(self._dtype)
        factors = torch.from_numpy(np.take(codes.scales, scale)).view(self._dtype)
        values.unflatten(1, (-1, _BLOCK)).mul_(factors[:, :, None])
        return values


@dataclass(frozen=True, slots=True)
class _Codes:
    """The value of every e4m3 and e8m0 byte in an activation dtype, as integers of its width."""

    elements: NDArray[Any]
    scales: NDArray[Any]


def _codes_of(dtype: torch.dtype) -> _Codes:
    every = torch.arange(256, dtype=torch.uint8)
    whole = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[dtype]
    elements = every.view(torch.float8_e4m3fn).to(dtype).view(whole).numpy()
    return _Codes(elements, e8m0_to_float(every).to(dtype).view(whole).numpy())


def _bytes_of(format: Format) -> torch.dtype:
    """An integer dtype of the same width: gathers are not defined for every float8 device."""
    return {8: torch.uint8, 16: torch.int16, 32: torch.int32}[format.bits]


def _packed(rows: TableRows, device: torch.device) -> Packed:
    data = torch.from_numpy(rows.data).to(device).view(_TORCH[rows.format.weight_dtype])
    scale = None if rows.scale is None else torch.from_numpy(rows.scale).to(device)
    return Packed(rows.format, data, scale, tuple(data.shape))


def _to_device(table: TableRows, device: torch.device) -> Packed:
    data = _copied(table.data, device).view(_TORCH[table.format.weight_dtype])
    scale = None if table.scale is None else _copied(table.scale, device)
    return Packed(table.format, data, scale, tuple(data.shape))


def _copied(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A mapped array on the device, a piece at a time: the host never holds more than one."""
    out = torch.empty(array.shape, dtype=torch.from_numpy(array[:0].copy()).dtype, device=device)
    for first in range(0, len(array), _COPIED_ROWS):
        out[first : first + _COPIED_ROWS].copy_(torch.from_numpy(array[first : first + _COPIED_ROWS].copy()))
    return out

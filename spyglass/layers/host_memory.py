"""Host memory for weights: in large pages, and locked where a GPU is to read it at full speed."""

from __future__ import annotations

import logging
import math
import mmap
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from spyglass.quant.formats import Format
from spyglass.quant.packed import TORCH_DTYPES, Packed

_THREADS = 8  # that lock memory side by side: the kernel walks its pages, which is no work for the memory's bus
_LOG = logging.getLogger(__name__)


class _Pages(mmap.mmap):
    """Anonymous memory; what was locked is let go before it is given back."""

    locked_at = 0

    def __del__(self) -> None:
        if self.locked_at and not sys.is_finalizing():  # then the driver is gone already
            torch.cuda.cudart().cudaHostUnregister(self.locked_at)


class HostPages:
    """Tensors in memory of their own, each in its own pages, to be locked together once they are written."""

    def __init__(self) -> None:
        self._held: list[tuple[_Pages, torch.Tensor]] = []

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self._held)

    def packed(self, format: Format, shape: tuple[int, ...]) -> Packed:
        """Memory for a weight or a stack of weights of logical `shape`, not yet written."""
        data = self._tensor(format.storage_shape(shape), TORCH_DTYPES[format.weight_dtype])
        scale_shape = format.scale_shape(shape)
        if scale_shape is None or format.scale_dtype is None:
            return Packed(format, data, None, shape)
        return Packed(format, data, self._tensor(scale_shape, TORCH_DTYPES[format.scale_dtype]), shape)

    def lock(self) -> bool:
        """Lock all of it for a GPU's copies; False, with a warning, where the system does not let it be."""
        started, waiting = time.perf_counter(), [pages for pages, _ in self._held if not pages.locked_at]
        tensors = [tensor for pages, tensor in self._held if not pages.locked_at]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="lock-memory") as threads:
            results = list(threads.map(_lock, tensors))
        for pages, tensor, error in zip(waiting, tensors, results, strict=True):
            pages.locked_at = 0 if error else tensor.data_ptr()
        if any(results):
            _LOG.warning(
                "host memory cannot be locked (CUDA error %d): copies to the GPU run at a part of their speed; "
                "look at the limit of locked memory (ulimit -l)",
                max(results),
            )
            return False
        _LOG.info("%.1f GB of host memory locked in %.1f s", self.nbytes / 1e9, time.perf_counter() - started)
        return True

    def _tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        pages = _Pages(-1, max(size, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        tensor = torch.frombuffer(pages, dtype=torch.uint8, count=size).view(dtype).view(tuple(shape))
        self._held.append((pages, tensor))
        return tensor


def _lock(tensor: torch.Tensor) -> int:
    """0, or the error that CUDA gives."""
    return int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))

"""Routed experts whose weights lie in host memory, while the rest of the model computes on a GPU.

A step of few rows sends them, with their routes, to the host, whose kernels multiply them there and send the sums back.
All of it is in the order of the stream: the call is a C function that the driver makes, so that nobody waits. A step of
many rows gets the weights of the layer copied to the GPU instead (`host_stream`).

On a CPU the rows take the same way, through the same buffers; the call is made at once.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from spyglass.errors import DeviceError
from spyglass.layers.build import BuildContext
from spyglass.layers.host_memory import HostPages
from spyglass.layers.host_stream import ExpertStream
from spyglass.layers.linear import Experts
from spyglass.ops import native
from spyglass.ops.build import why_not
from spyglass.ops.experts_grouped import cpu, reference
from spyglass.ops.experts_grouped.adapters import ExpertAdapters
from spyglass.ops.native import append_words, best
from spyglass.quant.formats import FakeQuant, Format
from spyglass.quant.packed import Packed

_HOST = torch.device("cpu")
_CAPTURED = 256  # steps of more rows are in no graph of a GPU
_ROUNDED = 64  # beyond that, numbers of rows are rounded up to a multiple, so that there are few kinds of call
_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Buffers:
    """Rows on their way: inputs of the call and its output, in host memory (locked where a GPU copies them)."""

    x_RC: torch.Tensor
    ids_RK: torch.Tensor
    weights_RK: torch.Tensor
    adapter_R: torch.Tensor
    out_RC: torch.Tensor


class HostSide:
    """What the hosted layers of one model share. `layers`: whose routed experts are in host memory.

    `device`: where the rest computes. Steps of `many` rows get the weights copied there, to `places` that take turns;
    smaller ones are computed on the host, by `threads` threads; None = as torch has them.

    `capturable`: a captured graph can hold their steps. On a GPU it could not be trusted to: a graph of a small model
    gave other sums than the same steps op by op, so there none is captured.

    Raises:
        DeviceError: the kernels for processors cannot run here.
    """

    def __init__(
        self,
        layers: Iterable[int],
        device: torch.device,
        *,
        places: int,
        reference: bool = False,
        overlaps: bool = False,
    ) -> None:
        self.layers, self.device, self.reference = frozenset(layers), device, reference
        if not reference and (told := why_not()) is not None:
            raise DeviceError(f"experts in host memory need the kernels for processors: {told}; or take experts=gpu")
        on_gpu = device.type == "cuda"
        # one core is left for the thread that drives the GPU: a kernel is as slow as the thread that has to share one
        self.threads = max(1, torch.get_num_threads() - 1) if on_gpu else None
        self.many: int | None = None
        self.capturable = not on_gpu
        self.report = f"those of {len(self.layers)} layers in host memory"
        self.pages = HostPages()
        self.stream = ExpertStream(device, places) if on_gpu and not reference else None
        self._modules: list[HostedExperts] = []
        self._buffers: dict[int, _Buffers] = {}

    def add(self, module: HostedExperts) -> None:
        """A layer that is being built, in their order."""
        self._modules.append(module)

    def ready(self) -> None:
        """All weights are there: lock them for the GPU's copies, and find out from how many rows on copies are sooner.

        What is found is said in the log, and `report`.
        """
        if self.stream is None or not self._modules:
            return
        self.pages.lock()
        if not self.stream.prepare(self._modules):
            return
        copied, reads = self.stream.measure(), _Reads(self._modules[0], self.threads)
        self.many = max(_CAPTURED + 1, reads.rows_in(copied))
        layer = sum(stack.data.nbytes for stack in self._modules[0].stacks.values())
        self.report = (
            f"those of {len(self._modules)} layers in host memory: {self.threads} threads read "
            f"{reads.bandwidth / 1e9:.0f} GB/s of them at one row; a layer's copy to the GPU takes {copied * 1e3:.0f} "
            f"ms ({layer / copied / 1e9:.0f} GB/s), so steps of {self.many} rows and more take copies; steps "
            "are not captured"
        )
        _LOG.info("experts: %s", self.report)

    def trial(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Sums of a few random rows by the kernel and by the definition; None where the definition runs anyway."""
        if self.reference or not self._modules:
            return None
        module, rows = self._modules[0], 5
        buffers = _some_rows(module, rows, torch.Generator().manual_seed(0))
        best().experts(*module.arguments(rows, buffers, None, 1))
        given = buffers.x_RC, buffers.ids_RK, buffers.weights_RK
        return buffers.out_RC, module.by_reference(*given, None, None)

    def expect(self, layer: int, x_TC: torch.Tensor) -> None:
        """A step with these rows has come to `layer`: begin to copy what will be multiplied next."""
        if self.stream is not None and self.many is not None and x_TC.is_cuda and len(x_TC) >= self.many:
            self.stream.expect(layer)

    def run(
        self,
        module: HostedExperts,
        x_TC: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        adapter_T: torch.Tensor | None,
        adapters: ExpertAdapters | None,
    ) -> Callable[[], torch.Tensor]:
        """Begin the sums of `Experts.forward` on the host; what comes back gives them, for the stream then at work."""
        rows = len(x_TC)
        room = rows if rows <= _CAPTURED else -(-rows // _ROUNDED) * _ROUNDED
        buffers = self._room(room, x_TC, ids_TK)
        more = (0, 0, 0, room - rows)
        ids_RK = torch.nn.functional.pad(ids_TK, more, value=-1) if room > rows else ids_TK
        sent = [(buffers.x_RC[:rows], x_TC), (buffers.ids_RK[:room], ids_RK), (buffers.weights_RK[:rows], weights_TK)]
        if adapters is not None and adapter_T is not None:
            sent.append((buffers.adapter_R[:rows], adapter_T))
        if self.device.type == "cpu":
            for to, given in sent:
                to.copy_(given)
            best().experts(*module.arguments(room, buffers, adapters, torch.get_num_threads()))
            return buffers.out_RC[:rows].clone
        words = module.words(room, buffers, adapters, self.threads or 1)
        for to, given in sent:
            to.copy_(given, non_blocking=True)
        _call_on_host(torch.cuda.current_stream(self.device), words)
        out_TC = torch.empty(x_TC.shape, dtype=torch.float32, device=x_TC.device)
        return lambda: out_TC.copy_(buffers.out_RC[:rows], non_blocking=True)

    def _room(self, rows: int, x_TC: torch.Tensor, ids_TK: torch.Tensor) -> _Buffers:
        """Buffers for so many rows: some for every step that may be in a graph, larger ones by powers of two.

        All layers use them in turn. None is ever given back, since graphs know where they are.
        """
        size = max(_CAPTURED, 1 << (rows - 1).bit_length())
        if size not in self._buffers:
            locked = self.device.type == "cuda"

            def memory(columns: int, dtype: torch.dtype) -> torch.Tensor:
                return torch.zeros(size, columns, dtype=dtype, pin_memory=locked)

            with torch.inference_mode(False):
                self._buffers[size] = _Buffers(
                    x_RC=memory(x_TC.shape[1], x_TC.dtype),
                    ids_RK=memory(ids_TK.shape[1], torch.int32),
                    weights_RK=memory(ids_TK.shape[1], torch.float32),
                    adapter_R=memory(1, torch.int32).view(-1),
                    out_RC=memory(x_TC.shape[1], torch.float32),
                )
        return self._buffers[size]


class HostedExperts(Experts):
    """Routed experts of layer `index` in host memory, of which a row has `chosen`; see the head of this file."""

    def __init__(
        self,
        build: BuildContext,
        name: str,
        host: HostSide,
        *,
        index: int,
        chosen: int,
        limit: float,
        rounding: FakeQuant | None,
    ) -> None:
        super().__init__(replace(build, device=_HOST), name, limit=limit, rounding=rounding)
        self._host, self.index, self.chosen = host, index, chosen
        self._words: dict[tuple[int, bool], tuple[NDArray[np.uint64], object]] = {}
        self._version = -1
        host.add(self)

    def _empty(self, format: Format, shape: tuple[int, ...]) -> Packed:
        return self._host.pages.packed(format, shape)

    def _put(self, name: str, expert: int, weight: Packed) -> None:
        if self.build.dtype == torch.bfloat16 and not self._host.reference and not self.build.expand:
            native.refuse_scales(f"{self.name}.{expert}.{name}", weight)
        super()._put(name, expert, weight)

    def begin(
        self,
        x_TC: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        adapter_T: torch.Tensor | None = None,
    ) -> Callable[[], torch.Tensor]:
        """As `Experts.begin`. Raises DeviceError where an input wants a gradient."""
        native.refuse_gradient("experts in host memory", x_TC, weights_TK)
        adapters = None if self.adapter is None or adapter_T is None else self.adapter()
        host, x_TC = self._host, x_TC.contiguous()
        is_many = host.many is not None and len(x_TC) >= host.many and adapters is None
        if x_TC.device.type == "meta":
            fp32_TC = torch.empty(x_TC.shape, dtype=torch.float32, device=x_TC.device)
            out = super().forward(x_TC, ids_TK, weights_TK) if is_many else fp32_TC
            return lambda: out
        if host.reference:
            out = self.by_reference(x_TC, ids_TK, weights_TK, adapter_T, adapters)
            return lambda: out
        if is_many and host.stream is not None:
            stacks = host.stream.take(self)
            out = super().forward(x_TC, ids_TK, weights_TK, stacks=stacks)
            host.stream.done(self)
            return lambda: out
        return host.run(self, x_TC, ids_TK, weights_TK, adapter_T, adapters)

    def forward(
        self,
        x_TC: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        adapter_T: torch.Tensor | None = None,
        stacks: Mapping[str, Packed] | None = None,
    ) -> torch.Tensor:
        """As `Experts.forward`. Raises as `begin`."""
        return self.begin(x_TC, ids_TK, weights_TK, adapter_T)()

    def arguments(
        self, rows: int, buffers: _Buffers, adapters: ExpertAdapters | None, threads: int
    ) -> tuple[object, ...]:
        """Of the kernel, for the first `rows` rows of the buffers."""
        return cpu.arguments(
            buffers.x_RC[:rows],
            buffers.ids_RK[:rows],
            buffers.weights_RK[:rows],
            self.stacks["w1"],
            self.stacks["w3"],
            self.stacks["w2"],
            buffers.out_RC[:rows],
            limit=self.limit,
            rounding=self.rounding,
            adapter_T=None if adapters is None else buffers.adapter_R[:rows],
            adapters=adapters,
            threads=threads,
        )

    def words(self, rows: int, buffers: _Buffers, adapters: ExpertAdapters | None, threads: int) -> NDArray[np.uint64]:
        """The same call in words, which stay where they are as long as weights and adapters do."""
        if self._version != self.build.version.number:
            if self._words:
                torch.cuda.synchronize(self._host.device)  # calls under way read the others
            self._words.clear()
            self._version = self.build.version.number
        key = rows, adapters is not None
        if key not in self._words:
            words: list[int] = []
            append_words(words, best(), "experts", self.arguments(rows, buffers, adapters, threads))
            self._words[key] = np.array(words, np.uint64), adapters
        return self._words[key][0]

    def by_reference(
        self,
        x_TC: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        adapter_T: torch.Tensor | None,
        adapters: ExpertAdapters | None,
    ) -> torch.Tensor:
        """`forward` by the definition, which reads the rows on the host anyway."""
        return reference.experts_grouped(
            x_TC.cpu(),
            ids_TK.cpu(),
            weights_TK.cpu(),
            self.stacks["w1"],
            self.stacks["w3"],
            self.stacks["w2"],
            limit=self.limit,
            rounding=self.rounding,
            adapter_T=None if adapter_T is None else adapter_T.cpu(),
            adapters=adapters,
        ).to(x_TC.device)


def routed_experts(
    build: BuildContext, name: str, *, layer: int, chosen: int, limit: float, rounding: FakeQuant | None
) -> Experts:
    """The routed experts of a layer, on the device or in host memory as `build.host` says."""
    if build.host is None or layer not in build.host.layers:
        return Experts(build, name, limit=limit, rounding=rounding)
    return HostedExperts(build, name, build.host, index=layer, chosen=chosen, limit=limit, rounding=rounding)


class _Reads:
    """How long the host takes for rows of one layer: a + b · rows, from few and many; bytes per second at one row."""

    def __init__(self, module: HostedExperts, threads: int | None) -> None:
        few, many = 64, 256
        experts = module.stacks["w1"].shape[0]

        def seconds(rows: int) -> float:
            generator, best_of = torch.Generator().manual_seed(rows), float("inf")
            for turn in range(3):  # each with other experts, which no processor's cache holds
                buffers = _some_rows(module, rows, generator)
                given = module.arguments(rows, buffers, None, threads or 1)
                started = time.perf_counter()
                best().experts(*given)
                best_of = min(best_of, time.perf_counter() - started) if turn else best_of
            return best_of

        at = {rows: seconds(rows) for rows in (1, few, many)}
        self._each = max((at[many] - at[few]) / (many - few), 1e-9)
        self._fixed = at[many] - many * self._each
        nbytes = sum(
            stack.data.nbytes + (0 if stack.scale is None else stack.scale.nbytes) for stack in module.stacks.values()
        )
        self.bandwidth = nbytes * min(module.chosen, experts) / experts / at[1]

    def rows_in(self, seconds: float) -> int:
        """How many rows take so long."""
        return int((seconds - self._fixed) / self._each)


def _some_rows(module: HostedExperts, rows: int, generator: torch.Generator) -> _Buffers:
    """Random rows, each with experts of its own."""
    experts, _, hidden = module.stacks["w1"].shape
    order = [torch.randperm(experts, generator=generator)[: module.chosen] for _ in range(rows)]
    return _Buffers(
        x_RC=torch.randn(rows, hidden, generator=generator).to(module.build.dtype),
        ids_RK=torch.stack(order).to(torch.int32),
        weights_RK=torch.ones(rows, len(order[0])),
        adapter_R=torch.zeros(rows, dtype=torch.int32),
        out_RC=torch.empty(rows, hidden),
    )


@cache
def _launch_host_function() -> Callable[..., int]:
    """The driver's `cuLaunchHostFunc`: stream, C function, its argument. A captured graph holds it as a node."""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = ctypes.c_int
    launch: Callable[..., int] = function
    return launch


def _call_on_host(stream: torch.cuda.Stream, words: NDArray[np.uint64]) -> None:
    """Make a kernel call in the order of a stream."""
    error = _launch_host_function()(stream.cuda_stream, best().replay_one, words.ctypes.data)
    if error:
        raise DeviceError(f"the GPU's driver refused a call on the host (CUDA error {error}); take experts=gpu")

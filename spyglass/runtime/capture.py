"""Captured graphs by what they were captured for: one bounded store, whichever back end makes them.

A graph is good for one key (the shape of its frame and what is computed) and one state (the weights and adapters of the
model, and where its pages lie). With another state all graphs are forgotten.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from spyglass.ops.declare import Backend
from spyglass.runtime import cpu_graph

Outputs = tuple[torch.Tensor, ...]
Run = Callable[[], Outputs]

MAX_GRAPHS = {"eager": 0, "cpu_graph": 64, "cuda_graph": 256}
_LOG = logging.getLogger(__name__)


class CapturedGraph(Protocol):
    """Some code, captured. Its inputs are whatever lies at the addresses it was captured with."""

    @property
    def outputs(self) -> Outputs:
        """What `replay` writes; the same tensors each time."""

    def replay(self) -> Outputs:
        """Run it on what its inputs hold now."""


class Capture:
    """The graphs of one driver, least recently used first. Not for two threads at once.

    `replays` counts runs from a graph, `captures` graphs that were made, `eager` keys that cannot be, by reason.
    """

    def __init__(self, backend: Backend, device: torch.device | str = "cpu", *, max_graphs: int | None = None) -> None:
        self.backend = backend
        self.replays = self.captures = 0
        self.eager: Counter[str] = Counter()
        self._max_graphs = MAX_GRAPHS[backend] if max_graphs is None else max_graphs
        self._graphs: OrderedDict[Hashable, CapturedGraph | None] = OrderedDict()  # None: seen, or cannot be captured
        self._refused: set[Hashable] = set()
        self._state: Hashable = None
        self._cuda = CudaGraphs(torch.device(device)) if backend == "cuda_graph" else None

    def __len__(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

    def use(self, state: Hashable) -> None:
        """Say what weights, adapters and pages are; what was captured with others is forgotten."""
        if state != self._state:
            self.clear()
            self._state = state

    def clear(self) -> None:
        self._graphs.clear()
        self._refused.clear()
        if self._cuda is not None:
            self._cuda.clear()

    def run(
        self,
        key: Hashable,
        run: Run,
        *,
        lasting: Callable[[], Iterable[torch.Tensor]] = tuple,
        harmless: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Outputs:
        """What `run` gives, from a graph where there is one; its outputs may be written again by the next run.

        On a CPU code is captured when it is run a second time; `lasting` gives the tensors it reads or writes that
        outlive it. On a GPU it is captured before its first run, which takes a run for warming up: inside `harmless`
        the inputs are such that it changes nothing.
        """
        if self.backend == "eager":
            return run()
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            self.replays += 1
            return graph.replay()
        if key in self._refused:
            return run()
        if self._cuda is not None:
            with harmless():
                self.prepare(key, run)
            graph = self._graphs.get(key)
            return run() if graph is None else graph.replay()
        if key not in self._graphs:
            self._keep(key, None)
            return run()
        try:
            made = cpu_graph.capture(run, lasting())
        except cpu_graph.CapturedOnce as error:
            self._refuse(key, str(error))
            return error.outputs
        self._keep(key, made)
        return made.outputs

    def prepare(self, key: Hashable, run: Run) -> None:
        """Capture for a GPU what has not been captured yet; `run` runs once for warming up and must change nothing."""
        if self._cuda is None or key in self._graphs or key in self._refused:
            return
        try:
            self._keep(key, self._cuda.capture(run))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # what torch raises when captured code waits for the device
            self._refuse(key, str(error))

    def _keep(self, key: Hashable, graph: CapturedGraph | None) -> None:
        self._graphs[key] = graph
        self.captures += graph is not None
        self._graphs.move_to_end(key)
        if len(self._graphs) > self._max_graphs:
            self._graphs.popitem(last=False)

    def _refuse(self, key: Hashable, why: str) -> None:
        self._graphs.pop(key, None)
        self._refused.add(key)
        if why not in self.eager:
            _LOG.warning("some steps run without a captured graph: %s", why)
        self.eager[why] += 1


@dataclass(slots=True)
class CudaGraph:
    """One CUDA graph and the outputs it writes, which lie in memory of its own."""

    graph: torch.cuda.CUDAGraph
    outputs: Outputs

    def replay(self) -> Outputs:
        """Launch it on the current stream."""
        self.graph.replay()
        return self.outputs


class CudaGraphs:
    """Captures on one side stream, into one pool of memory that all graphs share: they never run at the same time.

    One stream for all: torch keeps tens of MB of workspace per stream it multiplies on.
    """

    def __init__(self, device: torch.device, warm_up: int = 1) -> None:
        self._device, self._warm_up = device, warm_up
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def capture(self, run: Run) -> CudaGraph:
        """`warm_up` runs, to settle libraries and compile kernels, then the capture, which computes nothing.

        Raises:
            RuntimeError: the code waits for the device.
        """
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(self._warm_up):
                    run()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                outputs = run()
        return CudaGraph(graph, outputs)

    def clear(self) -> None:
        """Begin a new pool: the memory of the old one goes with its graphs."""
        self._pool = None

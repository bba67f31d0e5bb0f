"""Where the time of a training step goes: by op of the model, forward and backward, and by kernel.

Torch's profiler says which kernel ran and what launched it. Each launch belongs to the innermost range around it: a
call of an op, or a node of the backward, which belongs to the op that made it in the forward. On a CPU the same is done
with torch's own operations.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from spyglass.ops.declare import Ops

Event = Mapping[str, Any]
_OP, _NODE = "op ", "autograd::engine::evaluate_function: "
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_WIDTH = 110  # of a kernel's name


def op_times(work: Callable[[], object], ops: Ops, *, on_gpu: bool, lines: int = 40) -> str:
    """Two tables of milliseconds and launches, the largest first, of one run of `work`, forward and backward."""

    def named(op: str, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        with record_function(_OP + op):
            return function(*args, **options)

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with ops.watched(named), torch_profile(activities=kinds) as profiler:
        work()
        if on_gpu:
            torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    events = [event for event in found if event.get("ph") == "X"]
    by_range, by_kernel = _Times(), _Times()
    for where, what, microseconds in _on_gpu(events) if on_gpu else _on_host(events):
        by_range.add(where, microseconds)
        by_kernel.add(what[:_WIDTH], microseconds)
    return "\n\n".join([by_range.table("op or node of the backward", lines), by_kernel.table("kernel", lines)]) + "\n"


class _Times:
    """Microseconds and launches by name."""

    def __init__(self) -> None:
        self._time: dict[str, float] = {}
        self._count = Counter[str]()

    def add(self, name: str, microseconds: float) -> None:
        self._time[name] = self._time.get(name, 0.0) + microseconds
        self._count[name] += 1

    def table(self, title: str, lines: int) -> str:
        rows = [f"{'ms':>9} {'launches':>9}  {title}"]
        rows.append(f"{sum(self._time.values()) / 1e3:9.2f} {sum(self._count.values()):9}  all")
        largest = sorted(self._time.items(), key=lambda item: -item[1])[:lines]
        return "\n".join([*rows, *(f"{time / 1e3:9.2f} {self._count[name]:9}  {name}" for name, time in largest)])


def _on_gpu(events: Sequence[Event]) -> Iterator[tuple[str, str, float]]:
    """(range, kernel, microseconds) of everything that ran on the GPU."""
    launches = [event for event in events if event.get("cat") in _LAUNCHES]
    where = {event["args"].get("correlation"): name for event, name in _placed(events, launches)}
    for event in events:
        if event.get("cat") in _KERNELS:
            yield where.get(event["args"].get("correlation"), "elsewhere"), event["name"], event["dur"]


def _on_host(events: Sequence[Event]) -> Iterator[tuple[str, str, float]]:
    """(range, operation, microseconds) of torch's operations, without the time of those inside them."""
    operations = [event for event in events if event.get("cat") == "cpu_op"]
    own = {id(event): event["dur"] for event in operations}
    for inner, outer in _within(operations, operations):
        own[id(outer)] -= inner["dur"]
    for event, name in _placed(events, [event for event in operations if not event["name"].startswith(_NODE)]):
        yield name, event["name"], own[id(event)]


def _placed(events: Sequence[Event], wanted: Sequence[Event]) -> Iterator[tuple[Event, str]]:
    """Each of `wanted` with the name of the op it belongs to, or of the node where that is no op's."""
    host = [event for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
    ops = [event for event in host if event["name"].startswith(_OP)]
    nodes = [event for event in host if event["name"].startswith(_NODE)]
    started = min((event["ts"] for event in nodes), default=float("inf"))
    forward = [event for event in host if event["ts"] < started and "Sequence number" in event.get("args", {})]
    # a node carries the number of the operation that made it; the last one with that number did
    made = {event["args"]["Sequence number"]: op["name"] for event, op in _within(forward, ops)}
    around = {id(event): outer for event, outer in _within(wanted, [*ops, *nodes])}
    for event in wanted:
        outer = around.get(id(event))
        if outer is None:
            yield event, "outside of ops"
        elif outer["name"].startswith(_OP):
            yield event, outer["name"]
        else:
            op = made.get(outer.get("args", {}).get("Sequence number"))
            yield event, outer["name"].removeprefix(_NODE) if op is None else f"backward of {op}"


def _within(events: Sequence[Event], ranges: Sequence[Event]) -> Iterator[tuple[Event, Event]]:
    """Each event, in the order of time, with the innermost of `ranges` around it in its thread, where there is one."""
    chosen, open_to = {id(event) for event in events}, {id(event) for event in ranges}
    threads: dict[Any, dict[int, Event]] = {}
    for event in [*ranges, *events]:
        threads.setdefault(event.get("tid"), {})[id(event)] = event
    for thread in threads.values():
        stack: list[Event] = []
        for event in sorted(thread.values(), key=lambda event: (event["ts"], -event["dur"])):
            while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
                stack.pop()
            if stack and id(event) in chosen:
                yield event, stack[-1]
            if id(event) in open_to:
                stack.append(event)

"""Training steps made by other processes: cases are drawn, tokenised, cut into patches and packed, all without torch's
device. Arrays travel through memory that all processes share; only slot numbers are sent.
"""

from __future__ import annotations

import atexit
import mmap
import multiprocessing
import queue
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scripts.tiny.bins import Capacity, Filling, lay_out
from spyglass.config.read import read_model_config
from spyglass.engram import read_classes
from spyglass.prompt.tokenizer import load_tokenizer
from spyglass.tiny_world.cases import EFFORT, Case, Split
from spyglass.tiny_world.uses import make_any
from spyglass.tiny_world.words import Variant
from spyglass.train.data import Learner
from spyglass.train.packing import Sample

LOOK_EVERY = 5.0  # seconds, for whether the parent is still there
CASES_A_STEP = 4096  # more than fit, so that steps never share a case


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where cases come from: the folder with config.json and tokenizer, the split and its seed, the shape of a step.

    `kinds` to draw from, repeated ones more often; None = as the tiny world has them, or the `variant` of it.
    """

    folder: Path
    capacity: Capacity
    split: Split = "train"
    seed: int = 0
    kinds: tuple[str, ...] | None = None
    variant: Variant | None = None


def learner_of(folder: Path) -> Learner:
    """How chats become samples for the model in `folder`."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return Learner(read_model_config(folder), tokenizer, effort=EFFORT)


def sample_of(case: Case, learner: Learner) -> Sample:
    """A case as tokens. Where only a grammar asks for JSON its first token is not learnt: nothing tells of it."""
    sample = learner.sample(case.dialogue(), case.tools, case.response_format)
    if case.schema is not None and not case.schema_shown:
        sample.learn_T[np.flatnonzero(sample.learn_T)[0]] = False
    return sample


def make_step(
    source: Source, learner: Learner, number: int, patches_U: NDArray[np.uint8] | None = None
) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """Step `number` as arrays, with the kinds of its cases in the order of their targets.

    `sample_R`: which case each target belongs to, -1 = none. It ends with the first case that has no room; one that
    could never fit is left out. `patches_U` as in `lay_out`.
    """
    filling = Filling(capacity=source.capacity)
    kinds: dict[int, str] = {}
    for index in range(number * CASES_A_STEP, (number + 1) * CASES_A_STEP):
        case = make_any(source.seed, index, source.split, kinds=source.kinds, variant=source.variant)
        sample = sample_of(case, learner)
        if filling.add(sample):
            kinds[id(sample)] = case.kind
        elif Filling(capacity=source.capacity).add(sample):
            break
    config, engram = learner.config, learner.config.text.engram
    classes_V = None if engram is None else read_classes(source.folder, engram, config.text.vocab_size)
    arrays = lay_out(filling, config, classes_V, patches_U)
    order = [sample for group in filling.bins for sample in group]
    sample_R = np.full(source.capacity.targets, -1, np.int32)
    sample_R[: filling.targets] = np.repeat(np.arange(len(order)), [len(sample.rows) for sample in order])
    return arrays | {"sample_R": sample_R}, [kinds[id(sample)] for sample in order]


@dataclass(kw_only=True)
class Feed:
    """Processes that fill slots. Start it before the device is used: it forks.

    They end by `stop` or with their parent; a signal that asks a whole group to end is for the parent, which may want
    what they still make.
    """

    source: Source
    processes: int
    slots: int
    first: int = 0
    _workers: list[ForkProcess] = field(default_factory=list)

    def start(self) -> None:
        """Fork. The layout of a slot is that of a first step, made here."""
        context = multiprocessing.get_context("fork")
        arrays, _ = make_step(self.source, learner_of(self.source.folder), 0)
        self._layout, size = _layout_of(arrays)
        self.memory = mmap.mmap(-1, size * self.slots)
        self._size = size
        self._free: Any = context.Queue()
        self._ready: Any = context.Queue()
        self._next = context.Value("q", self.first)
        for slot in range(self.slots):
            self._free.put(slot)
        for _ in range(self.processes):
            worker = context.Process(target=self._work, daemon=True)
            worker.start()
            self._workers.append(worker)
        atexit.register(self.stop)  # they ignore SIGTERM, which is all that an interpreter that ends would send

    def _work(self) -> None:
        for ending in (signal.SIGTERM, signal.SIGINT):
            signal.signal(ending, signal.SIG_IGN)
        torch.set_num_threads(1)
        learner = learner_of(self.source.folder)
        while (slot := self._take_free()) is not None:
            views = dict(self.views(slot))
            with self._next.get_lock():
                number = self._next.value
                self._next.value += 1
            arrays, kinds = make_step(self.source, learner, number, views.get("patches_U"))
            for name, array in arrays.items():
                if array is not views[name]:
                    views[name][...] = array
            self._ready.put((slot, number, kinds))

    def _take_free(self) -> int | None:
        """A slot to fill; None when the parent is gone."""
        parent = multiprocessing.parent_process()
        assert parent is not None
        while parent.is_alive():
            try:
                slot: int = self._free.get(timeout=LOOK_EVERY)
            except queue.Empty:
                continue
            return slot
        return None

    def views(self, slot: int) -> Iterator[tuple[str, NDArray[Any]]]:
        """The arrays of a slot."""
        for name, (offset, shape, dtype) in self._layout.items():
            yield name, np.ndarray(shape, dtype, self.memory, slot * self._size + offset)

    def tensors(self, slot: int) -> dict[str, torch.Tensor]:
        """The same as host tensors over the shared memory."""
        return {name: torch.from_numpy(view) for name, view in self.views(slot)}

    def take(self, timeout: float) -> tuple[int, int, list[str]] | None:
        """Slot, step number and kinds of a finished step; None if there is none in time (seconds; 0 = now)."""
        try:
            found: tuple[int, int, list[str]] = (
                self._ready.get(timeout=timeout) if timeout else self._ready.get_nowait()
            )
        except queue.Empty:
            return None
        return found

    def give_back(self, slot: int) -> None:
        """The slot may be filled again."""
        self._free.put(slot)

    @property
    def drawn(self) -> int:
        """Steps begun so far, the next run's `first`."""
        return int(self._next.value)

    def stop(self) -> None:
        """End the processes."""
        atexit.unregister(self.stop)
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()


def _layout_of(arrays: dict[str, NDArray[Any]]) -> tuple[dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]], int]:
    layout, offset = {}, 0
    for name, array in arrays.items():
        layout[name] = (offset, array.shape, array.dtype)
        offset += -(-array.nbytes // 4096) * 4096
    return layout, offset

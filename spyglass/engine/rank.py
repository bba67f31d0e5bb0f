"""A process that has a part of a divided model and does with it what rank 0 sends: `python -m spyglass.engine.rank`."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from spyglass.batch.types import ImageBatch
from spyglass.engine.cache.pages import PageMemory
from spyglass.engine.fit import free_memory
from spyglass.engine.ranks import BEAT_S, COLLECTIVE_S, RankStart, answer_free
from spyglass.errors import CapacityError
from spyglass.lora.low_rank import AdapterFile
from spyglass.lora.pool import ModelBanks
from spyglass.model import LoadedModel, load_model
from spyglass.parallel.channel import Receiver, Ring
from spyglass.parallel.group import Group
from spyglass.parallel.processes import meet
from spyglass.params.shard import Shard
from spyglass.runtime.step_input import StepInput
from spyglass.runtime.steps import StepResult, StepRunner

Like = tuple[tuple[int, ...], torch.dtype]


class Rank:
    """Carries out messages, each a method's name and its arguments. `reply` sends an answer to rank 0."""

    def __init__(self, loaded: LoadedModel, group: Group, reply: Callable[[Any], None]) -> None:
        self._loaded, self._model, self._config, self._device = loaded, loaded.model, loaded.config, loaded.device
        self._group, self._reply = group, reply
        self._banks = ModelBanks(loaded.model)
        self._memories: dict[int, PageMemory] = {}
        self._runners: dict[int, StepRunner] = {}
        self._last: StepResult | None = None

    def run(self, receiver: Receiver) -> None:
        """Until rank 0 says to stop."""
        handlers: dict[str, Callable[..., None]] = {
            "step": self._step,
            "logits": self._logits,
            "encode": self._encode,
            "adapter": self._adapter,
            "clear": self._banks.clear,
            "compare": lambda work, adapter_ids: self._reply(work(self._loaded, None, adapter_ids)),
            "free": lambda: self._reply(answer_free(lambda: free_memory(self._device))),
        }
        while True:
            kind, operations, payload = pickle.loads(receiver.receive())
            if kind == "stop":
                return
            with torch.inference_mode():
                for number, operation, arguments in operations:
                    self._change(number, operation, arguments)
                handlers[kind](*payload)

    def _change(self, number: int, operation: str, arguments: tuple[Any, ...]) -> None:
        if operation == "open":
            groups, dtype, fill = arguments
            self._memories[number] = PageMemory(groups, dtype, self._device, fill)
        elif operation == "run":
            page_rows, banned, capture = arguments
            text = self._config.text
            banned_V = torch.zeros(text.vocab_size, dtype=torch.bool, device=self._device)
            banned_V[banned] = True
            self._runners[number] = StepRunner(self._model, text, page_rows, self._device, banned_V, capture=capture)
        elif operation == "close":
            self._memories.pop(number), self._runners.pop(number, None)
        else:
            getattr(self._memories[number], operation)(*arguments)

    def _received(self, like: Like) -> torch.Tensor:
        shape, dtype = like
        return self._group.broadcast(torch.empty(shape, dtype=dtype, device=self._device))

    def _step(
        self,
        number: int,
        step: StepInput,
        images: Like | None,
        engram: dict[int, Like] | None,
        amended: bool,
        argmax: bool,
    ) -> None:
        self._last = self._runners[number].run(
            step,
            self._memories[number].pages,
            image_rows_IC=None if images is None else self._received(images),
            engram_rows=None
            if engram is None
            else lambda: {layer: self._received(like) for layer, like in engram.items()},
            amend=(lambda batch: self._group.broadcast(batch.ids_T)) if amended else None,  # type: ignore[arg-type]
            argmax=argmax,
        )

    def _logits(self, number: int, count: int | None) -> None:
        assert self._last is not None
        rows_R = self._last.logit_rows_R if count is None else self._received(((count,), torch.int64))
        self._runners[number].logits(self._last.hidden_TC, rows_R)

    def _encode(self, given: tuple[int, ImageBatch | None, list[int]]) -> None:
        number, images, rows = given
        hidden = self._config.text.hidden_size
        mine = torch.empty(0, hidden, dtype=self._model.options.build.dtype, device=self._device)
        if images is not None:
            mine = self._runners[number].encode_images(images.to(self._device))
        self._group.join(mine.T.contiguous(), rows)

    def _adapter(self, adapter_id: int, adapter: AdapterFile, factor: float) -> None:
        try:
            self._banks.fill(adapter_id, adapter, factor)
        except CapacityError as error:
            self._reply(f"rank {self._group.rank}: {error}")
        else:
            self._reply(None)


def main(descriptors: list[int]) -> None:
    """`descriptors`: the pipe to rank 0 and, if there is a ring, that and the bell."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides when to end
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    pipe = Connection(descriptors[0])
    start: RankStart = pipe.recv()
    lock = threading.Lock()

    def reply(kind: str, payload: Any = None) -> None:
        with lock:
            pipe.send((kind, payload))

    threading.Thread(target=_beat, args=(reply, start.folder), daemon=True).start()
    reply("answer")
    try:
        torch.set_num_threads(start.threads)
        device = torch.device(start.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        group = meet(start.folder, start.rank, start.size, device, timeout_s=COLLECTIVE_S)
        loaded = load_model(
            **start.load, device=device, progress=False, shard=Shard(start.rank, start.size), group=group
        )
        reply("answer")
        ring = Ring(descriptors[1]) if len(descriptors) > 1 else None
        bell = descriptors[2] if ring is not None else None
        Rank(loaded, group, lambda payload: reply("answer", payload)).run(Receiver(pipe, ring, bell, start.rank - 1))
    except (EOFError, BrokenPipeError, ConnectionError):  # rank 0 has ended
        os._exit(1)
    except BaseException as error:
        logging.getLogger(__name__).exception("rank %d is over", start.rank)
        reply("failed", f"{type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)  # threads of the group may live on


def _beat(reply: Callable[[str], None], folder: str) -> None:
    """Signs of life, which also notice that rank 0 has ended."""
    while True:
        try:
            reply("beat")
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)
        time.sleep(BEAT_S)


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])

"""Who uses which adapter, where adapters come and go while an engine runs in a thread of its own.

A name that is withdrawn is gone at once; the memory of its adapter goes back between two steps, when the last call that
uses it has ended. An id is never given twice and caches know an adapter by its digests, so a name may soon stand for
another adapter.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from spyglass.engine.worker import EngineWorker
from spyglass.errors import AdapterError, NotServedError
from spyglass.lora.pool import AdapterPool
from spyglass.lora.use import NO_ADAPTER, AdapterHandle


class AdapterRegistry:
    """Counts the calls that use the adapters of `pool`, whose engine `worker` drives. Belongs to one event loop."""

    def __init__(self, pool: AdapterPool, worker: EngineWorker) -> None:
        self._pool, self._worker = pool, worker
        self._users: Counter[int] = Counter()  # by adapter
        self._leaving: dict[int, AdapterHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @contextmanager
    def used(self, name: str | None) -> Iterator[AdapterHandle]:
        """The adapter of a call (None = none), which stays as long as the block lasts; it ends with `worker.cancel`.

        Raises:
            NotServedError: no adapter has this name, any more.
        """
        if name is None:
            yield NO_ADAPTER
            return
        try:
            use = self._pool.use(name)
        except AdapterError as error:
            raise NotServedError(str(error)) from error
        self._users[use.adapter_id] += 1
        try:
            yield use
        finally:
            self._users[use.adapter_id] -= 1
            self._free_if_unused(use.adapter_id)

    def unregister(self, name: str) -> None:
        """Serve no new call with this adapter, and give its memory back when the last one has ended.

        Raises:
            AdapterError: no adapter has this name.
        """
        use = self._pool.unregister(name)
        self._leaving[use.adapter_id] = use
        self._free_if_unused(use.adapter_id)

    def _free_if_unused(self, adapter_id: int) -> None:
        if self._users[adapter_id]:
            return
        del self._users[adapter_id]
        if (use := self._leaving.pop(adapter_id, None)) is not None:
            # behind the order that ended the last call, so no step that computes with it is under way
            task = asyncio.get_running_loop().create_task(self._worker.between_steps(partial(self._pool.free, use)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

"""Adapters over HTTP: `POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, with the fields that vLLM gave them.

Off unless the server was started so, since whoever may call can change what others get; and then only folders below one
root are read. A load answers when a token has been drawn with the adapter; streams go on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from spyglass.config.shipped import base_note
from spyglass.engine.adapters import AdapterRegistry
from spyglass.engine.llm import LLM
from spyglass.errors import AdapterError, NotServedError
from spyglass.server.body import parse_json, read_body
from spyglass.server.log import log_audit
from spyglass.server.memory import MemoryBudget, Reservation
from spyglass.server.protocols.fields import FieldReader, Fields, text_field
from spyglass.server.readiness import Readiness

_LOAD = Fields(read=frozenset({"lora_name", "lora_path"}), neutral={"load_inplace": (False,)})
_UNLOAD = Fields(read=frozenset({"lora_name"}), ignored=frozenset({"lora_int_id"}))
_BODY_BYTES = 1 << 16
_LOG = logging.getLogger(__name__)
_SHOWN_CHARS = 200


class AdapterRoutes:
    """Loads adapters from folders below `root` and unloads any, one at a time. `reserved` names are the model's."""

    def __init__(
        self,
        llm: LLM,
        desk: AdapterRegistry,
        readiness: Readiness,
        held: MemoryBudget,
        *,
        root: Path,
        reserved: tuple[str, ...],
    ) -> None:
        self._llm, self._desk, self._readiness, self._held = llm, desk, readiness, held
        self._root, self._reserved = root.resolve(), reserved
        self._turn = asyncio.Lock()

    def routes(self) -> list[Route]:
        return [
            Route("/v1/load_lora_adapter", self._load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._unload, methods=["POST"]),
        ]

    async def _load(self, request: Request) -> Response:
        given = await self._read(request, _LOAD)
        name = text_field(given, "lora_name", "")
        folder = await asyncio.to_thread(folder_below, self._root, text_field(given, "lora_path", ""))
        async with self._turn:
            self._require_started()
            if name in (*self._reserved, *self._llm.adapters):
                raise HTTPException(409, f"{name!r} is served already; unload it first, or choose another name")
            await asyncio.to_thread(self._llm.add_adapter, name, folder)
            if (note := await asyncio.to_thread(base_note, folder, self._llm.name)) is not None:
                _LOG.warning("%s", note)
            wrong = await self._readiness.try_adapter(name)
            if wrong is not None:
                self._desk.unregister(name)
                raise AdapterError(f"the adapter in {str(folder)!r} draws no token, so it is not served: {wrong}")
        _audit("adapter loaded", request, name, folder=str(folder))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: Request) -> Response:
        name = text_field(await self._read(request, _UNLOAD), "lora_name", "")
        async with self._turn:
            self._require_started()
            if name not in self._llm.adapters:
                served = ", ".join(self._llm.adapters) or "none"
                raise NotServedError(f"there is no adapter {name[:_SHOWN_CHARS]!r} to unload; served are {served}")
            self._desk.unregister(name)
            self._readiness.forget_adapter(name)
        _audit("adapter unloaded", request, name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _read(self, request: Request, fields: Fields) -> Mapping[str, Any]:
        claim = Reservation(self._held)
        try:
            return FieldReader(strict=True).read(parse_json(await read_body(request, _BODY_BYTES, claim)), fields)
        finally:
            claim.release()

    def _require_started(self) -> None:
        """Raises HTTPException: the adapters of the start are still being tried."""
        if self._readiness.starting:
            raise HTTPException(503, "the server is still trying what it has; send it again", {"retry-after": "1"})


def _audit(event: str, request: Request, name: str, **more: str) -> None:
    address = "unix socket" if request.client is None else request.client.host
    log_audit(event, request.scope["record"], adapter=name, client=address, **more)


def folder_below(root: Path, given: str) -> Path:
    """The folder that a client names, relative to `root` or absolute, all links followed.

    Raises:
        AdapterError: it lies elsewhere, or is no path.
        NotServedError: there is no such folder.
    """
    if not given:
        raise AdapterError("lora_path is empty; name a folder below the one that adapters are loaded from")
    try:
        folder = (root / given).resolve()
        found = folder.is_dir()
    except (OSError, ValueError, RuntimeError):  # too long, null bytes, links in a circle
        raise AdapterError(f"lora_path {given[:_SHOWN_CHARS]!r} is no path") from None
    if not folder.is_relative_to(root):
        raise AdapterError(f"lora_path {given[:_SHOWN_CHARS]!r} is not below the folder that adapters are loaded from")
    if not found:
        raise NotServedError(f"there is no folder {given[:_SHOWN_CHARS]!r} where adapters are loaded from")
    return folder

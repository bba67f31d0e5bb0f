"""What a server tells of itself and its model: to people, to llama.cpp's clients and to Ollama's."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from spyglass import __version__
from spyglass.engine.llm import LLM
from spyglass.engine.request import SamplingParams
from spyglass.server.exchange import Served
from spyglass.server.protocols.ollama import model_details

OLLAMA_VERSION = "0.12.0"  # whose protocol `/api` is; its clients look at the number


def about_routes(llm: LLM, served: Served, started: int) -> Sequence[Route]:
    """`/version`, `/props`, and Ollama's lists of models. `started`: seconds since 1970."""
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started))

    async def version(_: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def props(_: Request) -> Response:
        default = SamplingParams()
        names = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
        params = {name: getattr(default, name) for name in names} | {"repeat_penalty": default.repetition_penalty}
        told = {
            "default_generation_settings": {"n_ctx": served.max_length, "params": params},
            "total_slots": llm.options.max_sequences,
            "model_alias": served.names[0],
            "modalities": {"vision": served.config.vision is not None, "audio": False},
            "build_info": f"spyglass {__version__}",
        }
        return JSONResponse(told)

    def card(name: str) -> dict[str, Any]:
        tagged, size = f"{name}:latest", llm.loaded.report.nbytes
        # its clients show the first twelve digits of what tells models apart; weights are not read for it
        digest = hashlib.sha256(repr((name, size, served.config)).encode()).hexdigest()
        same = {"name": tagged, "model": tagged, "size": size, "digest": digest}
        return {**same, "modified_at": since, "details": model_details(served)}

    async def tags(_: Request) -> Response:
        return JSONResponse({"models": [card(name) for name in served.names + served.adapters]})

    async def running(_: Request) -> Response:
        on_device = llm.loaded.device.type != "cpu"
        more = {"expires_at": "9999-12-31T23:59:59Z", "context_length": served.max_length}
        cards = [card(name) for name in served.names + served.adapters]
        return JSONResponse({"models": [{**c, **more, "size_vram": c["size"] if on_device else 0} for c in cards]})

    async def ollama_version(_: Request) -> Response:
        return JSONResponse({"version": OLLAMA_VERSION, "spyglass": __version__})

    return [
        Route("/version", version),
        Route("/props", props),
        Route("/api/tags", tags),
        Route("/api/ps", running),
        Route("/api/version", ollama_version),
    ]

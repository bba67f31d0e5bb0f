"""`spyglass serve`: load a checkpoint and answer HTTP clients until told to stop; logs go to stderr."""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spyglass.cli.options import (
    adapters_by_name,
    add_engine_options,
    add_model,
    add_server_options,
    engine_config,
    model_folder,
    note_bases,
    require_readable,
    server_config,
    stated_model,
    told_adapters,
)
from spyglass.config.engine import EngineConfig
from spyglass.config.keys import read_api_keys
from spyglass.config.shipped import model_name
from spyglass.progress import shown_bytes

if TYPE_CHECKING:
    from spyglass.config.server import ServerConfig
    from spyglass.engine import LLM

HELP = "Answer OpenAI and Anthropic clients over HTTP, streaming or not; a page to try it in a browser is at /."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options."""
    parser.usage = "spyglass serve [options] [MODEL]"
    add_model(parser)
    parser.add_argument(
        "--lora",
        metavar="NAME=DIR",
        action="append",
        default=[],
        help="serve an adapter under a model name of its own; for several: --lora A=ONE --lora B=TWO. "
        f"DIR is a PEFT folder{told_adapters()}",
    )
    parser.add_argument(
        "--lora-modules",
        metavar="NAME=DIR",
        dest="lora",
        nargs="+",
        action="extend",
        default=[],
        help="the same for several at once: --lora-modules A=ONE B=TWO",
    )
    add_server_options(parser)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; the result is the exit code."""
    folder = model_folder(stated_model(args))
    config = server_config(args)
    adapters = adapters_by_name(args.lora, config.model_name or (model_name(folder),))
    require_readable(folder, engine_config(args))  # before anything heavy is loaded
    note_bases(adapters, folder)
    from spyglass.server.run import bind, bind_unix
    from spyglass.server.tls import Certificate

    certificate = Certificate(config.tls_cert, config.tls_key) if config.tls_cert else None
    listening = (
        bind_unix(config.uds) if config.uds else bind(config.host, config.port)
    )  # a port that is taken is told before minutes of loading
    from spyglass.engine import LLM
    from spyglass.server.app import create_app
    from spyglass.server.log_lines import set_up_logs
    from spyglass.server.run import make_server, serve

    set_up_logs(config.log_level, config.log_format)
    engine: dict[str, Any] = {item.name: getattr(args, item.name) for item in fields(EngineConfig)}
    llm = LLM(folder, adapters=adapters, progress=True, **engine)
    app = create_app(llm, config)
    app.state.service.workers.start()
    listening.listen()  # not before: nobody is to wait while a model is loaded
    port = 0 if config.uds else listening.getsockname()[1]
    with suppress(OSError):  # a full disk below the log keeps nobody from being served
        print(banner(llm, config, port, app.state.service.max_live), file=sys.stderr, flush=True)
    try:
        asyncio.run(serve(make_server(app, config.grace_seconds, certificate=certificate), app, listening))
    finally:
        if config.uds:
            Path(config.uds).unlink(missing_ok=True)
    failure = None if llm.ranks is None else llm.ranks.failure
    if failure is not None:
        print(f"spyglass serve has ended: {failure}", file=sys.stderr)
    return 0 if failure is None else 1


def banner(llm: LLM, config: ServerConfig, port: int, max_live: int) -> str:
    """What a person wants to know when a server has started."""
    import torch

    from spyglass.machine import usable_cores

    shown = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "https" if config.tls_cert else "http"
    url = f"{scheme}://{shown}:{port}{config.root_path}" if not config.uds else f"unix:{config.uds}{config.root_path}"
    times = f"{llm.options.tensor_parallel_size} x " if llm.options.tensor_parallel_size > 1 else ""
    device = (
        f"{times}{llm.loaded.device}, {str(llm.loaded.dtype).removeprefix('torch.')}, {llm.loaded.numerics} numerics"
    )
    names = [key.name for key in read_api_keys(config.api_key, config.api_key_file)]
    keys = f"with an API key: {', '.join(names)}" if names else "no API key: whoever reaches this address may use it"
    images = {
        "yes": "yes: data URLs" + (" and http(s) addresses" if config.remote_images else ""),
        "no": "no: the checkpoint is text-only",
        "off": "off: loaded without its vision tower (--images 0)",
    }[llm.loaded.model.vision_state]
    host = llm.loaded.model.options.build.host
    lines = [
        ("model", f"{', '.join(config.model_name or (llm.name,))} ({llm.config.family}, {device})"),
        *([("adapters", ", ".join(llm.adapters))] if llm.adapters else []),
        *([("loading", f"clients may load adapters below {config.adapter_root}")] if config.adapter_root else []),
        ("clients", f"{url}/v1  ({keys})"),
        ("playground", f"{url}/"),
        ("vision", images),
        ("numbers", "not compared" if llm.numbers is None else str(llm.numbers)),
        ("memory", _memory(llm)),
        *([("experts", host.report)] if host is not None else []),
        *([("threads", f"{torch.get_num_threads()} on {usable_cores()}")] if llm.loaded.device.type == "cpu" else []),
        ("limits", f"{llm.engine.max_length:,} tokens a request, {llm.options.max_sequences} answers at a time, "
                   f"{max_live} with those that wait, bodies of {config.max_body_bytes >> 20} MiB"),
    ]  # fmt: skip
    return "\n".join(["Spyglass serves", *(f"  {name:<11}{text}" for name, text in lines)])


def _memory(llm: LLM) -> str:
    """What weights take and how many conversations the rest has room for."""
    report, longest = llm.loaded.report, llm.engine.max_length
    tokens, most = llm.engine.allocator.max_tokens_alone, llm.options.max_sequences
    weights = f"{shown_bytes(report.nbytes)} of weights read in {report.seconds:.1f} s"
    if tokens is None:
        return f"{weights}; the KV cache grows as it is used"
    whole = min(tokens // longest + 1, most)
    while whole and not llm.engine.allocator.has_room([longest] * whole):  # pages that are not full count too
        whole -= 1
    each = min(tokens // most, longest)
    shorter = f"{most} conversations at once of up to {each:,} tokens each, " if whole < most else ""
    return (
        f"{weights}; a KV cache of {tokens:,} tokens: {shorter}{whole} conversations at once of {longest:,} tokens each"
    )

"""How a model is to be served: where, for whom, and how much of it. Variables are `SPYGLASS_SERVER_` and the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from spyglass.config.keys import read_api_keys
from spyglass.config.options import SERVER_PREFIX, about, check_options, read_options
from spyglass.errors import ConfigError

_ROOT_PATH = re.compile(r"(/[\w.~%-]+)+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Checked when made. Limits of bodies and images default to those of the model makers' own public service.

    Raises:
        ConfigError: a field has a value that means nothing; the message names it.
    """

    host: str = field(default="127.0.0.1", metadata=about("address to listen on; 0.0.0.0 is every network"))
    port: int = field(default=8000, metadata=about("port to listen on; 0 takes a free one", low=0, high=65_535))
    uds: str = field(default="", metadata=about("listen on a Unix socket at this path instead of an address"))
    root_path: str = field(default="", metadata=about("path of a proxy below which the server is seen, as /models"))
    api_key: tuple[str, ...] = field(
        default=(),
        metadata=about(
            "key that clients must send: KEY, or 'NAME=KEY share=N requests=N tokens=N images=N', the numbers being a "
            "share of a busy server and rates a minute; may be given repeatedly. Other users of the machine see a "
            "command line: SPYGLASS_SERVER_API_KEY=key1,key2 or --api-key-file are safer"
        ),
    )
    api_key_file: str = field(default="", metadata=about("file with such keys, one a line; KEY may be sha256:HEX"))
    tls_cert: str = field(
        default="", metadata=about("serve https: file with the certificate and its chain (PEM); read again on change")
    )
    tls_key: str = field(default="", metadata=about("file with the certificate's private key (PEM), not encrypted"))
    model_name: tuple[str, ...] = field(
        default=(), metadata=about("what clients call the model (default: its folder's name); may be given repeatedly")
    )
    max_waiting: int = field(
        default=256, metadata=about("answers that may wait beyond those that run; more get status 429", low=0)
    )
    max_held_bytes: int = field(
        default=2 << 30, metadata=about("memory for bodies and images of requests under way; more get status 429")
    )
    grace_seconds: int = field(
        default=30, metadata=about("how long answers may go on when the server is to stop", low=0)
    )
    max_body_bytes: int = field(default=48 << 20, metadata=about("largest request body"))
    max_image_bytes: int = field(default=32 << 20, metadata=about("largest image file"))
    max_total_image_bytes: int = field(default=64 << 20, metadata=about("max total bytes of the images of a request"))
    max_image_side: int = field(default=8192, metadata=about("max pixels of an image's side (4096 from 15 on)"))
    max_image_pixels: int = field(default=256_000_000, metadata=about("max total pixels of the images of a request"))
    without_vision: Literal["refuse", "note"] = field(
        default="refuse",
        metadata=about(
            "images sent to a text-only model: refuse the request, or note in the text that one is left out"
        ),
    )
    remote_images: bool = field(default=False, metadata=about("fetch images from http(s) addresses"))
    fetch_seconds: int = field(default=60, metadata=about("max time to fetch the images of a request"))
    allow_adapter_loading: bool = field(
        default=False,
        metadata=about(
            "let whoever may call load and unload adapters (POST /v1/load_lora_adapter, /v1/unload_lora_adapter)"
        ),
    )
    adapter_root: str = field(default="", metadata=about("folder below which adapters may be loaded from"))
    cors_origin: tuple[str, ...] = field(
        default=(), metadata=about("web origin whose pages may call the server, or *; may be given repeatedly")
    )
    strict_fields: bool = field(
        default=False,
        metadata=about("refuse request fields that are not known, instead of ignoring them and naming them"),
    )
    log_level: Literal["debug", "info", "warning", "error"] = field(default="info", metadata=about("how much to log"))
    log_format: Literal["auto", "text", "json"] = field(
        default="auto",
        metadata=about("text for people, json for programs, auto: text where standard error is a terminal"),
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("api_key_file", "tls_cert", "tls_key"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected a path")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError(f"tls_cert is {self.tls_cert!r} with tls_key {self.tls_key!r}; give both or neither")
        object.__setattr__(self, "api_key", tuple(map(str, read_api_keys(self.api_key))))  # hashed from here on
        read_api_keys(self.api_key, self.api_key_file)
        if self.allow_adapter_loading != bool(self.adapter_root) or not Path(self.adapter_root).is_dir():
            raise ConfigError(
                f"allow_adapter_loading is {self.allow_adapter_loading} with adapter_root {self.adapter_root!r}; "
                "to load adapters over HTTP give both, the second a folder"
            )
        if not isinstance(self.root_path, str) or (self.root_path and not _ROOT_PATH.fullmatch(self.root_path)):
            raise ConfigError(f"root_path is {self.root_path!r}, expected a path such as /models")
        if not isinstance(self.uds, str):
            raise ConfigError(f"uds is {self.uds!r}, expected a path")
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError(f"host is {self.host!r}, expected a name or an address")


def read_server_config(
    stated: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None
) -> ServerConfig:
    """`stated` fields, then `SPYGLASS_SERVER_*` variables, then defaults. A stated None means "not stated".

    Raises:
        ConfigError: an unknown field or variable, or a value that means nothing.
    """
    return read_options(ServerConfig, SERVER_PREFIX, stated, environment)

"""Serving https: a certificate from files, read again when they change, as they do when it is renewed."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from spyglass.errors import ConfigError

_POLL_S = 1.0
_LOG = logging.getLogger(__name__)


class Certificate:
    """The files of a certificate chain and its key, and the `context` that new connections take it from.

    Raises:
        ConfigError: the files cannot be read, or do not belong together.
    """

    def __init__(self, chain: str, key: str) -> None:
        self._chain, self._key = chain, key
        self._seen = self._stamp()
        self.context = self._read()

    def reload_if_changed(self) -> bool:
        """Take the files as they are now, if they have changed; whether they were taken. What is wrong with them is
        logged once, and the old certificate stays."""
        seen = self._stamp()
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            self._read()  # both fit, before the context that serves is touched
            self.context.load_cert_chain(self._chain, self._key)
        except (ConfigError, OSError) as error:
            _LOG.error("the certificate has changed and cannot be used, the old one stays: %s", error)
            return False
        _LOG.info("the certificate has been read again from %s", self._chain)
        return True

    async def watch(self) -> None:
        """Look at the files every second."""
        while True:
            await asyncio.sleep(_POLL_S)
            await asyncio.to_thread(self.reload_if_changed)

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self._chain, self._key, password=_no_password)
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            why = "the key is encrypted" if isinstance(error, ValueError) else error
            raise ConfigError(
                f"tls_cert {self._chain!r} with tls_key {self._key!r} cannot be used: {why}; expected PEM files, the "
                "certificate first in its chain, and the key that belongs to it without a password"
            ) from error
        return context

    def _stamp(self) -> list[tuple[int, int, int] | None]:
        """What changes when a file or a link to it does; None where there is none."""
        found: list[tuple[int, int, int] | None] = []
        for path in (self._chain, self._key):
            try:
                status = Path(path).stat()
            except OSError:
                found.append(None)
            else:
                found.append((status.st_mtime_ns, status.st_size, status.st_ino))
        return found


def _no_password() -> str:
    raise ValueError("the key is encrypted")

"""Images from elsewhere: http(s) only, and never from an address that is not public.

Each hop (every redirect) is looked up once; all its addresses must be public, and the connection goes to the address
that was checked, whatever the name says a moment later. One deadline and one count of bytes hold for all images of a
request.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urljoin, urlsplit

from spyglass.errors import PromptError
from spyglass.prompt.decode import ImageLimits

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_HOPS = 5
_CHUNK = 1 << 16
_PORTS = {"http": 80, "https": 443}
# Public by its number, but a cloud's own service to its machines.
_METADATA = frozenset({ipaddress.ip_address("168.63.129.16")})
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_HEADERS = {"accept": "image/*", "accept-encoding": "identity", "user-agent": "spyglass", "connection": "close"}


def look_up(host: str, port: int) -> list[str]:
    """The addresses of a name, by the system's resolver. Raises OSError."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def connect(address: str, port: int, timeout_s: float) -> socket.socket:
    """A connection to an address (no name). Raises OSError."""
    return socket.create_connection((address, port), timeout_s)


def is_public(address: Address) -> bool:
    """Whether an address belongs to the open internet, also what it may stand for (mapped and translated IPv4).

    Tunnels (6to4, Teredo) are not: nobody serves images from them.
    """
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        tunnelled = address.sixtofour is not None or address.teredo is not None
        if tunnelled or address.is_site_local or address.scope_id is not None:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved and address not in _METADATA


@dataclass(slots=True, kw_only=True)
class RemoteImages:
    """Fetches the images of one request: `seconds` for all of them, `limits` on bytes and addresses.

    `count` hears of bytes as they come, and may refuse more.

    `resolve` and `dial` are the network; tests bring their own.
    """

    seconds: float
    limits: ImageLimits
    resolve: Callable[[str, int], Sequence[str]] = look_up
    dial: Callable[[str, int, float], socket.socket] = connect
    count: Callable[[int], None] = lambda _: None
    _deadline: float = field(init=False)
    _left: int = field(init=False)

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.seconds
        self._left = self.limits.total_bytes

    def __call__(self, url: str) -> bytes:
        """The bytes behind an address; blocks, so it is called off the event loop.

        Raises:
            PromptError: not http(s), not public, too long, too large, too slow, or it did not answer 200.
        """
        if len(url) > self.limits.url_chars:
            raise PromptError(f"an image URL has {len(url)} characters, it may have {self.limits.url_chars}")
        shown = url[:80]
        try:
            return self._follow(url)
        except PromptError as error:
            raise PromptError(f"image URL {shown!r}: {error}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            if self._seconds_left() <= 0:
                raise PromptError(f"image URL {shown!r} took more than the {self.seconds:g} s it may take") from error
            raise PromptError(f"image URL {shown!r} cannot be fetched: {_reason(error)}") from error

    def _follow(self, url: str) -> bytes:
        for _ in range(_MOST_HOPS + 1):
            with self._response(_checked(url)) as response:
                if response.status not in _REDIRECTS:
                    return self._read(response)
                location = response.headers.get("location")
            if not location:
                raise PromptError("it redirects to nowhere")
            url = urljoin(url, location)
            if len(url) > self.limits.url_chars:
                raise PromptError(f"it redirects to an address of {len(url)} characters")
        raise PromptError(f"it redirects more than {_MOST_HOPS} times")

    @contextlib.contextmanager
    def _response(self, parts: SplitResult) -> Iterator[http.client.HTTPResponse]:
        """Ask the one address that was checked. A timer ends the connection, however slowly it drips."""
        assert parts.hostname is not None
        port = parts.port or _PORTS[parts.scheme]
        address = self._public_address(parts.hostname, port)
        found = self.dial(address, port, max(0.001, self._seconds_left()))
        if parts.scheme == "https":
            found = ssl.create_default_context().wrap_socket(
                found, server_hostname=parts.hostname, do_handshake_on_connect=False
            )
        timer = threading.Timer(max(0.0, self._seconds_left()), _hang_up, (found,))
        timer.daemon = True
        timer.start()
        try:
            found.settimeout(max(0.001, self._seconds_left()))
            if isinstance(found, ssl.SSLSocket):
                found.do_handshake()
            connection = http.client.HTTPConnection(parts.hostname, port)
            connection.sock = found
            connection.request("GET", _path(parts), headers=_HEADERS)
            with connection.getresponse() as response:
                yield response
        finally:
            timer.cancel()
            found.close()

    def _public_address(self, host: str, port: int) -> str:
        try:
            found = list(self.resolve(host, port))
        except UnicodeError as error:
            raise PromptError(f"{host[:80]!r} is no host name") from error
        if not found:
            raise PromptError(f"{host!r} has no address")
        if not all(is_public(ipaddress.ip_address(text)) for text in found):
            raise PromptError(f"{host!r} is not a public address; send the image as a data URL")
        return found[0]

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        if response.status != 200:
            raise PromptError(f"it answered with status {response.status}")
        most = min(self.limits.file_bytes, self._left)
        data = bytearray()
        while chunk := response.read1(_CHUNK):
            self.count(len(chunk))
            data += chunk
            if len(data) > most:
                raise PromptError(f"it is larger than the {most} bytes that are left for it")
        if self._seconds_left() <= 0:  # what the timer has ended looks like the end
            raise TimeoutError
        if response.length:
            raise PromptError("it ended early")
        self._left -= len(data)
        return bytes(data)

    def _seconds_left(self) -> float:
        return self._deadline - time.monotonic()


def _checked(url: str) -> SplitResult:
    """Raises PromptError or ValueError: an address that is not for us."""
    if any(character <= " " or character == "\x7f" for character in url):
        raise PromptError("it holds spaces or control characters")
    parts = urlsplit(url)
    if parts.scheme not in _PORTS:
        raise PromptError("only http and https addresses are fetched")
    if parts.username is not None or parts.password is not None:
        raise PromptError("it holds a user name or password")
    if not parts.hostname:
        raise PromptError("it has no host")
    return parts


def _path(parts: SplitResult) -> str:
    """Path and query in ASCII, as a request line wants them."""
    text = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return "".join(c if c.isascii() else "".join(f"%{byte:02X}" for byte in c.encode("utf-8")) for c in text)


def _hang_up(found: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(found, socket.SHUT_RDWR)  # below TLS, whose state belongs to the reading thread


def _reason(error: BaseException) -> str:
    """What happened, without the system's numbers."""
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    text = error.strerror if isinstance(error, OSError) else str(error)
    return text or type(error).__name__

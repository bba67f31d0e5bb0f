"""Who calls: API keys, their rates a minute, and what a client is told of them in the headers that OpenAI gave them.

A rate is a bucket that holds a minute's worth and fills evenly. A request counts when it comes, its images and tokens
once they are known; an answer counts as long as it may become, and in the end as long as it was. What was used beyond
the bucket is waited for.
"""

from __future__ import annotations

import hmac
import math
import time
from collections.abc import Callable, Mapping, Sequence
from ipaddress import IPv6Address, ip_network
from typing import Any

from spyglass.config.keys import ApiKey, digest_of
from spyglass.engine.shares import ANYBODY, Client
from spyglass.errors import CapacityError, OverloadedError

_RATES, _TOLD = ("requests", "tokens", "images"), ("limit", "remaining", "reset")
RATE_HEADERS = tuple(f"x-ratelimit-{told}-{what}" for what in _RATES for told in _TOLD)
_MINUTE_S = 60.0
Clock = Callable[[], float]


class _Rate:
    """A bucket of `most` things, which is full again after a minute."""

    def __init__(self, what: str, most: int, clock: Clock) -> None:
        self.what, self.most = what, most
        self._clock = clock
        self._left, self._at = float(most), clock()

    @property
    def left(self) -> float:
        """What may be taken now; below 0 if more was."""
        now = self._clock()
        self._left = min(self.most, self._left + (now - self._at) * self.most / _MINUTE_S)
        self._at = now
        return self._left

    def wait_s(self, count: float) -> float:
        """Seconds until so many may be taken."""
        return max(0.0, count - self.left) * _MINUTE_S / self.most

    def take(self, count: float) -> None:
        """Take, or give back what is below 0."""
        self._left = min(self.most, self.left - count)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What it is, what is left and when it is full again."""
        values = self.most, max(0, math.floor(self.left)), _spelled(self.wait_s(self.most))
        told = zip(_TOLD, values, strict=True)
        return [(f"x-ratelimit-{name}-{self.what}".encode(), str(value).encode()) for name, value in told]


class Caller:
    """One key and what it has used. `name` is what logs and metrics call it; None for a server without keys."""

    def __init__(self, key: ApiKey | None = None, clock: Clock = time.monotonic) -> None:
        self.name = None if key is None else key.name
        self.client = ANYBODY if key is None else Client(key.name, key.share)
        limits = () if key is None else zip(_RATES, (key.requests, key.tokens, key.images), strict=True)
        self._rates = {what: _Rate(what, most, clock) for what, most in limits if most is not None}

    def take(self, **counts: int) -> None:
        """Count `requests`, `tokens` or `images`, all or none of them.

        Raises:
            OverloadedError: a rate is used up; the error says when it is not.
            CapacityError: the rate of a whole minute would not do.
        """
        wanted = [(rate, counts[what]) for what, rate in self._rates.items() if counts.get(what)]
        for rate, count in wanted:
            if rate.what == "images" and count > rate.most:
                raise CapacityError(
                    f"the request has {count} images, this API key may send {rate.most} a minute; send fewer"
                )
        for rate, count in wanted:
            if (wait := rate.wait_s(min(count, rate.most))) > 0:
                raise OverloadedError(
                    f"this API key may have {rate.most:,} {rate.what} a minute, and {count:,} more are too many now; "
                    f"send the request again in {_spelled(wait)}",
                    wait,
                )
        for rate, count in wanted:
            rate.take(count)

    def give_back(self, tokens: int) -> None:
        """Tokens that were counted and not used; below 0, used and not counted."""
        if "tokens" in self._rates:
            self._rates["tokens"].take(-tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """`x-ratelimit-limit-requests` and its like, for each rate of the key."""
        return [header for rate in self._rates.values() for header in rate.headers()]


class KeyRing:
    """The keys of a server, by their hashes."""

    def __init__(self, keys: Sequence[ApiKey], clock: Clock = time.monotonic) -> None:
        self._callers = [(key.digest, Caller(key, clock)) for key in keys]
        self.nobody = Caller()

    @property
    def clients(self) -> tuple[Client, ...]:
        return tuple(caller.client for _, caller in self._callers)

    def find(self, headers: Mapping[str, str]) -> Caller | None:
        """The caller whose key a request has; without keys everybody is the same one. None: no key, or a wrong one.

        Every key is compared with everything sent, so that time tells nothing.
        """
        if not self._callers:
            return self.nobody
        scheme, _, token = headers.get("authorization", "").partition(" ")
        sent = [token.strip()] if scheme.lower() == "bearer" else []
        sent.append(headers.get("x-api-key", ""))
        digests = [digest_of(text.encode("latin-1").decode("utf-8", "surrogateescape")) for text in sent if text]
        found = [caller for mine, caller in self._callers for theirs in digests if hmac.compare_digest(mine, theirs)]
        return found[0] if found else None


def sender_of(scope: Mapping[str, Any], client: Client) -> Client:
    """Whose bodies are read in turn: those of a key, and without keys those of an address (of IPv6 its network)."""
    if client != ANYBODY or not scope.get("client"):
        return client
    host = scope["client"][0]
    try:
        return Client(str(IPv6Address(host).ipv4_mapped or ip_network(f"{host}/64", strict=False)))
    except ValueError:  # of IPv4, or what a proxy says
        return Client(host)


def _spelled(seconds: float) -> str:
    """A time as OpenAI writes it: 1m3s, 1.5s, 20ms."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 1000) / 1000, 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"

"""Several clients of one engine: whose turn it is, how many rows each is due, and how many places it may take.

A client is whoever's requests count together (a key of the server). Its recent use is the tokens that steps ran for it,
forgotten over `_MEMORY` steps, divided by its share. Who has used less comes first, so a client that asks for little
does not notice one that asks for everything, and one that asks for everything falls back to its share (compare
"Fairness in Serving Large Language Models", OSDI 2024, whose counters never forget).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_MEMORY = 1024  # steps, after which 1/e of a use is left


@dataclass(frozen=True, slots=True)
class Client:
    """Who asks. Clients that want more than there is get it in proportion to their shares."""

    name: str = ""
    share: int = 1


ANYBODY = Client()


class RecentUse:
    """Tokens of each client in the last steps."""

    def __init__(self) -> None:
        self._tokens: dict[Client, float] = {}

    def count(self, tokens: Mapping[Client, int]) -> None:
        """A step has so many tokens of each client."""
        kept = {client: used * (1 - 1 / _MEMORY) for client, used in self._tokens.items() if used > 1}
        for client, more in tokens.items():
            kept[client] = kept.get(client, 0.0) + more
        self._tokens = kept

    def of(self, client: Client) -> float:
        """What a client has used, per share."""
        return self._tokens.get(client, 0.0) / client.share


def due_rows(active: Iterable[Client], rows: int) -> dict[Client, int]:
    """How many of `rows` each of the active clients may insist on: its share of them, one at least."""
    clients = dict.fromkeys(active)
    total = sum(client.share for client in clients)
    return {client: max(1, rows * client.share // total) for client in clients}


class Places:
    """`most` places for the clients of a server. Half of them are for whoever comes; of the other half each of the
    named `clients` has its share to itself, one at least. A single client, or an unnamed one, may have all. Not
    thread-safe."""

    def __init__(self, most: int, clients: Sequence[Client] = ()) -> None:
        shares = sum(client.share for client in clients)
        several = clients if len(clients) > 1 else ()
        self.most = most
        self._own = {client: max(1, most // 2 * client.share // shares) for client in several}
        self._common = max(0, most - sum(self._own.values()))
        self._taken = Counter[Client]()

    @property
    def num_taken(self) -> int:
        """Places that are taken, by anybody."""
        return self._taken.total()

    def most_of(self, client: Client) -> int:
        """What a client may take when nobody else has any."""
        return self._common + self._own.get(client, 0)

    def has_room(self, client: Client, count: int = 1) -> bool:
        """Whether a client may take so many more."""
        after = self._taken.copy()
        after[client] += count
        common = sum(max(0, taken - self._own.get(who, 0)) for who, taken in after.items())
        return common <= self._common or after[client] <= self._own.get(client, 0)

    def take(self, client: Client, count: int = 1) -> None:
        """Take places; whoever has to ask asks before. A negative count gives them back."""
        self._taken[client] += count
        if not self._taken[client]:
            del self._taken[client]

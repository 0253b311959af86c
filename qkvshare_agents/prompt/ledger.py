"""What members generated, as ids; who they are."""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from qkvshare_agents.ids import Ids
from qkvshare_agents.prompt.members import Author

_MOST_AUTHORS = 64  # of one text; then earlier ones are forgotten
_MOST_ENTRIES = 50_000


class Words(Protocol):
    """What was generated, as far as one team's prompts may be spelt by it."""

    def find(self, key: str) -> Ids | None: ...


class Ledger:
    """Text that a member generated -> the ids it generated, by scope: no team's spelling changes another's prompts.

    Decoding and encoding again changes ids in a third of longer answers, so the ids are kept verbatim. The
    entries used longest ago go when there are `capacity_tokens` (of 8 bytes), or too many entries: then the text is
    encoded again, a shorter match.
    """

    def __init__(self, capacity_tokens: int = 2_000_000) -> None:
        self._capacity_tokens = capacity_tokens
        self._authors: dict[str, frozenset[Author]] = {}
        self._entries: OrderedDict[tuple[str, str], array[int]] = OrderedDict()  # by (scope, key)
        self._tokens = 0
        self._lock = threading.Lock()

    def record(self, key: str, ids: Sequence[int], scope: str = "", name: str | None = None) -> None:
        """name: of the member that generated it, None for what came from elsewhere."""
        if not key or not ids:
            return
        with self._lock:
            if name is not None:
                others = self._authors.get(key, frozenset())
                self._authors[key] = frozenset({(scope, name)}) | (others if len(others) < _MOST_AUTHORS else set())
            self._tokens += len(ids) - len(self._entries.pop((scope, key), ()))
            self._entries[scope, key] = array("q", ids)
            while len(self._entries) > (1 if self._tokens > self._capacity_tokens else _MOST_ENTRIES):
                self._forget_oldest()

    def _forget_oldest(self) -> None:
        (scope, key), dropped = self._entries.popitem(last=False)
        self._tokens -= len(dropped)
        authors = frozenset(author for author in self._authors.pop(key, ()) if author[0] != scope)
        if authors:
            self._authors[key] = authors

    def find(self, key: str, scope: str = "") -> Ids | None:
        with self._lock:
            ids = self._entries.get((scope, key))
            if ids is None:
                return None
            self._entries.move_to_end((scope, key))
            return tuple(ids)

    def within(self, scope: str) -> Words:
        """What was generated in one scope."""
        return _Scoped(self, scope)

    def authors(self, key: str) -> frozenset[Author]:
        """Who generated this: (scope, name); several, if they said the same."""
        with self._lock:
            return self._authors.get(key, frozenset())


@dataclass(frozen=True)
class _Scoped:
    ledger: Ledger
    scope: str

    def find(self, key: str) -> Ids | None:
        return self.ledger.find(key, self.scope)

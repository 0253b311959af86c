"""KV of a prompt that is put together from what is stored, and what is read behind it.

A prompt that does not fit into the context continues from the stored KV of most of its tokens, without the dropped
ones: pages stay as they are, and their keys are moved while they are imported. What is read behind that has seen tokens
that are gone, or keys from another conversation: it is an approximation, and never stored under the ids alone. Its
*mark* is added to each id, so that no other prompt finds it. An assembly is looked up by all ids that it stands for,
the dropped ones included, compared id by id.
"""

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from qkvshare_agents import spans
from qkvshare_agents.ids import Ids
from qkvshare_agents.kv.page import Page
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.spans import Spans
from qkvshare_agents.store.page_store import PageStore
from qkvshare_agents.store.runs import Readers

_MOST = 64  # assemblies that are remembered; the least recently used goes first
_MARK = 1 << 32  # above every token id


@dataclass(frozen=True)
class Piece:
    """Tokens `kept` of a stored path: number x of the path was computed at position x + shift, and is number x + at of
    the prompt."""

    path: Ids
    kept: Spans
    shift: int = 0
    at: int = 0

    @property
    def tokens(self) -> int:
        return spans.count(self.kept)

    def without(self, dropped: Spans) -> "Piece":
        """dropped: of the prompt."""
        return replace(self, kept=spans.without(self.kept, spans.moved(dropped, -self.at)))


@dataclass(frozen=True)
class Assembly:
    """The KV of `prefix`, leading ids of prompts, without the `dropped` ones.

    pieces: its parts, in order. mark: of what was read behind it; 0 if that is exact, as behind nothing dropped, or
    behind a text that was cut before it was read: then it is stored behind the ids `stem`. why: it is no exact KV, for
    the report.
    """

    prefix: Ids = ()
    dropped: Spans = ()
    pieces: tuple[Piece, ...] = ()
    mark: int = 0
    stem: Ids = ()
    why: str = "spliced"

    @property
    def tokens(self) -> int:
        return len(self.prefix) - spans.count(self.dropped)

    def path(self, ids: Ids) -> Ids:
        """Where the store has what was read behind the assembly; ids: of a whole prompt, and its answer."""
        return self.stem + tuple(i + self.mark for i in ids[len(self.prefix) :])

    def found(self, store: PageStore, ids: Ids, readers: Readers | None) -> "Source | None":
        """What is stored for the leading `ids`; None if it is another prompt's or a part of it is gone."""
        if ids[: len(self.prefix)] != self.prefix:
            return None
        if any(store.match(piece.path, readers).tokens < piece.kept[-1][1] for piece in self.pieces):
            return None
        path = self.path(ids)
        tokens = store.match(path, readers).tokens
        own = [Piece(path[:tokens], ((0, min(tokens, len(self.stem))),))] if self.stem else []
        if tokens > len(self.stem):
            shift = 0 if self.mark == 0 else self.tokens
            at = len(self.prefix) - len(self.stem)
            own.append(Piece(path[:tokens], ((len(self.stem), tokens),), shift, at))
        covered = len(self.prefix) + max(0, tokens - len(self.stem))
        return Source(self, covered, tuple(p for p in (*self.pieces, *own) if p.tokens))


@dataclass(frozen=True)
class Source:
    """Stored KV that a prompt can continue from: of its first `covered` tokens, without what the assembly dropped."""

    assembly: Assembly
    covered: int
    pieces: tuple[Piece, ...]

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)

    def without(self, dropped: Spans) -> "Source":
        pieces = tuple(piece.without(dropped) for piece in self.pieces)
        return replace(self, pieces=tuple(piece for piece in pieces if piece.tokens))


class Assemblies:
    """Those of one store. Thread-safe as the store is; forgotten with it."""

    def __init__(self, store: PageStore) -> None:
        self.store = store
        self._known: dict[tuple[Ids, Spans, tuple[Piece, ...]], Assembly] = {}
        self._marks = itertools.count(1)
        self._lock = threading.Lock()

    def make(self, ids: Ids, dropped: Spans, source: Source) -> Assembly:
        """The assembly of the leading `ids` that `source`, already without `dropped`, has KV of."""
        prefix = ids[: source.covered]
        with self._lock:
            known = self._known.get((prefix, dropped, source.pieces))
            return known or Assembly(prefix, dropped, source.pieces, self.mark())

    def mark(self) -> int:
        """A new one."""
        return next(self._marks) * _MARK

    def keep(self, assembly: Assembly) -> None:
        key = (assembly.prefix, assembly.dropped, assembly.pieces)
        with self._lock:
            self._known.pop(key, None)
            self._known[key] = assembly
            while len(self._known) > _MOST:
                del self._known[next(iter(self._known))]

    def sources(self, ids: Ids, readers: Readers | None) -> list[Source]:
        """Everything that `ids` may continue from, the exact KV of the leading ones first."""
        with self._lock:
            known = [Assembly(), *self._known.values()]
        return [source for assembly in known if (source := assembly.found(self.store, ids, readers))]


def bring(
    store: PageStore, pieces: Sequence[Piece], kv: KVCache, readers: Readers | None
) -> tuple[list[int], list[Page]]:
    """Append the pieces to `kv`; returns the positions at which their tokens were computed, and the pages opened."""
    positions: list[int] = []
    pages: list[Page] = []
    for piece in pieces:
        start = 0
        for page, tokens in store.match(piece.path, readers).runs:
            spans = [(max(a, start), min(b, start + tokens)) for a, b in piece.kept]
            wanted = [i for a, b in spans for i in range(a, b)]
            if wanted:
                kv.load([(page, tokens)])
                kv.keep(kv.tokens - tokens, [i - start for i in wanted])
                positions += [i + piece.shift for i in wanted]
                pages.append(page)
            start += tokens
    return positions, pages

"""Pages by prefix, within a byte budget.

Looking up a prompt walks down a tree of token runs as far as the token ids agree, so that edits, resets, dropped
messages or another agent's private turns make the match shorter and can't give a wrong one. Where two conversations
part inside a sealed page, both share its bytes: the branch starts behind a *slice* node that uses the page's first
tokens, and nothing is encoded again.

A reader that names owners finds only what these have; whoever computes the same ids again joins them. Layers with a
window keep their KV where one of a conversation's newest *points* (ends of turns, begins of cues) looks back at it.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.ids import Ids
from qkvshare_agents.kv.page import EMPTY_PAGE, Page
from qkvshare_agents.kv.shape import Window
from qkvshare_agents.store.lookback import Lookback
from qkvshare_agents.store.prefix_tree import (
    NO_MATCH,
    Match,
    Node,
    agreeing,
    chained_key,
    continuable,
    credit,
    inherit,
    path,
    upwards,
    walk,
)
from qkvshare_agents.store.runs import Readers
from qkvshare_agents.store.shelf import Shelf
from qkvshare_agents.store.turnstile import Turnstile


@dataclass
class _Outgrown:
    """Open runs that made way. shares: up to which token each of their owners owned the conversation."""

    shares: dict[str, int] = field(default_factory=dict)
    points: set[int] = field(default_factory=set)
    by: frozenset[str] = frozenset()
    headers: set[int] = field(default_factory=set)


class PageStore:
    """Prefix tree of pages. Thread-safe; a reader's match stays valid when its pages are evicted meanwhile.

    What a call costs goes with the path that it touches, not with what else is stored; others wait for the lock no
    longer than for that, or for one page that makes room.
    """

    def __init__(self, root_key: bytes, budget_bytes: int, window: Window | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.window = window
        self.evicted_pages = 0
        self._lock = Turnstile()
        self._root = Node((), EMPTY_PAGE, None, root_key)
        self._shelf = Shelf()
        self._lookback = Lookback(window) if window else None

    def match(self, ids: Sequence[int], readers: Readers | None = None) -> Match:
        """The longest stored prefix of `ids` that `readers` own, compared id by id. Touches the path it returns.

        Up to SHORTEST_SLICE - 1 tokens less when the ids part (or end) inside a page, and less where a layer's window
        reaches back to KV that is not kept.
        """
        with self._lock:
            match = self._look_up(tuple(ids), readers)
            self._shelf.touch(match.nodes)
            return match

    def stored_tokens(self, ids: Sequence[int]) -> int:
        """How many leading `ids` have stored KV, whoever owns it."""
        with self._lock:
            return self._find(tuple(ids)).tokens

    def address(self, ids: Sequence[int]) -> str:
        """Content address of the last page of `ids`' longest stored prefix; "" if there is none."""
        with self._lock:
            nodes = self._find(tuple(ids)).nodes
            return nodes[-1].key.hex() if nodes else ""

    def extend(
        self,
        ids: Sequence[int],
        page_size: int,
        sealed_tokens: int,
        make_page: Callable[[int, int, bool], Page],
        owners: Sequence[str] = (),
        *,
        points: Sequence[int] = (),
        header: int = 0,
        computed_from: int = 0,
        by: str = "",
    ) -> int:
        """Store the KV of `ids` as far as it is not stored yet; returns the number of pages made.

        Full pages up to `sealed_tokens` are made with make_page(start, stop, True), the open rest with
        make_page(start, stop, False). `owners` become owners of all of it. Pages are made outside the lock
        and put into the tree afterwards, all or none: an error or a cancellation in between leaves the store
        as it was. points: positions in `ids`, beside their end, from where it should be possible to go on until newer
        ones come; header: another one, for as long as its tokens are stored, where what others begin with ends.
        computed_from: the KV of ids from here on is new; pages that lack layers with a window are made again of it.
        by: the adapters that computed it.
        Raises InvalidSetting for an id that is negative or has more than 63 bits.
        """
        run = tuple(ids)
        if run and not 0 <= min(run) <= max(run) < 2**63:
            raise InvalidSetting(f"token ids must be in 0 ... 2**63 - 1; these are in {min(run)} ... {max(run)}")
        with self._lock:
            ahead = [point for point in (header, *points, len(run)) if point >= computed_from]
            headers = {header} & set(ahead)
            found = self._look_up(run)
            if found.tokens == len(run):
                self._settle(found.nodes, dict.fromkeys(owners, len(run)), ahead, headers)
                return 0
            base = self._find(run, lambda node, tokens: tokens * self._will_do(node, ahead, computed_from))
            lacking = [(n.start, min(n.end, base.tokens)) for n in base.nodes if self._lacks(n, ahead)]
            replaced = {n for n in base.nodes if (n.start, n.end) in lacking}
            self._shelf.touch(base.nodes)  # others make room first
            less = sum(node.page.nbytes for node in (*replaced, *self._outgrown(run)))
            room = self.budget_bytes - sum(node.page.nbytes for node in base.nodes if node not in replaced)
        spans = list(_spans(base.tokens, len(run), page_size, sealed_tokens))
        pages = [make_page(*span) for span in spans]
        renewed = {span: make_page(*span, True) for span in lacking}
        more = sum(page.nbytes for page in renewed.values())
        fitting = _fitting(pages, room - more)
        with self._room(sum(page.nbytes for page in fitting) + more - less):
            if base.nodes and base.nodes[-1].parent is None:
                return len(pages) + len(renewed)  # what others use had to go for what still others use
            self.evicted_pages += len(pages) - len(fitting)
            gone = self._drop_outgrown(run)
            node = self._end(base)
            for known in path(node):
                if page := renewed.get((known.start, known.end)):
                    self._renew(known, page, by)
            for (start, stop, sealed), page in zip(spans, fitting, strict=False):
                node = self._child(node, run[start:stop], page, sealed, gone.by | {by})
            shares = gone.shares | dict.fromkeys(owners, len(run))
            self._settle(path(node), shares, [*ahead, *gone.points], headers | gone.headers)
        return len(pages) + len(renewed)

    def clear(self) -> None:
        """Forget every page, and free its memory at once: parents and children point at each other."""
        with self._lock:
            for node in list(walk(self._root)):
                node.children.clear()
                node.parent, node.looks_at = None, ()
            self._root.children.clear()
            self._shelf.clear()
            if self._lookback:
                self._lookback.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all stored pages as held in memory, a shared page counted once."""
        return self._shelf.nbytes

    @property
    def page_count(self) -> int:
        return self._shelf.page_count

    def _find(
        self, ids: Ids, usable: Callable[[Node, int], int] | None = None, readers: Readers | None = None
    ) -> Match:
        """The longest match. usable: of how many tokens up to somewhere in a run use can be made; the most counts
        then."""
        found = agreeing(self._root, ids, readers)
        match, most = NO_MATCH, 0
        for node, common in found:
            tokens = node.start + common
            if tokens <= most:
                break
            if (used := usable(node, tokens) if usable else tokens) > most:
                match, most = Match.up_to(node, common), used
        stored = found[0][0].start + found[0][1] if found else 0
        return replace(match, agreeing=stored, window=self.window)

    def _look_up(self, ids: Ids, readers: Readers | None = None) -> Match:
        """The longest match that can be continued from."""
        window = self.window
        if window is None:
            return self._find(ids, readers=readers)
        walked: set[Node] = set()  # from where nothing is found that was not found from behind it

        def usable(node: Node, tokens: int) -> int:
            if node in walked:
                return 0
            walked.update(itertools.takewhile(lambda n: n not in walked, upwards(node)))
            return continuable(((n, n.page) for n in upwards(node)), tokens, window)

        found = self._find(ids, usable, readers)
        return found.head(found.tokens)

    def _will_do(self, node: Node, points: Sequence[int], computed_from: int) -> bool:
        """Whether new pages can follow `node`: it is sealed, since open runs are replaced, and nothing before it lacks
        what is looked back at from the points, unless that was computed again."""
        if not node.sealed or self.window is None:
            return node.sealed
        first = self.window.first_seen(min(points))
        seen = itertools.takewhile(lambda n: n.end > first, upwards(node))
        return not any(n.start < computed_from and self._lacks(n, points) for n in seen)

    def _lacks(self, node: Node, points: Sequence[int]) -> bool:
        """Whether layers with a window miss there what they look back at from one of the points."""
        window = self.window
        return window is not None and window.sees(node.start, node.end, points) and not node.page.holds(window.layers)

    def _settle(
        self, nodes: Sequence[Node], shares: Mapping[str, int], points: Collection[int], headers: Collection[int] = ()
    ) -> None:
        """Note owners and points of a path that was stored or found, and keep what is looked back at from them."""
        credit(nodes, shares)
        for node in nodes:
            node.points.update(point for point in points if node.start < point <= node.end)
            node.headers.update(header for header in headers if node.start < header <= node.end)
        self._shelf.touch(nodes)
        if self._lookback:
            self._lookback.settle(nodes)
        self._forget_unseen()

    def _forget_unseen(self) -> None:
        """Drop the KV of layers with a window where no kept point looks back at it. Slices go on sharing their page."""
        if self._lookback is None:
            return
        for node in self._lookback.unseen():
            bare, sharing = node.page.without(self._lookback.window.layers), self._shelf.sharing(node.page)
            if bare is not node.page and not any(each.watchers for each in sharing):
                for each in sharing:
                    self._shelf.replace(each, bare)

    def _outgrown(self, ids: Ids) -> list[Node]:
        """Open runs that `ids` go on from, or end with."""
        return [n for n, common in agreeing(self._root, ids) if not n.sealed and common == len(n.ids)]

    def _drop_outgrown(self, ids: Ids) -> "_Outgrown":
        """Remove open runs that `ids` go on from; returns what is to be known of their successors, too."""
        gone = _Outgrown()
        for node in self._outgrown(ids):
            gone.points |= node.points
            gone.by |= node.by
            gone.headers |= node.headers
            inherit(gone.shares, node)
            self._remove(node)
        return gone

    def _end(self, base: Match) -> Node:
        """The node below which new pages go: the match's last, or a slice of it when it is not used up."""
        if not base.nodes:
            return self._root
        last = base.nodes[-1]
        if base.last_tokens == len(last.ids):
            return last
        assert last.parent is not None
        head = self._child(last.parent, last.ids[: base.last_tokens], last.page, by=last.by)
        head.headers |= {header for header in last.headers if header <= head.end}
        return head

    def _child(self, parent: Node, ids: Ids, page: Page, sealed: bool = True, by: frozenset[str] = frozenset()) -> Node:
        layers = self.window.layers if self.window else frozenset()
        for child in parent.children.get(ids):
            return child  # stored meanwhile, or a slice that another branch made
        for child in parent.children.covering(ids) if not sealed else ():
            if child.page.holds(layers) or not page.holds(layers):
                return child  # a longer run
        node = Node(ids, page, parent, chained_key(parent.key, ids), sealed, start=parent.end, by=by)
        parent.children.add(node)
        self._shelf.put(node)
        return node

    def _renew(self, node: Node, page: Page, by: str) -> None:
        self._shelf.replace(node, page)
        node.by = frozenset({by})

    def _remove(self, node: Node) -> None:
        """Take a run that nothing follows out of the tree."""
        assert node.parent is not None
        if self._lookback:
            self._lookback.leave(node)
        node.parent.children.remove(node)
        node.parent = None
        self._shelf.drop(node)

    @contextmanager
    def _room(self, more_bytes: int) -> Iterator[None]:
        """The lock, once so many more bytes fit into the budget.

        Runs that were used least recently go first, newest tokens first. They go one at a time, each with the lock
        taken anew, so that no reader waits for more than one.
        """
        while True:
            with self._lock:
                if self._shelf.nbytes + more_bytes > self.budget_bytes and self._evict():
                    continue
                yield
                while self._shelf.nbytes > self.budget_bytes and self._evict():
                    pass  # what could not be foreseen: another turn has changed the same path meanwhile
                return

    def _evict(self) -> bool:
        """Drop one run; False if there is none."""
        if (node := self._shelf.oldest) is None:
            return False
        pages = self._shelf.page_count
        self._remove(node)
        self._forget_unseen()
        self.evicted_pages += pages - self._shelf.page_count
        return True


def _fitting(pages: Sequence[Page], room_bytes: int) -> list[Page]:
    """The first ones that fit."""
    ends = itertools.accumulate(page.nbytes for page in pages)
    return [page for page, end in zip(pages, ends, strict=True) if end <= room_bytes]


def _spans(start: int, end: int, page_size: int, sealed_tokens: int) -> Iterator[tuple[int, int, bool]]:
    """(start, stop, sealed): full pages up to `sealed_tokens`, then what stays open."""
    while start + page_size <= min(sealed_tokens, end):
        yield start, start + page_size, True
        start += page_size
    if start < end:
        yield start, end, False

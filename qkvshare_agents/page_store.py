"""Pages by prefix, within a byte budget.

Looking up a prompt walks down a tree of token runs as far as the token ids agree, so that edits, resets, dropped
messages or another agent's private turns make the match shorter and can't give a wrong one. Where two conversations
part inside a sealed page, both share its bytes: the branch starts behind a *slice* node that uses the page's first
tokens, and nothing is encoded again.

A reader that names owners finds only what these have; whoever computes the same ids again joins them. Layers with a
window keep their KV where one of a conversation's newest *points* (ends of turns, begins of cues) looks back at it.
"""

import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from qkvshare_agents.access import Readers
from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.page import EMPTY_PAGE, Page
from qkvshare_agents.prefix_tree import (
    NO_MATCH,
    Ids,
    Match,
    Node,
    chained_key,
    common_tokens,
    continuable,
    credit,
    looked_back_at,
    path,
    remove,
    upwards,
    walk,
)
from qkvshare_agents.span import Window

SHORTEST_SLICE = 16  # tokens; reading less than this again is cheaper than a node for it
KEPT_POINTS = 4  # of each branch, the newest: what was said before can be continued from full attention only


class PageStore:
    """Prefix tree of pages. Thread-safe; a reader's match stays valid when its pages are evicted meanwhile."""

    def __init__(self, root_key: bytes, budget_bytes: int, window: Window | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.window = window
        self.evicted_pages = 0
        self._lock = threading.Lock()
        self._clock = itertools.count(1)
        self._root = Node((), EMPTY_PAGE, None, root_key)

    def match(self, ids: Sequence[int], readers: Readers | None = None) -> Match:
        """The longest stored prefix of `ids` that `readers` own, compared id by id. Touches the path it returns.

        Up to SHORTEST_SLICE - 1 tokens less when the ids part (or end) inside a page, and less where a layer's window
        reaches back to KV that is not kept.
        """
        with self._lock:
            match = self._look_up(tuple(ids), readers)
            self._touch(match.nodes)
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
        computed_from: int = 0,
        by: str = "",
    ) -> int:
        """Store the KV of `ids` as far as it is not stored yet; returns the number of pages made.

        Full pages up to `sealed_tokens` are made with make_page(start, stop, True), the open rest with
        make_page(start, stop, False). `owners` become owners of all of it. Pages are made outside the lock
        and put into the tree afterwards, all or none: an error or a cancellation in between leaves the store
        as it was. points: positions in `ids`, beside their end, from where it should be possible to go on.
        computed_from: the KV of ids from here on is new; pages that lack layers with a window are made again of it.
        by: the adapters that computed it.
        Raises InvalidSetting for an id that is negative or has more than 63 bits.
        """
        run = tuple(ids)
        if run and not 0 <= min(run) <= max(run) < 2**63:
            raise InvalidSetting(f"token ids must be in 0 ... 2**63 - 1; these are in {min(run)} ... {max(run)}")
        with self._lock:
            ahead = [point for point in (*points, len(run)) if point >= computed_from]
            found = self._look_up(run)
            if found.tokens == len(run):
                self._settle(found.nodes, dict.fromkeys(owners, len(run)), ahead)
                return 0
            base = self._find(run, lambda node, tokens: tokens * self._will_do(node, ahead, computed_from))
            lacking = [(n.start, min(n.end, base.tokens)) for n in base.nodes if self._lacks(n, ahead)]
        spans = list(_spans(base.tokens, len(run), page_size, sealed_tokens))
        pages = [make_page(*span) for span in spans]
        renewed = {span: make_page(*span, True) for span in lacking}
        with self._lock:
            shares, kept, others = self._drop_outgrown(run)
            node = self._end(base)
            for known in path(node):
                if page := renewed.get((known.start, known.end)):
                    known.page, known.by = page, frozenset({by})
            for (start, stop, sealed), page in zip(spans, pages, strict=True):
                node = self._child(node, run[start:stop], page, sealed, others | {by})
            self._settle(path(node), shares | dict.fromkeys(owners, len(run)), [*ahead, *kept])
        return len(pages) + len(renewed)

    def clear(self) -> None:
        """Forget every page, and free its memory at once: parents and children point at each other."""
        with self._lock:
            for node in [self._root, *walk(self._root)]:
                node.children.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all stored pages as held in memory, a shared page counted once."""
        with self._lock:
            return _nbytes(_pages(walk(self._root)))

    @property
    def page_count(self) -> int:
        with self._lock:
            return len(_pages(walk(self._root)))

    def _agreeing(self, ids: Ids, readers: Readers | None = None) -> Iterator[tuple[Node, int, int]]:
        """Every run that begins as `ids` go on at its place: (node, tokens before it, tokens that agree and that
        `readers` may use)."""
        stack = [(self._root, 0)]
        while stack:
            parent, start = stack.pop()
            for child in parent.children:
                common = common_tokens(child.ids, ids[start : start + len(child.ids)])
                if common := min(common, child.readable(readers)):
                    yield child, start, common
                if common == len(child.ids):
                    stack.append((child, start + common))

    def _find(
        self, ids: Ids, usable: Callable[[Node, int], int] | None = None, readers: Readers | None = None
    ) -> Match:
        """The longest match; of equals the one whose last run is used up, which needs no slice to branch from.

        usable: of how many tokens up to somewhere in a run use can be made; the most counts then.
        """
        found = [
            (start + common, common == len(node.ids), node, common)
            for node, start, common in self._agreeing(ids, readers)
            if common >= min(len(node.ids), SHORTEST_SLICE)
        ]
        found.sort(key=lambda candidate: candidate[:2], reverse=True)
        match, most = NO_MATCH, 0
        for tokens, _, node, common in found:
            if tokens <= most:
                break
            if (used := usable(node, tokens) if usable else tokens) > most:
                match, most = Match.up_to(node, common), used
        return replace(match, agreeing=found[0][0] if found else 0, window=self.window)

    def _look_up(self, ids: Ids, readers: Readers | None = None) -> Match:
        """The longest match that can be continued from."""
        window = self.window
        if window is None:
            return self._find(ids, readers=readers)
        found = self._find(
            ids, lambda n, tokens: continuable(((m, m.page) for m in upwards(n)), tokens, window), readers
        )
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

    def _settle(self, nodes: Sequence[Node], shares: Mapping[str, int], points: Collection[int]) -> None:
        """Note owners and points of a path that was stored or found, and hold the limits."""
        credit(nodes, shares)
        for node in nodes:
            node.points.update(point for point in points if node.start < point <= node.end)
        self._touch(nodes)
        self._forget_unseen()
        self._evict()

    def _forget_unseen(self) -> None:
        """Drop the KV of layers with a window where no kept point looks back at it."""
        if self.window is None:
            return
        needed = looked_back_at(self._root, self.window, KEPT_POINTS)
        bare: dict[int, Page] = {}  # slices go on sharing their page
        for node in walk(self._root):
            if id(node.page) not in needed:
                node.page = bare.setdefault(id(node.page), node.page.without(self.window.layers))

    def _drop_outgrown(self, ids: Ids) -> tuple[dict[str, int], set[int], frozenset[str]]:
        """Remove open runs that `ids` go on from; returns up to which token each of their owners owned `ids`, their
        points, and the adapters that computed them."""
        shares: dict[str, int] = {}
        points: set[int] = set()
        adapters: frozenset[str] = frozenset()
        for node, start, common in list(self._agreeing(ids)):
            if not node.sealed and common == len(node.ids):
                remove(node)
                points |= node.points
                adapters |= node.by
                for owner, tokens in node.owners.items():
                    shares[owner] = max(start + tokens, shares.get(owner, 0))
        return shares, points, adapters

    def _end(self, base: Match) -> Node:
        """The node below which new pages go: the match's last, or a slice of it when it is not used up."""
        if not base.nodes:
            return self._root
        last = base.nodes[-1]
        if base.last_tokens == len(last.ids):
            return last
        assert last.parent is not None
        return self._child(last.parent, last.ids[: base.last_tokens], last.page, by=last.by)

    def _child(self, parent: Node, ids: Ids, page: Page, sealed: bool = True, by: frozenset[str] = frozenset()) -> Node:
        layers = self.window.layers if self.window else frozenset()
        for child in parent.children:
            covers = (
                not sealed and child.ids[: len(ids)] == ids and (child.page.holds(layers) or not page.holds(layers))
            )
            if child.ids == ids or covers:
                return child  # stored meanwhile, a slice that another branch made, or a longer run that covers it
        node = Node(ids, page, parent, chained_key(parent.key, ids), sealed, start=parent.end, by=by)
        parent.children.append(node)
        return node

    def _touch(self, nodes: Sequence[Node]) -> None:
        now = next(self._clock)
        for node in nodes:
            node.last_used = now

    def _evict(self) -> None:
        """Drop least recently used runs, newest tokens first, until the budget holds."""
        stored = len(_pages(walk(self._root)))
        while (pages := _pages(walk(self._root))) and _nbytes(pages) > self.budget_bytes:
            remove(min((n for n in walk(self._root) if not n.children), key=lambda node: node.last_used))
        self.evicted_pages += stored - len(pages)


def _spans(start: int, end: int, page_size: int, sealed_tokens: int) -> Iterator[tuple[int, int, bool]]:
    """(start, stop, sealed): full pages up to `sealed_tokens`, then what stays open."""
    while start + page_size <= min(sealed_tokens, end):
        yield start, start + page_size, True
        start += page_size
    if start < end:
        yield start, end, False


def _pages(nodes: Iterable[Node]) -> list[Page]:
    """Each page once: slices share theirs."""
    return list({id(node.page): node.page for node in nodes}.values())


def _nbytes(pages: Iterable[Page]) -> int:
    return sum(page.nbytes for page in pages)

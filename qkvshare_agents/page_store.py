"""Pages by prefix, within a byte budget.

A tree of token runs: the path from the root to a node is a prefix of some conversation, and the node's page
holds the KV of its run. Looking up a prompt walks down as far as the token ids agree, so that edits, resets,
dropped messages or another agent's private turns make the match shorter and can't give a wrong one. Where
two conversations part inside a sealed page, both share its bytes: the branch starts behind a *slice* node
that uses the page's first tokens, and nothing is encoded again.

Every node has a content address, a chained SHA-256 over (root, parent, token ids). The root covers the model's
fingerprint and the tenant's salt.
"""

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from qkvshare_agents.page import Page

SHORTEST_SLICE = 16  # tokens; reading less than this again is cheaper than a node for it


@dataclass(eq=False)
class Node:
    """A run of token ids and the page with their KV. `page` may hold more tokens than the run (a slice)."""

    ids: tuple[int, ...]
    page: Page | None
    parent: "Node | None"
    key: bytes
    owner: str = ""
    sealed: bool = True  # else the unfilled page and residual window: native, a leaf, replaced when it grows
    children: list["Node"] = field(default_factory=list)
    last_used: int = 0


@dataclass(frozen=True)
class Match:
    """The longest stored prefix of a prompt: `nodes` from the root's child on, the last used up to `last_tokens`."""

    nodes: tuple[Node, ...]
    last_tokens: int

    @property
    def runs(self) -> Iterator[tuple[Page, int]]:
        """(page, tokens of it to read), in order."""
        for node in self.nodes:
            assert node.page is not None
            yield node.page, (self.last_tokens if node is self.nodes[-1] else len(node.ids))

    @property
    def tokens(self) -> int:
        return sum(len(node.ids) for node in self.nodes[:-1]) + self.last_tokens

    @property
    def nbytes(self) -> int:
        """Stored bytes of the pages, each counted once."""
        return sum(page.nbytes for page in {id(n.page): n.page for n in self.nodes if n.page}.values())

    @property
    def owner(self) -> str:
        """Who computed the last page of the match."""
        return self.nodes[-1].owner if self.nodes else ""


NO_MATCH = Match((), 0)


class PageStore:
    """Prefix tree of pages. Thread-safe; a reader's match stays valid when its pages are evicted meanwhile."""

    def __init__(self, root_key: bytes, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.evicted_pages = 0
        self._lock = threading.Lock()
        self._clock = itertools.count(1)
        self._root = Node((), None, None, root_key)

    def match(self, ids: Sequence[int]) -> Match:
        """The longest stored prefix of `ids`, compared id by id. Touches the path it returns."""
        with self._lock:
            match = self._find(ids)
            self._touch(match.nodes)
            return match

    def extend(
        self,
        ids: Sequence[int],
        owner: str,
        page_size: int,
        sealed_tokens: int,
        make_page: Callable[[int, int, bool], Page],
    ) -> int:
        """Store the KV of `ids` as far as it is not stored yet; returns the number of pages made.

        Full pages up to `sealed_tokens` are made with make_page(start, stop, True), the open rest with
        make_page(start, stop, False). Pages are made outside the lock and put into the tree afterwards, all
        or none: an error or a cancellation in between leaves the store as it was.
        """
        with self._lock:
            match = self._find(ids)
        if match.tokens == len(ids):
            return 0
        base, start = self._base(match)
        spans = [(t, t + page_size, True) for t in range(start, sealed_tokens - page_size + 1, page_size)]
        if (end := spans[-1][1] if spans else start) < len(ids):
            spans.append((end, len(ids), False))
        pages = [make_page(*span) for span in spans]
        with self._lock:
            node = self._slice(base, match)
            rest = tuple(ids[start:])
            node.children = [c for c in node.children if c.sealed or c.ids != rest[: len(c.ids)]]
            for (first, stop, sealed), page in zip(spans, pages, strict=True):
                node = self._child(node, tuple(ids[first:stop]), page, owner, sealed)
            self._touch(_path(node))
            self._evict()
        return len(pages)

    def clear(self) -> None:
        """Forget every page."""
        with self._lock:
            self._root.children.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all stored pages as held in memory, a shared page counted once."""
        with self._lock:
            return sum(page.nbytes for page in self._pages().values())

    @property
    def page_count(self) -> int:
        with self._lock:
            return len(self._pages())

    def _pages(self) -> dict[int, Page]:
        return {id(node.page): node.page for node in _walk(self._root) if node.page is not None}

    def _find(self, ids: Sequence[int]) -> Match:
        path: list[Node] = []
        node, start, last = self._root, 0, 0
        while True:
            best, common = _best_child(node, ids, start)
            if best is None or common < min(len(best.ids), SHORTEST_SLICE):
                break
            path.append(best)
            last, node, start = common, best, start + common
            if common < len(best.ids):
                break
        return Match(tuple(path), last) if path else NO_MATCH

    def _base(self, match: Match) -> tuple[Node, int]:
        """The node below which new pages go, and the tokens before it. Open runs are replaced, not extended."""
        nodes = list(match.nodes)
        tokens = match.tokens
        if nodes and not nodes[-1].sealed:
            tokens -= match.last_tokens
            nodes.pop()
        return (nodes[-1] if nodes else self._root), tokens

    def _slice(self, base: Node, match: Match) -> Node:
        """`base`, or the node that uses only its first tokens when the match ends inside its page."""
        if base is self._root or base is not match.nodes[-1] or match.last_tokens == len(base.ids):
            return base
        assert base.page is not None and base.parent is not None
        return self._child(base.parent, base.ids[: match.last_tokens], base.page, base.owner)

    def _child(self, parent: Node, ids: tuple[int, ...], page: Page, owner: str, sealed: bool = True) -> Node:
        for child in parent.children:
            if child.ids == ids or (not sealed and child.ids[: len(ids)] == ids):
                return child  # stored meanwhile, a slice that another branch made, or a longer run that covers it
        key = hashlib.sha256(parent.key + b"".join(i.to_bytes(8, "little") for i in ids)).digest()
        node = Node(ids, page, parent, key, owner, sealed)
        parent.children.append(node)
        return node

    def _touch(self, path: Sequence[Node]) -> None:
        now = next(self._clock)
        for node in path:
            node.last_used = now

    def _evict(self) -> None:
        """Drop least recently used runs, newest tokens first, until the budget holds."""
        while sum(page.nbytes for page in self._pages().values()) > self.budget_bytes:
            leaves = [node for node in _walk(self._root) if not node.children and node.parent is not None]
            oldest = min(leaves, key=lambda node: node.last_used)
            assert oldest.parent is not None
            oldest.parent.children.remove(oldest)
            self.evicted_pages += 1


def _best_child(node: Node, ids: Sequence[int], start: int) -> tuple[Node | None, int]:
    """The child that agrees with `ids[start:]` longest; of equals the one that is used up, so that walking goes on."""
    best, common = None, 0
    for child in node.children:
        limit = min(len(child.ids), len(ids) - start)
        agree = next((i for i in range(limit) if child.ids[i] != ids[start + i]), limit)
        if agree > common or (agree == common and agree == len(child.ids) > 0):
            best, common = child, agree
    return best, common


def _path(node: Node) -> list[Node]:
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path


def _walk(root: Node) -> Iterator[Node]:
    stack = [root]
    while stack:
        node = stack.pop()
        stack.extend(node.children)
        yield node

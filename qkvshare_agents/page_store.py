"""Pages by prefix, within a byte budget.

A tree of token runs: the path from the root to a node is a prefix of some conversation, and the node's page
holds the KV of its run. Looking up a prompt walks down as far as the token ids agree, so that edits, resets,
dropped messages or another agent's private turns make the match shorter and can't give a wrong one. Where
two conversations part inside a sealed page, both share its bytes: the branch starts behind a *slice* node
that uses the page's first tokens, and nothing is encoded again.

Every node has a content address, a chained SHA-256 over (root, parent, token ids). The root covers the model's
fingerprint and the tenant's salt. Nodes know their *owners*: who computed a run's KV or was handed
it. A reader that names owners finds only what these have; whoever computes the same ids again joins them.
"""

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from qkvshare_agents.access import Readers
from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.page import EMPTY_PAGE, Page

SHORTEST_SLICE = 16  # tokens; reading less than this again is cheaper than a node for it
_MOST_OWNERS = 256  # of one node; who came first is forgotten first, and then reads the text again

Ids = tuple[int, ...]


@dataclass(eq=False)
class Node:
    """A run of token ids and the page with their KV. `page` may hold more tokens than the run (a slice).

    owners: who computed the run's KV or was handed it, and how many of its leading tokens.
    """

    ids: Ids
    page: Page
    parent: "Node | None"
    key: bytes
    sealed: bool = True  # else the unfilled page and residual window: native, a leaf, replaced when it grows
    children: list["Node"] = field(default_factory=list)
    owners: dict[str, int] = field(default_factory=dict)
    last_used: int = 0

    def readable(self, readers: Readers | None) -> int:
        """How many leading tokens of the run `readers` may use."""
        if readers is None:
            return len(self.ids)
        return max((self.owners.get(reader, 0) for reader in readers), default=0)


@dataclass(frozen=True)
class Match:
    """The longest stored prefix of a prompt: `nodes` from the root's child on, the last used up to `last_tokens`."""

    nodes: tuple[Node, ...]
    last_tokens: int

    @property
    def runs(self) -> Iterator[tuple[Page, int]]:
        """(page, tokens of it to read), in order."""
        for node in self.nodes:
            yield node.page, (self.last_tokens if node is self.nodes[-1] else len(node.ids))

    @property
    def tokens(self) -> int:
        return sum(len(node.ids) for node in self.nodes[:-1]) + self.last_tokens

    def head(self, tokens: int) -> "Match":
        """The first `tokens` tokens of the match."""
        kept: list[Node] = []
        for node, (_, used) in zip(self.nodes, self.runs, strict=True):
            if tokens <= 0:
                break
            kept.append(node)
            last, tokens = min(used, tokens), tokens - used
        return Match(tuple(kept), last) if kept else NO_MATCH

    @property
    def nbytes(self) -> int:
        """Stored bytes of the pages, each counted once."""
        return _nbytes(_pages(self.nodes))


NO_MATCH = Match((), 0)


class PageStore:
    """Prefix tree of pages. Thread-safe; a reader's match stays valid when its pages are evicted meanwhile."""

    def __init__(self, root_key: bytes, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.evicted_pages = 0
        self._lock = threading.Lock()
        self._clock = itertools.count(1)
        self._root = Node((), EMPTY_PAGE, None, root_key)

    def match(self, ids: Sequence[int], readers: Readers | None = None) -> Match:
        """The longest stored prefix of `ids` that `readers` own, compared id by id. Touches the path it returns.

        Up to SHORTEST_SLICE - 1 tokens less when the ids part (or end) inside a page.
        """
        with self._lock:
            match = self._find(tuple(ids), readers=readers)
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
    ) -> int:
        """Store the KV of `ids` as far as it is not stored yet; returns the number of pages made.

        Full pages up to `sealed_tokens` are made with make_page(start, stop, True), the open rest with
        make_page(start, stop, False). `owners` become owners of all of it. Pages are made outside the lock
        and put into the tree afterwards, all or none: an error or a cancellation in between leaves the store
        as it was. Raises InvalidSetting for an id that is negative or has more than 63 bits.
        """
        run = tuple(ids)
        if run and not 0 <= min(run) <= max(run) < 2**63:
            raise InvalidSetting(f"token ids must be in 0 ... 2**63 - 1; these are in {min(run)} ... {max(run)}")
        with self._lock:
            found = self._find(run)
            if found.tokens == len(run):
                _credit(found.nodes, dict.fromkeys(owners, len(run)))
                self._touch(found.nodes)
                return 0
            base = self._find(run, sealed_only=True)  # open runs are replaced, not extended
        spans = list(_spans(base.tokens, len(run), page_size, sealed_tokens))
        pages = [make_page(*span) for span in spans]
        with self._lock:
            shares = self._drop_outgrown(run)
            node = self._end(base)
            for (start, stop, sealed), page in zip(spans, pages, strict=True):
                node = self._child(node, run[start:stop], page, sealed)
            path = _path(node)
            _credit(path, shares | dict.fromkeys(owners, len(run)))
            self._touch(path)
            self._evict()
        return len(pages)

    def clear(self) -> None:
        """Forget every page, and free its memory at once: parents and children point at each other."""
        with self._lock:
            for node in [self._root, *_walk(self._root)]:
                node.children.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all stored pages as held in memory, a shared page counted once."""
        with self._lock:
            return _nbytes(_pages(_walk(self._root)))

    @property
    def page_count(self) -> int:
        with self._lock:
            return len(_pages(_walk(self._root)))

    def _agreeing(self, ids: Ids, readers: Readers | None = None) -> Iterator[tuple[Node, int, int]]:
        """Every run that begins as `ids` go on at its place: (node, tokens before it, tokens that agree and that
        `readers` may use)."""
        stack = [(self._root, 0)]
        while stack:
            parent, start = stack.pop()
            for child in parent.children:
                common = _common(child.ids, ids[start : start + len(child.ids)])
                if common := min(common, child.readable(readers)):
                    yield child, start, common
                if common == len(child.ids):
                    stack.append((child, start + common))

    def _find(self, ids: Ids, *, sealed_only: bool = False, readers: Readers | None = None) -> Match:
        """The longest match; of equals the one whose last run is used up, which needs no slice to branch from."""
        last, last_tokens, best = None, 0, (0, False)
        for node, start, common in self._agreeing(ids, readers):
            rank = (start + common, common == len(node.ids))
            long_enough = common >= min(len(node.ids), SHORTEST_SLICE)
            if long_enough and rank > best and (node.sealed or not sealed_only):
                last, last_tokens, best = node, common, rank
        return Match(tuple(_path(last)), last_tokens) if last else NO_MATCH

    def _drop_outgrown(self, ids: Ids) -> dict[str, int]:
        """Remove open runs that `ids` go on from; returns up to which token each of their owners owned `ids`."""
        shares: dict[str, int] = {}
        for node, start, common in list(self._agreeing(ids)):
            if not node.sealed and common == len(node.ids):
                _remove(node)
                for owner, tokens in node.owners.items():
                    shares[owner] = max(start + tokens, shares.get(owner, 0))
        return shares

    def _end(self, base: Match) -> Node:
        """The node below which new pages go: the match's last, or a slice of it when it is not used up."""
        if not base.nodes:
            return self._root
        last = base.nodes[-1]
        if base.last_tokens == len(last.ids):
            return last
        assert last.parent is not None
        return self._child(last.parent, last.ids[: base.last_tokens], last.page)

    def _child(self, parent: Node, ids: Ids, page: Page, sealed: bool = True) -> Node:
        for child in parent.children:
            if child.ids == ids or (not sealed and child.ids[: len(ids)] == ids):
                return child  # stored meanwhile, a slice that another branch made, or a longer run that covers it
        node = Node(ids, page, parent, chained_key(parent.key, ids), sealed)
        parent.children.append(node)
        return node

    def _touch(self, path: Sequence[Node]) -> None:
        now = next(self._clock)
        for node in path:
            node.last_used = now

    def _evict(self) -> None:
        """Drop least recently used runs, newest tokens first, until the budget holds."""
        stored = len(_pages(_walk(self._root)))
        while (pages := _pages(_walk(self._root))) and _nbytes(pages) > self.budget_bytes:
            _remove(min((n for n in _walk(self._root) if not n.children), key=lambda node: node.last_used))
        self.evicted_pages += stored - len(pages)


def _credit(path: Sequence[Node], shares: Mapping[str, int]) -> None:
    """Make each owner an owner of its first so many tokens of `path`, which begins at the root's child."""
    start = 0
    for node in path:
        for owner, tokens in shares.items():
            if tokens > start:
                node.owners[owner] = max(min(tokens - start, len(node.ids)), node.owners.pop(owner, 0))
        while len(node.owners) > _MOST_OWNERS:
            del node.owners[next(iter(node.owners))]
        start += len(node.ids)


def chained_key(parent_key: bytes, ids: Ids) -> bytes:
    """Content address of the run `ids` behind its parent's."""
    return hashlib.sha256(parent_key + b"".join(i.to_bytes(8, "little") for i in ids)).digest()


def _spans(start: int, end: int, page_size: int, sealed_tokens: int) -> Iterator[tuple[int, int, bool]]:
    """(start, stop, sealed): full pages up to `sealed_tokens`, then what stays open."""
    while start + page_size <= min(sealed_tokens, end):
        yield start, start + page_size, True
        start += page_size
    if start < end:
        yield start, end, False


def _common(a: Ids, b: Ids) -> int:
    if a == b:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _path(node: Node) -> list[Node]:
    """From the root's child to `node`."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def _remove(node: Node) -> None:
    assert node.parent is not None
    node.parent.children.remove(node)


def _walk(root: Node) -> Iterator[Node]:
    """Every node but the root."""
    stack = [*root.children]
    while stack:
        node = stack.pop()
        stack.extend(node.children)
        yield node


def _pages(nodes: Iterable[Node]) -> list[Page]:
    """Each page once: slices share theirs."""
    return list({id(node.page): node.page for node in nodes}.values())


def _nbytes(pages: Iterable[Page]) -> int:
    return sum(page.nbytes for page in pages)

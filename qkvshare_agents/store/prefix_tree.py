"""A tree of token runs with their pages, and what of it can be continued from.

The path from the root to a node is a prefix of some conversation. Every node has a content address, a chained
SHA-256 over (root, parent, token ids). Nodes know their *owners*: who computed a run's KV or was handed it.

Layers with a window look back over a few tokens only. Behind a position, no more than that of their KV is handed over
or kept, so that a conversation can be continued from a position only where the tokens before it still have theirs.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from qkvshare_agents.ids import Ids
from qkvshare_agents.kv.page import Page
from qkvshare_agents.kv.shape import Window
from qkvshare_agents.store.prefixes import Prefixes
from qkvshare_agents.store.runs import Readers

SHORTEST_SLICE = 16  # tokens; reading less than this again is cheaper than a node for it
_MOST_OWNERS = 256  # of one node; who came first is forgotten first, and then reads the text again
_MOST_ALIKE = 64  # runs in one place that are looked at because they begin as the ids do, and part from them


class Children:
    """The runs that follow a node. Open ones are apart: nothing continues from them."""

    __slots__ = ("_kinds",)

    def __init__(self) -> None:
        self._kinds: dict[bool, Prefixes[Node]] = {}  # by whether they are sealed; most nodes have one kind or none

    def __iter__(self) -> "Iterator[Node]":
        return itertools.chain.from_iterable(self._kinds.values())

    def __len__(self) -> int:
        return sum(map(len, self._kinds.values()))

    def add(self, node: "Node") -> None:
        self._kinds.setdefault(node.sealed, Prefixes()).add(node)

    def remove(self, node: "Node") -> None:
        self._kinds[node.sealed].remove(node.ids)

    def clear(self) -> None:
        self._kinds.clear()

    def get(self, ids: Ids) -> "list[Node]":
        """Those with exactly these ids: a sealed one, an open one, or both."""
        return [node for kind in self._kinds.values() if (node := kind.get(ids))]

    def covering(self, ids: Ids) -> "Iterator[Node]":
        """Those that begin with all of `ids`."""
        for kind in self._kinds.values():
            yield from kind.begun_with(ids)

    def alike(self, ids: Ids, start: int) -> "Iterator[tuple[Node, int]]":
        """(node, tokens that agree) of those that `ids` go on with from `start` on: all that are used up, and the most
        alike of the others."""
        for kind in self._kinds.values():
            for node in kind.beginning(ids, start):
                yield node, len(node.ids)
            yield from itertools.islice(kind.parting(ids, start, SHORTEST_SLICE), _MOST_ALIKE)


@dataclass(eq=False)
class Node:
    """A run of token ids and the page with their KV. `page` may hold more tokens than the run (a slice).

    start: tokens before the run. points: positions in it, counted from the conversation's begin, where a turn ended or
    a cue began. owners: who computed the run's KV or was handed it, and how many of its leading tokens. by: with which
    adapters it was computed. looks_at: whose layers with a window are kept for branches that end here; watchers: of
    how many such branches this is one. headers: positions in the run where the system text and tools of conversations
    end. A node without a parent is the root, or was removed.
    """

    ids: Ids
    page: Page
    parent: "Node | None"
    key: bytes
    sealed: bool = True  # else the unfilled page and residual window: native, a leaf, replaced when it grows
    children: Children = field(default_factory=Children)
    owners: dict[str, int] = field(default_factory=dict)
    points: set[int] = field(default_factory=set)
    start: int = 0
    by: frozenset[str] = frozenset()
    looks_at: "tuple[Node, ...]" = ()
    watchers: int = 0
    headers: set[int] = field(default_factory=set)

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    def readable(self, readers: Readers | None) -> int:
        """How many leading tokens of the run `readers` may use."""
        if readers is None:
            return len(self.ids)
        return max((self.owners.get(reader, 0) for reader in readers), default=0)


@dataclass(frozen=True)
class Match:
    """The longest stored prefix of a prompt: `nodes` from the root's child on, the last used up to `last_tokens`.

    pages: of the nodes, when they were looked up. agreeing: how many tokens are stored, of which it may be
    possible to continue from fewer. window: what layers without full attention look back over.
    """

    nodes: tuple[Node, ...]
    pages: tuple[Page, ...]
    last_tokens: int
    agreeing: int = 0
    window: Window | None = None

    @staticmethod
    def up_to(node: Node, last_tokens: int) -> "Match":
        nodes = tuple(path(node))
        return Match(nodes, tuple(n.page for n in nodes), last_tokens, node.start + last_tokens)

    @property
    def runs(self) -> Iterator[tuple[Page, int]]:
        """(page, tokens of it to read), in order; pages that no window reaches are without the layers with a window."""
        first = self.window.first_seen(self.tokens) if self.window else 0
        for node, page in zip(self.nodes, self.pages, strict=True):
            reached = self.window is None or node.end > first
            kept = page if reached or self.window is None else page.without(self.window.layers)
            yield kept, (self.last_tokens if node is self.nodes[-1] else len(node.ids))

    @property
    def tokens(self) -> int:
        return self.nodes[-1].start + self.last_tokens if self.nodes else 0

    def head(self, tokens: int) -> "Match":
        """The first `tokens` tokens of the match, or fewer where it can't be continued from there."""
        if self.window:
            tokens = continuable(zip(reversed(self.nodes), reversed(self.pages), strict=True), tokens, self.window)
        count = sum(node.start < tokens for node in self.nodes)
        if not count:
            return replace(self, nodes=(), pages=(), last_tokens=0)
        last = min(tokens, self.tokens) - self.nodes[count - 1].start
        return replace(self, nodes=self.nodes[:count], pages=self.pages[:count], last_tokens=last)

    def not_by(self, adapters: str) -> int:
        """How many tokens were computed with other adapters."""
        runs = zip(self.nodes, self.runs, strict=True)
        return sum(tokens for node, (_, tokens) in runs if node.by - {adapters})

    @property
    def nbytes(self) -> int:
        """Stored bytes of what is read of the pages."""
        return sum(page.nbytes for page, _ in self.runs)


NO_MATCH = Match((), (), 0)


def continuable(backwards: Iterable[tuple[Node, Page]], tokens: int, window: Window) -> int:
    """The last position up to `tokens` before which all layers have what they look back at.

    backwards: the nodes of a path with their pages, the last first.
    """
    for node, page in backwards:
        if node.start >= tokens:
            continue
        if node.end <= window.first_seen(tokens):
            break
        if not page.holds(window.layers):
            tokens = node.start
    return tokens


def agreeing(root: Node, ids: Ids, readers: Readers | None = None) -> list[tuple[Node, int]]:
    """Runs that begin as `ids` go on at their place: (node, tokens that agree and that `readers` may use), of which
    there are at least SHORTEST_SLICE or all. Most tokens first; of equals those that are used up, which need no slice
    to branch from."""
    found: list[tuple[int, bool, Node]] = []
    stack = [root]
    while stack:
        parent = stack.pop()
        for node, alike in parent.children.alike(ids, parent.end):
            common = min(alike, node.readable(readers))
            whole = common == len(node.ids)
            if common >= min(len(node.ids), SHORTEST_SLICE):
                found.append((node.start + common, whole, node))
            if whole:
                stack.append(node)
    found.sort(key=lambda candidate: candidate[:2], reverse=True)
    return [(node, tokens - node.start) for tokens, _, node in found]


def credit(path: Sequence[Node], shares: Mapping[str, int]) -> None:
    """Make each owner an owner of its first so many tokens of `path`, which begins at the root's child."""
    start = 0
    for node in path:
        for owner, tokens in shares.items():
            if tokens > start:
                node.owners[owner] = max(min(tokens - start, len(node.ids)), node.owners.pop(owner, 0))
        while len(node.owners) > _MOST_OWNERS:
            del node.owners[next(iter(node.owners))]
        start += len(node.ids)


def inherit(shares: dict[str, int], node: Node) -> None:
    """Note that the owners of `node` own the ids up to it as far as they own it."""
    for owner, tokens in node.owners.items():
        shares[owner] = max(node.start + tokens, shares.get(owner, 0))


def chained_key(parent_key: bytes, ids: Ids) -> bytes:
    """Content address of the run `ids` behind its parent's."""
    return hashlib.sha256(parent_key + b"".join(i.to_bytes(8, "little") for i in ids)).digest()


def upwards(node: Node) -> Iterator[Node]:
    """From `node` to the root's child."""
    while node.parent is not None:
        yield node
        node = node.parent


def path(node: Node) -> list[Node]:
    """From the root's child to `node`."""
    return [*upwards(node)][::-1]


def walk(root: Node) -> Iterator[Node]:
    """Every node but the root."""
    stack = [*root.children]
    while stack:
        node = stack.pop()
        stack.extend(node.children)
        yield node

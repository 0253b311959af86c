"""A tree of token runs with their pages, and what of it can be continued from.

The path from the root to a node is a prefix of some conversation. Every node has a content address, a chained
SHA-256 over (root, parent, token ids). Nodes know their *owners*: who computed a run's KV or was handed it.

Layers with a window look back over a few tokens only. Behind a position, no more than that of their KV is handed over
or kept, so that a conversation can be continued from a position only where the tokens before it still have theirs.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from qkvshare_agents.access import Readers
from qkvshare_agents.page import Page
from qkvshare_agents.span import Window

_MOST_OWNERS = 256  # of one node; who came first is forgotten first, and then reads the text again

Ids = tuple[int, ...]


@dataclass(eq=False)
class Node:
    """A run of token ids and the page with their KV. `page` may hold more tokens than the run (a slice).

    start: tokens before the run. points: positions in it, counted from the conversation's begin, where a turn ended or
    a cue began. owners: who computed the run's KV or was handed it, and how many of its leading tokens. by: with which
    adapters it was computed.
    """

    ids: Ids
    page: Page
    parent: "Node | None"
    key: bytes
    sealed: bool = True  # else the unfilled page and residual window: native, a leaf, replaced when it grows
    children: list["Node"] = field(default_factory=list)
    owners: dict[str, int] = field(default_factory=dict)
    points: set[int] = field(default_factory=set)
    start: int = 0
    last_used: int = 0
    by: frozenset[str] = frozenset()

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


def looked_back_at(root: Node, window: Window, kept_points: int) -> set[int]:
    """The id() of every page that layers with a window need behind the newest points of a branch."""
    needed: set[int] = set()
    for leaf in walk(root):
        if leaf.children:
            continue
        points: list[int] = []
        for node in upwards(leaf):
            points += sorted(node.points, reverse=True)[: kept_points - len(points)]
            if window.sees(node.start, node.end, points):
                needed.add(id(node.page))
            elif len(points) == kept_points:
                break
    return needed


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


def chained_key(parent_key: bytes, ids: Ids) -> bytes:
    """Content address of the run `ids` behind its parent's."""
    return hashlib.sha256(parent_key + b"".join(i.to_bytes(8, "little") for i in ids)).digest()


def common_tokens(a: Ids, b: Ids) -> int:
    if a == b:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def upwards(node: Node) -> Iterator[Node]:
    """From `node` to the root's child."""
    while node.parent is not None:
        yield node
        node = node.parent


def path(node: Node) -> list[Node]:
    """From the root's child to `node`."""
    return [*upwards(node)][::-1]


def remove(node: Node) -> None:
    assert node.parent is not None
    node.parent.children.remove(node)


def walk(root: Node) -> Iterator[Node]:
    """Every node but the root."""
    stack = [*root.children]
    while stack:
        node = stack.pop()
        stack.extend(node.children)
        yield node

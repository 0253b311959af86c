"""Which runs keep the KV of their layers with a window: those that are looked back at from the newest points of a
branch, and from the end of a header, with which other conversations begin."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from qkvshare_agents.kv.shape import Window
from qkvshare_agents.store.prefix_tree import Node, upwards

# Of each branch, the newest: those of two turns, where their cues begin and where their prompts and answers end. What
# was said before can be continued from full attention only.
KEPT_POINTS = 6


class Lookback:
    """Every run that a branch ends with *looks at* the runs behind its newest points. For one thread.

    What follows it takes over: points that are no longer among the newest are given up then.
    """

    def __init__(self, window: Window) -> None:
        self.window = window
        self._doubtful: dict[Node, None] = {}  # may be looked at by none now

    def settle(self, path: Sequence[Node]) -> None:
        """A branch ends with the last run of `path`, whose points are noted."""
        if not path:
            return
        self._look(path[-1], self._behind_newest_points(path[-1]))
        for node in path[:-1]:
            self._look(node)
        self._doubtful.update(dict.fromkeys(path))

    def leave(self, node: Node) -> None:
        """The run is about to go; the branch ends before it then, unless another one goes on there."""
        parent = node.parent
        if parent is not None and parent.parent is not None and len(parent.children) == 1:
            self._look(parent, self._behind_newest_points(parent))
        node.headers = set()
        self._look(node)
        self._doubtful.pop(node, None)

    def unseen(self) -> Iterator[Node]:
        """Runs that no branch looks at, of those that changed since the last call."""
        doubtful, self._doubtful = self._doubtful, {}
        return (node for node in doubtful if not node.watchers)

    def clear(self) -> None:
        self._doubtful.clear()

    def _look(self, node: Node, behind_points: Iterable[Node] = ()) -> None:
        """Look at these runs from `node`, and behind the header that ends in it, and no longer at others."""
        before, node.looks_at = node.looks_at, (*behind_points, *self._behind_header(node))
        for each in node.looks_at:
            each.watchers += 1
        for each in before:
            each.watchers -= 1
            self._doubtful[each] = None

    def _behind_header(self, end: Node) -> Iterator[Node]:
        return itertools.takewhile(lambda node: self.window.sees(node.start, node.end, end.headers), upwards(end))

    def _behind_newest_points(self, end: Node) -> Iterator[Node]:
        points: list[int] = []
        for node in upwards(end):
            points += sorted(node.points, reverse=True)[: KEPT_POINTS - len(points)]
            if self.window.sees(node.start, node.end, points):
                yield node
            elif len(points) == KEPT_POINTS:
                return

"""Which runs keep the KV of their layers with a window: those that the newest points of a branch look back at."""

from collections.abc import Iterator, Sequence

from qkvshare_agents.prefix_tree import Node, upwards
from qkvshare_agents.span import Window

KEPT_POINTS = 4  # of each branch, the newest: what was said before can be continued from full attention only


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
        self._look(path[-1])
        for node in path[:-1]:
            self._look_away(node)
        self._doubtful.update(dict.fromkeys(path))

    def leave(self, node: Node) -> None:
        """The run is about to go; the branch ends before it then, unless another one goes on there."""
        parent = node.parent
        if parent is not None and parent.parent is not None and len(parent.children) == 1 and not parent.looks_at:
            self._look(parent)
        self._look_away(node)
        self._doubtful.pop(node, None)

    def unseen(self) -> Iterator[Node]:
        """Runs that no branch looks at, of those that changed since the last call."""
        doubtful, self._doubtful = self._doubtful, {}
        return (node for node in doubtful if not node.watchers)

    def clear(self) -> None:
        self._doubtful.clear()

    def _look(self, node: Node) -> None:
        seen = tuple(self._behind_newest_points(node))
        for each in seen:
            each.watchers += 1
        self._look_away(node)
        node.looks_at = seen

    def _look_away(self, node: Node) -> None:
        for each in node.looks_at:
            each.watchers -= 1
            self._doubtful[each] = None
        node.looks_at = ()

    def _behind_newest_points(self, end: Node) -> Iterator[Node]:
        points: list[int] = []
        for node in upwards(end):
            points += sorted(node.points, reverse=True)[: KEPT_POINTS - len(points)]
            if self.window.sees(node.start, node.end, points):
                yield node
            elif len(points) == KEPT_POINTS:
                return

"""The runs of a store in the order of their use, and how much memory their pages take."""

from collections import OrderedDict
from collections.abc import Sequence

from qkvshare_agents.kv.page import Page
from qkvshare_agents.store.prefix_tree import Node


class Shelf:
    """Runs, least recently used first and what follows a run before it; their pages, each counted once. For one thread.

    Since whoever uses a run uses all runs before it, nothing follows the least recently used one.
    """

    def __init__(self) -> None:
        self._nodes: OrderedDict[Node, None] = OrderedDict()
        self._sharing: dict[int, dict[Node, None]] = {}  # by id() of the page, which its runs keep alive
        self.nbytes = 0

    @property
    def page_count(self) -> int:
        return len(self._sharing)

    @property
    def oldest(self) -> Node | None:
        """The run that is to go next."""
        return next(iter(self._nodes), None)

    def put(self, node: Node) -> None:
        """A new run, unused as yet."""
        self._nodes[node] = None
        self._nodes.move_to_end(node, last=False)
        self._take_up(node)

    def drop(self, node: Node) -> None:
        del self._nodes[node]
        self._lay_down(node)

    def touch(self, path: Sequence[Node]) -> None:
        """The runs of a path from the root were used."""
        for node in reversed(path):
            self._nodes.move_to_end(node)

    def replace(self, node: Node, page: Page) -> None:
        """Give the run another page. Runs that share its old one keep that."""
        self._lay_down(node)
        node.page = page
        self._take_up(node)

    def sharing(self, page: Page) -> list[Node]:
        """The runs that are on the page."""
        return list(self._sharing[id(page)])

    def clear(self) -> None:
        self._nodes.clear()
        self._sharing.clear()
        self.nbytes = 0

    def _take_up(self, node: Node) -> None:
        nodes = self._sharing.setdefault(id(node.page), {})
        self.nbytes += 0 if nodes else node.page.nbytes
        nodes[node] = None

    def _lay_down(self, node: Node) -> None:
        nodes = self._sharing[id(node.page)]
        del nodes[node]
        if not nodes:
            del self._sharing[id(node.page)]
            self.nbytes -= node.page.nbytes

"""A page store that gives pages to other processes and takes theirs.

Sender and receiver name pages by content address: the chain over (fingerprint and salt, token ids) is the same on
both sides, so that only what the receiver lacks needs to travel, and another tenant's addresses fit nowhere.
"""

import hashlib
from collections.abc import Callable, Collection, Sequence

from qkvshare_agents.ids import Ids
from qkvshare_agents.kv.page import Page, crop
from qkvshare_agents.store.page_store import PageStore
from qkvshare_agents.store.prefix_tree import Match, Node, chained_key, inherit, path
from qkvshare_agents.store.runs import Step


class SharedPageStore(PageStore):
    """PageStore with runs going out (`steps`) and coming in (`graft`)."""

    @property
    def root_key(self) -> bytes:
        """A hash of the model and the salt."""
        return self._root.key

    def resize(self, budget_bytes: int) -> None:
        """Keep to another budget from now on; what is over it is dropped at once, least recently used first."""
        self.budget_bytes = budget_bytes
        with self._room(0):
            pass

    def weigh(self, ids: Sequence[int]) -> tuple[int, int]:
        """How many leading `ids` have stored KV, and the bytes of the pages that hold it; touches nothing."""
        with self._lock:
            match = self._find(tuple(ids))
            return match.tokens, match.nbytes

    def held(self, ids: Sequence[int]) -> tuple[bytes, ...]:
        """Content addresses of the sealed runs that `ids` begin with: what nobody needs to send.

        A page that lacks layers with a window goes by `bare_key`, and will do where no window looks back at it.
        """
        with self._lock:
            match = self._find(tuple(ids))
            self._shelf.touch(match.nodes)
        layers = self.window.layers if self.window else frozenset()
        whole = (n for n in zip(match.nodes, match.pages, strict=True) if n[0].sealed and n[0].end <= match.tokens)
        return tuple(node.key if page.holds(layers) else bare_key(node.key) for node, page in whole)

    def steps(self, match: Match, have: Collection[bytes]) -> tuple[Step, ...]:
        """What was found, without pages of sealed runs whose address is in `have`.

        A page of which only the first tokens are used goes out cropped to these.
        """
        steps: list[Step] = []
        parent_key = self._root.key
        for node, (page, tokens) in zip(match.nodes, match.runs, strict=True):
            key = chained_key(parent_key, node.ids[:tokens])
            unseen = self.window is not None and not self.window.sees(node.start, node.end, (match.tokens,))
            known = node.sealed and (key in have or (unseen and bare_key(key) in have))
            steps.append(Step(tokens, key, node.sealed, None if known else crop(page, tokens)))
            parent_key = key
        return tuple(steps)

    def lacks(self, ids: Sequence[int], steps: Sequence[Step]) -> bool:
        """Whether the steps leave out pages that are not here either."""
        end = sum(step.tokens for step in steps)
        here, stop = set(self.held(ids[:end])), 0
        for step in steps:
            start, stop = stop, stop + step.tokens
            unseen = self.window is not None and not self.window.sees(start, stop, (end,))
            if step.page is None and step.key not in here and not (unseen and bare_key(step.key) in here):
                return True
        return False

    def fits(self, ids: Sequence[int], steps: Sequence[Step]) -> bool:
        """Whether the steps' addresses are those that `ids` have in this store: the same model and salt."""
        key, start, run = self._root.key, 0, tuple(ids)
        for step in steps:
            key = chained_key(key, run[start : start + step.tokens])
            if key != step.key:
                return False
            start += step.tokens
        return True

    def lineup(self, ids: Sequence[int], steps: Sequence[Step]) -> tuple[list[tuple[Page, int]], int]:
        """Pages for `steps`, those that did not travel from here: (page, tokens of it) run by run, as far as they
        come. And how many of the runs are not stored here."""
        run, start, new, window = tuple(ids), 0, 0, self.window
        end = sum(step.tokens for step in steps)
        runs: list[tuple[Page, int]] = []
        with self._lock:
            node: Node | None = self._root
            for step in steps:
                node = _stored(node, run[start : start + step.tokens], step.sealed) if node else None
                page = step.page or (node.page if node else None)
                seen = window is not None and window.sees(start, start + step.tokens, (end,))
                if page is None or (seen and window is not None and not page.holds(window.layers)):
                    break
                runs.append((page, step.tokens))
                start, new = start + step.tokens, new + (node is None)
        return runs, new

    def renew(self, ids: Sequence[int], make_page: Callable[[int, int, bool], Page], by: str = "") -> int:
        """Replace those pages under `ids` that handoffs lie behind; returns how many. make_page: as for `extend`.

        Conversations that share a run read its new page from now on; what they computed behind the old one stays.
        """
        with self._lock:
            found, start = self._find(tuple(ids)), 0
            self._shelf.touch(found.nodes)  # others make room first
        made: list[tuple[Node, int, Page]] = []
        for node, (page, tokens) in zip(found.nodes, found.runs, strict=True):
            if page.hops:
                made.append((node, tokens, make_page(start, start + tokens, node.sealed)))
            start += tokens
        more = sum(page.nbytes - (node.page.nbytes if tokens == len(node.ids) else 0) for node, tokens, page in made)
        with self._room(more):
            for node, tokens, page in made:
                if node.parent is None:
                    continue  # evicted meanwhile
                if tokens == len(node.ids):
                    self._renew(node, page, by)
                elif node.sealed:
                    self._child(node.parent, node.ids[:tokens], page, by=frozenset({by}))
        return len(made)

    def graft(self, ids: Sequence[int], steps: Sequence[Step], owners: Sequence[str] = (), by: str = "") -> int:
        """Store the steps' pages under `ids`; returns how many leading ids can be continued from now.

        Runs that are stored already keep their own page, unless it lacks layers that the other has; `owners` join
        theirs. It ends before the first run whose page neither travelled nor is here any more. by: the adapters that
        computed what is new.
        """
        run = tuple(ids)
        shares: dict[str, int] = {}  # up to which token owners of runs that make way own the ids
        steps, more_bytes = self._fitting_steps(run, steps)
        with self._room(more_bytes):
            node = self._root
            for step in steps:
                part = run[node.end : node.end + step.tokens]
                known = _stored(node, part, step.sealed)
                if known is None and step.page is None:
                    break
                if known is None:
                    assert step.page is not None
                    for child in node.children.get(part):
                        self._remove(child)  # open here, sealed there: it would be in the way of what follows
                        inherit(shares, child)
                    known = self._child(node, part, step.page, step.sealed, frozenset({by}))
                elif self._completes(step, known):
                    assert step.page is not None
                    self._shelf.replace(known, step.page)
                node = known
            nodes = path(node)
            for other in self._outgrown(run[: node.end]):
                if other not in nodes:
                    self._remove(other)
                    inherit(shares, other)
            for owner in owners:
                shares[owner] = node.end
            self._settle(nodes, shares, {node.end})
            return self._look_up(run).tokens

    def _completes(self, step: Step, known: Node) -> bool:
        """Whether the step's page has layers with a window that the stored one lacks."""
        layers = self.window.layers if self.window else frozenset()
        return step.page is not None and step.page.holds(layers) and not known.page.holds(layers)

    def _fitting_steps(self, ids: Ids, steps: Sequence[Step]) -> tuple[Sequence[Step], int]:
        """As many of the steps as fit into the budget, and how many more bytes they take. Touches what is stored."""
        with self._lock:
            node: Node | None = self._root
            known: list[Node] = []
            used = more = start = 0
            for count, step in enumerate(steps):
                part = ids[start : start + step.tokens]
                node = _stored(node, part, step.sealed) if node else None
                if node:
                    known.append(node)
                page = step.page if node is None or self._completes(step, node) else node.page
                used += page.nbytes if page else 0
                if used > self.budget_bytes:
                    steps = steps[:count]
                    break
                more += page.nbytes - node.page.nbytes if page and node else page.nbytes if page else 0
                start += step.tokens
            self._shelf.touch(known)
        return steps, more


def bare_key(key: bytes) -> bytes:
    """The name of a page without its layers with a window."""
    return hashlib.sha256(key + b"without windows").digest()


def _stored(parent: Node, ids: Ids, sealed: bool) -> Node | None:
    """The child that these ids have already. An open one will do only where nothing is to follow it."""
    return next((c for c in parent.children.get(ids) if c.sealed or not sealed), None)

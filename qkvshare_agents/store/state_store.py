"""Copies of recurrent state by the tokens that they have read, within a byte budget."""

import threading
from collections import OrderedDict
from collections.abc import Sequence

from qkvshare_agents.ids import Ids
from qkvshare_agents.kv.state import Snapshot
from qkvshare_agents.store.prefixes import Prefixes


class SnapshotStore:
    """Snapshots by the ids that they have read, within a byte budget; the least recently used go first. Thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.nbytes = 0
        self._kept: OrderedDict[Ids, Snapshot] = OrderedDict()
        self._in_order: Prefixes[Ids] = Prefixes(lambda ids: ids)
        self._lock = threading.Lock()

    def keep(self, ids: Sequence[int], snapshot: Snapshot) -> None:
        """`ids`: exactly those that the snapshot has read, at least one."""
        with self._lock:
            key = tuple(ids)
            self._drop(key)
            self._kept[key] = snapshot
            self._in_order.add(key)
            self.nbytes += snapshot.nbytes
            while self.nbytes > self.budget_bytes and self._kept:
                self._drop(next(iter(self._kept)))

    def longest(self, ids: Sequence[int]) -> Snapshot | None:
        """The snapshot that has read the longest prefix of `ids`, compared id by id."""
        with self._lock:
            best = next(self._in_order.beginning(tuple(ids)), None)
            if best is None:
                return None
            self._kept.move_to_end(best)
            return self._kept[best]

    def _drop(self, ids: Ids) -> None:
        if (snapshot := self._kept.pop(ids, None)) is not None:
            self._in_order.remove(ids)
            self.nbytes -= snapshot.nbytes

    def holds(self, ids: Sequence[int]) -> bool:
        """Whether there is a snapshot that has read exactly `ids`."""
        with self._lock:
            return tuple(ids) in self._kept

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._in_order.clear()
            self.nbytes = 0

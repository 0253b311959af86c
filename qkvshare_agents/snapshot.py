"""Recurrent state, which can't be cut: valid behind exactly the tokens it has read.

Layers with linear attention, state spaces or convolutions fold all earlier tokens into one state of fixed size. It is
copied at the end of every turn and before every cue, where the next member or a branch may go on.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from qkvshare_agents.encoder import Ids


@dataclass(frozen=True)
class Snapshot:
    """State behind `tokens` tokens: of each recurrent layer, the fields of its cache by name, in native precision."""

    tokens: int
    layers: tuple[Mapping[str, Any], ...]

    @cached_property
    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(self.layers))

    @property
    def fp16_bytes(self) -> int:
        """The same values at 16 bits."""
        return 2 * sum(tensor.numel() for tensor in tensors_in(self.layers))


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested containers."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def copied(value: Any) -> Any:
    """The same containers with every tensor copied: layers update theirs in place."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: copied(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(part) for part in value)
    return value


class SnapshotStore:
    """Snapshots by the ids that they have read, within a byte budget; the least recently used go first. Thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._kept: OrderedDict[Ids, Snapshot] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(snapshot.nbytes for snapshot in self._kept.values())

    def keep(self, ids: Sequence[int], snapshot: Snapshot) -> None:
        """`ids`: exactly those that the snapshot has read."""
        with self._lock:
            self._kept[tuple(ids)] = snapshot
            self._kept.move_to_end(tuple(ids))
            used = sum(kept.nbytes for kept in self._kept.values())
            while self._kept and used > self.budget_bytes:
                used -= self._kept.popitem(last=False)[1].nbytes

    def longest(self, ids: Sequence[int]) -> Snapshot | None:
        """The snapshot that has read the longest prefix of `ids`, compared id by id."""
        prompt = tuple(ids)
        with self._lock:
            found = [key for key in self._kept if prompt[: len(key)] == key]
            if not found:
                return None
            best = max(found, key=len)
            self._kept.move_to_end(best)
            return self._kept[best]

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()

"""Recurrent state, which can't be cut: valid behind exactly the tokens it has read.

Layers with linear attention, state spaces or convolutions fold all earlier tokens into one state of fixed size. It is
copied at the end of every turn and before every cue, where the next member or a branch may go on.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from qkvshare_agents.encoder import Ids
from qkvshare_agents.errors import PackageError
from qkvshare_agents.prefixes import Prefixes


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


@dataclass(frozen=True)
class StatePart:
    """One tensor of a recurrent layer's state. layer: counted among those that have one. name: where it stands in the
    layer's fields, `conv_states.0`."""

    layer: int
    name: str
    tensor: Tensor

    def __str__(self) -> str:
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return f"{self.name} of layer {self.layer}: {dtype} {list(self.tensor.shape)}"


@dataclass(frozen=True)
class State:
    """What of a snapshot behind `tokens` tokens can move: its tensors, in the order of layers and fields."""

    tokens: int
    parts: tuple[StatePart, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.tensor.nbytes for part in self.parts)


def taken_apart(snapshot: Snapshot) -> State:
    parts = (StatePart(i, name, t) for i, layer in enumerate(snapshot.layers) for name, t in _named(layer))
    return State(snapshot.tokens, tuple(parts))


def difference(state: State, like: Snapshot) -> str | None:
    """The first name, shape or dtype that is not as in `like`; None if all are."""
    came, own = (list(map(str, some.parts)) for some in (state, taken_apart(like)))
    if len(came) != len(own):
        return f"{len(came)} tensors, not {len(own)}"
    return next((f"{a}, not {b}" for a, b in zip(came, own, strict=True) if a != b), None)


def put_together(state: State, like: Snapshot) -> Snapshot:
    """A snapshot of copies of `state`'s tensors; everything else is taken from `like`, of the same model.

    Raises PackageError if names, shapes or dtypes are not those of `like`.
    """
    if different := difference(state, like):
        raise PackageError(f"the package's recurrent state is another than this model's: {different}")
    tensors = iter([part.tensor for part in state.parts])
    return Snapshot(state.tokens, tuple(_filled(layer, tensors) for layer in like.layers))


def _named(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, part in inner:
        yield from _named(part, f"{name}.{key}" if name else str(key))


def _filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same containers with every tensor replaced, on the device of the old one."""
    if isinstance(value, Tensor):
        return next(tensors).to(value.device, copy=True)
    if isinstance(value, Mapping):
        return {key: _filled(part, tensors) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_filled(part, tensors) for part in value)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested containers."""
    return [tensor for _, tensor in _named(value)]


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

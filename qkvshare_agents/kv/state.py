"""Recurrent state, which can't be cut: valid behind exactly the tokens it has read.

Layers with linear attention, state spaces or convolutions fold all earlier tokens into one state of fixed size. It is
copied at the end of every turn and before every cue, where the next member or a branch may go on.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from qkvshare_agents.errors import PackageError


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

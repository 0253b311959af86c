"""The shape of a model's KV: groups of layers that are alike, windows, devices."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class LayerGroup:
    """Layers, in ascending order, whose keys are [H, T, key_dim] and values [H, T, value_dim]."""

    layers: tuple[int, ...]
    heads: int
    key_dim: int
    value_dim: int

    @property
    def values_per_token(self) -> int:
        """How many numbers all of its layers keep of one token."""
        return len(self.layers) * self.heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class Window:
    """`layers` look back over a window, of `tokens` where it is widest, the token that looks included."""

    layers: frozenset[int]
    tokens: int

    def first_seen(self, position: int) -> int:
        """The first token that what comes at `position` looks back at."""
        return max(0, position - self.tokens + 1)

    def sees(self, start: int, stop: int, positions: Iterable[int]) -> bool:
        """Whether any of the tokens [start, stop) is looked back at from one of the positions."""
        return any(start < position and stop > self.first_seen(position) for position in positions)


def sizes(groups: Iterable[LayerGroup]) -> dict[int, tuple[int, int, int]]:
    """(heads, key_dim, value_dim) of every layer: what groups of one model have in common wherever its layers are."""
    return {layer: (g.heads, g.key_dim, g.value_dim) for g in groups for layer in g.layers}


def in_words(groups: Iterable[LayerGroup]) -> str:
    """Layers x heads x size of keys + of values; groups of one shape as one."""
    alike: dict[tuple[int, int, int], int] = {}
    for g in groups:
        size = (g.heads, g.key_dim, g.value_dim)
        alike[size] = alike.get(size, 0) + len(g.layers)
    return ", ".join(f"{count} layers x {h} heads x {dk} + {dv}" for (h, dk, dv), count in alike.items())


@dataclass(frozen=True)
class KVShape:
    """What a model keeps of a token: groups of layers that are alike, by their indices among the layers with KV.

    windows: of each layer, how many tokens it attends to (None: all); empty if that holds for all layers. devices:
    where each group is; empty if all of them are on `device`. indexed: layers whose tokens an indexer picks; what it
    keeps of a token are layers of their own, behind all others.
    """

    groups: tuple[LayerGroup, ...]
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int | None, ...] = ()
    devices: tuple[torch.device, ...] = ()
    indexed: tuple[int, ...] = ()

    @property
    def places(self) -> tuple[torch.device, ...]:
        """Of each group."""
        return self.devices or (self.device,) * len(self.groups)

    @property
    def layers(self) -> int:
        """Layers that have KV."""
        return sum(len(group.layers) for group in self.groups)

    @property
    def indexers_from(self) -> int | None:
        """The first of the layers that indexers keep; None without any."""
        return self.layers - len(self.indexed) if self.indexed else None

    @property
    def values_per_token(self) -> int:
        """How many numbers all layers keep of one token."""
        return sum(group.values_per_token for group in self.groups)

    @cached_property
    def window(self) -> Window | None:
        """The layers that have one, and the widest; None where all layers look back at everything.

        A few tokens are added, which canaries are read again from.
        """
        layers = frozenset(layer for layer, tokens in enumerate(self.windows) if tokens)
        return Window(layers, max(tokens or 0 for tokens in self.windows) + WATCHED) if layers else None

    def fp16_bytes(self, tokens: int) -> int:
        """What `tokens` tokens take in a 16-bit cache, of windows only what they show: the yardstick of all ratios."""
        total = 0
        for group in self.groups:
            window = self.windows[group.layers[0]] if self.windows else None
            total += (tokens if window is None else min(tokens, window - 1)) * group.values_per_token
        return 2 * total


WATCHED = 4  # tokens whose distributions are compared

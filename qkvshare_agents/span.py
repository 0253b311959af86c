"""Native keys and values of consecutive tokens, by groups of layers that are alike.

Layers of equal shape are stacked (`[L, H, T, D]`), since one call for 30 of them takes a third of the time of 30
calls. A layer's index is its place among the layers that have KV, not among all.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor


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
class Block:
    """Keys [L, H, T, Dk] and values [L, H, T, Dv] of the layers of one group."""

    layers: tuple[int, ...]
    keys: Tensor
    values: Tensor


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


@dataclass(frozen=True)
class Span:
    """`tokens` consecutive tokens of all layers, a block for every group; no block where no layer has KV."""

    tokens: int
    blocks: tuple[Block, ...]

    def layers(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(index, keys [H, T, Dk], values [H, T, Dv]) of every layer, in ascending order."""
        found = {
            layer: (keys, values)
            for block in self.blocks
            for layer, keys, values in zip(block.layers, block.keys, block.values, strict=True)
        }
        for layer in sorted(found):
            yield layer, *found[layer]

    def without(self, layers: frozenset[int]) -> "Span":
        """The groups that have none of `layers`."""
        return Span(self.tokens, tuple(block for block in self.blocks if layers.isdisjoint(block.layers)))

    def cut(self, start: int, stop: int) -> "Span":
        """Tokens [start, stop) of it, as views."""
        blocks = (Block(b.layers, b.keys[:, :, start:stop], b.values[:, :, start:stop]) for b in self.blocks)
        return Span(min(stop, self.tokens) - start, tuple(blocks))


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

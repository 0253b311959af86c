"""Native keys and values of consecutive tokens, by groups of layers that are alike.

Layers of equal shape are stacked (`[L, H, T, D]`), since one call for 30 of them takes a third of the time of 30
calls. A layer's index is its place among the layers that have KV, not among all.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Keys [L, H, T, Dk] and values [L, H, T, Dv] of the layers of one group."""

    layers: tuple[int, ...]
    keys: Tensor
    values: Tensor


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

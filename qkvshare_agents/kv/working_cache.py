"""One agent's view while its turn runs: native keys and values, filled from pages.

The tensors are allocated once and kept between turns, since fresh memory costs more in page faults than
dequantizing into it does, and they have room for the tokens to come, so that no step copies the history
(transformers' own cache concatenates on every update).
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from qkvshare_agents.kv.page import Page
from qkvshare_agents.kv.shape import KVShape, LayerGroup
from qkvshare_agents.kv.span import Block, Span
from qkvshare_agents.kv.state import Snapshot
from qkvshare_kernels import memory

_ROUND_TOKENS = 256


class KVCache:
    """Native keys and values of the running turn. Not thread-safe: one turn at a time.

    round_tokens: room is made for a multiple of so many tokens.
    """

    def __init__(self, shape: KVShape, *, round_tokens: int = _ROUND_TOKENS) -> None:
        self.shape, self._round_tokens = shape, round_tokens
        self._held = self._allocate(0)
        self._places = {
            layer: (g, row) for g, group in enumerate(shape.groups) for row, layer in enumerate(group.layers)
        }
        self._room = 0
        self._lengths = [0] * shape.layers
        self.state: Snapshot | None = None  # of layers that are no attention, behind exactly `tokens` tokens

    @property
    def tokens(self) -> int:
        """Tokens that every layer holds."""
        return min(self._lengths, default=self.state.tokens if self.state else 0)

    @property
    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for pair in self._held for tensor in pair)

    def clear(self, reserve_tokens: int) -> None:
        """Start over, with room for `reserve_tokens` tokens."""
        self._lengths = [0] * self.shape.layers
        self.state = None
        self.reserve(reserve_tokens)

    def load(self, runs: Iterable[tuple[Page, int]]) -> None:
        """Append the first `tokens` tokens of each page, in order.

        Of layers with a window only what is looked back at from behind the last. Raises CodecError if that is missing.
        """
        start, added, window = self.tokens, list(runs), self.shape.window
        end = start + sum(tokens for _, tokens in added)
        self.reserve(end)
        for page, tokens in added:
            span = self.span(start, start + tokens)
            seen = window is None or window.sees(start, start + tokens, (end,))
            page.open_into(span if seen or window is None else span.without(window.layers))
            start += tokens
        self._lengths = [end] * self.shape.layers

    def keep(self, start: int, wanted: Sequence[int]) -> None:
        """Of the tokens from `start` on, keep only the `wanted`, counted from `start`, in their order."""
        used, stop = self.tokens, start + len(wanted)
        if stop < used:
            for block in self.span(start, used).blocks:
                index = torch.tensor(list(wanted), device=block.keys.device)
                for part in (block.keys, block.values):
                    part[:, :, : len(wanted)] = part.index_select(2, index)
        self._lengths = [stop] * self.shape.layers

    def crop(self, tokens: int) -> None:
        """Forget what lies beyond the first `tokens` tokens."""
        self._lengths = [min(tokens, length) for length in self._lengths]

    def span(self, start: int, stop: int) -> Span:
        """Views of the tokens [start, stop) of all layers, whatever they hold of what was never loaded."""
        blocks = zip(self.shape.groups, self._held, strict=True)
        return Span(
            stop - start, tuple(Block(g.layers, k[:, :, start:stop], v[:, :, start:stop]) for g, (k, v) in blocks)
        )

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views of all that a layer holds: keys [H, T, Dk] and values [H, T, Dv]."""
        (group, row), stop = self._places[layer], self._lengths[layer]
        keys, values = self._held[group]
        return keys[row, :, :stop], values[row, :, :stop]

    def room(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views of all the room of a layer, filled or not."""
        group, row = self._places[layer]
        keys, values = self._held[group]
        return keys[row], values[row]

    def advance(self, tokens: int) -> None:
        """All layers hold `tokens` tokens now, since they were written into their room."""
        self._lengths = [tokens] * self.shape.layers

    def length(self, layer: int) -> int:
        """Tokens of one layer; within a forward, layers that were run have more."""
        return self._lengths[layer]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys [H, t, Dk] and values [H, t, Dv] of one layer; returns views of all its tokens [H, T, D]."""
        start = self._lengths[layer]
        stop = start + keys.shape[-2]
        self.reserve(stop)
        self._lengths[layer] = stop
        held_keys, held_values = self.layer(layer)
        held_keys[:, start:].copy_(keys)
        held_values[:, start:].copy_(values)
        return held_keys, held_values

    def _allocate(self, tokens: int) -> tuple[tuple[Tensor, Tensor], ...]:
        def empty(group: LayerGroup, dim: int, place: torch.device) -> Tensor:
            return memory.empty((len(group.layers), group.heads, tokens, dim), self.shape.dtype, place)

        with torch.inference_mode(False):  # it may grow inside of a forward, and is written to outside of any
            placed = zip(self.shape.groups, self.shape.places, strict=True)
            return tuple((empty(g, g.key_dim, place), empty(g, g.value_dim, place)) for g, place in placed)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens in all; views of before show what they showed."""
        if tokens <= self._room:
            return
        used = max(self._lengths, default=0)
        old = self.span(0, used)
        self._room = -(-max(tokens, used * 5 // 4) // self._round_tokens) * self._round_tokens
        self._held = self._allocate(self._room)
        for new, kept in zip(self.span(0, used).blocks, old.blocks, strict=True):
            new.keys.copy_(kept.keys)
            new.values.copy_(kept.values)

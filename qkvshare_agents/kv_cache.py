"""One agent's view while its turn runs: native keys and values, filled from pages.

The tensors are allocated once and kept between turns, since fresh memory costs more in page faults than
dequantizing into it does, and they have room for the tokens to come, so that no step copies the history
(transformers' own cache concatenates on every update).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from qkvshare_agents.drift import WATCHED
from qkvshare_agents.page import Page
from qkvshare_agents.snapshot import Snapshot
from qkvshare_agents.span import Block, LayerGroup, Span, Window
from qkvshare_kernels import memory

_ROUND_TOKENS = 256


@dataclass(frozen=True)
class KVShape:
    """What a model keeps of a token: groups of layers that are alike, by their indices among the layers with KV.

    windows: of each layer, how many tokens it attends to (None: all); empty if that holds for all layers.
    """

    groups: tuple[LayerGroup, ...]
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int | None, ...] = ()

    @property
    def layers(self) -> int:
        """Layers that have KV."""
        return sum(len(group.layers) for group in self.groups)

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
        self._reserve(reserve_tokens)

    def load(self, runs: Iterable[tuple[Page, int]]) -> None:
        """Append the first `tokens` tokens of each page, in order.

        Of layers with a window only what is looked back at from behind the last. Raises CodecError if that is missing.
        """
        start, added, window = self.tokens, list(runs), self.shape.window
        end = start + sum(tokens for _, tokens in added)
        self._reserve(end)
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
            index = torch.tensor(list(wanted), device=self.shape.device)
            for block in self.span(start, used).blocks:
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

    def length(self, layer: int) -> int:
        """Tokens of one layer; within a forward, layers that were run have more."""
        return self._lengths[layer]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys [H, t, Dk] and values [H, t, Dv] of one layer; returns views of all its tokens [H, T, D]."""
        start = self._lengths[layer]
        stop = start + keys.shape[-2]
        self._reserve(stop)
        self._lengths[layer] = stop
        held_keys, held_values = self.layer(layer)
        held_keys[:, start:].copy_(keys)
        held_values[:, start:].copy_(values)
        return held_keys, held_values

    def _allocate(self, tokens: int) -> tuple[tuple[Tensor, Tensor], ...]:
        shape = self.shape

        def empty(group: LayerGroup, dim: int) -> Tensor:
            return memory.empty((len(group.layers), group.heads, tokens, dim), shape.dtype, shape.device)

        with torch.inference_mode(False):  # it may grow inside of a forward, and is written to outside of any
            return tuple((empty(group, group.key_dim), empty(group, group.value_dim)) for group in shape.groups)

    def _reserve(self, tokens: int) -> None:
        if tokens <= self._room:
            return
        used = max(self._lengths, default=0)
        old = self.span(0, used)
        self._room = -(-max(tokens, used * 5 // 4) // self._round_tokens) * self._round_tokens
        self._held = self._allocate(self._room)
        for new, kept in zip(self.span(0, used).blocks, old.blocks, strict=True):
            new.keys.copy_(kept.keys)
            new.values.copy_(kept.values)

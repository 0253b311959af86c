"""One agent's view while its turn runs: native keys and values, filled from pages.

The tensors are allocated once and kept between turns, since fresh memory costs more in page faults than
dequantizing into it does, and they have room for the tokens to come, so that no step copies the history
(transformers' own cache concatenates on every update).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkvshare_agents.page import Page
from qkvshare_agents.snapshot import Snapshot

_ROUND_TOKENS = 256


@dataclass(frozen=True)
class KVShape:
    """Keys [L, H, T, key_dim] and values [L, H, T, value_dim] of a model whose layers are all alike.

    windows: of each layer, how many tokens it attends to (None: all); empty if that holds for all layers. Their KV is
    kept for all tokens nevertheless, so that a conversation can be continued from any token; masks do the rest.
    """

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int | None, ...] = ()

    def fp16_bytes(self, tokens: int) -> int:
        """What `tokens` tokens take in a 16-bit cache, of windows only what they show: the yardstick of all ratios."""
        windows = self.windows or (None,) * self.layers
        kept = sum(tokens if window is None else min(tokens, window - 1) for window in windows)
        return 2 * kept * self.heads * (self.key_dim + self.value_dim)


class KVCache:
    """Native keys and values of the running turn. Not thread-safe: one turn at a time."""

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self._keys, self._values = self._allocate(0)
        self._lengths = [0] * shape.layers
        self.state: Snapshot | None = None  # of layers that are no attention, behind exactly `tokens` tokens

    @property
    def tokens(self) -> int:
        """Tokens that every layer holds."""
        return min(self._lengths, default=self.state.tokens if self.state else 0)

    @property
    def nbytes(self) -> int:
        return self._keys.untyped_storage().nbytes() + self._values.untyped_storage().nbytes()

    def clear(self, reserve_tokens: int) -> None:
        """Start over, with room for `reserve_tokens` tokens."""
        self._lengths = [0] * self.shape.layers
        self.state = None
        self._reserve(reserve_tokens)

    def load(self, runs: Iterable[tuple[Page, int]]) -> None:
        """Append the first `tokens` tokens of each page, in order."""
        start = self.tokens
        for page, tokens in runs:
            self._reserve(start + tokens)
            page.open_into(*self.span(start, start + tokens))
            start += tokens
            self._lengths = [start] * self.shape.layers

    def keep(self, start: int, wanted: Sequence[int]) -> None:
        """Of the tokens from `start` on, keep only the `wanted`, counted from `start`, in their order."""
        used, stop = self.tokens, start + len(wanted)
        if stop < used:
            index = torch.tensor(list(wanted), device=self.shape.device)
            for behind in self.span(start, used):
                behind[:, :, : len(wanted)] = behind.index_select(2, index)
        self._lengths = [stop] * self.shape.layers

    def crop(self, tokens: int) -> None:
        """Forget what lies beyond the first `tokens` tokens."""
        self._lengths = [min(tokens, length) for length in self._lengths]

    def span(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Views of keys [L, H, stop - start, Dk] and values [L, H, stop - start, Dv]."""
        self._reserve(stop if not self._lengths else 0)  # without attention layers nothing was appended
        return self._keys[:, :, start:stop], self._values[:, :, start:stop]

    def append_all(self, keys: Tensor, values: Tensor) -> None:
        """Add keys [L, H, t, Dk] and values [L, H, t, Dv] of all layers."""
        start = self.tokens
        stop = start + keys.shape[-2]
        self._reserve(stop)
        for ours, given in zip(self.span(start, stop), (keys, values), strict=True):
            ours.copy_(given)
        self._lengths = [stop] * self.shape.layers

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys [H, t, Dk] and values [H, t, Dv] of one layer; returns views of all its tokens [H, T, D]."""
        start = self._lengths[layer]
        stop = start + keys.shape[-2]
        self._reserve(stop)
        self._keys[layer, :, start:stop].copy_(keys)
        self._values[layer, :, start:stop].copy_(values)
        self._lengths[layer] = stop
        return self._keys[layer, :, :stop], self._values[layer, :, :stop]

    def _allocate(self, tokens: int) -> tuple[Tensor, Tensor]:
        s = self.shape
        return tuple(  # type: ignore[return-value]
            torch.empty(s.layers, s.heads, tokens, dim, dtype=s.dtype, device=s.device)
            for dim in (s.key_dim, s.value_dim)
        )

    def _reserve(self, tokens: int) -> None:
        if tokens <= self._keys.shape[2]:
            return
        used = max(self._lengths, default=0)
        old = self.span(0, used)
        room = -(-max(tokens, used * 5 // 4) // _ROUND_TOKENS) * _ROUND_TOKENS
        self._keys, self._values = self._allocate(room)
        for new, kept in zip(self.span(0, used), old, strict=True):
            new.copy_(kept)

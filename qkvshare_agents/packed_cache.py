"""One agent's history as it is stored: packed pages that attention reads in place, and a native tail.

For agents that live long and must not hold a native copy of what they have read (`KVCache` is one). A new token attends
to codes (`qkvshare_kernels.attention`); what needs native keys and values, such as several tokens at once or a mask,
gets those of one layer at a time, in memory that all layers share.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from qkvshare_agents.kv_cache import KVCache, KVShape
from qkvshare_agents.page import Page, Precision, seal
from qkvshare_kernels import backend
from qkvshare_kernels.attention import PackedPages

Native = tuple[Tensor, Tensor]
_ROUND_TOKENS = 256


class PackedCache:
    """Pages of all layers, and the newest tokens in native precision. Not thread-safe: one turn at a time."""

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self.runs: list[tuple[Page, int, int]] = []  # page, and its tokens' place
        self._packed = [PackedPages() for _ in range(shape.layers)]
        self._native: list[list[Native]] = [[] for _ in range(shape.layers)]
        self._tail = KVCache(shape)
        self._settled = 0
        self._scratch: Native | None = None

    @property
    def tokens(self) -> int:
        """Tokens that every layer holds."""
        return self._settled + self._tail.tokens

    @property
    def native_bytes(self) -> int:
        """Bytes of native keys and values that this cache holds beside its pages: the tail, and one layer's scratch."""
        return self._tail.nbytes + sum(t.untyped_storage().nbytes() for t in self._scratch or ())

    @property
    def page_bytes(self) -> int:
        return sum(page.nbytes for page, _, _ in self.runs)

    def drop_scratch(self) -> None:
        """Free what `dequantized` wrote to."""
        self._scratch = None

    def load(self, runs: Iterable[tuple[Page, int]]) -> None:
        """Append the first `tokens` tokens of each page, in order, by reference. The tail must be empty."""
        for page, tokens in runs:
            self._add(page, tokens)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Add keys [H, t, Dk] and values [H, t, Dv] of one layer to the tail."""
        self._tail.append(layer, keys, values)

    def length(self, layer: int) -> int:
        """Tokens of one layer; within a forward, layers that were run have more."""
        return self._settled + self._tail.length(layer)

    @torch.inference_mode()
    def seal(self, precision: Precision) -> int:
        """Pack the tail's full pages but for its newest `residual_length` tokens; returns how many tokens."""
        size, sealed, tail = precision.page_size, 0, self._tail
        while tail.tokens - sealed - precision.residual_length >= size:
            page = seal(*tail.span(sealed, sealed + size), precision, starts_sequence=self._settled == 0)
            self._add(page, size)
            sealed += size
        if sealed:
            rest = tail.span(sealed, tail.tokens)
            self._tail = KVCache(self.shape)
            for layer in range(self.shape.layers):
                self._tail.append(layer, rest[0][layer], rest[1][layer])
        return sealed

    def attend(self, layer: int, query: Tensor, scaling: float) -> Tensor:
        """Attention of one new token: query [HQ, Dk] over all of the layer's tokens; returns [HQ, Dv]."""
        native = [*self._native[layer], self._tail.of_layer(layer)]
        kernels = backend.kernels(self.shape.device)
        return kernels.attention(query, self._packed[layer], native, scaling)

    @torch.inference_mode()
    def dequantized(self, layer: int) -> Native:
        """Keys [H, T, Dk] and values [H, T, Dv] of one layer, valid until the next call for any layer."""
        total = self.length(layer)
        keys, values = (x[:, :total] for x in self._room(total))
        for page, start, stop in self.runs:
            page.open_layer_into(layer, keys[:, start:stop], values[:, start:stop])
        tail = self._tail.of_layer(layer)
        keys[:, self._settled :].copy_(tail[0])
        values[:, self._settled :].copy_(tail[1])
        return keys, values

    def _add(self, page: Page, tokens: int) -> None:
        for layer in range(self.shape.layers):
            native, packed = page.parts(layer, tokens)
            if native:
                self._native[layer].append(native)
            if packed:
                self._packed[layer].append(*packed)
        self.runs.append((page, self._settled, self._settled + tokens))
        self._settled += tokens

    def _room(self, tokens: int) -> Native:
        if self._scratch is None or self._scratch[0].shape[1] < tokens:
            s = self.shape
            room = -(-tokens // _ROUND_TOKENS) * _ROUND_TOKENS
            keys, values = (
                torch.empty(s.heads, room, dim, dtype=s.dtype, device=s.device) for dim in (s.key_dim, s.value_dim)
            )
            self._scratch = keys, values
        return self._scratch

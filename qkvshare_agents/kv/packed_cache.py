"""One agent's history as it is stored: packed pages that attention reads in place, and a native tail.

For agents that live long and must not hold a native copy of what they have read (`KVCache` is one). A new token attends
to codes (`qkvshare_kernels.attention`); what needs native keys and values, such as several tokens at once or a mask,
gets those of one layer at a time, in memory that all layers share.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from qkvshare_agents.kv.page import Page, Precision, seal
from qkvshare_agents.kv.shape import KVShape
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_kernels import backend
from qkvshare_kernels.attention import PackedPages

Native = tuple[Tensor, Tensor]
_TAIL_TOKENS = 32  # room for the newest tokens is made in such steps: it would be most of what is native


class PackedCache:
    """Pages of all layers, and the newest tokens in native precision. Not thread-safe: one turn at a time.

    runs: each page with the place [start, stop) of its tokens, in order.
    """

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self.runs: list[tuple[Page, int, int]] = []
        self._packed = [PackedPages() for _ in range(shape.layers)]
        self._native: list[list[Native]] = [[] for _ in range(shape.layers)]
        self._factors: list[Tensor | None] = [None] * shape.layers  # by which packed keys were multiplied
        self._uneven: set[int] = set()  # layers of which pages pack keys only, values only, or with differing factors
        placed = zip(shape.groups, shape.places, strict=True)
        self._groups = {layer: (group, place) for group, place in placed for layer in group.layers}
        self._tail = KVCache(shape, round_tokens=_TAIL_TOKENS)
        self._settled = 0
        self._scratch: dict[torch.device, Tensor] = {}

    @property
    def tokens(self) -> int:
        """Tokens that every layer holds."""
        return self._settled + self._tail.tokens

    @property
    def settled(self) -> int:
        """Tokens in pages; what was appended since lies in the tail."""
        return self._settled

    @property
    def tail(self) -> KVCache:
        return self._tail

    @property
    def native_bytes(self) -> int:
        """Bytes of native keys and values that this cache holds beside its pages: the tail, and one layer's scratch."""
        return self._tail.nbytes + sum(scratch.untyped_storage().nbytes() for scratch in self._scratch.values())

    @property
    def page_bytes(self) -> int:
        return sum(page.nbytes for page, _, _ in self.runs)

    def load(self, runs: Iterable[tuple[Page, int]]) -> None:
        """Append the first `tokens` tokens of each page, in order, by reference. Before anything is appended."""
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
            page = seal(tail.span(sealed, sealed + size), precision, starts_sequence=self._settled == 0)
            self._add(page, size)
            sealed += size
        if sealed:
            self._tail = KVCache(self.shape, round_tokens=_TAIL_TOKENS)
            for layer in range(self.shape.layers):
                self._tail.append(layer, *(held[:, sealed:] for held in tail.layer(layer)))
        return sealed

    def attend(self, layer: int, query: Tensor, scaling: float) -> Tensor:
        """Attention of one new token: query [HQ, Dk] over all of the layer's tokens; returns [HQ, Dv]."""
        kernels = backend.kernels(query.device)
        if layer in self._uneven:
            return kernels.attention(query, PackedPages(), [self.dequantized(layer)], scaling)
        native = [*self._native[layer], self._tail.layer(layer)]
        factors = self._factors[layer]
        if factors is None:
            return kernels.attention(query, self._packed[layer], native, scaling)
        # Packed keys are as they are stored: the query is divided by their factors, and native keys are multiplied
        divided = query.float().unflatten(0, (len(factors), -1)) / factors[:, None]
        multiplied = [(keys.float() * factors[:, None], values.float()) for keys, values in native]
        return kernels.attention(divided.flatten(0, 1), self._packed[layer], multiplied, scaling).to(query.dtype)

    @torch.inference_mode()
    def dequantized(self, layer: int) -> Native:
        """Keys [H, T, Dk] and values [H, T, Dv] of one layer, valid until the next call for any layer."""
        keys, values = self._room(layer)
        for page, start, stop in self.runs:
            for out, stored in zip((keys, values), page.layer(layer, stop - start), strict=True):
                stored.open_into(out[:, start:stop])
        for out, tail in zip((keys, values), self._tail.layer(layer), strict=True):
            out[:, self._settled :].copy_(tail)
        return keys, values

    def drop_scratch(self) -> None:
        """Free what `dequantized` wrote to."""
        self._scratch.clear()

    def _add(self, page: Page, tokens: int) -> None:
        for layer in range(self.shape.layers):
            keys, values = page.layer(layer, tokens)
            split, other = (0 if side.native is None else side.native.shape[-2] for side in (keys, values))
            if split != other:
                self._uneven.add(layer)
                continue
            if keys.native is not None and values.native is not None:
                self._native[layer].append((keys.native, values.native))
            if keys.packed and values.packed:
                if self._packed[layer].tokens and not _same(keys.factors, self._factors[layer]):
                    self._uneven.add(layer)
                self._factors[layer] = keys.factors
                self._packed[layer].append(keys.packed, values.packed)
        self.runs.append((page, self._settled, self._settled + tokens))
        self._settled += tokens

    def _room(self, layer: int) -> Native:
        (group, place), tokens = self._groups[layer], self.length(layer)
        sizes = [group.heads * tokens * dim for dim in (group.key_dim, group.value_dim)]
        scratch = self._scratch.get(place)
        if scratch is None or scratch.numel() < sum(sizes):
            scratch = torch.empty(sum(sizes) * 5 // 4, dtype=self.shape.dtype, device=place)
            self._scratch[place] = scratch
        keys, values, _ = scratch.split([*sizes, scratch.numel() - sum(sizes)])
        return keys.view(group.heads, tokens, group.key_dim), values.view(group.heads, tokens, group.value_dim)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))

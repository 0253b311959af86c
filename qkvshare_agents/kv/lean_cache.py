"""A working cache whose history stays packed, for hosts that must not hold a native copy of it.

What a turn continues from is read where it is stored (`PackedCache`); what the turn adds is native until it ends. So a
host holds, beside its pages, the running turn's own tokens and, where attention needs it, one layer's native copy.
"""

from collections.abc import Iterable

from torch import Tensor

from qkvshare_agents.kv.packed_cache import PackedCache
from qkvshare_agents.kv.page import Page
from qkvshare_agents.kv.shape import KVShape
from qkvshare_agents.kv.span import Span
from qkvshare_agents.kv.working_cache import KVCache


class LeanCache(KVCache):
    """Used like a KVCache. packed: what attention over packed pages reads."""

    def __init__(self, shape: KVShape) -> None:
        super().__init__(shape)
        self.packed = PackedCache(shape)

    @property
    def tokens(self) -> int:
        if not self.shape.layers:
            return self.state.tokens if self.state else 0
        return self.packed.tokens

    @property
    def nbytes(self) -> int:
        """Of what is native, at the moment; pages belong to whoever stores them."""
        return self.packed.native_bytes

    def clear(self, reserve_tokens: int) -> None:
        """Start over. Nothing is reserved: there is no history to be copied when the tail grows."""
        self.state = None
        self.packed = PackedCache(self.shape)

    def load(self, runs: Iterable[tuple[Page, int]]) -> None:
        """Append the first `tokens` tokens of each page, in order, by reference. Before anything is appended."""
        self.packed.load(runs)

    def crop(self, tokens: int) -> None:
        """Forget what lies beyond the first `tokens` tokens."""
        if tokens >= self.packed.settled:
            self.packed.tail.crop(tokens - self.packed.settled)
            return
        kept = [(page, min(stop, tokens) - start) for page, start, stop in self.packed.runs if start < tokens]
        self.packed = PackedCache(self.shape)
        self.packed.load(kept)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Native keys [H, T, Dk] and values [H, T, Dv] of one layer, valid until another layer is asked for."""
        return self.packed.dequantized(layer)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys [H, t, Dk] and values [H, t, Dv] of one layer; returns what `layer` does."""
        self.packed.append(layer, keys, values)
        return self.packed.dequantized(layer)

    def span(self, start: int, stop: int) -> Span:
        """Tokens [start, stop): views of what the turn added; a native copy where they reach into pages."""
        settled, tail = self.packed.settled, self.packed.tail
        if start >= settled:
            return tail.span(start - settled, stop - settled)
        runs = [run for run in self.packed.runs if run[2] > start]
        native, before = KVCache(self.shape), runs[0][1]
        native.load((page, end - begin) for page, begin, end in runs)
        for layer in range(self.shape.layers):
            native.append(layer, *tail.layer(layer))
        return native.span(start - before, stop - before)

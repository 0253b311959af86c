"""Keys or values of layers that have a shape and a width in common: native tokens, then packed ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from qkvshare_agents.errors import CodecError
from qkvshare_agents.kv import codec
from qkvshare_agents.kv.balance import Balance
from qkvshare_agents.kv.codec import Encoded


@dataclass(frozen=True)
class Stored:
    """Keys or values [..., H, T, D]: the first tokens `native`, then `packed`, whose channels were multiplied by
    `factors` [..., H, D] unless that is None."""

    native: Tensor | None
    packed: Encoded | None
    factors: Tensor | None = None

    def open_into(self, out: Tensor) -> None:
        """Write all of it, in the reader's precision, into a view [..., T, D]."""
        split = 0 if self.native is None else self.native.shape[-2]
        if self.native is not None:
            out[..., :split, :].copy_(self.native)
        if self.packed is None:
            return
        rest = out[..., split:, :]
        if self.factors is None:
            codec.decode_into(self.packed, rest)
        elif rest.dtype == torch.float32:
            codec.decode_into(self.packed, rest)
            rest.div_(self.factors[..., None, :])
        else:
            opened = torch.empty(rest.shape, dtype=torch.float32, device=rest.device)
            codec.decode_into(self.packed, opened)
            rest.copy_(opened.div_(self.factors[..., None, :]))


@dataclass(frozen=True)
class Part:
    """Keys or values [L, H, T, D] of `layers`, in this order: the first tokens `native`, then `packed`.

    balance: by whose factors channels were multiplied before they were packed.
    """

    layers: tuple[int, ...]
    native: Tensor | None
    packed: Encoded | None
    balance: Balance | None = None

    @property
    def native_tokens(self) -> int:
        return 0 if self.native is None else self.native.shape[-2]

    def tensors(self) -> tuple[Tensor, ...]:
        native = () if self.native is None else (self.native,)
        return native + (self.packed.tensors() if self.packed else ())

    @property
    def factors(self) -> Tensor | None:
        """[L, H, D]: what `packed` is to be divided by, or None."""
        if self.balance is None or self.packed is None:
            return None
        codes = self.packed.codes
        return self.balance.factors(self.layers, codes.shape[-3], codes.device)

    def head(self, tokens: int) -> "Part":
        """The first `tokens` tokens as views of the same bytes."""
        native = None if self.native is None else self.native[..., :tokens, :]
        rest = tokens - self.native_tokens
        return replace(self, native=native, packed=self.packed.head(rest) if self.packed and rest > 0 else None)

    def layer(self, layer: int, tokens: int) -> "Stored":
        """The first `tokens` tokens of one of its layers, as views of the same bytes."""
        row, rest = self.layers.index(layer), tokens - self.native_tokens
        native = None if self.native is None else self.native[row, :, :tokens]
        packed = self.packed.layer(row).head(rest) if self.packed and rest > 0 else None
        factors = self.factors
        return Stored(native, packed, None if factors is None else factors[row])

    def open_into(self, out: Tensor) -> None:
        """Write the first `out.shape[-2]` tokens into a view [L, H, t, D]."""
        head = self.head(out.shape[-2])
        Stored(head.native, head.packed, head.factors).open_into(out)


def fill(out: Tensor, layers: tuple[int, ...], parts: Sequence[Part]) -> None:
    """Write what `parts` hold of `layers` into `out` [L, H, t, D]."""
    filled = 0
    for part in parts:
        if part.layers == layers:
            return part.open_into(out)
        rows = _rows(part.layers, layers)
        if isinstance(rows, slice):
            part.open_into(out[rows])
        elif rows:  # layers that are not neighbours in `out` are no view of it
            opened = torch.empty(len(rows), *out.shape[1:], dtype=out.dtype, device=out.device)
            part.open_into(opened)
            out[list(rows)] = opened
        filled += len(part.layers) if rows else 0
    if filled != len(layers):
        raise CodecError(f"the page holds {filled} of {len(layers)} layers of a group")


@lru_cache(maxsize=4096)
def _rows(wanted: tuple[int, ...], layers: tuple[int, ...]) -> slice | tuple[int, ...]:
    """Where `wanted` are in `layers`: a slice if they follow each other; () if one of them is not there."""
    place = {layer: row for row, layer in enumerate(layers)}
    rows = tuple(place.get(layer, -1) for layer in wanted)
    if -1 in rows:
        return ()
    return slice(rows[0], rows[-1] + 1) if rows == tuple(range(rows[0], rows[-1] + 1)) else rows

"""Decode attention over packed pages: one new token reads a history that is never unpacked as a whole.

`attention` is the specification and the way that runs everywhere: one page after the other is dequantized, and
what was read is brought to the same greatest score (online softmax, FlashAttention, arXiv 2205.14135). Parts of
the history may be read apart and joined (flash decoding), and in any order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from qkvshare_kernels import plain

Native = tuple[Tensor, Tensor]
Part = tuple[Tensor, Tensor, Tensor]  # greatest score [H, G], sum of weights [H, G] and of weighted values [H, G, Dv]


class Packed(Protocol):
    """What one page keeps of the keys or the values of one layer: codes [H, T, bytes], see `plain.quantize`."""

    @property
    def codes(self) -> Tensor: ...
    @property
    def scale(self) -> Tensor: ...
    @property
    def minimum(self) -> Tensor | None: ...
    @property
    def bits(self) -> int: ...
    @property
    def group(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def group_size(self) -> int | None: ...
    @property
    def rotated(self) -> bool: ...


@dataclass
class PackedPages:
    """Keys and values of one layer's packed tokens, page by page; widths may differ from page to page.

    Pages are only appended. `prepared` is for implementations, which keep there what they made of the pages.
    """

    pages: list[tuple[Packed, Packed]] = field(default_factory=list)
    prepared: dict[str, Any] = field(default_factory=dict)
    tokens: int = 0

    def append(self, keys: Packed, values: Packed) -> None:
        if keys.codes.shape[:2] != values.codes.shape[:2]:
            raise ValueError(f"keys of {tuple(keys.codes.shape)} and values of {tuple(values.codes.shape)} codes")
        self.pages.append((keys, values))
        self.tokens += keys.codes.shape[-2]


def attention(query: Tensor, packed: PackedPages, native: Sequence[Native], scaling: float) -> Tensor:
    """softmax(scaling * query . keys) . values over all packed and native tokens of one layer.

    query: [HQ, Dk]; each of the H key heads serves HQ / H neighbouring query heads. native: keys [H, T, Dk] and values
    [H, T, Dv] in the cache's dtype. Returns [HQ, Dv] in the query's dtype; sums are float32. There must be a token.
    """
    parts = [_read(query, unpacked(k, query), unpacked(v, query), scaling) for k, v in packed.pages]
    return join(query, [*parts, *read_native(query, native, scaling)])


def read_native(query: Tensor, native: Sequence[Native], scaling: float) -> list[Part]:
    return [_read(query, keys.float(), values.float(), scaling) for keys, values in native if keys.shape[-2]]


def join(query: Tensor, parts: Sequence[Part]) -> Tensor:
    """Attention over everything from what was read apart."""
    if not parts:
        raise ValueError("there is no token to attend to")
    greatest, total, summed = (torch.stack(of_all) for of_all in zip(*parts, strict=True))
    weights = (greatest - greatest.amax(0)).exp()
    out = (summed * weights[..., None]).sum(0) / (total * weights).sum(0)[..., None]
    return out.flatten(0, 1).to(query.dtype)


def unpacked(packed: Packed, like: Tensor) -> Tensor:
    """[H, T, D] in float32, on the device of `like`."""
    out = torch.empty(*packed.codes.shape[:-1], packed.dim, dtype=torch.float32, device=like.device)
    plain.dequantize(
        packed.codes,
        packed.scale,
        packed.minimum,
        packed.bits,
        group_dim(packed),
        out,
        group_size=packed.group_size,
        rotate=packed.rotated,
    )
    return out


def group_dim(packed: Packed) -> int:
    return -2 if packed.group == "channel" else -1


def _read(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Part:
    grouped = query.float().view(keys.shape[0], -1, keys.shape[-1]) * scaling
    scores = grouped @ keys.mT
    greatest = scores.amax(-1)
    weights = (scores - greatest[..., None]).exp()
    return greatest, weights.sum(-1), weights @ values

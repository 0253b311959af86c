"""Plain ways to quantize a tensor [H, T, D], as caches are often stored: what ours are compared with."""

from collections.abc import Callable
from statistics import NormalDist

import torch
from torch import Tensor

GROUP_SIZE = 64  # values of a token's head that share a scale
_FLOAT8 = torch.float8_e4m3fn
_SMALLEST_SCALE = 2.0**-14

# An encoder of [H, T, D] returns the tensors it keeps and how to get the values back.
Encode = Callable[[Tensor], tuple[list[Tensor], Callable[[], Tensor]]]


def cast(x: Tensor) -> tuple[list[Tensor], Callable[[], Tensor]]:
    half = x.to(torch.float16, copy=True)
    return [half], lambda: half


def per_token(x: Tensor, *, bits: int) -> tuple[list[Tensor], Callable[[], Tensor]]:
    """Integers with scale and minimum for each GROUP_SIZE values of a token's head."""
    return _integers(x, _grouped(x.float()), bits)


def per_tensor(x: Tensor, *, bits: int) -> tuple[list[Tensor], Callable[[], Tensor]]:
    """Integers with one scale and minimum."""
    return _integers(x, x.float().flatten(), bits)


def _integers(x: Tensor, groups: Tensor, bits: int) -> tuple[list[Tensor], Callable[[], Tensor]]:
    minimum = groups.amin(-1, keepdim=True).half()
    spread = (groups - minimum.float()).amax(-1, keepdim=True)
    scale = (spread / (2**bits - 1)).clamp_min(_SMALLEST_SCALE).half()
    codes = ((groups - minimum.float()) / scale.float()).round().clamp(0, 2**bits - 1).to(torch.uint8)
    kept = _nibbles(codes) if bits == 4 else codes

    def decode() -> Tensor:
        whole = _from_nibbles(kept) if bits == 4 else kept
        return (whole * scale.float() + minimum.float()).reshape(x.shape)

    return [kept, scale, minimum], decode


def normal_float(x: Tensor) -> tuple[list[Tensor], Callable[[], Tensor]]:
    """NF4: 16 levels at the quantiles of a normal distribution, scaled by a group's largest magnitude.

    QLoRA (arXiv 2305.14314): eight levels below zero, zero, and seven above it.
    """
    normal, offset = NormalDist(), 0.9677083
    above = [normal.inv_cdf(0.5 + (offset - 0.5) * i / 8) for i in range(1, 9)]
    below = [-normal.inv_cdf(0.5 + (offset - 0.5) * i / 7) for i in range(7, 0, -1)]
    levels = torch.tensor([*below, 0.0, *above])
    levels /= levels.abs().max()
    groups = _grouped(x.float())
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(_SMALLEST_SCALE).half()
    middles = (levels[1:] + levels[:-1]) / 2
    kept = _nibbles(torch.bucketize(groups / scale.float(), middles).to(torch.uint8))
    return [kept, scale], lambda: (levels[_from_nibbles(kept).long()] * scale.float()).reshape(x.shape)


def float8(x: Tensor) -> tuple[list[Tensor], Callable[[], Tensor]]:
    """float8_e4m3fn with one fp16 scale for each token's head."""
    largest = x.float().abs().amax(-1, keepdim=True)
    scale = (largest / torch.finfo(_FLOAT8).max * (1 + 2.0**-10)).clamp_min(2.0**-14).half()
    codes = (x.float() / scale.float()).to(_FLOAT8)
    return [codes, scale], lambda: codes.float() * scale.float()


def _grouped(x: Tensor) -> Tensor:
    """[H, T, G, GROUP_SIZE], or the whole head in one group if that does not divide it."""
    return x.unflatten(-1, (-1, GROUP_SIZE if x.shape[-1] % GROUP_SIZE == 0 else x.shape[-1]))


def _nibbles(codes: Tensor) -> Tensor:
    low, high = codes.chunk(2, -1)
    return low | high << 4


def _from_nibbles(packed: Tensor) -> Tensor:
    return torch.cat([packed & 15, packed >> 4], -1)

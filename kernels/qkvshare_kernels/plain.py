"""quantize and dequantize in plain torch: `reference` in one call each, on any device."""

import torch
from torch import Tensor

from qkvshare_kernels import reference

LARGEST = torch.finfo(torch.float16).max
REFUSAL = f"keys or values hold NaN, Inf or magnitudes beyond {LARGEST:,.0f}"


def quantize(
    x: Tensor,
    bits: int,
    dim: int,
    *,
    symmetric: bool,
    group_size: int | None = None,
    fit: float = 0.0,
    rotate: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rotate (if asked), quantize and pack `x` [..., H, T, D] (fp32, fp16 or bf16; T >= 1), see `reference.quantize`.

    Returns packed codes uint8 [..., H, T, ceil(D * bits / 8)], scale and minimum (None if symmetric) in fp16, [..., H,
    G, D] for `dim` -2 or [..., H, T, G] for -1. Raises ValueError for NaN, Inf, or values that would decode to more
    than fp16 holds.
    """
    values = x.float()
    if rotate:
        values = reference.rotate(values)
    codes, scale, minimum = reference.quantize(values, bits, dim, symmetric=symmetric, group_size=group_size, fit=fit)
    refuse_what_fp16_cant_hold(scale, minimum, bits)
    return reference.pack(codes, bits).contiguous(), scale, minimum


def dequantize(
    packed: Tensor,
    scale: Tensor,
    minimum: Tensor | None,
    bits: int,
    dim: int,
    out: Tensor,
    *,
    group_size: int | None = None,
    rotate: bool = False,
) -> None:
    """Unpack, scale and rotate back (if asked) into `out` [..., H, T, D], any float dtype, a view of a cache.

    Here the rotation is a matrix product, which is faster in torch than `reference.rotate` and differs from it by
    rounding: at most D * 2**-24 of the largest value of a token.
    """
    codes = reference.unpack(packed, bits, out.shape[-1])
    values = torch.empty(out.shape, dtype=torch.float32, device=out.device) if rotate else out
    reference.dequantize(codes, scale, minimum, bits, dim, values, group_size=group_size)
    if rotate:
        out.copy_(values @ reference.hadamard(out.shape[-1], out.device))


def turn(x: Tensor, cos: Tensor, sin: Tensor, first: int, interleaved: bool) -> None:
    """Turn pairs of `x` [..., T, D] (any float dtype) in place by angles given as `cos` and `sin` [T, pairs], float32.

    The pairs begin at value `first`. interleaved: they are neighbours, else half of the turned values apart (RoFormer,
    arXiv 2104.09864, and GPT-NeoX's layout).
    """
    turned = x[..., first : first + 2 * cos.shape[-1]]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    left, right = a.float(), b.float()
    moved = left * cos - right * sin, right * cos + left * sin
    a.copy_(moved[0])
    b.copy_(moved[1])


def refuse_what_fp16_cant_hold(scale: Tensor, minimum: Tensor | None, bits: int) -> None:
    levels = (1 << bits) - 1
    reach = scale.float() * (levels / 2) if minimum is None else minimum.float() + scale.float() * levels
    if not bool((reach.abs() <= LARGEST).all()):  # also for NaN and Inf, which pass into scale or minimum
        raise ValueError(REFUSAL)

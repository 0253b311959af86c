"""Uniform quantization of groups in plain torch: the specification, and the CPU path.

Axis letters: `L` layers, `H` KV heads, `T` tokens, `D` head size. A *group* is the set of values that share
one scale; here it runs along one whole dimension (`dim`) of the tensor. The value of a code is
`x ~ code * scale + minimum`; the minimum is called zero point in the papers (KIVI, arXiv 2402.02750), where
it is an integer. Without a minimum (`symmetric`) codes are signed.

Scales and minima are stored in fp16. Both are rounded outwards (the minimum down, the scale up), so that
every value of the group lies inside the code range and no clamping pass is needed. Codes are
`floor(v + 0.5)`, which all implementations share, since `round` is half-to-even here and elsewhere not.
"""

from functools import lru_cache

import torch
from torch import Tensor

FP16_STEP = 2.0**-11  # half the relative distance of neighbouring fp16 numbers
SMALLEST_SCALE = 2.0**-14  # smallest normal fp16 number; a constant group gets this scale


@lru_cache(maxsize=16)
def hadamard(dim: int, device: torch.device) -> Tensor:
    """Rotation [D, D] of the head dimension that spreads outlying channels: it is its own inverse.

    Hadamard matrices of the largest power of two in `dim`, along the diagonal (QuaRot, arXiv 2404.00456).
    """
    block = torch.ones(1, 1, dtype=torch.float64)
    while dim % (2 * len(block)) == 0:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    block = block / len(block) ** 0.5
    return torch.block_diag(*[block] * (dim // len(block))).to(device, torch.float32)


def quantize(x: Tensor, bits: int, dim: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Encode `x` [..., float32] in groups along `dim`.

    Returns (codes, scale, minimum): codes like `x` in uint8 (int8 if symmetric), scale and minimum in fp16
    with size 1 along `dim`; the minimum is None if symmetric. NaN, Inf and magnitudes beyond fp16 show as a
    scale or minimum that is not finite; the caller checks.
    """
    if symmetric:
        largest = (1 << (bits - 1)) - 1
        span = x.abs().amax(dim, keepdim=True)
        scale = _round_up(span / largest)
        # floor(v + 0.5) through truncation of a number that is never negative: shift up, truncate, shift down
        shifted = (x * scale.float().reciprocal()).add_(largest + 1.5).to(torch.uint8)
        return shifted.to(torch.int8) - (largest + 1), scale, None
    levels = (1 << bits) - 1
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    minimum = (low - low.abs() * (2 * FP16_STEP)).to(torch.float16)
    scale = _round_up((high - minimum.float()) / levels)
    inverse = scale.float().reciprocal()
    return torch.addcmul(0.5 - minimum.float() * inverse, x, inverse).to(torch.uint8), scale, minimum


def dequantize(codes: Tensor, scale: Tensor, minimum: Tensor | None, out: Tensor) -> None:
    """Write `codes * scale + minimum` into `out` (any float dtype, may be strided)."""
    values = codes.to(torch.float32)
    target = out if out.dtype == torch.float32 else values
    if minimum is None:
        torch.mul(values, scale.float(), out=target)
    else:
        torch.addcmul(minimum.float(), values, scale.float(), out=target)
    if target is not out:
        out.copy_(values)


def _round_up(scale: Tensor) -> Tensor:
    return (scale * (1 + 2 * FP16_STEP)).clamp_min(SMALLEST_SCALE).to(torch.float16)
